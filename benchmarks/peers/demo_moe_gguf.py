"""The demo MoE as a GGUF file that llama.cpp reads too: its architecture qwen2moe, matrices in one of TYPES.

llama.cpp's qwen2moe weights experts by the softmax over all of them, not over the chosen ones. The demo's weights are
all the same to about rounding (proa/demo/tensors.py), so that experts scaled for all 16 instead of the 12 chosen give
the same model. It also demands an output head of its own: the embedding is written twice.
Never: measuring.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, quants

from proa.demo.assemble import TOP_K
from proa.demo.safetensors_writer import Pending
from proa.demo.split import Split, load_split
from proa.demo.tensors import moe_tensors

TYPES = {name: GGMLQuantizationType[name.upper()] for name in ("bf16", "f16", "q8_0", "q4_1")}
_ARCHITECTURE = "qwen2moe"
_Array = npt.NDArray[np.float32]

# The demo's tensors as Hugging Face names them -> GGUF's names.
_WHOLE = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
_PARTS = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
    "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}  # fmt: skip
_FLOATS = ("norm.weight", "ffn_gate_inp.weight", "ffn_gate_inp_shexp.weight")  # float32, as llama.cpp converts them


def write_demo_moe(dense: Path, folder: Path, kind: str) -> Path:
    """The file in `folder`, made of the demo's dense GGUF if it is not there. `kind`: of TYPES."""
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / f"SmolLM2-MoE.{kind.upper()}.gguf"
    if not target.is_file():
        scratch = target.with_suffix(f".{os.getpid()}.partial")
        try:
            _write(GGUFReader(dense), scratch, TYPES[kind])
            scratch.replace(target)
        finally:
            scratch.unlink(missing_ok=True)
    return target


def _write(reader: GGUFReader, path: Path, kind: GGMLQuantizationType) -> None:
    split = load_split()
    writer = GGUFWriter(path, _ARCHITECTURE)
    facts = _facts(reader, split)
    for key, value in facts.items():
        (writer.add_float32 if isinstance(value, float) else writer.add_uint32)(f"{_ARCHITECTURE}.{key}", value)
    for name, field in reader.fields.items():
        if name.startswith("tokenizer."):
            sub = field.types[-1] if field.types[0] is GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], sub)
    for name, values in _tensors(reader, facts, split):
        writer.add_tensor(name, *_encoded(name, values, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _facts(reader: GGUFReader, split: Split) -> dict[str, Any]:
    """Metadata of the architecture, most of it as in the dense file."""
    kept = ["block_count", "context_length", "embedding_length", "feed_forward_length", "attention.head_count"]
    kept += ["attention.head_count_kv", "attention.layer_norm_rms_epsilon", "rope.freq_base"]
    facts = {key: _read(reader, f"llama.{key}") for key in kept}
    shared = facts["feed_forward_length"] // 2
    return facts | {
        "expert_count": split.num_experts,
        "expert_used_count": TOP_K,
        "expert_feed_forward_length": (facts["feed_forward_length"] - shared) // split.num_experts,
        "expert_shared_feed_forward_length": shared,
    }


def _read(reader: GGUFReader, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise ValueError(f"The demo's GGUF has no {key}.")
    return field.contents()


def _tensors(reader: GGUFReader, facts: Mapping[str, Any], split: Split) -> Iterator[tuple[str, _Array]]:
    config = {
        "num_hidden_layers": facts["block_count"],
        "num_attention_heads": facts["attention.head_count"],
        "num_key_value_heads": facts["attention.head_count_kv"],
        "shared_expert_intermediate_size": facts["expert_shared_feed_forward_length"],
        "num_experts_per_tok": split.num_experts,  # what down projections are scaled by
    }
    experts: list[Pending] = []
    for tensor in moe_tensors(reader, config, split):
        if ".mlp.experts." in tensor.name:  # one after the other, of one layer and projection
            experts.append(tensor)
            if len(experts) == split.num_experts:
                yield _expert_name(tensor.name), np.stack([one.make() for one in experts])
                experts = []
        elif tensor.name in _WHOLE:
            yield _WHOLE[tensor.name], tensor.make()
            if tensor.name == "model.embed_tokens.weight":
                yield "output.weight", tensor.make()
        else:
            _, _, layer, part = tensor.name.removesuffix(".weight").split(".", 3)
            values = tensor.make()
            yield f"blk.{layer}.{_PARTS[part]}.weight", values[0] if part == "mlp.shared_expert_gate" else values


def _expert_name(name: str) -> str:
    _, _, layer, _, _, _, projection, _ = name.split(".")
    return f"blk.{layer}.ffn_{projection.removesuffix('_proj')}_exps.weight"


def _encoded(name: str, values: _Array, kind: GGMLQuantizationType) -> tuple[Any, Any, GGMLQuantizationType]:
    """What add_tensor takes. Experts' down have 48 columns, which blocks of 32 do not divide: float16, as llama.cpp's
    own converter chooses."""
    if name.endswith(_FLOATS):
        return np.ascontiguousarray(values), None, GGMLQuantizationType.F32
    block_columns, _ = GGML_QUANT_SIZES[kind]
    chosen = GGMLQuantizationType.F16 if values.shape[-1] % block_columns else kind
    return quants.quantize(np.ascontiguousarray(values), chosen), None, chosen
