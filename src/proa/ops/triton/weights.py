"""The first passes over a row of logits for sampling and logprobs: its largest logit, and per part the sum of
exp((logit - largest) / temperature). Belongs here: those, and editing single logits temporarily. Never: which token is
sampled.

Weights are integers, 2**40 for the most likely token: integer sums do not depend on their order, so that a row gives
the same token however the work is distributed. Tokens below 2**-41 of the most likely one have weight 0.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops import draws
from proa.ops.sizes import EDIT_WORDS, mask_words, parts_of
from proa.ops.sizes import LOGIT_BINS as BINS
from proa.ops.sizes import LOGIT_COLUMNS as COLUMNS
from proa.ops.triton.variant import Variant

BINS_PER_NAT: tl.constexpr = tl.constexpr(draws.BINS_PER_NAT)
BEST_WEIGHT: tl.constexpr = tl.constexpr(1099511627776.0)  # 2**40
NOTHING: tl.constexpr = tl.constexpr(-(2**63))
LOWEST: tl.constexpr = tl.constexpr(-3.4028234663852886e38)  # finite

IS_BEST: tl.constexpr = tl.constexpr(draws.BEST)
IS_CUT: tl.constexpr = tl.constexpr(draws.CUT)


@triton.jit
def scores_at(logits, token, vocab):
    """Load logits as float32; NaN and +inf count as -inf: the argmax kernel reports such rows."""
    score = tl.load(logits + token, token < vocab, float("-inf"))
    return tl.where(score < float("inf"), score + 0.0, float("-inf"))  # -0.0 counts as 0.0


@triton.jit
def allowed_scores_at(logits, token, vocab, words, mask, row_words):
    """scores_at, -inf for tokens that the mask's bits forbid. mask: index of its row in `words`; -1: none."""
    score = scores_at(logits, token, vocab)
    word = tl.load(words + mask.to(tl.int64) * row_words + token // 32, (token < vocab) & (mask >= 0), -1)
    return tl.where(((word >> (token % 32)) & 1) != 0, score, float("-inf"))


@triton.jit
def keys_of(score, token):
    """int64 keys ordered by (score, lowest id first)."""
    bits = score.to(tl.int32, bitcast=True)
    rising = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return (rising.to(tl.int64) << 32) | (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def token_of(key):
    return (0x7FFFFFFF - (key & 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def score_of(key):
    rising = (key >> 32).to(tl.int32)
    return (rising ^ ((rising >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def largest_key(keys, parts, PARTS: tl.constexpr):
    part = tl.arange(0, PARTS)
    return tl.max(tl.load(keys + part, part < parts, NOTHING), 0)


@triton.jit
def logs_of(score, largest, inverse):
    """float64 log-weights, 0 for the most likely token; the difference is taken in float32, as on the CPU."""
    return (score - tl.maximum(largest, LOWEST)).to(tl.float64) * inverse


@triton.jit
def weights_of(log):
    return (tl.exp(log) * BEST_WEIGHT + 0.5).to(tl.int64)


@triton.jit
def bins_of(log, BINS: tl.constexpr):
    return tl.minimum(log * -BINS_PER_NAT, BINS - 1.0).to(tl.int32)


@triton.jit
def _largest(
    logits, row_stride, vocab, rows, masks, words, row_words, keys, counts, found, parts,
    BLOCK: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    job, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = tl.load(rows + job).to(tl.int64)
    token = part * BLOCK + tl.arange(0, BLOCK)
    mask = tl.load(masks + job)
    key = keys_of(allowed_scores_at(logits + row * row_stride, token, vocab, words, mask, row_words), token)
    tl.store(keys + job * parts + part, tl.max(tl.where(token < vocab, key, NOTHING), 0))
    if part == 0:
        tl.store(counts + job * BINS + tl.arange(0, BINS), tl.zeros([BINS], tl.int32))
        tl.store(found + job, 0)


@triton.jit
def _weigh(
    logits, row_stride, vocab, rows, masks, words, row_words, kinds, inverses, keys, masses, counts, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    job, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind = tl.load(kinds + job)
    if kind == IS_BEST:
        return
    row = tl.load(rows + job).to(tl.int64)
    largest = score_of(largest_key(keys + job * parts, parts, PARTS))
    token = part * BLOCK + tl.arange(0, BLOCK)
    mask = tl.load(masks + job)
    score = allowed_scores_at(logits + row * row_stride, token, vocab, words, mask, row_words)
    log = logs_of(score, largest, tl.load(inverses + job))
    weight = weights_of(log)
    tl.store(masses + job * parts + part, tl.sum(weight, 0))
    if kind == IS_CUT:
        bins = tl.histogram(bins_of(log, BINS), BINS, mask=weight > 0)
        tl.atomic_add(counts + job * BINS + tl.arange(0, BINS), bins, mask=bins > 0, sem="relaxed")


@triton.jit
def _edited(logits, row_stride, vocab, edits, count, BLOCK: tl.constexpr):
    """This program's edits: their indices, addresses of the logits, the logits, and a mask."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    at = edits + i * 5
    row, token = tl.load(at, i < count, 0).to(tl.int64), tl.load(at + 1, i < count, 0)
    return i, at, logits + row * row_stride + token, (i < count) & (token < vocab)


@triton.jit(do_not_specialize=["count"])
def _edit(logits, row_stride, vocab, edits, saved, count, BLOCK: tl.constexpr):
    """Penalties and biases, rounded step by step as on the CPU."""
    i, at, logit, inside = _edited(logits, row_stride, vocab, edits, count, BLOCK)
    repetition = tl.load(at + 2, inside, 0x3F800000).to(tl.float32, bitcast=True)
    less = tl.load(at + 3, inside, 0).to(tl.float32, bitcast=True)
    plus = tl.load(at + 4, inside, 0).to(tl.float32, bitcast=True)
    score = tl.load(logit, inside, 0.0)
    tl.store(saved + i, score, inside)
    score = tl.where(score > 0, tl.div_rn(score, repetition), score * repetition)
    tl.store(logit, score - less + plus, inside)


@triton.jit(do_not_specialize=["count"])
def _restore(logits, row_stride, vocab, edits, saved, count, BLOCK: tl.constexpr):
    i, _, logit, inside = _edited(logits, row_stride, vocab, edits, count, BLOCK)
    tl.store(logit, tl.load(saved + i, inside, 0.0), inside)


EDITS = 256  # edits per program


def check_logits(logits: Tensor, jobs: int, space: draws.DrawSpace) -> None:
    """Raise ValueError for logits that the kernels would misread."""
    if logits.dtype is not torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits must be float32 with contiguous rows, not {logits.dtype}, strides {logits.stride()}")
    if jobs > space.jobs or logits.shape[1] != space.vocab:
        raise ValueError(f"{jobs} rows of {logits.shape[1]} do not fit a space for {space.jobs} of {space.vocab}")


def weigh(
    logits: Tensor, rows: Tensor, kinds: Tensor, inverses: Tensor, space: draws.DrawSpace,
    masks: draws.Masks | None = None,
) -> None:  # fmt: skip
    """Fill space.keys (largest key per part), space.masses (sum of weights per part, int64; not for BEST) and
    space.counts (for CUT: histogram of log-weights).

    logits float32 [R, vocab], rows may be strided; rows, kinds int32 [J]: index of the row, and BEST, WHOLE or CUT;
    inverses float64 [J]: 1 / temperature. masks: None: all tokens are allowed.
    """
    check_logits(logits, len(rows), space)
    if not len(rows):
        return
    vocab, stride, parts = space.vocab, logits.stride(0), parts_of(space.vocab)
    grid, (of, words) = (len(rows), parts), masks or space.no_masks(len(rows))
    _largest[grid](
        logits, stride, vocab, rows, of, words, mask_words(vocab), space.keys, space.counts, space.found, parts,
        BLOCK=COLUMNS, BINS=BINS,
    )  # fmt: skip
    _weigh[grid](
        logits, stride, vocab, rows, of, words, mask_words(vocab), kinds, inverses, space.keys, space.masses,
        space.counts, parts, BLOCK=COLUMNS, PARTS=triton.next_power_of_2(parts), BINS=BINS,
    )  # fmt: skip


def edit(logits: Tensor, edits: Tensor, saved: Tensor) -> None:
    """See Edit of ops/device_table.py."""
    if edits.shape[1:] != (EDIT_WORDS,) or edits.dtype is not torch.int32 or not edits.is_contiguous():
        raise ValueError(f"edits must be int32 [N, {EDIT_WORDS}], contiguous, not {edits.dtype} {tuple(edits.shape)}")
    if len(saved) < len(edits):
        raise ValueError(f"saved must have room for {len(edits)} logits, not {len(saved)}")
    grid = (triton.cdiv(len(edits), EDITS),)
    _edit[grid](logits, logits.stride(0), logits.shape[1], edits, saved, len(edits), BLOCK=EDITS)


def restore(logits: Tensor, edits: Tensor, saved: Tensor) -> None:
    """Undo `edit`."""
    grid = (triton.cdiv(len(edits), EDITS),)
    _restore[grid](logits, logits.stride(0), logits.shape[1], edits, saved, len(edits), BLOCK=EDITS)


def variants() -> Iterator[Variant]:
    sizes = dict.fromkeys(("row_stride", "vocab", "parts", "row_words"), "i32")
    rows = {"logits": "*fp32", "rows": "*i32", "masks": "*i32", "words": "*i32", "keys": "*i64", "counts": "*i32"}
    yield Variant(_largest, {**rows, **sizes, "found": "*i32"}, {"BLOCK": COLUMNS, "BINS": BINS})
    yield Variant(
        _weigh,
        {**rows, **sizes, "kinds": "*i32", "inverses": "*fp64", "masses": "*i64"},
        {"BLOCK": COLUMNS, "PARTS": 128, "BINS": BINS},
    )
    edits = {"logits": "*fp32", "row_stride": "i32", "vocab": "i32", "edits": "*i32", "saved": "*fp32", "count": "i32"}
    yield Variant(_edit, edits, {"BLOCK": EDITS})
    yield Variant(_restore, edits, {"BLOCK": EDITS})
