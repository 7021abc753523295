"""Loading: values, types, views, progress, and files that break while they are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from proa.errors import WeightsError
from proa.weights.checkpoint import open_checkpoint
from proa.weights.load import load_weights
from tiny import make_tiny, reference_params, tiny_reference
from weights_cases import assert_same, fresh_targets, load


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("target", [torch.float32, torch.bfloat16, torch.float16])
def test_types(stored: torch.dtype, target: torch.dtype, tmp_path: Path) -> None:
    """The stored value is rounded once, to the target's type."""
    folder = make_tiny("qwen2-moe", tmp_path / "model")
    tensors = {name: tensor.to(stored) for name, tensor in tiny_reference("qwen2-moe").state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    want = reference_params(tiny_reference("qwen2-moe"))
    assert_same(load(folder, target), {name: t.to(stored).to(target) for name, t in want.items()})


def test_targets_may_be_views_of_fused_storage(tmp_path: Path) -> None:
    folder = make_tiny("qwen2-moe", tmp_path / "model")
    checkpoint = open_checkpoint(folder)
    declared = checkpoint.declare()
    targets = fresh_targets(declared)
    qkv = torch.full((64 + 32 + 32, 64), torch.nan)
    gate_up = torch.full((8, 48, 64), torch.nan)
    transposed = torch.full((24, 64), torch.nan)  # a target that is not contiguous
    for part, rows in (("q", slice(0, 64)), ("k", slice(64, 96)), ("v", slice(96, 128))):
        targets[f"blocks.1.mixer.{part}.weight"] = qkv[rows]
    for expert in range(8):
        targets[f"blocks.1.ffn.experts.{expert}.gate.weight"] = gate_up[expert, :24]
        targets[f"blocks.1.ffn.experts.{expert}.up.weight"] = gate_up[expert, 24:]
    targets["blocks.1.ffn.experts.5.down.weight"] = transposed.T
    load_weights(checkpoint, declared, targets, lambda done, total: None)
    want = reference_params(tiny_reference("qwen2-moe"))
    assert_same(targets, want)
    assert torch.equal(qkv, torch.cat([want[f"blocks.1.mixer.{p}.weight"] for p in "qkv"]))
    stacked = tiny_reference("qwen2-moe").state_dict()["model.layers.1.mlp.experts.gate_up_proj"]
    assert torch.equal(gate_up, stacked)


def test_progress(tmp_path: Path) -> None:
    folder = make_tiny("mixtral", tmp_path / "model", vocab_size=8192)  # a tensor of more than one chunk
    checkpoint = open_checkpoint(folder)
    declared = checkpoint.declare()
    calls: list[tuple[int, int]] = []
    load_weights(checkpoint, declared, fresh_targets(declared), lambda *call: calls.append(call))
    done = [call[0] for call in calls]
    assert done == sorted(done)
    assert {call[1] for call in calls} == {checkpoint.tensor_bytes}
    assert done[-1] == checkpoint.tensor_bytes
    assert len(calls) > len(checkpoint.tensors)


def tied_with_head(folder: Path, head: torch.Tensor) -> Path:
    make_tiny("smollm2", folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, "lm_head.weight": head}, folder / "model.safetensors")
    return folder


def test_stored_head_of_a_tied_model_must_be_the_embedding(tmp_path: Path) -> None:
    embed = tiny_reference("smollm2").state_dict()["model.embed_tokens.weight"].clone()
    assert_same(load(tied_with_head(tmp_path / "same", embed)), reference_params(tiny_reference("smollm2")))
    embed[255, 63] += 1.0
    folder = tied_with_head(tmp_path / "other", embed)
    with pytest.raises(WeightsError, match=r"lm_head.weight differs.*tie_word_embeddings=false"):
        load(folder)
    untied = load(folder, override_config={"tie_word_embeddings": False})
    assert torch.equal(untied["head.weight"], embed)


def test_float16_overflow_is_refused(tmp_path: Path) -> None:
    folder = make_tiny("llama2", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = 70000.0
    save_file(tensors, folder / "model.safetensors")
    assert float(load(folder, torch.bfloat16)["norm.weight"][3]) == 70144.0
    with pytest.raises(WeightsError, match=r"model.norm.weight has values beyond float16's range"):
        load(folder, torch.float16)


def test_types_that_cannot_be_loaded(tmp_path: Path) -> None:
    folder = make_tiny("llama2", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=rf"{name} is stored as F8_E4M3"):
        load(folder)


def test_file_cut_off_after_opening(tmp_path: Path) -> None:
    folder = make_tiny("llama2", tmp_path / "model")
    checkpoint = open_checkpoint(folder)
    declared = checkpoint.declare()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(WeightsError, match="ends too early"):
        load_weights(checkpoint, declared, fresh_targets(declared), lambda done, total: None)


def test_wrong_config_stops_before_reading(tmp_path: Path) -> None:
    folder = make_tiny("qwen3", tmp_path / "model")
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 113}))
    message = r"mlp.gate_proj.weight: the config says \[113, 64\], model.safetensors has \[112, 64\]"
    with pytest.raises(WeightsError, match=message):
        load(folder)


def test_targets_must_be_the_parameters(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny("llama2", tmp_path / "model"))
    declared = checkpoint.declare()
    targets = fresh_targets(declared)
    targets["norm.weight"] = torch.empty(3)
    with pytest.raises(ValueError, match=r"norm\.weight"):
        load_weights(checkpoint, declared, targets, lambda done, total: None)
    del targets["norm.weight"]
    with pytest.raises(ValueError, match=r"norm\.weight"):
        load_weights(checkpoint, declared, targets, lambda done, total: None)
