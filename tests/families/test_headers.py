"""Every family accounts for every tensor of a real checkpoint: names, shapes, layout, values."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from proa.weights.checkpoint import open_checkpoint
from proa.weights.sources import resolve
from tiny import TINY, make_tiny, reference_params, tiny_reference
from weights_cases import assert_same, load


@pytest.mark.parametrize("name", TINY)
def test_saved_checkpoint_is_used_completely(name: str, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(make_tiny(name, tmp_path / name))
    declared = checkpoint.declare()
    sources = resolve(declared, checkpoint.tensors)
    assert {source.tensor for source in sources.params.values()} == checkpoint.tensors.keys()
    assert sources.ignored == {}
    reference = tiny_reference(name)
    assert declared.spec.num_params == sum(tensor.numel() for tensor in reference_params(reference).values())
    assert_same(load(checkpoint.path), reference_params(reference))


@pytest.mark.parametrize("name", ["qwen2-moe", "qwen2-moe-mixed", "qwen3-moe", "qwen3-next", "mixtral"])
@pytest.mark.parametrize("transposed", [False, True])
def test_stacked_experts(name: str, transposed: bool, tmp_path: Path) -> None:
    """The layouts that save_pretrained does not write: all experts of a layer in one tensor, both orientations."""
    folder = make_tiny(name, tmp_path / name)
    reference = tiny_reference(name)
    tensors = {
        key: tensor.mT.contiguous() if transposed and ".experts." in key else tensor
        for key, tensor in reference.state_dict().items()
    }
    save_file(tensors, folder / "model.safetensors")
    assert_same(load(folder), reference_params(reference))


def test_sharded(tmp_path: Path) -> None:
    folder = make_tiny("qwen3-moe", tmp_path / "model", max_shard_size="200KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 3
    assert_same(load(folder), reference_params(tiny_reference("qwen3-moe")))


@pytest.mark.parametrize("num_files", [1, 2])
def test_torch_bin(num_files: int, tmp_path: Path) -> None:
    folder = make_tiny("qwen2-moe", tmp_path / "model")
    (folder / "model.safetensors").unlink()
    reference = tiny_reference("qwen2-moe")
    items = list(reference.state_dict().items())
    for i in range(num_files):
        name = "pytorch_model.bin" if num_files == 1 else f"pytorch_model-{i + 1:05}-of-{num_files:05}.bin"
        torch.save(dict(items[i::num_files]), folder / name)
    assert open_checkpoint(folder).load_format == "bin"
    assert_same(load(folder), reference_params(reference))


def test_mtp_layers_are_ignored_by_name(tmp_path: Path) -> None:
    """Qwen3-Next as published: MTP layers are not parameters of the model, and the reason for ignoring them is
    given."""
    folder = make_tiny("qwen3-next", tmp_path / "model")
    tensors = dict(tiny_reference("qwen3-next").state_dict())
    tensors |= {"mtp.fc.weight": torch.ones(64, 128), "mtp.layers.0.mlp.experts.3.up_proj.weight": torch.ones(24, 64)}
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    ignored = resolve(checkpoint.declare(), checkpoint.tensors).ignored
    assert ignored.keys() == {"mtp.fc.weight", "mtp.layers.0.mlp.experts.3.up_proj.weight"}
    assert all("MTP" in why for why in ignored.values())
    assert_same(load(folder), reference_params(tiny_reference("qwen3-next")))


def test_old_llama_buffers_are_ignored_by_name(tmp_path: Path) -> None:
    folder = make_tiny("llama2", tmp_path / "model")
    tensors = dict(tiny_reference("llama2").state_dict())
    tensors |= {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": torch.ones(8) for i in range(3)}
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    ignored = resolve(checkpoint.declare(), checkpoint.tensors).ignored
    assert len(ignored) == 3
    assert_same(load(folder), reference_params(tiny_reference("llama2")))
