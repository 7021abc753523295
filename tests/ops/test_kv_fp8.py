"""A KV cache in fp8 (E4M3): what is stored, and attention over it, of plain torch and of every instruction set.

Rounding to E4M3 changes a value x by at most 2^-4 |x|, or half of the smallest number's spacing, 2^-10, times the
scale. Logits are then off by d = scale * sum |q| (2^-4 |k| + 2^-10 key_scale); a softmax whose logits are off by at
most D has weights within exp(+-2 D) of the right ones.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from ops.op_cases import natives
from ops.triton_bounds import BF16, EPS32, assert_within, rand, stored
from ops_run import NativeRun, TorchRun
from proa.ops.caches import KvPages
from proa.ops.reference import to_e4m3
from proa.ops.table import batch_of

RUNS = [pytest.param(TorchRun(), id="torch"), *natives()]
SCALES = torch.tensor([0.037, 1.7]).tolist()  # as float32 has them
PAGE_TOKENS = 4
ROUNDED, LEAST = 2.0**-4 * 1.001, 2.0**-10


def cache_of(pages: int, kv_heads: int, dim: int) -> KvPages:
    """Every code is NaN."""
    codes = torch.full((2, pages, PAGE_TOKENS, kv_heads, dim), 0x7F, dtype=torch.uint8)
    return KvPages(*codes.view(torch.float8_e4m3fn), *SCALES)


@pytest.mark.parametrize(
    ("x", "scale", "want"),
    [
        (0.0, 1.0, 0.0),
        (448.0, 1.0, 448.0),
        (464.0, 1.0, 448.0),
        (-1e30, 1.0, -448.0),
        (1.0625, 1.0, 1.0),  # a tie, to the even one
        (1.1875, 1.0, 1.25),
        (2.0**-10, 1.0, 0.0),
        (3 * 2.0**-10, 1.0, 2.0**-8),
        (1000.0, 4.0, 256.0),
        (math.inf, 1.0, math.nan),
        (math.nan, 2.0, math.nan),
    ],
)
def test_rounding(x: float, scale: float, want: float) -> None:
    got = to_e4m3(torch.tensor([x, x]), scale).float()
    assert torch.equal(got.nan_to_num(1e9), torch.full((2,), want).nan_to_num(1e9))


@pytest.mark.parametrize("ops", RUNS)
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "heads", "kv_heads", "dim", "window"),
    [
        ([1, 1, 1], [1, 7, 33], 4, 4, 16, None),
        ([9, 1], [14, 40], 6, 2, 24, None),
        ([11, 3], [27, 6], 3, 1, 80, 4),
    ],
)
def test_attention(
    ops: TorchRun | NativeRun,
    q_lens: list[int],
    kv_lens: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    window: int | None,
    sunk: bool,
    rng: torch.Generator,
) -> None:
    counts = [-(-n // PAGE_TOKENS) for n in kv_lens]
    order = torch.randperm(sum(counts) + 3, generator=rng).tolist()  # pages lie anywhere
    pages = [[order.pop() for _ in range(n)] for n in counts]
    cache, scale = cache_of(sum(counts) + 3, kv_heads, dim), dim**-0.5
    keys, values = ([rand(rng, n, kv_heads, dim) for n in kv_lens] for _ in range(2))
    every = batch_of(kv_lens, kv_lens, pages, PAGE_TOKENS).slots
    ops.write_kv(torch.cat(keys), torch.cat(values), cache, every)
    held = []
    for x, side, of in ((keys, cache.keys, SCALES[0]), (values, cache.values, SCALES[1])):
        codes = side.float().flatten(0, 1)
        assert torch.equal(codes[every], to_e4m3(torch.cat(x), of).float())
        assert codes.isnan().sum() == (len(codes) - len(every)) * kv_heads * dim, "another slot was written"
        held.append(torch.split(codes[every].double() * of, kv_lens))
    for side in (
        cache.keys,
        cache.values,
    ):  # slots past the end of a sequence are finite in service, and must not matter
        side.view(torch.uint8)[side.float().isnan()] = 0x7E

    q = rand(rng, sum(q_lens), heads, dim)
    sinks = 2 * torch.randn(heads, generator=rng) if sunk else None
    got = ops.attention(q, cache, batch_of(q_lens, kv_lens, pages, PAGE_TOKENS), scale, window, sinks)
    row = 0
    for s, (q_len, n) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for position in range(n - q_len, n):
            seen = slice(0 if window is None else max(0, position - window + 1), position + 1)
            for h in range(heads):
                mine = tuple(t[s][seen, h * kv_heads // heads].double() for t in (keys, values, *held))
                sink = None if sinks is None else sinks[h : h + 1].double()
                near_what_is_held(got[row, h], q[row, h].double(), mine[2], mine[3], scale, sink)
                near_what_was_given(got[row, h], q[row, h].double(), mine[0], mine[1], scale, sink)
            row += 1


def weights(q: Tensor, k: Tensor, scale: float, sink: Tensor | None) -> Tensor:
    logits = k @ q * scale
    return torch.softmax(logits if sink is None else torch.cat((logits, sink)), 0)[: len(k)]


def near_what_is_held(got: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, sink: Tensor | None) -> None:
    """Check attention over the dequantised cache with the bounds of test_ops.py."""
    p = weights(q, k, scale, sink)
    wobble = (k.abs() @ q.abs() * scale).max() * (len(q) + 5) * EPS32
    bound = (p @ v.abs()) * (4 * wobble + 3 * torch.finfo(BF16).eps + (len(p) + 9) * EPS32)
    assert_within(got, p @ v, bound + 2 * stored(p @ v))  # plain torch rounds before its scale and after it


def near_what_was_given(got: Tensor, q: Tensor, k: Tensor, v: Tensor, scale: float, sink: Tensor | None) -> None:
    p = weights(q, k, scale, sink)
    off = (scale * ((ROUNDED * k.abs() + LEAST * SCALES[0]) @ q.abs())).max()
    size, grown = p @ v.abs(), torch.exp(2 * off)
    bound = grown * (p @ (ROUNDED * v.abs() + LEAST * SCALES[1])) + (grown - 1) * size
    assert_within(got, p @ v, bound + size * 8 * torch.finfo(BF16).eps)
