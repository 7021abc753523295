"""Latent attention by expanded keys and values, against float32 or float64."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from proa.ops.caches import LatentPages

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "probes"))
from expanded_latents import Causal, ExpandedAttention, flash, pays, segments_for

PAGE = 16


def plain(q: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """A library's attention, in float32."""
    logits = torch.einsum("qhd,khd->hqk", q.float(), keys.float()) * scale
    if causal:
        last = torch.arange(len(keys) - len(q), len(keys), device=q.device)[:, None]
        logits = logits.masked_fill(last < torch.arange(len(keys), device=q.device), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values.float())
    return out.bfloat16().contiguous(), logits.logsumexp(-1)


@given(st.integers(1, 5000), st.integers(0, 70000), st.sampled_from([64, 4096]), st.sampled_from([16, 64]))
def test_segments_cover_every_key_once_and_the_last_holds_the_rows(rows: int, past: int, most: int, page: int) -> None:
    end, found = 0, segments_for(rows, past, most, page)
    for first, tokens in found:
        assert first == end
        assert first % page == 0
        end += tokens
    assert end == past + rows
    assert found[-1][1] >= rows
    assert all(tokens <= most for _, tokens in found[:-1])
    assert found[-1][1] <= max(most, rows + page - 1)


@pytest.mark.parametrize(
    ("rows", "past", "values", "expected"),
    [(1024, 15360, 128, True), (1024, 0, 128, True), (600, 100_000, 128, True), (64, 16384, 128, False),
     (1, 16384, 128, False), (1024, 15360, 256, False)],
)  # fmt: skip
def test_it_is_chosen_where_it_needs_clearly_fewer_products(rows: int, past: int, values: int, expected: bool) -> None:
    assert pays(rows, past, 512, 64, 128, values) is expected


def check(
    causal: Causal, rows: int, past: int, heads: int, widths: tuple[int, int, int, int], most: int, most_bytes: int,
    rng: torch.Generator, device: torch.device,
) -> None:  # fmt: skip
    """widths: K, R, V, rank. Compare with absorbed attention of the same latents in float32."""
    k, r, v, rank = widths
    pages = -(-(past + rows) // PAGE)
    table = torch.randperm(pages + 3, generator=rng)[:pages].to(torch.int32)
    stored = torch.randn(pages + 3, PAGE, rank + r, generator=rng).bfloat16()
    weight = (torch.randn(heads, k + v, rank, generator=rng) * rank**-0.5).bfloat16()
    q, scale = torch.randn(rows, heads, k + r, generator=rng).bfloat16(), (k + r) ** -0.5
    table, stored, weight, q = (x.to(device) for x in (table, stored, weight, q))
    out = torch.full((rows, heads, v), torch.nan, dtype=torch.bfloat16, device=device)
    cache = LatentPages(stored, rank)
    ExpandedAttention(causal, most, most_bytes).attend(q, weight, cache, table, past, scale, out)
    seen = stored[table.long()].flatten(0, 1)[: past + rows].float()
    hidden = torch.arange(past, past + rows, device=device)[:, None] < torch.arange(past + rows, device=device)
    for head in range(heads):
        w_k, w_v = weight[head].float().split([k, v])
        mine = torch.cat((q[:, head, :k].float() @ w_k, q[:, head, k:].float()), -1)
        p = (mine @ seen.T * scale).masked_fill(hidden, -torch.inf).softmax(-1)
        want = p @ seen[:, :rank] @ w_v.T
        # Keys, values and each segment's result are rounded to bfloat16.
        torch.testing.assert_close(out[:, head].float(), want, atol=0.03, rtol=0.03)


@pytest.mark.parametrize(
    ("rows", "past"), [(33, 0), (70, 64), (40, 331), (1, 64), (161, 37)]
)  # 331: five segments of 64 tokens and a rest; 161: more bytes for one of the widest heads than allowed
@pytest.mark.parametrize(("heads", "widths"), [(5, (128, 64, 128, 96)), (16, (64, 64, 64, 64)), (2, (24, 8, 16, 40))])
def test_expanded(
    rows: int, past: int, heads: int, widths: tuple[int, int, int, int], rng: torch.Generator, device: torch.device
) -> None:
    check(plain, rows, past, heads, widths, 64, 200_000, rng, device)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "past"), [(513, 0), (1024, 15360), (700, 20_001), (2048, 40_000)])
@pytest.mark.parametrize(
    ("heads", "widths"), [(128, (128, 64, 128, 512)), (16, (128, 64, 128, 512)), (8, (64, 64, 64, 256))]
)
def test_flash(
    rows: int, past: int, heads: int, widths: tuple[int, int, int, int], rng: torch.Generator, device: torch.device
) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    check(flash, rows, past, heads, widths, 16384, 320 << 20, rng, device)
