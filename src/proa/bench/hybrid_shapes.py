"""Whole models by name, to be filled with random weights: their configs. Never: weights, measuring."""

from __future__ import annotations

import msgspec

from proa.errors import UsageError

_POSITIONS = 1 << 20  # longest context


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose layers are all alike: grouped-query attention, then routed experts."""

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
    note: str = ""  # what the model of this name has and this shape does not

    def cut(self, layers: int | None) -> ModelShape:
        """With so many of its layers. Raises UsageError for more than it has."""
        if layers is not None and layers > self.layers:
            raise UsageError(f"--layers {layers}: {self.name} has {self.layers}.", "Use as many or fewer.")
        return msgspec.structs.replace(self, layers=layers or self.layers)

    def config(self) -> dict[str, object]:
        """In the style of Hugging Face."""
        return {
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
            "torch_dtype": "bfloat16",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "attention_bias": False,
            "num_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.width,
            "intermediate_size": self.width,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": _POSITIONS,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab,
        }


MODEL_SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="qwen3-30b-a3b", hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128, experts=128, top_k=8,
            width=768, vocab=151936,
        ),
        ModelShape(
            name="qwen3-next", hidden=2048, layers=48, heads=16, kv_heads=2, head_dim=256, experts=512, top_k=10,
            width=512, vocab=151936, note="attention stands in for linear attention; there is no shared expert",
        ),
        ModelShape(
            name="minimax-m2", hidden=3072, layers=62, heads=48, kv_heads=8, head_dim=128, experts=256, top_k=8,
            width=1536, vocab=200064, note="routing is softmax without a bias",
        ),
        ModelShape(
            name="tiny", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=2, width=32, vocab=512,
        ),
    )
}  # fmt: skip
