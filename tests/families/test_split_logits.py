"""Experts split in any way over a GPU and the CPU: as near to float32 as plain torch in bfloat16, prefill and decode,
single sequences and batches. On a simulated GPU everywhere, on a real one if there is one.

Routers choose all experts here, as in test_native_logits.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import hybrid_engines
from engines import load_decoder
from families.split_devices import DEVICES
from hybrid_engines import SPLITS, Split, load_split
from proa.cache.pool import allocate_pool
from proa.native.doorbell import Way
from proa.native.pool import Pool
from teacher_forced import MOE, all_experts, forced, prompts
from tiny import TINY, make_tiny


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("split", SPLITS)
def test_no_further_from_float32_than_torch_in_bfloat16(
    device: str, name: str, split: str, pool: Pool, tmp_path: Path
) -> None:
    check(device, name, split, pool, tmp_path)


@pytest.mark.gpu
@pytest.mark.parametrize("name", sorted(set(TINY) - set(MOE)))
def test_models_without_experts(name: str, pool: Pool, tmp_path: Path) -> None:
    check("cuda", name, "all on the GPU", pool, tmp_path)


def check(device: str, name: str, split: str, pool: Pool, tmp_path: Path) -> None:
    folder = make_tiny(name, tmp_path)
    override = all_experts(folder)
    loaded = [load_decoder(folder, dtype, **override) for dtype in (torch.float32, torch.bfloat16)]
    loaded.append(load_split(folder, pool, SPLITS[split], device, **override))
    cases = (([19], [11]), ([9, 30, 4, 13, 21, 6, 11, 3], [1, 22, 2, 5, 17, 4, 8, 1]))
    # All rows together: with few rows, the errors of two roundings of the same sums differ by a tenth.
    exact, plain, got = (
        torch.cat([forced(model, prompts(lengths), prompt_tokens) for lengths, prompt_tokens in cases])
        for model in loaded
    )
    scale = exact.abs().max()
    off_plain, off_got = ((rows - exact).pow(2).mean().sqrt() for rows in (plain, got))
    assert off_plain <= 0.05 * scale, "the yardstick itself is off"
    assert off_got <= 1.05 * off_plain + 1e-4 * scale


@pytest.mark.parametrize("device", DEVICES)
def test_every_transport_gives_the_same_bits(device: str, pool: Pool, tmp_path: Path) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    got = [
        forced(load_split(folder, pool, Split(0.5, way=way), device), prompts([9, 30, 4]), [1, 22, 2]) for way in Way
    ]
    assert got[0].isfinite().all()
    assert torch.equal(got[0], got[1])
    assert torch.equal(got[0], got[2])


@pytest.mark.gpu
def test_fills_on_other_streams_are_awaited(pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    texts = prompts([19])
    expected = forced(load_split(folder, pool, SPLITS["half"], "cuda"), texts, [11])

    def late(*args: object, **more: object) -> object:
        torch.cuda._sleep(1 << 30)  # about half a second, on the stream where the cache is then filled with zeros
        return allocate_pool(*args, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(hybrid_engines, "allocate_pool", late)
    assert torch.equal(forced(load_split(folder, pool, SPLITS["half"], "cuda"), texts, [11]), expected)
