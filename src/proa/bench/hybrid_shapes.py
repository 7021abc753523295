"""Layer sizes of published models, and the config.json that they give, for models of random weights."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import msgspec

from proa.errors import UsageError

_POSITIONS = 1 << 20  # max_position_embeddings
_INTERVAL = 4  # in qwen3_next, every 4th layer has full attention, the others linear attention


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose layers are all equal: grouped-query attention, then routed experts.

    qwen3_next: three layers of linear attention per layer of gated attention; a shared expert beside the routed ones.
    minimax_m2, glm4_moe: sigmoid router scores with a correction bias; rotary embedding of half of each head. glm4_moe:
    the first layer is dense, the others have a shared expert; q, k and v have biases. gpt_oss: sliding-window attention
    in every other layer, attention sinks, biases, a clamped SwiGLU.
    """

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
    family: Literal["qwen3_moe", "qwen3_next", "minimax_m2", "glm4_moe", "gpt_oss"] = "qwen3_moe"
    dense_width: int = 0  # MLP width of dense first layers
    note: str = ""  # differences from the published model of this name

    def cut(self, layers: int | None) -> ModelShape:
        """Return the shape with only `layers` layers; None: all. Raises UsageError for more than it has."""
        if layers is not None and layers > self.layers:
            raise UsageError(
                f"--layers is {layers}, but {self.name} has {self.layers} layers.", f"Use {self.layers} or fewer."
            )
        return msgspec.structs.replace(self, layers=layers or self.layers)

    @contextmanager
    def folder(self) -> Iterator[Path]:
        """A temporary folder with a config.json, as of a checkpoint."""
        with tempfile.TemporaryDirectory(prefix="proa-shape-") as folder:
            (Path(folder) / "config.json").write_text(json.dumps(self.config()))
            yield Path(folder)

    def config(self) -> dict[str, object]:
        """Build the contents of a Hugging Face config.json."""
        architecture, own = {
            "qwen3_moe": ("Qwen3MoeForCausalLM", self._qwen3_moe),
            "qwen3_next": ("Qwen3NextForCausalLM", lambda: self._qwen3_moe() | self._linear()),
            "minimax_m2": ("MiniMaxM2ForCausalLM", self._minimax_m2),
            "glm4_moe": ("Glm4MoeForCausalLM", self._glm4_moe),
            "gpt_oss": ("GptOssForCausalLM", self._gpt_oss),
        }[self.family]
        return {
            "architectures": [architecture],
            "model_type": self.family,
            "torch_dtype": "bfloat16",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "num_experts_per_tok": self.top_k,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e6,
            "max_position_embeddings": _POSITIONS,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab,
            **own(),
        }

    def _qwen3_moe(self) -> dict[str, object]:
        return {
            "attention_bias": False,
            "num_experts": self.experts,
            "moe_intermediate_size": self.width,
            "intermediate_size": self.width,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }

    def _minimax_m2(self) -> dict[str, object]:
        return {
            "num_local_experts": self.experts,
            "intermediate_size": self.width,
            "rotary_dim": self.head_dim // 2,
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
        }

    def _glm4_moe(self) -> dict[str, object]:
        return {
            "attention_bias": True,
            "n_routed_experts": self.experts,
            "n_shared_experts": 1,
            "moe_intermediate_size": self.width,
            "intermediate_size": self.dense_width,
            "first_k_dense_replace": 1,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.0,
        }

    def _gpt_oss(self) -> dict[str, object]:
        return {
            "attention_bias": True,
            "num_local_experts": self.experts,
            "intermediate_size": self.width,
            "sliding_window": 128,
            "swiglu_limit": 7.0,
        }

    def _linear(self) -> dict[str, object]:
        """Build qwen3_next's own keys; the last layer has full attention, also if layers are cut."""
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


class LatentShape(ModelShape, frozen=True, kw_only=True):
    """A DeepSeek model: latent attention (MLA), shared experts beside the routed ones, dense first layers. `head_dim`
    is qk_nope_head_dim and v_head_dim. With `groups`, routing is group-limited as in DeepSeek-V3, else as in V2-Lite.
    """

    rank: int  # kv_lora_rank
    rotary: int  # qk_rope_head_dim
    q_rank: int | None = None  # q_lora_rank
    shared: int  # shared experts
    dense: int  # dense first layers
    groups: int = 0  # n_group
    kept_groups: int = 0  # topk_group

    def config(self) -> dict[str, object]:
        return {
            "architectures": ["DeepseekV3ForCausalLM" if self.groups else "DeepseekV2ForCausalLM"],
            "model_type": "deepseek_v3" if self.groups else "deepseek_v2",
            "torch_dtype": "bfloat16",
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "q_lora_rank": self.q_rank,
            "kv_lora_rank": self.rank,
            "qk_nope_head_dim": self.head_dim,
            "qk_rope_head_dim": self.rotary,
            "v_head_dim": self.head_dim,
            "n_routed_experts": self.experts,
            "num_experts_per_tok": self.top_k,
            "moe_intermediate_size": self.width,
            "n_shared_experts": self.shared,
            "first_k_dense_replace": min(self.dense, self.layers - 1),
            "intermediate_size": self.dense_width,
            "norm_topk_prob": bool(self.groups),
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1e4,
            "max_position_embeddings": _POSITIONS,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab,
            **(self._groups() if self.groups else {"topk_method": "greedy"}),
        }

    def _groups(self) -> dict[str, object]:
        return {"n_group": self.groups, "topk_group": self.kept_groups, "routed_scaling_factor": 2.5}


MODEL_SHAPES: dict[str, ModelShape] = {
    shape.name: shape
    for shape in (
        ModelShape(
            name="qwen3-30b-a3b", hidden=2048, layers=48, heads=32, kv_heads=4, head_dim=128, experts=128, top_k=8,
            width=768, vocab=151936,
        ),
        ModelShape(
            name="qwen3-next-80b-a3b", hidden=2048, layers=48, heads=16, kv_heads=2, head_dim=256, experts=512,
            top_k=10, width=512, vocab=151936, family="qwen3_next",
        ),
        ModelShape(
            name="minimax-m2", hidden=3072, layers=62, heads=48, kv_heads=8, head_dim=128, experts=256, top_k=8,
            width=1536, vocab=200064, family="minimax_m2",
        ),
        ModelShape(
            name="glm-4.5-air", hidden=4096, layers=46, heads=96, kv_heads=8, head_dim=128, experts=128, top_k=8,
            width=1408, vocab=151552, family="glm4_moe", dense_width=10944,
        ),
        LatentShape(
            name="deepseek-v2-lite", hidden=2048, layers=27, heads=16, kv_heads=16, head_dim=128, experts=64, top_k=6,
            width=1408, vocab=102400, rank=512, rotary=64, shared=2, dense=1, dense_width=10944,
        ),
        LatentShape(
            name="deepseek-v3", hidden=7168, layers=61, heads=128, kv_heads=128, head_dim=128, experts=256, top_k=8,
            width=2048, vocab=129280, rank=512, rotary=64, q_rank=1536, shared=1, dense=3, dense_width=18432, groups=8,
            kept_groups=4,
        ),
        ModelShape(
            name="gpt-oss-120b", hidden=2880, layers=36, heads=64, kv_heads=8, head_dim=64, experts=128, top_k=4,
            width=2880, vocab=201088, family="gpt_oss", note="attention has the experts' format, and no yarn",
        ),
        ModelShape(
            name="tiny", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=2, width=32, vocab=512,
        ),
        ModelShape(
            name="tiny-next", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=32, experts=8, top_k=2, width=32,
            vocab=512, family="qwen3_next",
        ),
        LatentShape(
            name="tiny-latent", hidden=64, layers=3, heads=4, kv_heads=4, head_dim=16, experts=8, top_k=2, width=32,
            vocab=512, rank=32, rotary=8, q_rank=48, shared=1, dense=1, dense_width=96, groups=4, kept_groups=2,
        ),
        ModelShape(
            name="tiny-oss", hidden=64, layers=2, heads=4, kv_heads=2, head_dim=16, experts=8, top_k=2, width=32,
            vocab=512, family="gpt_oss",
        ),
    )
}  # fmt: skip
