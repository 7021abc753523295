"""Latent attention by Triton against float64; see test_triton_attention.py for the bounds."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ops.triton_bounds import BF16, EPS32, assert_within, poisoned, rand, stored
from proa.models.spec import Block, LatentAttention, Mlp, Model, Rope
from proa.ops.caches import LatentPages
from proa.ops.gpu_traits import traits_of
from proa.ops.sizes import attention_floats
from proa.ops.triton.latent_attention import decode, prefill, splits_for
from proa.plan.kernels import partials_bytes

SMALL, LARGE = 99 << 10, 227 << 10  # shared memory per thread block
DEEPSEEK = (512, 64)


@dataclass
class Paged:
    """Sequences with shuffled pages; everything that kernels must not read is NaN."""

    cache: LatentPages
    page_table: Tensor
    kv_lens: Tensor
    rows: list[Tensor]  # per sequence [kv_len, rank + key]


def paged(
    kv_lens: list[int], widths: tuple[int, int], page_tokens: int, rng: torch.Generator, device: torch.device
) -> Paged:
    counts = [-(-n // page_tokens) for n in kv_lens]
    order = torch.randperm(sum(counts) + 3, generator=rng)
    pool = poisoned(len(order), page_tokens, sum(widths))
    table = torch.full((len(kv_lens), max(counts) + 2), -(2**20), dtype=torch.int32)
    rows = []
    for s, (n, pages) in enumerate(zip(kv_lens, torch.split(order[:-3], counts), strict=True)):
        table[s, : len(pages)] = pages
        rows.append(rand(rng, n, sum(widths)))
        pool[pages.repeat_interleave(page_tokens)[:n], torch.arange(n) % page_tokens] = rows[-1]
    lens = torch.tensor(kv_lens, dtype=torch.int32, device=device)
    return Paged(LatentPages(pool.to(device), widths[0]), table.to(device), lens, rows)


def attended(q: Tensor, rows: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Attention of one sequence's q [n, heads, rank + key], its last n positions: the result and its error bound."""
    scale, (count, _, width), kv_len = scale_of(q), q.shape, len(rows)
    q, rows = q.double().transpose(0, 1), rows.double()
    hidden = (torch.arange(kv_len - count, kv_len)[:, None] < torch.arange(kv_len)).to(q.device)
    weights = torch.softmax((q @ rows.T * scale).masked_fill(hidden, -torch.inf), -1)
    off = (q.abs() @ rows.abs().T * scale).masked_fill(hidden, 0).amax(-1, keepdim=True) * (width + 6) * EPS32
    relative = 2 * off + torch.finfo(BF16).eps / 2 + (kv_len + 32) * EPS32
    want = weights @ rows[:, :rank]
    size = weights @ rows[:, :rank].abs()
    return want.transpose(0, 1), (size * relative * 1.01 + stored(want)).transpose(0, 1)


def scale_of(q: Tensor) -> float:
    return 1 / math.sqrt(q.shape[2])


def run_decode(q: Tensor, p: Paged, splits: int, given: int) -> Tensor:
    count, heads, _ = q.shape
    rank = p.cache.rank
    out = poisoned(count, heads + 1, rank).to(q.device)
    workspace = poisoned(attention_floats(count, heads, rank, splits), dtype=torch.float32).to(q.device)
    decode(
        q, p.cache, p.page_table, p.kv_lens, scale_of(q), splits, given, workspace, out[:, :heads]
    )  # fmt: skip
    assert out[:, heads:].isnan().all()
    return out[:, :heads]


@pytest.mark.parametrize("given", [SMALL, LARGE])
@pytest.mark.parametrize(
    ("kv_lens", "heads", "widths", "page_tokens", "splits"),
    [
        ([1], 1, (32, 8), 16, 1),
        ([130, 0, 64, 1], 16, (32, 8), 16, 3),
        ([200, 3], 20, (40, 16), 7, 4),
        ([65, 0, 129], 70, (64, 8), 16, 17),
        ([70], 16, DEEPSEEK, 64, 2),
        ([0, 0], 4, (32, 8), 16, 2),
    ],
)
def test_decode(
    kv_lens: list[int],
    heads: int,
    widths: tuple[int, int],
    page_tokens: int,
    splits: int,
    given: int,
    rng: torch.Generator,
    device: torch.device,
) -> None:
    p = paged(kv_lens, widths, page_tokens, rng, device)
    q = rand(rng, len(kv_lens), heads + 2, sum(widths))[:, :heads]  # of rows that go on
    out = run_decode(q.to(device), p, splits, given)
    for s, n in enumerate(kv_lens):
        if n:
            want, bound = attended(q[s : s + 1], p.rows[s], widths[0])
            assert_within(out[s : s + 1], want, bound)
        else:
            assert torch.equal(out[s], torch.zeros_like(out[s]))


@pytest.mark.parametrize("given", [SMALL, LARGE])
@pytest.mark.parametrize(
    ("q_lens", "kv_lens", "heads", "widths", "page_tokens"),
    [
        ([1], [1], 1, (32, 8), 16),
        ([70], [70], 4, (32, 8), 16),
        ([9, 0, 3, 1], [140, 0, 3, 65], 16, (32, 8), 16),
        ([5, 13], [5, 90], 20, (40, 16), 7),
        ([3, 2], [40, 2], 70, (64, 8), 16),
        ([6], [50], 16, DEEPSEEK, 64),
    ],
)
def test_prefill(
    q_lens: list[int],
    kv_lens: list[int],
    heads: int,
    widths: tuple[int, int],
    page_tokens: int,
    given: int,
    rng: torch.Generator,
    device: torch.device,
) -> None:
    p = paged(kv_lens, widths, page_tokens, rng, device)
    starts = [0, *torch.tensor(q_lens).cumsum(0).tolist()]
    count = starts[-1] + 2  # padding at the end
    q = rand(rng, count, heads + 1, sum(widths))[:, :heads]
    out = poisoned(count, heads, widths[0]).to(device)
    q_starts = torch.tensor(starts, dtype=torch.int32, device=device)
    prefill(
        q.to(device), p.cache, p.page_table, q_starts, p.kv_lens, scale_of(q), given, out
    )  # fmt: skip
    for s, n in enumerate(q_lens):
        if n:
            mine = slice(starts[s], starts[s + 1])
            want, bound = attended(q[mine], p.rows[s], widths[0])
            assert_within(out[mine], want, bound)
    assert out[starts[-1] :].isnan().all()


def test_what_does_not_fit_is_refused(device: torch.device) -> None:
    cache = LatentPages(torch.zeros(1, 16, 40, dtype=BF16, device=device), 32)
    q, out = (torch.zeros(1, 4, width, dtype=BF16, device=device) for width in (40, 32))
    table, lens = (torch.zeros(shape, dtype=torch.int32, device=device) for shape in ((1, 1), (1,)))
    workspace = torch.zeros(4 * 33, device=device)
    for message, args in {
        "does not fit a cache": (q[:, :, :32], cache, table, lens, 1.0, 1, SMALL, workspace, out),
        "int32": (q, cache, table.long(), lens, 1.0, 1, SMALL, workspace, out),
        "workspace": (q, cache, table, lens, 1.0, 2, SMALL, workspace, out),
        "contiguous heads": (q, cache, table, lens, 1.0, 1, SMALL, workspace, q),
    }.items():
        with pytest.raises(ValueError, match=message):
            decode(*args)


def test_splits_fill_the_processors_and_no_more() -> None:
    assert splits_for(1, 16, 132, LARGE) == 132
    assert splits_for(1, 128, 132, LARGE) == 66
    assert splits_for(512, 128, 132, LARGE) == 1
    assert 1 <= splits_for(32, 16, 132, LARGE) * 32 <= 3 * 132


@pytest.mark.parametrize("heads", [1, 16, 20, 64, 128])
@pytest.mark.parametrize("processors", [46, 132, 192])
def test_the_plan_has_room_for_splits(heads: int, processors: int) -> None:
    mixer = LatentAttention(64, heads, None, 512, 128, 128, Rope(64))
    spec = Model(64, 100, (Block(mixer, Mlp(64, 96)),), 1e-6, 512)
    for sequences in (1, 2, 7, 64, 300):
        for given in (SMALL, 163 << 10, LARGE):
            splits = splits_for(sequences, heads, processors, given)
            assert attention_floats(sequences, heads, 512, splits) * 4 <= partials_bytes(spec, sequences)


@pytest.mark.gpu
def test_a_graph_follows_lengths_on_the_device(rng: torch.Generator, device: torch.device) -> None:
    """Captured once, replayed after sequences grew and one ended."""
    p = paged([300, 40, 77], DEEPSEEK, 16, rng, device)
    q, out = rand(rng, 3, 16, 576).to(device), poisoned(3, 16, 512).to(device)
    workspace = torch.empty(attention_floats(3, 16, 512, 9), device=device)
    lens = torch.tensor([1, 1, 1], dtype=torch.int32, device=device)
    given = traits_of(device).shared_bytes

    def step() -> None:
        decode(q, p.cache, p.page_table, lens, scale_of(q), 9, given, workspace, out)

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
            want, bound = attended(q[s : s + 1].cpu(), p.rows[s][:n], 512)
            assert_within(out[s : s + 1], want, bound)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 20, 64, 128])
def test_long_contexts(heads: int, rng: torch.Generator, device: torch.device) -> None:
    """Decode of 64K positions beside short ones, and a chunk of 2048 rows over a past, in tiles of both sizes."""
    kv_lens = [65536, 7, 0, 12345]
    p = paged(kv_lens, DEEPSEEK, 16, rng, device)
    q = rand(rng, len(kv_lens), heads, 576).to(device)
    for given in (SMALL, traits_of(device).shared_bytes):
        out = run_decode(q, p, splits_for(len(kv_lens), heads, 132, given), given)
        for s in (0, 1, 3):
            want, bound = attended(q[s : s + 1], p.rows[s].to(device), 512)
            assert_within(out[s : s + 1], want, bound)
        assert not out[2].any()

    p = paged([4096, 100], DEEPSEEK, 16, rng, device)
    q, starts = rand(rng, 2148, heads, 576).to(device), torch.tensor([0, 2048, 2148], dtype=torch.int32, device=device)
    for given in (SMALL, traits_of(device).shared_bytes):
        out = poisoned(2148, heads, 512).to(device)
        prefill(q, p.cache, p.page_table, starts, p.kv_lens, scale_of(q), given, out)
        for s, mine in enumerate((slice(0, 2048), slice(2048, 2148))):
            for some in range(mine.start, mine.stop, 256):  # float64 of all heads at once would not fit
                last = min(some + 256, mine.stop)
                seen = p.rows[s][: len(p.rows[s]) - (mine.stop - last)].to(device)
                want, bound = attended(q[some:last], seen, 512)
                assert_within(out[some:last], want, bound)
