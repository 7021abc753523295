"""Builds the demo checkpoint, a Qwen2-MoE folder in Hugging Face's format, from a Llama GGUF and split.npz."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock
from gguf import GGUFReader

from proa.demo.made import STAMP_NAME, TOP_K, is_made, stamp_of
from proa.demo.safetensors_writer import Dtype, write_safetensors
from proa.demo.split import Split, load_split
from proa.demo.tensors import moe_tensors
from proa.demo.tokenizer import write_tokenizer
from proa.errors import ResourceError, UsageError, WeightsError
from proa.types import ProgressCallback


def assemble(
    gguf: Path, folder: Path, top_k: int = TOP_K, dtype: Dtype = "bfloat16", progress: ProgressCallback | None = None
) -> Path:
    """Build the demo MoE with `top_k` of 16 experts per token in `folder`, unless it is there already; return `folder`.

    The complete folder is put in place by a rename; concurrent calls wait for each other. dtype float32 keeps the
    GGUF's values exactly (for tests). Raises UsageError if `folder` contains something else, WeightsError if `gguf` is
    not the model that the split was made for, ResourceError if the disk is full.
    """
    split = load_split()
    if not 1 <= top_k <= split.num_experts:
        raise UsageError(
            f"top_k is {top_k}, but the demo has {split.num_experts} experts.", f"Use 1 to {split.num_experts}."
        )
    stamp = stamp_of(gguf, top_k, dtype)
    if is_made(folder, stamp):
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{folder.name}.lock")):
        if not is_made(folder, stamp):
            scratch = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(scratch, ignore_errors=True)  # left by a run that was killed
            scratch.mkdir()
            try:
                _write_folder(scratch, GGUFReader(gguf), split, top_k, dtype, progress)
                _write_json(scratch / STAMP_NAME, stamp)
                shutil.rmtree(folder, ignore_errors=True)  # made by an older version
                scratch.rename(folder)
            finally:
                shutil.rmtree(scratch, ignore_errors=True)
    return folder


def _write_folder(
    folder: Path, reader: GGUFReader, split: Split, top_k: int, dtype: Dtype, progress: ProgressCallback | None
) -> None:
    config = _config(reader, split, top_k, dtype)
    tensors = list(moe_tensors(reader, config, split))
    elem_bytes = 2 if dtype == "bfloat16" else 4
    total = elem_bytes * sum(math.prod(t.shape) for t in tensors)
    _check_disk(folder, total)
    done = 0

    def written(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress:
            progress("assembling the demo model", done, total)

    write_safetensors(folder / "model.safetensors", tensors, dtype, written)
    write_tokenizer(folder, reader)
    _write_json(folder / "config.json", config)
    special = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    # The sampling parameters of SmolLM2-Instruct's model card; at temperature 1 so small a model is incoherent.
    _write_json(folder / "generation_config.json", {"do_sample": True, "temperature": 0.2, "top_p": 0.9, **special})


def _check_disk(folder: Path, need_bytes: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < need_bytes * 1.05:
        raise ResourceError(
            f"The demo model needs {need_bytes / 1e6:.0f} MB in {folder.parent}, which has {free / 1e6:.0f} MB free.",
            "Free some space or set PROA_CACHE to a folder on another disk.",
        )


def _config(reader: GGUFReader, split: Split, top_k: int, dtype: Dtype) -> dict[str, Any]:
    """Build config.json of Qwen2MoeForCausalLM. Raises WeightsError if the GGUF's sizes differ from the split's."""

    def read(key: str) -> Any:
        field = reader.get_field(key)
        return None if field is None else field.contents()

    width = read("llama.feed_forward_length")
    shape = (read("llama.block_count"), width, read("llama.embedding_length"))
    expected = (*split.neurons.shape, split.router.shape[2])
    if shape != expected:
        raise WeightsError(
            f"The GGUF has (layers, MLP width, hidden size) {shape}; the demo's split was made for {expected}.",
            "Use the SmolLM2-135M-Instruct that `proa serve demo` fetches.",
        )
    shared = width // 2
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        "torch_dtype": dtype,
        "vocab_size": read("llama.vocab_size"),
        "hidden_size": read("llama.embedding_length"),
        "num_hidden_layers": read("llama.block_count"),
        "num_attention_heads": read("llama.attention.head_count"),
        "num_key_value_heads": read("llama.attention.head_count_kv"),
        "intermediate_size": width,
        "shared_expert_intermediate_size": shared,
        "moe_intermediate_size": (width - shared) // split.num_experts,
        "num_experts": split.num_experts,
        "num_experts_per_tok": top_k,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "qkv_bias": False,
        "hidden_act": "silu",
        # a float32 in the GGUF; 7 digits identify it
        "rms_norm_eps": float(f"{read('llama.attention.layer_norm_rms_epsilon'):.7g}"),
        "rope_theta": read("llama.rope.freq_base"),
        "rope_scaling": None,
        "use_sliding_window": False,
        "max_position_embeddings": read("llama.context_length"),
        "tie_word_embeddings": True,
        "bos_token_id": read("tokenizer.ggml.bos_token_id"),
        "eos_token_id": read("tokenizer.ggml.eos_token_id"),
        "pad_token_id": read("tokenizer.ggml.padding_token_id"),
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n")
