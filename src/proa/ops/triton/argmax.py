"""Argmax over the vocabulary, in two launches: with one program per row, a single row would leave most of the GPU idle.

Every logit becomes an integer key ordered by (logit, lowest id first), so that the argmax is a maximum of keys.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.sizes import LOGIT_COLUMNS as COLUMNS
from proa.ops.sizes import argmax_keys, parts_of
from proa.ops.triton.variant import Variant
from proa.ops.triton.weights import NOTHING, keys_of, token_of

NOT_FINITE: tl.constexpr = tl.constexpr(2**63 - 1)  # larger than any logit's key


@triton.jit
def _best_of_part(logits, keys, vocab, row_stride, parts, BLOCK: tl.constexpr):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    token = part * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab
    logit = tl.load(logits + row * row_stride + token, inside, 0.0)
    logit = tl.where(logit == 0.0, 0.0, logit)  # -0.0 counts as 0.0
    key = tl.where(tl.abs(logit) < float("inf"), keys_of(logit, token), NOT_FINITE)
    tl.store(keys + row * parts + part, tl.max(tl.where(inside, key, NOTHING), 0))


@triton.jit
def _best_of_row(keys, out, parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK)
    key = tl.max(tl.load(keys + row * parts + part, part < parts, NOTHING), 0)
    tl.store(out + row, tl.where(key == NOT_FINITE, -1, token_of(key)))


def argmax(logits: Tensor, workspace: Tensor, out: Tensor) -> None:
    """Argmax of each row, the lowest id among equals; -1 for a row with a non-finite logit.

    logits float32 [R, vocab], rows may be strided; workspace int64 [argmax_keys(R, vocab)] or more; out int32 [R].
    """
    rows, vocab = logits.shape
    if logits.dtype is not torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits must be float32 with contiguous rows, not {logits.dtype}, strides {logits.stride()}")
    if workspace.dtype is not torch.int64 or workspace.numel() < argmax_keys(rows, vocab):
        raise ValueError(f"the workspace must be int64 [{argmax_keys(rows, vocab)}] or more, contiguous")
    if out.shape != (rows,) or out.dtype is not torch.int32 or not out.is_contiguous():
        raise ValueError(f"out must be int32 [{rows}], contiguous, not {out.dtype} {tuple(out.shape)}")
    if not rows:
        return
    parts = parts_of(vocab)
    _best_of_part[(rows, parts)](logits, workspace, vocab, logits.stride(0), parts, BLOCK=COLUMNS)
    _best_of_row[(rows,)](workspace, out, parts, BLOCK=triton.next_power_of_2(parts), num_warps=1)


def variants() -> Iterator[Variant]:
    sizes = dict.fromkeys(("vocab", "row_stride", "parts"), "i32")
    yield Variant(_best_of_part, {"logits": "*fp32", "keys": "*i64", **sizes}, {"BLOCK": COLUMNS}, aligned=("logits",))
    yield Variant(_best_of_row, {"keys": "*i64", "out": "*i32", "parts": "i32"}, {"BLOCK": 128}, warps=1)
