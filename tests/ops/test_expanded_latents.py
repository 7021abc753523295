"""Latent attention by expanded keys and values, against float32 or float64."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor

from ops.triton_bounds import rand
from proa.ops import cuda_latent, expanded_latents, reference, sizes
from proa.ops.caches import LatentPages
from proa.ops.cuda_attention import Rectangle, cudnn
from proa.ops.cuda_latent import CudaLatentAttention, CudaLatentMaps
from proa.ops.expanded_latents import Causal, ExpandedAttention, flash
from proa.ops.gpu_traits import GpuTraits
from proa.ops.sizes import SEGMENT_TOKENS, expanded_bytes, expands
from proa.ops.table import AttentionBatch, DeviceBatch, batch_of

PAGE = 16


def plain(q: Tensor, keys: Tensor, values: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """A library's attention, in float32."""
    logits = torch.einsum("qhd,khd->hqk", q.float(), keys.float()) * scale
    if causal:
        last = torch.arange(len(keys) - len(q), len(keys), device=q.device)[:, None]
        logits = logits.masked_fill(last < torch.arange(len(keys), device=q.device), -torch.inf)
    out = torch.einsum("hqk,khd->qhd", logits.softmax(-1), values.float())
    return out.bfloat16().contiguous(), logits.logsumexp(-1)


class Tiles:
    """A library's attention without a mask, in float32. shapes: rows and keys that it was called with."""

    def __init__(self) -> None:
        self.shapes = set[tuple[int, int]]()

    def __call__(self, q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        self.shapes.add((q.shape[2], keys.shape[2]))
        q, keys, values = (x[0].transpose(0, 1) for x in (q, keys, values))
        out, logs = plain(q, keys, values, scale, causal=False)
        return out.transpose(0, 1)[None], logs[None, :, :, None]


@pytest.mark.parametrize(
    ("rows", "past", "values", "expected"),
    [(1024, 15360, 128, True), (1024, 0, 128, True), (600, 100_000, 128, True), (513, 0, 128, True),
     (512, 0, 128, False), (512, 16384, 128, False), (1, 16384, 128, False), (1024, 15360, 256, False)],
)  # fmt: skip
def test_it_is_chosen_where_it_needs_clearly_fewer_products(rows: int, past: int, values: int, expected: bool) -> None:
    """And for no step that may be a graph, of up to 512 rows."""
    assert expands(rows, past, 512, 64, 128, values) is expected


def check(
    causal: Causal, rows: int, past: int, heads: int, widths: tuple[int, int, int, int], most: tuple[int, ...],
    rng: torch.Generator, device: torch.device, by: Rectangle | None = None, tile_rows: int = 1024,
    page: int = PAGE,
) -> None:  # fmt: skip
    """widths: K, R, V, rank. Compare with absorbed attention of the same latents in float32."""
    k, r, v, rank = widths
    pages = -(-(past + rows) // page)
    table = torch.randperm(pages + 3, generator=rng)[:pages].to(torch.int32)
    stored = torch.randn(pages + 3, page, rank + r, generator=rng).bfloat16()
    weight = (torch.randn(heads, k + v, rank, generator=rng) * rank**-0.5).bfloat16()
    q, scale = torch.randn(rows, heads, k + r, generator=rng).bfloat16(), (k + r) ** -0.5
    table, stored, weight, q = (x.to(device) for x in (table, stored, weight, q))
    out = torch.full((rows, heads, v), torch.nan, dtype=torch.bfloat16, device=device)
    cache = LatentPages(stored, rank)
    expanded = ExpandedAttention(causal, rows, by, most, (PAGE,), tile_rows)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    expanded.attend(q, weight, cache, table, past, scale, out, beside_decode=False)
    if device.type == "cuda" and most == SEGMENT_TOKENS:
        taken = torch.cuda.max_memory_allocated() - before
        assert taken <= expanded_bytes(rows, heads, rank, r, k, v) + (1 << 20)  # flash-attention's random state
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
    rows: int, past: int, heads: int, widths: tuple[int, int, int, int], rng: torch.Generator, device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sizes, "EXPANDED_BYTES", 200_000)  # heads in groups
    check(plain, rows, past, heads, widths, (64,), rng, device)


@pytest.mark.parametrize(("rows", "past", "segments"), [(16, 16, {16}), (33, 64, {64}), (70, 379, {64, 32, 16})])
@pytest.mark.parametrize(("heads", "widths"), [(5, (128, 64, 128, 96)), (2, (24, 8, 16, 40))])
def test_whole_segments_have_a_kernel_of_their_own(
    rows: int, past: int, segments: set[int], heads: int, widths: tuple[int, int, int, int], rng: torch.Generator,
    device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Which sees tiles of one size, some of whose last rows are not the prompt's."""
    monkeypatch.setattr(sizes, "EXPANDED_BYTES", 200_000)
    tiles = Tiles()
    check(plain, rows, past, heads, widths, (64, 32, 16), rng, device, tiles, 16)
    assert tiles.shapes == {(16, tokens) for tokens in segments}


@pytest.mark.parametrize("by", [None, Tiles()])
@pytest.mark.parametrize("page", [1, 24, 40])
def test_segments_begin_within_pages(
    by: Rectangle | None, page: int, rng: torch.Generator, device: torch.device
) -> None:  # fmt: skip
    check(plain, 70, 379, 2, (24, 8, 16, 40), (64, 32, 16), rng, device, by, 32, page)


@pytest.mark.parametrize("by", [None, Tiles()])
def test_many_rows_are_computed_in_blocks(
    by: Rectangle | None, rng: torch.Generator, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expanded_latents, "EXPANDED_ROWS", 48)
    check(plain, 100, 37, 3, (24, 8, 16, 40), (64, 32, 16), rng, device, by, 32)


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "past"), [(513, 0), (1024, 15360), (700, 20_001), (2048, 40_000)])
@pytest.mark.parametrize(
    ("heads", "widths"), [(128, (128, 64, 128, 512)), (16, (128, 64, 128, 512)), (8, (64, 64, 64, 256))]
)
@pytest.mark.parametrize("by", [None, cudnn])
def test_libraries(
    rows: int, past: int, heads: int, widths: tuple[int, int, int, int], by: Rectangle | None, rng: torch.Generator,
    device: torch.device,
) -> None:  # fmt: skip
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    check(flash, rows, past, heads, widths, SEGMENT_TOKENS, rng, device, by)


class Watched(ExpandedAttention):
    """Notes which sequences it computes."""

    def __init__(self, most_rows: int) -> None:
        super().__init__(plain, most_rows, None, (64,), (PAGE,))
        self.seen: list[tuple[int, int, bool]] = []

    def attend(self, q: Tensor, *args: object, beside_decode: bool) -> None:  # type: ignore[override]
        self.seen.append((len(q), args[3], beside_decode))
        super().attend(q, *args, beside_decode=beside_decode)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("q_lens", "pasts", "chosen"),
    [
        ((600,), (64,), [0]),
        ((3, 600, 17, 1), (70, 0, 40, 5), [1]),
        ((513, 520), (0, 64), [0, 1]),
        ((40, 3, 60), (64, 200, 0), []),
    ],
)
@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("rows_at_once", [1024, 16])
def test_sequences_of_a_step(
    q_lens: tuple[int, ...], pasts: tuple[int, ...], chosen: list[int], beside: bool, rows_at_once: int,
    rng: torch.Generator, device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Those that gain have their keys and values expanded, the others attend over latents, some rows at a time."""
    monkeypatch.setattr(cuda_latent, "LATENT_ROWS", rows_at_once)
    heads, keys, values, rank, rotary = 2, 8, 8, 32, 8
    kv_lens, rows = [a + b for a, b in zip(q_lens, pasts, strict=True)], sum(q_lens)
    counts = [-(-n // PAGE) for n in kv_lens]
    order = torch.randperm(sum(counts), generator=rng).tolist()
    on_cpu = batch_of(q_lens, kv_lens, [[order.pop() for _ in range(n)] for n in counts], PAGE)
    cache = LatentPages(rand(rng, sum(counts), PAGE, rank + rotary), rank)
    q, weight = rand(rng, rows, heads, keys + rotary), rand(rng, heads * (keys + values), rank) * rank**-0.5
    expected = reference.TorchLatentMaps(heads, keys, values, rank, torch.float32)
    expected.weight.copy_(weight)
    want = expected.attend(q.float(), LatentPages(cache.rows.float(), rank), on_cpu, 0.25)
    table = torch.zeros(len(q_lens), max(counts), dtype=torch.int32)
    for row, pages in zip(table, on_cpu.page_table, strict=True):
        row[: len(pages)] = pages
    starts, lens = (torch.tensor(n, dtype=torch.int32) for n in (list(accumulate(q_lens, initial=0)), kv_lens))
    at = DeviceBatch(0, *(x.to(device) for x in (starts, lens, table)), torch.empty(0))
    batch = AttentionBatch(tuple(q_lens), tuple(kv_lens), (), torch.empty(0), at, beside_decode=beside)
    attention, watched = CudaLatentAttention(GpuTraits(90, 1)), Watched(rows)
    attention.bind(watched)
    maps = CudaLatentMaps(heads, keys, values, rank, device, attention)
    maps.weight.copy_(weight)
    got = maps.attend(q.to(device), LatentPages(cache.rows.to(device), rank), batch, 0.25)
    assert watched.seen == [(q_lens[s], pasts[s], beside) for s in chosen]
    torch.testing.assert_close(got.cpu().float(), want, atol=0.03, rtol=0.03)
