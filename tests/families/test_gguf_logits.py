"""GGUF files of every architecture, as llama.cpp's converter writes them (tests/tiny_gguf.py), against transformers in
float32; and on native kernels, CPU only and split with a GPU, against plain torch in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from engines import load_decoder, load_native
from hybrid_engines import SPLITS, load_split
from proa.native.pool import Pool
from teacher_forced import all_experts, forced, prompts
from tiny import tiny_reference
from tiny_gguf import SAID, make_tiny_gguf

TEXTS, PROMPT_TOKENS = prompts([9, 30, 4]), [1, 22, 2]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


@pytest.mark.parametrize("name", SAID)
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    file = make_tiny_gguf(name, tmp_path / "m.gguf", **SAID[name])
    got = forced(load_decoder(file), [TEXTS[1]], [22])
    with torch.inference_mode():
        want = tiny_reference(name, **SAID[name])(torch.tensor([TEXTS[1]])).logits[0]
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


@pytest.mark.parametrize("name", ["gpt-oss", "ernie", "deepseek-v2", "deepseek-v3", "qwen3-next"])
@pytest.mark.parametrize("quant", ["F32", "Q8_0"])
@pytest.mark.parametrize("device", ["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_no_further_from_float32_than_torch_in_bfloat16(
    device: str, name: str, quant: str, pool: Pool, tmp_path: Path
) -> None:
    file = make_tiny_gguf(name, tmp_path / "m.gguf", quant, **SAID[name])
    override = all_experts(file)
    exact, plain = (
        forced(load_decoder(file, dtype, **override), TEXTS, PROMPT_TOKENS) for dtype in (torch.float32, torch.bfloat16)
    )
    native = forced(load_native(file, pool, **override), TEXTS, PROMPT_TOKENS)
    split = forced(load_split(file, pool, SPLITS["half"], device, **override), TEXTS, PROMPT_TOKENS)
    scale = exact.abs().max()
    off_plain, *off = ((rows - exact).pow(2).mean().sqrt() for rows in (plain, native, split))
    assert off_plain <= 0.05 * scale, "the yardstick itself is off"
    assert all(each <= 1.05 * off_plain + 1e-4 * scale for each in off)
