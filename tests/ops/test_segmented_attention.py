"""Attention of prompts with a long past, in tiles and segments, against float64; see paged_attention.py."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from ops.paged_attention import attended, in_e4m3, on, paged, softmax_of
from ops.triton_bounds import assert_within, poisoned, rand
from proa.models.mixers import AttentionKernel
from proa.ops.attention_rates import inputs_of
from proa.ops.cuda_attention import SegmentedAttention, cudnn, segments_of, tiles_of
from proa.ops.gpu_traits import GpuTraits, traits_of
from proa.ops.sizes import SEGMENT_TOKENS, segment_rows
from proa.ops.table import AttentionBatch, DeviceBatch

TILE_ROWS, SEGMENTS = 32, (128, 64)


def plain(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """A library's attention, in float32."""
    group = q.shape[1] // keys.shape[1]
    keys, values = (x.float().repeat_interleave(group, 1) for x in (keys, values))
    logits = q.float() @ keys.mT * scale
    out = torch.softmax(logits, -1) @ values
    rows = out.transpose(1, 2).contiguous().transpose(1, 2)  # in the layout of q
    return rows.bfloat16(), torch.logsumexp(logits, -1, keepdim=True)


@given(st.integers(1, 5000), st.integers(0, 70000), st.sampled_from([16, 512, 2048]), st.sampled_from([64, 4096]))
def test_tiles_cover_every_row_and_see_what_they_cover(rows: int, past: int, tile_rows: int, least: int) -> None:
    tiles = tiles_of(rows, past, tile_rows, least)
    written = torch.zeros(rows, dtype=torch.bool)
    for tile in tiles:
        assert 0 <= tile.first <= rows - tile.rows
        assert tile.covered % least == 0
        assert tile.covered <= past + tile.first
        assert tile.covered == 0 or tile.rows == tile_rows
        written[tile.first : tile.first + tile.rows] = True
    assert written.all()
    assert sum(tile.rows for tile in tiles) <= rows + tile_rows // 2


@given(st.integers(0, 40))
def test_segments_cover_without_gaps(count: int) -> None:
    end = 0
    for first, tokens in segments_of(count * SEGMENT_TOKENS[-1], SEGMENT_TOKENS):
        assert first == end
        end += tokens
    assert end == count * SEGMENT_TOKENS[-1]


def run(
    q_lens: list[int], pasts: list[int], heads: int, kv_heads: int, dim: int, rng: torch.Generator,
    device: torch.device, attention: SegmentedAttention, *, e4m3: bool = False, sinks: bool = False,
    beside: bool = False, fused: bool = False,
) -> bool:  # fmt: skip
    """Compare with float64. Returns whether segments were used. fused: queries are a part of wider rows."""
    kv_lens = [rows + past for rows, past in zip(q_lens, pasts, strict=True)]
    p = paged(kv_lens, kv_heads, dim, 16, rng, device)
    p = in_e4m3(p) if e4m3 else p
    q = rand(rng, sum(q_lens), heads + fused * 2 * kv_heads, dim).to(device)[:, :heads]
    softmax = softmax_of(dim, heads, None, sinks, rng)
    starts = torch.tensor([0, *torch.tensor(q_lens).cumsum(0).tolist()], dtype=torch.int32, device=device)
    states = torch.zeros(len(q_lens), dtype=torch.int32, device=device)
    table = torch.nn.functional.pad(p.page_table, (0, -p.page_table.shape[1] % 4)).contiguous()
    on_device = DeviceBatch(0, starts, p.kv_lens, table, states)
    batch = AttentionBatch(tuple(q_lens), tuple(kv_lens), (), starts, on_device, beside_decode=beside)
    out = poisoned(*q.shape).to(device)
    used = attention.attend(q, p.cache, batch, on(softmax, device), out)
    if used:
        wide = torch.float32 if device.type == "cuda" and max(kv_lens) > 10_000 else torch.float64
        for rows, got, keys, values in zip(q.split(q_lens), out.split(q_lens), p.keys, p.values, strict=True):
            where = device if wide is torch.float32 else torch.device("cpu")
            of = (rows.to(where), keys.to(where), values.to(where))
            want, bound = attended(*of, on(softmax, where), wide)
            # A segment's result is rounded to bfloat16 before it is merged.
            assert_within(got.to(where), want, 2 * bound)
    return used


@pytest.mark.parametrize(
    ("q_lens", "pasts", "heads", "kv_heads", "dim"),
    [
        ([32], [64], 2, 1, 32),
        ([80], [63], 4, 2, 16),
        ([70], [500], 2, 2, 18),
        ([64, 1, 40], [300, 200, 3], 6, 2, 16),
    ],
)
@pytest.mark.parametrize("e4m3", [False, True])
@pytest.mark.parametrize("sinks", [False, True])
def test_segments(
    q_lens: list[int], pasts: list[int], heads: int, kv_heads: int, dim: int, e4m3: bool, sinks: bool,
    rng: torch.Generator, device: torch.device,
) -> None:  # fmt: skip
    traits = traits_of(device) if device.type == "cuda" else GpuTraits(80, 1)
    attention = SegmentedAttention(plain, traits, TILE_ROWS, SEGMENTS)
    assert run(q_lens, pasts, heads, kv_heads, dim, rng, device, attention, e4m3=e4m3, sinks=sinks)


@pytest.mark.parametrize(("beside", "tokens"), [(False, [128, 128, 64]), (True, [64] * 5)])
def test_segments_beside_decode_are_short(
    beside: bool, tokens: list[int], rng: torch.Generator, device: torch.device
) -> None:
    seen = list[int]()

    def noted(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        seen.append(keys.shape[2])
        return plain(q, keys, values, scale)

    traits = traits_of(device) if device.type == "cuda" else GpuTraits(80, 1)
    attention = SegmentedAttention(noted, traits, TILE_ROWS, SEGMENTS, SEGMENTS[1:])
    assert run([32], [340], 4, 2, 16, rng, device, attention, beside=beside)
    assert seen == tokens


def test_the_library_sees_the_strides_of_the_trial(rng: torch.Generator, device: torch.device) -> None:
    """Each new one would take cuDNN 60 ms, in a prompt instead of at start."""
    seen = set[tuple[int, ...]]()

    def noted(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        seen.add((*q.stride()[1:], *keys.stride()[1:], *values.stride()[1:]))
        return plain(q, keys, values, scale)

    traits = traits_of(device) if device.type == "cuda" else GpuTraits(80, 1)
    assert run([32], [340], 4, 2, 16, rng, device, SegmentedAttention(noted, traits, TILE_ROWS, SEGMENTS), fused=True)
    q, keys, values = inputs_of(AttentionKernel(4, 2, 16), SEGMENTS[0], device)
    assert seen == {(*q.stride()[1:], *keys.stride()[1:], *values.stride()[1:])}


def test_short_pasts_are_left_to_the_other_kernel(rng: torch.Generator, device: torch.device) -> None:
    def refuse(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        raise AssertionError("no segment is seen")

    attention = SegmentedAttention(refuse, GpuTraits(80, 1), TILE_ROWS, SEGMENTS)
    assert not run([40, 31], [31, 200], 2, 1, 16, rng, device, attention)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(32, 4, 128), (16, 2, 256), (64, 8, 64), (4, 2, 32)])
@pytest.mark.parametrize("e4m3", [False, True])
def test_cudnn(heads: int, kv_heads: int, dim: int, e4m3: bool, rng: torch.Generator, device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    attention = SegmentedAttention(cudnn, traits_of(device))
    rows = segment_rows(heads) + 100
    assert run([rows, rows], [25_000, 4096], heads, kv_heads, dim, rng, device, attention, e4m3=e4m3)
