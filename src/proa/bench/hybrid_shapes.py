"""Whole models by name, to be filled with random weights: their configs. Never: weights, measuring."""

from __future__ import annotations

import msgspec

from proa.errors import UsageError

_POSITIONS = 1 << 20  # longest context
_INTERVAL = 4  # one layer of so many attends, where others are linear


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose layers are all alike: grouped-query attention, then routed experts. Or `linear`, like Qwen3-Next's:
    three layers of linear attention to one of gated attention, and a shared expert beside the routed ones. Or with
    `sinks`, like gpt-oss: every other layer in a window, biases, a clamped SwiGLU."""

    name: str
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    experts: int
    top_k: int
    width: int  # of an expert
    vocab: int
    linear: bool = False
    sinks: bool = False
    note: str = ""  # what the model of this name has and this shape does not

    def cut(self, layers: int | None) -> ModelShape:
        """With so many of its layers. Raises UsageError for more than it has."""
        if layers is not None and layers > self.layers:
            raise UsageError(f"--layers {layers}: {self.name} has {self.layers}.", "Use as many or fewer.")
        return msgspec.structs.replace(self, layers=layers or self.layers)

    def config(self) -> dict[str, object]:
        """In the style of Hugging Face."""
        own = self._sinks() if self.sinks else self._qwen() | (self._linear() if self.linear else {})
        return {
            "torch_dtype": "bfloat16",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts_per_tok": self.top_k,
            "intermediate_size": self.width,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": _POSITIONS,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab,
            **own,
        }

    def _qwen(self) -> dict[str, object]:
        return {
            "architectures": ["Qwen3NextForCausalLM" if self.linear else "Qwen3MoeForCausalLM"],
            "model_type": "qwen3_next" if self.linear else "qwen3_moe",
            "attention_bias": False,
            "num_experts": self.experts,
            "moe_intermediate_size": self.width,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }

    def _sinks(self) -> dict[str, object]:
        return {
            "architectures": ["GptOssForCausalLM"],
            "model_type": "gpt_oss",
            "attention_bias": True,
            "num_local_experts": self.experts,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
        }

    def _linear(self) -> dict[str, object]:
        """The last layer attends, however many there are."""
        attends = [(i + 1) % _INTERVAL == 0 or i + 1 == self.layers for i in range(self.layers)]
        return {
            "layer_types": ["full_attention" if full else "linear_attention" for full in attends],
            "partial_rotary_factor": 0.25,
            "shared_expert_intermediate_size": self.width,
            "linear_num_key_heads": self.heads,
            "linear_num_value_heads": 2 * self.heads,
            "linear_key_head_dim": self.head_dim // 2,
            "linear_value_head_dim": self.head_dim // 2,
            "linear_conv_kernel_dim": 4,
        }


MODEL_SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="qwen3-30b-a3b", hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128, experts=128, top_k=8,
            width=768, vocab=151936,
        ),
        ModelShape(
            name="qwen3-next-80b-a3b", hidden=2048, layers=48, heads=16, kv_heads=2, head_dim=256, experts=512,
            top_k=10, width=512, vocab=151936, linear=True,
        ),
        ModelShape(
            name="minimax-m2", hidden=3072, layers=62, heads=48, kv_heads=8, head_dim=128, experts=256, top_k=8,
            width=1536, vocab=200064, note="routing is softmax without a bias",
        ),
        ModelShape(
            name="gpt-oss-120b", hidden=2880, layers=36, heads=64, kv_heads=8, head_dim=64, experts=128, top_k=4,
            width=2880, vocab=201088, sinks=True, note="attention has the experts' format, and no yarn",
        ),
        ModelShape(
            name="tiny", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=2, width=32, vocab=512,
        ),
        ModelShape(
            name="tiny-next", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, experts=8, top_k=2, width=32,
            vocab=512, linear=True,
        ),
        ModelShape(
            name="tiny-oss", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=2, width=32,
            vocab=512, sinks=True,
        ),
    )
}  # fmt: skip
