"""Attention over parts of the keys, merged by the logarithms of their softmax's sums, is attention over all keys."""

from __future__ import annotations

from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from proa.ops.reference import attention, attention_with_sums, merge_attention
from proa.ops.table import AttentionBatch, KvPages, batch_of

PAGE_TOKENS, DIM = 4, 16
BOUND = 2.0**-18  # float32: sums of at most 64 terms, and exponentials of differences


def batch(kv_lens: list[int], pages: list[list[int]]) -> AttentionBatch:
    return batch_of([1] * len(kv_lens), kv_lens, pages, PAGE_TOKENS)


@settings(deadline=None)
@given(
    pages=st.integers(1, 12),
    cuts=st.lists(st.integers(1, 11), max_size=4),
    heads=st.sampled_from([(4, 4), (4, 2), (6, 1)]),
    scales=st.sampled_from([(1.0, 1.0), (0.5, 0.25)]),
    with_sinks=st.booleans(),
    empty=st.booleans(),
    seed=st.integers(0, 99),
)
def test_parts_of_the_keys(
    pages: int,
    cuts: list[int],
    heads: tuple[int, int],
    scales: tuple[float, float],
    with_sinks: bool,
    empty: bool,
    seed: int,
) -> None:
    generator = torch.Generator().manual_seed(seed)
    keys, values = (torch.randn(pages, PAGE_TOKENS, heads[1], DIM, generator=generator) for _ in range(2))
    q = 3 * torch.randn(2, heads[0], DIM, generator=generator)
    sinks = torch.randn(heads[0], generator=generator) if with_sinks else None
    cache, order = KvPages(keys, values, *scales), torch.randperm(pages, generator=generator).tolist()
    kv_len = pages * PAGE_TOKENS - seed % PAGE_TOKENS
    want = attention(q, cache, batch([kv_len] * 2, [order] * 2), 0.25, None, sinks)
    ends = sorted({0, pages, *(cut for cut in cuts if cut < pages)})
    parts = []
    for first, end in pairwise(ends):
        tokens = min(end * PAGE_TOKENS, kv_len) - first * PAGE_TOKENS
        here = batch([tokens] * 2, [order[first:end]] * 2)
        parts.append(attention_with_sums(q, cache, here, 0.25, None, sinks if first == 0 else None))
    if empty:  # whatever it says
        parts.append((torch.full_like(q, 7.0), torch.full(q.shape[:2], -torch.inf)))
    got, total = merge_attention(torch.stack([out for out, _ in parts]), torch.stack([sums for _, sums in parts]))
    assert (got - want).abs().max() <= BOUND * values.abs().max()
    seen = keys[order].flatten(0, 1)[:kv_len].double().repeat_interleave(heads[0] // heads[1], 1)
    scores = torch.einsum("thd,khd->thk", q.double(), seen) * 0.25 * scales[0]
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[None, :, None].expand(2, -1, 1)), -1)
    torch.testing.assert_close(total.double(), scores.logsumexp(-1), rtol=2.0**-20, atol=2.0**-18)


def test_rows_without_any_key_are_zeros() -> None:
    parts, sums = torch.ones(2, 1, 3, DIM), torch.full((2, 1, 3), -torch.inf)
    got, total = merge_attention(parts, sums)
    assert not got.any()
    assert total.isneginf().all()
