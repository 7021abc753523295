"""Quantised checkpoints in every format: values equal the format's definition, bit for bit if a packed format holds
them, and logits are as near to float32 as those of plain torch in bfloat16, on the CPU only and split with a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engines import load_decoder, load_native
from families.split_devices import DEVICES
from hybrid_engines import SPLITS, Kept, load_split
from proa.native.formats import BF16_FORM, QUANTISED
from proa.native.pool import Pool
from proa.weights.checkpoint import open_checkpoint
from proa.weights.sources import resolve, stored_types
from teacher_forced import all_experts, forced, prompts
from tiny import TINY
from tiny_quantised import DECODED, OTHER_NAMES, SCHEMES, Scheme, fp8_block, make_quantised

ALL = SCHEMES | DECODED
READ = ALL | OTHER_NAMES
SIZES = {"moe_intermediate_size": 96}


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


@pytest.mark.one_table
@pytest.mark.parametrize("name", READ)
def test_values_are_the_formats(name: str, tmp_path: Path) -> None:
    folder, values = make_quantised(READ[name], "qwen3-moe", tmp_path / "m", **SIZES)
    checkpoint = open_checkpoint(folder)
    declared = checkpoint.declare()
    sources = resolve(declared, checkpoint.tensors).params
    model = load_decoder(folder).decoder
    assert model is not None
    stored = stored_types(resolve(declared, checkpoint.tensors), checkpoint.tensors)
    assert READ[name].kept in set(stored.values())
    for ours, tensor in dict(model.parameters()).items():
        want = values[sources[ours].tensor].reshape(tuple(tensor.shape))
        # Two products of float32 at most, and a sum that is exact.
        np.testing.assert_allclose(tensor.numpy(), want, rtol=2.0**-23, atol=0)


@pytest.mark.one_table
@pytest.mark.parametrize("name", ALL)
def test_native_is_no_further_from_float32_than_torch(name: str, pool: Pool, tmp_path: Path) -> None:
    folder, _ = make_quantised(ALL[name], "qwen3-moe", tmp_path / "m", **SIZES)
    override = all_experts(folder)
    texts, prompt_tokens = prompts([9, 30, 4]), [1, 22, 2]
    exact = forced(load_decoder(folder, torch.float32, **override), texts, prompt_tokens)
    plain = forced(load_decoder(folder, torch.bfloat16, **override), texts, prompt_tokens)
    got = forced(load_native(folder, pool, **override), texts, prompt_tokens)
    _assert_near(got, plain, exact)


@pytest.mark.parametrize(
    "model", ["llama-bias", "qwen2", "qwen2-moe-mixed", "olmoe", "mixtral", "qwen3-next", "deepseek-v3"]
)
@pytest.mark.parametrize("name", ["fp8 small blocks", "fp8 tensor", "gptq zeros"])
def test_every_family(name: str, model: str, pool: Pool, tmp_path: Path) -> None:
    """Other tensor names, biases, shared experts, fused matrices."""
    sizes = {"intermediate_size": 96, "shared_expert_intermediate_size": 160, "moe_intermediate_size": 96}
    sizes |= {"q_lora_rank": 64, "kv_lora_rank": 64}
    known = {key: value for key, value in sizes.items() if key in TINY[model].config}
    folder, _ = make_quantised(SCHEMES[name], model, tmp_path / "m", **known)
    checkpoint = open_checkpoint(folder)
    stored = stored_types(resolve(checkpoint.declare(), checkpoint.tensors), checkpoint.tensors)
    assert set(stored.values()) == {"BF16", SCHEMES[name].kept}
    override = all_experts(folder)
    models = (
        load_decoder(folder, torch.float32, **override),
        load_decoder(folder, torch.bfloat16, **override),
        load_native(folder, pool, **override),
    )
    # With few rows, a single row that happens to be accurate would dominate the comparison.
    texts = [(prompts(lengths), [1, 22, 2]) for lengths in ([9, 30, 4], [19, 25, 7])]
    exact, plain, got = (torch.cat([forced(model, *text) for text in texts]) for model in models)
    _assert_near(got, plain, exact)


def scale_of(written: dict[str, torch.Tensor]) -> torch.Tensor:
    return written["weight_scale_inv"] if "weight_scale_inv" in written else written["weight_scale"].float()


def stacked(folder: Path, values: dict[str, np.ndarray], scheme: Scheme) -> None:
    """Stack the experts of a layer in one tensor, gate before up; blocks are counted from the first row of gate."""
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        name = f"model.layers.{layer}.mlp.experts"
        for fused, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            both = [np.concatenate([values.pop(f"{name}.{e}.{part}.weight") for part in parts]) for e in range(8)]
            written = [scheme.write(torch.from_numpy(matrix).float()) for matrix in both]
            tensors |= {
                f"{name}.{fused}": torch.stack([of["weight"] for of, _ in written]),
                f"{name}.{fused}_scale_inv": torch.stack([scale_of(of) for of, _ in written]),
            }
            values[f"{name}.{fused}"] = np.stack([exact for _, exact in written])
    others = {name: tensor for name, tensor in tensors.items() if not re.search(r"experts\.\d", name)}
    save_file(others, folder / "model.safetensors")


@pytest.mark.parametrize("scheme", ["fp8 small blocks", "fp8 modelopt"])
@pytest.mark.parametrize("width", [48, 24])
def test_stacked_experts(width: int, scheme: str, pool: Pool, tmp_path: Path) -> None:
    """gate has 24 rows: the last ones share a panel of 16 rows, and perhaps a block, with the first ones of up."""
    folder, values = make_quantised(SCHEMES[scheme], "qwen3-moe", tmp_path / "m", moe_intermediate_size=width)
    stacked(folder, values, SCHEMES[scheme])
    checkpoint = open_checkpoint(folder)
    sources = resolve(checkpoint.declare(), checkpoint.tensors).params
    model = load_decoder(folder).decoder
    assert model is not None
    for ours, tensor in dict(model.parameters()).items():
        at = sources[ours]
        want = values[at.tensor].reshape(-1, values[at.tensor].shape[-1])[at.first_row : at.first_row + at.rows]
        np.testing.assert_allclose(tensor.numpy(), want.reshape(tensor.shape), rtol=2.0**-23, atol=0)
    override = all_experts(folder)
    texts, prompt_tokens = prompts([9, 30, 4]), [1, 22, 2]
    exact = forced(load_decoder(folder, torch.float32, **override), texts, prompt_tokens)
    plain = forced(load_decoder(folder, torch.bfloat16, **override), texts, prompt_tokens)
    _assert_near(forced(load_native(folder, pool, **override), texts, prompt_tokens), plain, exact)


def test_experts_alone(pool: Pool, tmp_path: Path) -> None:
    """Kimi K2's form: only experts are quantised, all else is bfloat16."""
    folder, _ = make_quantised(SCHEMES["int4"], "qwen3-moe", tmp_path / "m", only=r".*experts", **SIZES)
    checkpoint = open_checkpoint(folder)
    stored = stored_types(resolve(checkpoint.declare(), checkpoint.tensors), checkpoint.tensors)
    assert {name for name, of in stored.items() if of != "BF16"} == {name for name in stored if ".experts." in name}
    override = all_experts(folder)
    texts, prompt_tokens = prompts([9, 30, 4]), [1, 22, 2]
    exact = forced(load_decoder(folder, torch.float32, **override), texts, prompt_tokens)
    plain = forced(load_decoder(folder, torch.bfloat16, **override), texts, prompt_tokens)
    _assert_near(forced(load_native(folder, pool, **override), texts, prompt_tokens), plain, exact)


LINEAR_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


@pytest.mark.parametrize("config", [{}, {"linear_fp8_config": LINEAR_FP8}])
@pytest.mark.parametrize("experts", ["int4", "gptq", "awq", "int4 paired"])
def test_fp8_beside_integers(experts: str, config: dict[str, Any], tmp_path: Path) -> None:
    """Attention in block-scaled FP8, experts in 4 bits: the config describes the experts, and FP8 possibly
    separately."""
    scheme = READ[experts]
    both = replace(scheme, config=scheme.config | config) if experts != "int4 paired" else scheme
    sizes = {**SIZES, "head_dim": 48}  # q_proj has 192 rows, o_proj as many columns
    folder, values = make_quantised(both, "qwen3-moe", tmp_path / "m", only=r".*experts", **sizes)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight") and "self_attn" in name]:
        written, values[name] = fp8_block(torch.float32)(tensors[name].float())
        tensors |= {f"{name.removesuffix('.weight')}.{part}": tensor for part, tensor in written.items()}
    save_file(tensors, folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    declared = checkpoint.declare()
    sources = resolve(declared, checkpoint.tensors).params
    stored = stored_types(resolve(declared, checkpoint.tensors), checkpoint.tensors)
    assert {"FP8 block 128", scheme.kept} < set(stored.values())
    model = load_decoder(folder).decoder
    assert model is not None
    for ours, tensor in dict(model.parameters()).items():
        want = values[sources[ours].tensor].reshape(tuple(tensor.shape))
        np.testing.assert_allclose(tensor.numpy(), want, rtol=2.0**-23, atol=0)


@pytest.mark.one_table
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("name", SCHEMES)
def test_split_is_no_further_from_float32_than_torch(
    name: str, split: str, device: str, pool: Pool, tmp_path: Path
) -> None:
    folder, _ = make_quantised(SCHEMES[name], "qwen3-moe", tmp_path / "m", **SIZES)
    override = all_experts(folder)
    texts, prompt_tokens = prompts([9, 30, 4]), [1, 22, 2]
    exact = forced(load_decoder(folder, torch.float32, **override), texts, prompt_tokens)
    plain = forced(load_decoder(folder, torch.bfloat16, **override), texts, prompt_tokens)
    keep: list[Kept] = []
    got = forced(load_split(folder, pool, SPLITS[split], device, keep=keep, **override), texts, prompt_tokens)
    shapes = [layer.memory.shape for layer in keep[0].hybrid.layers]
    kept = QUANTISED[SCHEMES[name].kept]
    assert {s.up_form for s in shapes} == {s.down_form for s in shapes} == {(kept.format, kept.group)}
    assert BF16_FORM not in {s.up_form for s in shapes}
    _assert_near(got, plain, exact)


def _assert_near(got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    scale = exact.abs().max()
    off_plain, off_got = ((rows - exact).pow(2).mean().sqrt() for rows in (plain, got))
    assert off_plain <= 0.05 * scale, "the yardstick itself is off"
    assert off_got <= 1.05 * off_plain + 1e-4 * scale
