"""GGUF models split over a GPU and the CPU: matrices keep their block formats on both. The simulated GPU holds all but
experts in bfloat16.

The reference is plain torch in bfloat16, which rounds each weight of a block once more.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engines import load_decoder
from families.split_devices import DEVICES
from hybrid_engines import SPLITS, Kept, load_split
from proa.native.formats import Format
from proa.native.pool import Pool
from teacher_forced import all_experts, forced, prompts
from tiny_gguf import make_tiny_gguf

KINDS = {
    "Q4_0": Format.INT4_F16, "Q4_1": Format.UINT4_F16, "Q8_0": Format.INT8_F16, "Q5_0": Format.INT8_F16,
    "Q5_1": Format.BF16, "MXFP4": Format.MXFP4, "F16": Format.BF16,
}  # fmt: skip


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(("up", "down"), [("Q4_0", "Q8_0"), ("Q4_1", "Q4_1"), ("Q5_0", "MXFP4"), ("Q5_1", "F16")])
def test_no_further_from_float32_than_torch_in_bfloat16(
    up: str, down: str, split: str, device: str, pool: Pool, tmp_path: Path
) -> None:
    file = make_tiny_gguf("qwen3-moe", tmp_path / "m.gguf", up, down=down, moe_intermediate_size=32)
    override = all_experts(file)
    texts, prompt_tokens = prompts([9, 30, 4]), [1, 22, 2]
    exact = forced(load_decoder(file, torch.float32, **override), texts, prompt_tokens)
    plain = forced(load_decoder(file, torch.bfloat16, **override), texts, prompt_tokens)
    keep: list[Kept] = []
    got = forced(load_split(file, pool, SPLITS[split], device, keep=keep, **override), texts, prompt_tokens)
    shapes = [layer.memory.shape for layer in keep[0].hybrid.layers]
    assert {(s.up_form.format, s.down_form.format) for s in shapes} == {(KINDS[up], KINDS[down])}
    if device == "cuda":
        blocks = keep[0].model.blocks
        forms = {form.format for block in blocks for part in (block.mixer.qkv, block.mixer.o) for form in part.forms}
        assert forms == {KINDS[up]}
    scale = exact.abs().max()
    off_plain, off_got = ((rows - exact).pow(2).mean().sqrt() for rows in (plain, got))
    assert off_plain <= 0.05 * scale, "the yardstick itself is off"
    assert off_got <= 1.05 * off_plain + 1e-4 * scale
