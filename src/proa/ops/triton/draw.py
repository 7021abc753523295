"""Sample a token for each row with temperature, top_k, top_p and min_p, as sampling/sampler.py defines them. Never:
editing logits (weights.edit), random numbers.

Sampling inverts the cumulative distribution at the row's uniform number: in the order of token ids, or, with top_k,
top_p or min_p ("a cut"), in descending order of probability. Nothing is sorted: few tokens can survive a cut; each of
these candidates counts the candidates before it and sums their weights.

    weigh    per part of a row: the largest logit, the sum of weights, a histogram of log-weights
    gather   the histogram bounds the cut: collect the tokens above that bound as candidates
    rank     per candidate: number of candidates before it, and their weight
    pick     apply top_k, top_p, min_p; pick the first token whose cumulative weight exceeds uniform * total weight
"""

from __future__ import annotations

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from proa.ops.draws import DrawJobs, DrawSpace
from proa.ops.sizes import LOGIT_BINS as BINS
from proa.ops.sizes import LOGIT_COLUMNS as COLUMNS
from proa.ops.sizes import mask_words, parts_of
from proa.ops.triton.variant import Variant
from proa.ops.triton.weights import (
    BEST_WEIGHT,
    BINS_PER_NAT,
    IS_BEST,
    IS_CUT,
    NOTHING,
    allowed_scores_at,
    bins_of,
    keys_of,
    largest_key,
    logs_of,
    score_of,
    token_of,
    weigh,
    weights_of,
)

RANKED, AGAINST, RANK_PROGRAMS = (
    16,
    128,
    64,
)  # candidates per program at a time, candidates compared with at once, programs
PICKED = 1024

# A bound on the rounding of sums of float64 over BINS, relative to their total.
ROUNDING: tl.constexpr = tl.constexpr(1e-9)


@triton.jit
def _last_bin(counts, masses, parts, top_k, top_p, floor, vocab, PARTS: tl.constexpr, BINS: tl.constexpr):
    """The last bin of the histogram that can hold a token which survives top_k and top_p."""
    number = tl.arange(0, BINS)
    count = tl.load(counts + number)
    by_count = tl.sum((tl.cumsum(count, 0) < top_k).to(tl.int32), 0)
    part = tl.arange(0, PARTS)
    total = tl.sum(tl.load(masses + part, part < parts, 0), 0).to(tl.float64)
    # top_p cuts a token if it and all tokens after it weigh at most 1 - top_p; upper edges of bins bound the weights.
    most = count.to(tl.float64) * (tl.exp(number.to(tl.float64) / -BINS_PER_NAT) * BEST_WEIGHT + 1.0)
    after = tl.sum(most, 0) - tl.cumsum(most, 0)
    by_mass = tl.sum((after > total * (1.0 - top_p - ROUNDING)).to(tl.int32), 0)
    last = tl.where(top_k < vocab, by_count, tl.minimum(by_mass, floor))
    return tl.minimum(last, BINS - 1)


@triton.jit
def _gather(
    logits, row_stride, vocab, rows, masks, words, row_words, kinds, top_k, floors, inverses, top_p, keys, masses,
    counts, found, kept_keys, kept_weights, parts, most_kept,
    BLOCK: tl.constexpr, PARTS: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    job, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if tl.load(kinds + job) != IS_CUT:
        return
    last = _last_bin(
        counts + job * BINS, masses + job * parts, parts, tl.load(top_k + job), tl.load(top_p + job),
        tl.load(floors + job), vocab, PARTS, BINS,
    )  # fmt: skip
    row = tl.load(rows + job).to(tl.int64)
    largest = score_of(largest_key(keys + job * parts, parts, PARTS))
    token = part * BLOCK + tl.arange(0, BLOCK)
    mask = tl.load(masks + job)
    score = allowed_scores_at(logits + row * row_stride, token, vocab, words, mask, row_words)
    log = logs_of(score, largest, tl.load(inverses + job))
    weight = weights_of(log)
    kept = (weight > 0) & (bins_of(log, BINS) <= last)
    number = tl.sum(kept.to(tl.int32), 0)
    if number > 0:
        first = tl.atomic_add(found + job, number, sem="relaxed")
        place = first + tl.cumsum(kept.to(tl.int32), 0) - 1
        kept = kept & (place < most_kept)
        at = job * most_kept + place
        tl.store(kept_keys + at, keys_of(score, token), kept)
        tl.store(kept_weights + at, weight, kept)


@triton.jit
def _rank(
    kinds, found, kept_keys, kept_weights, before, ranks, most_kept,
    RANKED: tl.constexpr, AGAINST: tl.constexpr, PROGRAMS: tl.constexpr,
):  # fmt: skip
    job = tl.program_id(0).to(tl.int64)
    number = tl.load(found + job)
    if (tl.load(kinds + job) != IS_CUT) | (number > most_kept):
        return
    base = job * most_kept
    for begin in range(tl.program_id(1) * RANKED, number, PROGRAMS * RANKED):
        mine = begin + tl.arange(0, RANKED)
        key = tl.load(kept_keys + base + mine, mine < number, 0)
        weight = tl.zeros([RANKED, AGAINST], tl.int64)
        rank = tl.zeros([RANKED, AGAINST], tl.int32)
        for other_begin in range(0, number, AGAINST):
            others = other_begin + tl.arange(0, AGAINST)
            other = tl.load(kept_keys + base + others, others < number, NOTHING)
            precedes = other[None, :] > key[:, None]
            weight += tl.where(precedes, tl.load(kept_weights + base + others, others < number, 0)[None, :], 0)
            rank += precedes.to(tl.int32)
        tl.store(before + base + mine, tl.sum(weight, 1), mine < number)
        tl.store(ranks + base + mine, tl.sum(rank, 1), mine < number)


@triton.jit
def _mark(uniform, total):
    """The threshold: the first token whose cumulative weight exceeds it is sampled."""
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _survives(rank, before, weight, top_k, limit, least):
    """True if a candidate survives the cut. The most likely token always does, and a token before a survivor does
    too."""
    kept = (rank < top_k) & (before < limit) & (weight >= least)
    return kept | (rank == 0)


@triton.jit
def _pick_cut(
    rows, kinds, top_k, top_p, min_p, uniforms, masses, found, kept_keys, kept_weights, before, ranks, tokens, vocab,
    parts, most_kept, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    job = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + job)
    if (tl.load(kinds + job) != IS_CUT) | (tl.load(tokens + row) < 0):
        return
    number = tl.load(found + job)
    if number > most_kept:
        tl.store(tokens + row, -2)
        return
    base = job * most_kept
    most, share = tl.load(top_k + job), tl.load(top_p + job)
    part = tl.arange(0, PARTS)
    mass = tl.sum(tl.load(masses + job * parts + part, part < parts, 0), 0)
    if most < vocab:
        mass = tl.zeros([], tl.int64)
        for begin in range(0, number, BLOCK):
            i = begin + tl.arange(0, BLOCK)
            chosen = (i < number) & (tl.load(ranks + base + i, i < number, 0) < most)
            mass += tl.sum(tl.load(kept_weights + base + i, chosen, 0), 0)
    # Integers below share * mass are those below the next integer.
    limit = tl.where(share < 1.0, tl.ceil(share * mass.to(tl.float64)).to(tl.int64), mass)
    least = (tl.load(min_p + job) * BEST_WEIGHT).to(tl.int64)
    total = tl.zeros([], tl.int64)
    for begin in range(0, number, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        inside = i < number
        weight = tl.load(kept_weights + base + i, inside, 0)
        earlier, rank = tl.load(before + base + i, inside, 0), tl.load(ranks + base + i, inside, 0)
        total += tl.sum(tl.where(_survives(rank, earlier, weight, most, limit, least), weight, 0), 0)
    mark = _mark(tl.load(uniforms + job), total)
    key = tl.full([], NOTHING, tl.int64)
    for begin in range(0, number, BLOCK):
        i = begin + tl.arange(0, BLOCK)
        inside = i < number
        weight, earlier = tl.load(kept_weights + base + i, inside, 0), tl.load(before + base + i, inside, 0)
        hit = inside & (earlier <= mark) & (mark < earlier + weight)
        key = tl.maximum(key, tl.max(tl.where(hit, tl.load(kept_keys + base + i, inside, NOTHING), NOTHING), 0))
    tl.store(tokens + row, token_of(key))


@triton.jit
def _pick_whole(
    logits, row_stride, vocab, rows, masks, words, row_words, kinds, inverses, uniforms, keys, masses, tokens, parts,
    BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    job = tl.program_id(0).to(tl.int64)
    row, kind = tl.load(rows + job).to(tl.int64), tl.load(kinds + job)
    if (kind == IS_CUT) | (tl.load(tokens + row) < 0):
        return
    best = largest_key(keys + job * parts, parts, PARTS)
    if kind == IS_BEST:
        tl.store(tokens + row, token_of(best))
        return
    part = tl.arange(0, PARTS)
    mass = tl.load(masses + job * parts + part, part < parts, 0)
    mark = _mark(tl.load(uniforms + job), tl.sum(mass, 0))
    chosen = tl.sum((tl.cumsum(mass, 0) <= mark).to(tl.int32), 0)
    mark -= tl.sum(tl.where(part < chosen, mass, 0), 0)
    token = chosen * BLOCK + tl.arange(0, BLOCK)
    mask = tl.load(masks + job)
    score = allowed_scores_at(logits + row * row_stride, token, vocab, words, mask, row_words)
    log = logs_of(score, score_of(best), tl.load(inverses + job))
    passed = tl.cumsum(weights_of(log), 0) <= mark
    tl.store(tokens + row, chosen * BLOCK + tl.sum(passed.to(tl.int32), 0))


def draw(logits: Tensor, jobs: DrawJobs, cuts: bool, space: DrawSpace, tokens: Tensor) -> None:
    """See Draw of ops/device_table.py."""
    number = len(jobs.rows)
    masks = jobs.masks or space.no_masks(number)
    weigh(logits, jobs.rows, jobs.kinds, jobs.inverses, space, masks)
    if not number:
        return
    vocab, stride, parts = space.vocab, logits.stride(0), parts_of(space.vocab)
    rounded, row_words = triton.next_power_of_2(parts), mask_words(vocab)
    _pick_whole[(number,)](
        logits, stride, vocab, jobs.rows, *masks, row_words, jobs.kinds, jobs.inverses, jobs.uniforms, space.keys,
        space.masses, tokens, parts, BLOCK=COLUMNS, PARTS=rounded,
    )  # fmt: skip
    if not cuts:
        return
    _gather[(number, parts)](
        logits, stride, vocab, jobs.rows, *masks, row_words, jobs.kinds, jobs.top_k, jobs.floors, jobs.inverses,
        jobs.top_p, space.keys, space.masses, space.counts, space.found, space.kept_keys, space.kept_weights, parts,
        space.most_kept, BLOCK=COLUMNS, PARTS=rounded, BINS=BINS,
    )  # fmt: skip
    _rank[(number, RANK_PROGRAMS)](
        jobs.kinds, space.found, space.kept_keys, space.kept_weights, space.before, space.ranks, space.most_kept,
        RANKED=RANKED, AGAINST=AGAINST, PROGRAMS=RANK_PROGRAMS,
    )  # fmt: skip
    _pick_cut[(number,)](
        jobs.rows, jobs.kinds, jobs.top_k, jobs.top_p, jobs.min_p, jobs.uniforms, space.masses, space.found,
        space.kept_keys, space.kept_weights, space.before, space.ranks, tokens, vocab, parts, space.most_kept,
        PARTS=rounded, BLOCK=PICKED,
    )  # fmt: skip


_TYPES = {
    "logits": "*fp32", "inverses": "*fp64", "uniforms": "*fp64", "top_p": "*fp64", "min_p": "*fp64",
    **dict.fromkeys(("row_stride", "vocab", "parts", "most_kept", "row_words"), "i32"),
    **dict.fromkeys(("rows", "masks", "words", "kinds", "top_k", "floors", "counts"), "*i32"),
    **dict.fromkeys(("found", "ranks", "tokens"), "*i32"),
    **dict.fromkeys(("keys", "masses", "kept_keys", "kept_weights", "before"), "*i64"),
}  # fmt: skip


def variants() -> Iterator[Variant]:
    for kernel, constants in (
        (_gather, {"BLOCK": COLUMNS, "PARTS": 128, "BINS": BINS}),
        (_rank, {"RANKED": RANKED, "AGAINST": AGAINST, "PROGRAMS": RANK_PROGRAMS}),
        (_pick_cut, {"PARTS": 128, "BLOCK": PICKED}),
        (_pick_whole, {"BLOCK": COLUMNS, "PARTS": 128}),
    ):
        names = [name for name in kernel.arg_names if name not in constants]
        yield Variant(kernel, {name: _TYPES[name] for name in names}, constants)
