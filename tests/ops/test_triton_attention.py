"""Paged attention by Triton against float64."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from ops.paged_attention import Paged, attended, in_e4m3, on, paged, softmax_of
from ops.triton_bounds import BF16, assert_within, poisoned, rand
from proa.ops.caches import KvPages
from proa.ops.sizes import (
    MOST_HEAD_GROUP,
    attention_floats,
    attention_splits,
    prompt_split_floats,
    prompt_splits,
)
from proa.ops.triton import attention, kv_codes
from proa.ops.triton.attention import Softmax, prefill, prefill_in_splits
from proa.ops.triton.attention_decode import decode


@pytest.fixture(params=["as it is", pytest.param("by bits", marks=pytest.mark.gpu)])
def widening(request: pytest.FixtureRequest, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ways to convert e4m3: in software, and on GPUs that can, in hardware."""
    if request.param == "by bits":
        if not kv_codes._native(device):
            pytest.skip("nothing else is done here")
        monkeypatch.setattr(kv_codes, "_native", lambda _: False)


def run_decode(q: Tensor, p: Paged, softmax: Softmax, splits: int) -> Tensor:
    rows, heads, dim = q.shape
    out = poisoned(rows, heads + 1, dim).to(q.device)
    workspace = poisoned(attention_floats(rows, heads, dim, splits), dtype=torch.float32).to(q.device)
    decode(q, p.cache, p.page_table, p.kv_lens, softmax, splits, workspace, out[:, :heads])
    assert out[:, heads:].isnan().all()
    return out[:, :heads]


def assert_attended(out: Tensor, q: Tensor, p: Paged, starts: list[int], softmax: Softmax) -> None:
    """The rows starts[s] to starts[s + 1] of each sequence s are right, and rows behind them were not written."""
    for s, (first, end) in enumerate(pairwise(starts)):
        if first < end:
            want, bound = attended(q[first:end], p.keys[s], p.values[s], softmax, torch.float64)
            assert_within(out[first:end], want, bound)
    assert out[starts[-1] :].isnan().all()


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("kv_lens", "heads", "kv_heads", "dim", "page_tokens", "window", "splits"),
    [
        ([1], 1, 1, 64, 16, None, 1),
        ([130, 0, 64, 1], 8, 2, 64, 16, None, 3),
        ([70, 3], 5, 1, 80, 7, None, 2),
        ([70, 3], 6, 3, 100, 16, None, 2),
        ([70, 3], 4, 2, 18, 16, 9, 2),
        ([200], 12, 1, 96, 16, 33, 4),
        ([65, 0, 129], 2, 2, 128, 16, None, 17),
        ([40, 41, 1], 4, 2, 192, 5, 40, 2),
        ([100], 20, 1, 256, 64, 1, 2),
        ([0, 0], 4, 4, 64, 16, 8, 2),
    ],
)
def test_decode(
    kv_lens: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    page_tokens: int,
    window: int | None,
    splits: int,
    sinks: bool,
    rng: torch.Generator,
    device: torch.device,
) -> None:
    p = paged(kv_lens, kv_heads, dim, page_tokens, rng, device)
    q = rand(rng, len(kv_lens), heads + 2, dim)[:, :heads]  # of rows that go on
    softmax = softmax_of(dim, heads, window, sinks, rng)
    out = run_decode(q.to(device), p, on(softmax, device), splits)
    for s, n in enumerate(kv_lens):
        if n:
            want, bound = attended(q[s : s + 1], p.keys[s], p.values[s], softmax, torch.float64)
            assert_within(out[s : s + 1], want, bound)
        else:
            assert torch.equal(out[s], torch.zeros_like(out[s]))


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "heads", "kv_heads", "dim", "page_tokens", "window"),
    [
        ([1], [1], 1, 1, 64, 16, None),
        ([70], [70], 1, 1, 64, 16, None),
        ([9, 0, 3, 1], [140, 0, 3, 65], 8, 1, 64, 16, None),
        ([5, 13], [5, 90], 12, 2, 80, 7, None),
        ([5, 13], [5, 90], 6, 3, 100, 16, None),
        ([5, 13], [5, 90], 4, 2, 18, 16, 9),
        ([33], [230], 2, 1, 128, 16, 20),
        ([20, 7], [20, 150], 5, 1, 96, 16, 64),
        ([66, 2], [68, 70], 2, 2, 192, 5, 1),
        ([6], [80], 16, 1, 256, 64, None),
        ([0, 4, 0], [0, 4, 0], 3, 1, 64, 16, 100),
        ([3], [65], 16, 1, 64, 16, None),  # the first row sees all of a block but its last position
        ([4], [200], 32, 1, 64, 16, 70),  # of a tile's two rows, the second alone does not see where it begins
    ],
)
def test_prefill(
    q_lens: list[int],
    kv_lens: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    page_tokens: int,
    window: int | None,
    sinks: bool,
    rng: torch.Generator,
    device: torch.device,
) -> None:
    p = paged(kv_lens, kv_heads, dim, page_tokens, rng, device)
    starts = [sum(q_lens[:s]) for s in range(len(q_lens) + 1)]
    rows = starts[-1] + 3  # the last three belong to no sequence
    q = rand(rng, rows, heads + 2, dim)[:, :heads]
    softmax = softmax_of(dim, heads, window, sinks, rng)
    out = poisoned(rows, heads, dim).to(device)
    q_starts = torch.tensor(starts, dtype=torch.int32, device=device)
    prefill(q.to(device), p.cache, p.page_table, q_starts, p.kv_lens, on(softmax, device), out)
    assert_attended(out, q, p, starts, softmax)


@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("window", [None, 1, 70, 300])
@pytest.mark.parametrize("splits", [2, 5, 16])
def test_prefill_by_several_programs(
    splits: int, window: int | None, sinks: bool, rng: torch.Generator, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Splits that no row, or only some rows of a tile, see; a sequence without rows; rows of no sequence."""
    monkeypatch.setattr(attention, "LEAST_SHARE", 64)
    q_lens, kv_lens, heads, kv_heads, dim = [9, 0, 70, 1], [400, 0, 90, 333], 8, 2, 64
    p = paged(kv_lens, kv_heads, dim, 16, rng, device)
    starts = [sum(q_lens[:s]) for s in range(len(q_lens) + 1)]
    q = rand(rng, starts[-1] + 3, heads, dim)
    softmax = softmax_of(dim, heads, window, sinks, rng)
    out = poisoned(len(q), heads, dim).to(device)
    q_starts = torch.tensor(starts, dtype=torch.int32, device=device)
    prefill_in_splits(q.to(device), p.cache, p.page_table, q_starts, p.kv_lens, on(softmax, device), splits, out)
    assert_attended(out, q, p, starts, softmax)


@pytest.mark.usefixtures("widening")
@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "heads", "kv_heads", "dim", "page_tokens", "window", "splits"),
    [
        ([9, 0, 3, 1], [140, 0, 3, 65], 8, 2, 128, 16, None, 3),
        ([5, 13], [5, 90], 12, 1, 80, 7, 33, 2),
        ([6], [70], 3, 3, 24, 5, None, 4),  # rows of 72 bytes
        ([6], [70], 4, 2, 100, 16, None, 4),
        ([6], [70], 3, 3, 18, 5, None, 4),
        ([4], [66], 4, 1, 256, 64, None, 2),
    ],
)
def test_in_e4m3(
    q_lens: list[int],
    kv_lens: list[int],
    heads: int,
    kv_heads: int,
    dim: int,
    page_tokens: int,
    window: int | None,
    splits: int,
    rng: torch.Generator,
    device: torch.device,
) -> None:
    """Decode and prefill, against the exact dequantised values."""
    p = in_e4m3(paged(kv_lens, kv_heads, dim, page_tokens, rng, device))
    softmax = softmax_of(dim, heads, window, True, rng)
    starts = [sum(q_lens[:s]) for s in range(len(q_lens) + 1)]
    q = rand(rng, starts[-1], heads, dim)
    out = poisoned(*q.shape).to(device)
    q_starts = torch.tensor(starts, dtype=torch.int32, device=device)
    prefill(q.to(device), p.cache, p.page_table, q_starts, p.kv_lens, on(softmax, device), out)
    last = q[[max(0, end - 1) for end in starts[1:]]]
    decoded = run_decode(last.to(device), p, on(softmax, device), splits)
    for s, n in enumerate(q_lens):
        if n:
            mine = slice(starts[s], starts[s + 1])
            want, bound = attended(q[mine], p.keys[s], p.values[s], softmax, torch.float64)
            assert_within(out[mine], want, bound)
            assert_within(decoded[s : s + 1], want[-1:], bound[-1:])


def test_a_single_position_beside_a_sink(device: torch.device) -> None:
    """One position of logit 0 and value 1 beside a sink of log 3: a quarter; a sink of -inf takes nothing."""
    ones, zeros = torch.ones(1, 16, 1, 64, dtype=BF16), torch.zeros(1, 16, 1, 64, dtype=BF16)
    cache = KvPages(zeros.to(device), ones.to(device))
    softmax = Softmax(1.0, None, torch.tensor([math.log(3), -math.inf], device=device))
    table = torch.zeros(1, 1, dtype=torch.int32, device=device)
    p = Paged(cache, table, torch.ones(1, dtype=torch.int32, device=device), [], [])
    q = torch.ones(1, 2, 64, dtype=BF16, device=device)
    want = torch.tensor([0.25, 1.0]).to(BF16)[:, None].expand(2, 64)
    for splits in (1, 2):
        assert torch.equal(run_decode(q, p, softmax, splits)[0].cpu(), want)
    out, starts = poisoned(1, 2, 64).to(device), torch.tensor([0, 1], dtype=torch.int32, device=device)
    prefill(q, cache, table, starts, p.kv_lens, softmax, out)
    assert torch.equal(out[0].cpu(), want)


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    cache = KvPages(*torch.zeros(2, 1, 16, 2, 64, dtype=BF16, device=device))
    q, table = torch.zeros(1, 4, 64, dtype=BF16, device=device), torch.zeros(1, 1, dtype=torch.int32, device=device)
    lens, workspace = torch.ones(1, dtype=torch.int32, device=device), torch.zeros(4 * 65, device=device)
    for message, args in {
        "does not fit a cache": (q[:, :3], cache, table, lens, Softmax(1.0), 1, workspace, q[:, :3]),
        "int32": (q, cache, table.long(), lens, Softmax(1.0), 1, workspace, q),
        "workspace": (q, cache, table, lens, Softmax(1.0), 2, workspace, q),
        "window": (q, cache, table, lens, Softmax(1.0, 0), 1, workspace, q),
        "sinks": (q, cache, table, lens, Softmax(1.0, None, torch.zeros(3)), 1, workspace, q),
        "contiguous heads": (
            q.transpose(1, 2).contiguous().transpose(1, 2),
            cache,
            table,
            lens,
            Softmax(1.0),
            1,
            workspace,
            q,
        ),
    }.items():
        with pytest.raises(ValueError, match=message):
            decode(*args)


def test_splits_fill_the_processors_and_no_more() -> None:
    assert attention_splits(1, 4, 132) * 4 >= 2 * 132
    assert attention_splits(1, 1, 132) == 256
    assert attention_splits(512, 8, 132) == 1
    assert 1 <= attention_splits(64, 4, 132) * 64 * 4 <= 2 * 8 * 132


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(32, 4, 128), (16, 2, 256), (16, 16, 128), (64, 8, 64), (24, 2, 64)]
)
def test_splits_of_prompts_fill_the_processors_once_within_their_room(heads: int, kv_heads: int, dim: int) -> None:
    for rows in (2, 32, 64, 128, 256, 512, 4096):
        splits = prompt_splits(rows, heads, kv_heads, 132)
        programs = -(-rows // (MOST_HEAD_GROUP // (heads // kv_heads))) * kv_heads
        assert splits in (1, 16) or splits * programs <= 264 < (splits + 1) * programs
        assert splits == 1 or rows * heads * splits * (dim + 1) <= prompt_split_floats(rows, heads, dim)
    assert prompt_splits(4096, heads, kv_heads, 132) == 1


@pytest.mark.gpu
def test_a_graph_follows_lengths_on_the_device(rng: torch.Generator, device: torch.device) -> None:
    """Captured once, replayed after sequences grew and one ended."""
    p = paged([300, 40, 77], 2, 128, 16, rng, device)
    q, out = rand(rng, 3, 8, 128).to(device), poisoned(3, 8, 128).to(device)
    softmax = softmax_of(128, 8, None, False, rng)
    workspace = torch.empty(attention_floats(3, 8, 128, 9), device=device)
    lens = torch.tensor([1, 1, 1], dtype=torch.int32, device=device)

    def step() -> None:
        decode(q, p.cache, p.page_table, lens, softmax, 9, workspace, out)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for now in ([1, 1, 1], [150, 39, 64], [300, 40, 0]):
        lens.copy_(torch.tensor(now))
        out.fill_(torch.nan)
        graph.replay()
        for s, n in enumerate(now):
            if not n:
                assert not out[s].any()
                continue
            want, bound = attended(q[s : s + 1].cpu(), p.keys[s][:n], p.values[s][:n], softmax, torch.float64)
            assert_within(out[s : s + 1], want, bound)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(32, 4, 128, None), (64, 8, 64, 128), (16, 2, 256, None), (16, 16, 128, None)],
)
def test_long_contexts(
    heads: int, kv_heads: int, dim: int, window: int | None, fp8: bool, rng: torch.Generator, device: torch.device
) -> None:
    """Decode of 64K positions beside short ones, and a chunk of 2048 rows over a past."""
    softmax = softmax_of(dim, heads, window, True, rng)
    kv_lens = [65536, 7, 0, 12345]
    p = paged(kv_lens, kv_heads, dim, 16, rng, device)
    p = in_e4m3(p) if fp8 else p
    q = rand(rng, len(kv_lens), heads, dim).to(device)
    out = run_decode(q, p, on(softmax, device), attention_splits(len(kv_lens), kv_heads, 132))
    for s in (0, 1, 3):
        want, bound = attended(
            q[s : s + 1], p.keys[s].to(device), p.values[s].to(device), on(softmax, device), torch.float64
        )
        assert_within(out[s : s + 1], want, bound)
    assert not out[2].any()

    p = paged([4096, 100], kv_heads, dim, 16, rng, device)
    p = in_e4m3(p) if fp8 else p
    q = rand(rng, 2048 + 100, heads, dim).to(device)
    out, starts = poisoned(*q.shape).to(device), torch.tensor([0, 2048, 2148], dtype=torch.int32, device=device)
    prefill(q, p.cache, p.page_table, starts, p.kv_lens, on(softmax, device), out)
    for s, mine in enumerate((slice(0, 2048), slice(2048, 2148))):
        keys, values = p.keys[s].to(device), p.values[s].to(device)
        want, bound = attended(q[mine], keys, values, on(softmax, device), torch.float64)
        assert_within(out[mine], want, bound)
