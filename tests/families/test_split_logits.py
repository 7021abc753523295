"""Experts split in any way over a GPU and the CPU: as near to float32 as plain torch in bfloat16, prefill and decode,
single sequences and batches. On a simulated GPU everywhere, on a real one if there is one.

Routers choose all experts here, as in test_native_logits.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import hybrid_engines
from engines import Loaded, load_decoder
from families.test_native_logits import all_experts, prompts
from hybrid_engines import SPLITS, Split, load_split
from proa.cache.pool import allocate_pool
from proa.engine.executors.batch import Span, StepBatch, StepLimits
from proa.native.doorbell import Way
from proa.native.pool import Pool
from proa.sampling.rows import Row
from proa.types import Sampling
from tiny import TINY, make_tiny

MOE = [name for name in sorted(TINY) if "experts" in str(TINY[name].config)]
PAGE_TOKENS, PAGES = 4, 128
LIMITS = StepLimits(rows=64, sequences=8, context_tokens=128, page_tokens=PAGE_TOKENS, head_rows=64)
CASES = [
    pytest.param("sim", name, split, id=f"sim-{name}-{split}") for name in MOE for split in SPLITS
] + [
    pytest.param("cuda", name, split, id=f"cuda-{name}-{split}", marks=pytest.mark.gpu)
    for name in sorted(TINY) for split in (SPLITS if name in MOE else ["all on the GPU"])
]  # fmt: skip


GREEDY = Sampling(max_tokens=1, temperature=0.0)


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


def forced(model: Loaded, texts: list[list[int]], prompt_tokens: list[int]) -> Tensor:
    """Logits of all rows: the prompts of all sequences in one step, then one token each until they end."""
    executor = model.make(LIMITS, PAGES)
    most = -(-LIMITS.context_tokens // PAGE_TOKENS)
    pages = [list(range(i * most // 2, (i + 1) * most // 2)) for i in range(len(texts))]
    found: list[Tensor] = []

    def step(parts: list[tuple[int, int, int]]) -> None:
        """(sequence, from, to)"""
        spans = [Span(texts[i][a:b], a, pages[i], prompt_tokens[i], i) for i, a, b in parts]
        batch = StepBatch(spans, range(len(spans)))
        step = executor.launch(batch)
        executor.sample(step, batch.sampled, [Row(GREEDY, texts[i], prompt_tokens[i]) for i, _, _ in parts])
        result = executor.wait(step)
        found.append(executor.logits_of(step, range(batch.num_tokens)).clone().float())
        last = found[-1][batch.rows_of(batch.sampled)].argmax(-1).tolist()
        assert result.tokens == {i: [token] for i, token in enumerate(last)}

    step([(i, 0, n) for i, n in enumerate(prompt_tokens)])
    for t in range(max(len(text) - n for text, n in zip(texts, prompt_tokens, strict=True))):
        parts = [(i, n + t, n + t + 1) for i, n in enumerate(prompt_tokens) if n + t < len(texts[i])]
        step(parts)
    return torch.cat(found)


@pytest.mark.parametrize(("device", "name", "split"), CASES)
def test_no_further_from_float32_than_torch_in_bfloat16(
    device: str, name: str, split: str, pool: Pool, tmp_path: Path
) -> None:
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


@pytest.mark.parametrize("device", ["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
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
