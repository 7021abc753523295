"""Logprobs of each row: of the sampled token and of the top tokens. Never: edited logits, sampling."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.draws import DrawSpace
from proa.ops.sizes import LOGIT_COLUMNS as COLUMNS
from proa.ops.sizes import logprobs_keys, parts_of
from proa.ops.triton.variant import Variant
from proa.ops.triton.weights import (
    BEST_WEIGHT,
    NOTHING,
    keys_of,
    largest_key,
    score_of,
    scores_at,
    token_of,
    weigh,
)


@triton.jit(do_not_specialize=["count"])
def _top_of_part(logits, row_stride, vocab, rows, top, parts, count, BLOCK: tl.constexpr):
    """Write the `count` largest keys of a part, in descending order, to top [J, parts, count]."""
    job, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + job).to(tl.int64)
    token = part * BLOCK + tl.arange(0, BLOCK)
    key = keys_of(scores_at(logits + row * row_stride, token, vocab), token)
    key = tl.where(token < vocab, key, NOTHING)
    for i in range(0, count):
        largest = tl.max(key, 0)
        tl.store(top + (job * parts + part) * count + i, largest)
        key = tl.where(key == largest, NOTHING, key)


@triton.jit(do_not_specialize=["count"])
def _explain(
    logits, row_stride, vocab, rows, tokens, keys, masses, top, ids, logprobs, parts, count, PARTS: tl.constexpr
):  # fmt: skip
    job = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + job).to(tl.int64)
    part = tl.arange(0, PARTS)
    mass = tl.sum(tl.load(masses + job * parts + part, part < parts, 0), 0)
    largest = score_of(largest_key(keys + job * parts, parts, PARTS)).to(tl.float64)
    log_sum = largest + tl.log(tl.maximum(mass, 1).to(tl.float64) / BEST_WEIGHT)
    chosen = tl.load(tokens + row)
    inside = (chosen >= 0) & (chosen < vocab)
    score = tl.load(logits + row * row_stride + chosen, inside, 0.0)
    tl.store(logprobs + job * (count + 1), (score.to(tl.float64) - log_sum).to(tl.float32))
    # Each part's list is sorted: repeatedly take the largest head and advance in that list.
    lists = top + (job * parts + part) * count
    place = tl.zeros([PARTS], tl.int32)
    for i in range(0, count):
        head = tl.load(lists + place, (part < parts) & (place < count), NOTHING)
        best = tl.max(head, 0)
        tl.store(ids + job * count + i, token_of(best))
        tl.store(logprobs + job * (count + 1) + 1 + i, (score_of(best).to(tl.float64) - log_sum).to(tl.float32))
        place += (head == best).to(tl.int32)


def row_logprobs(
    logits: Tensor, rows: Tensor, tokens: Tensor, ones: tuple[Tensor, Tensor], space: DrawSpace, workspace: Tensor,
    ids: Tensor, logprobs: Tensor,
) -> None:  # fmt: skip
    """See RowLogprobs of ops/device_table.py. ids and logprobs must be contiguous, count at most the vocabulary."""
    number, count = ids.shape
    if count > space.vocab or logprobs.shape != (number, count + 1) or len(rows) != number:
        raise ValueError(f"{len(rows)} rows, ids {tuple(ids.shape)} and logprobs {tuple(logprobs.shape)} do not fit")
    if workspace.dtype is not torch.int64 or workspace.numel() < logprobs_keys(number, space.vocab, count):
        keys = logprobs_keys(number, space.vocab, count)
        raise ValueError(f"the workspace must be int64 [{keys}] or more, contiguous")
    weigh(logits, rows, *ones, space)
    if not number:
        return
    vocab, stride, parts = space.vocab, logits.stride(0), parts_of(space.vocab)
    _top_of_part[(number, parts)](logits, stride, vocab, rows, workspace, parts, count, BLOCK=COLUMNS)
    _explain[(number,)](
        logits, stride, vocab, rows, tokens, space.keys, space.masses, workspace, ids, logprobs, parts, count,
        PARTS=triton.next_power_of_2(parts), num_warps=1,
    )  # fmt: skip


def variants() -> Iterator[Variant]:
    sizes = dict.fromkeys(("row_stride", "vocab", "parts", "count"), "i32")
    rows = {"logits": "*fp32", "rows": "*i32", "top": "*i64", **sizes}
    yield Variant(_top_of_part, rows, {"BLOCK": COLUMNS})
    more = {"tokens": "*i32", "keys": "*i64", "masses": "*i64", "ids": "*i32", "logprobs": "*fp32"}
    yield Variant(_explain, {**rows, **more}, {"PARTS": 128}, warps=1)
