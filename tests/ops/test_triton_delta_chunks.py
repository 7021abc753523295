"""The chunked gated delta rule against float64, row by row: odd lengths, all decays, repeated keys; rows and states of
sequences that are not chunked are unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from delta_cases import SHAPES, Mixed, Shape, apply_rule, gates, inputs, poisoned_state, weights
from ops.delta_inputs import batch, chunks_of, on
from ops.triton_bounds import BF16, poisoned
from proa.ops.caches import RecurrentState
from proa.ops.table import DeltaInputs, DeltaWeights
from proa.ops.triton.delta_chunks import by_chunks

FEW = 4  # sequences of up to this many rows are not chunked
ROUNDED = 2.0**-18  # of q and k, which are kept as pairs of bfloat16


def rows_of(shape: Shape, x: DeltaInputs, w: DeltaWeights, rng: torch.Generator) -> Mixed:
    """Random outputs of the convolution, float32."""
    count = len(x.q)
    q, k = (torch.randn(count, shape.groups, shape.key_dim, generator=rng) for _ in range(2))
    q, k = (torch.nn.functional.normalize(t, dim=-1) for t in (q, k))
    v = torch.randn(count, shape.heads, shape.value_dim, generator=rng)
    return mixed_of(shape, q * shape.key_dim**-0.5, k, v, x, w)


def mixed_of(shape: Shape, q: Tensor, k: Tensor, v: Tensor, x: DeltaInputs, w: DeltaWeights) -> Mixed:
    q, k = (t.double().repeat_interleave(shape.members, 1) for t in (q, k))
    dq, dk = (t.norm(dim=-1) * ROUNDED for t in (q, k))
    beta, rate, d_rate = gates(x, w)
    return Mixed(q, k, v.double(), beta, rate, dq, dk, torch.zeros_like(dk), d_rate)


def as_pairs(x: Tensor) -> Tensor:
    """float32 [rows, groups, dim] whose bytes are pairs of bfloat16."""
    high = x.bfloat16()
    return torch.cat((high, (x - high.float()).bfloat16()), -1).view(torch.float32)


def kernel_rows(shape: Shape, m: Mixed) -> Tensor:
    """The input of `by_chunks`: float32 [T, channels]."""
    q, k = (as_pairs(t[:, :: shape.members].float()).flatten(1) for t in (m.q, m.k))
    return torch.cat((q, k, m.v.float().flatten(1)), 1)


def joined_rows(parts: list[Mixed]) -> Mixed:
    return Mixed(*(torch.cat(t) for t in zip(*(vars(p).values() for p in parts), strict=True)))


def run(
    shape: Shape, m: Mixed, x: DeltaInputs, w: DeltaWeights, state: RecurrentState, lens: tuple[list[int], list[int]],
    slots: list[int], device: torch.device,
) -> Tensor:  # fmt: skip
    """lens: per sequence, rows of this step, and rows in total."""
    rows, seen = len(m.q), poisoned(len(m.q), shape.heads, shape.value_dim, dtype=torch.float32).to(device)
    there = replace(w, conv=w.conv.to(device), a_log=w.a_log.to(device), dt_bias=w.dt_bias.to(device))
    chunks = chunks_of(rows, shape.heads, device)
    at = batch(*lens, slots, device)
    by_chunks(on(x, device), there, state, at, FEW, kernel_rows(shape, m).to(device), chunks, seen)
    return seen.cpu()


@pytest.mark.parametrize(
    ("size", "lens"),
    [("one", [n]) for n in (5, 16, 17, 63, 64, 65, 127, 128, 129, 200)]
    + [("small", [3, 70, 0, 5, 64, 1]), ("wide", [90, 4, 33])],
)
@pytest.mark.parametrize("past", [0, 9])
def test_odd_lengths(size: str, lens: list[int], past: int, rng: torch.Generator, device: torch.device) -> None:
    shape = SHAPES[size]
    w, padding = weights(shape, rng, BF16), 3
    x = inputs(shape, sum(lens) + padding, rng, BF16)
    m = rows_of(shape, x, w, rng)
    slots = torch.randperm(len(lens) + 1, generator=rng)[: len(lens)].tolist()
    state = poisoned_state(shape, len(lens) + 1, BF16)
    if past:
        state.rule.copy_(torch.randn(state.rule.shape, generator=rng))
    before = state.rule.clone()
    state = RecurrentState(state.rule.to(device), state.tail.to(device))
    seen = run(shape, m, x, w, state, (lens, [n + past if n else 0 for n in lens]), slots, device)
    row, written = 0, set()
    for n, slot in zip(lens, slots, strict=True):
        part = slice(row, row + n)
        row += n
        if n <= FEW:
            assert seen[part].isnan().all()
            continue
        written.add(slot)
        assert_ruled(seen[part], state.rule[slot], part_of(m, part), before[slot].double() if past else None)
        inputs_of = torch.cat([t[part].flatten(1) for t in (x.q, x.k, x.v)], 1)
        assert torch.equal(state.tail[slot].cpu(), inputs_of[len(inputs_of) - (shape.taps - 1) :])
    assert seen[row:].isnan().all()
    others = [i for i in range(len(lens) + 1) if i not in written]
    assert torch.equal(state.rule[others].cpu().nan_to_num(7.0), before[others].nan_to_num(7.0))
    assert state.tail[others].isnan().all()


def part_of(m: Mixed, rows: slice) -> Mixed:
    return Mixed(*(t[rows] for t in vars(m).values()))


def assert_ruled(seen: Tensor, rule: Tensor, m: Mixed, start: Tensor | None) -> None:
    want = apply_rule(m, [(0, len(m.q))], start)
    off = (seen.double() - want.seen).norm(dim=-1)
    assert (off <= want.d_seen).all(), f"worst {(off / want.d_seen).max():.3g} of what it may be"
    off = (rule.cpu().double() - want.state).flatten(1).norm(dim=1)
    assert (off <= want.off).all(), f"worst {(off / want.off).max():.3g} of what the state may be off"


Change = Callable[[DeltaInputs, Mixed], None]


def strong_decay(x: DeltaInputs, m: Mixed) -> None:
    x.a[:] = 300.0  # exp(-300 exp(a_log)) and less


def strong_then_weak(x: DeltaInputs, m: Mixed) -> None:
    """Sums of logarithms of thousands whose differences matter."""
    x.a[:] = -8.0
    x.a[5:40:3] = 300.0


def no_decay(x: DeltaInputs, m: Mixed) -> None:
    x.a[:] = -300.0


def beta_is_one(x: DeltaInputs, m: Mixed) -> None:
    x.b[:] = 100.0


def beta_is_zero(x: DeltaInputs, m: Mixed) -> None:
    x.b[:] = -80.0  # 2e-35


def same_keys(x: DeltaInputs, m: Mixed) -> None:
    """The triangle is full of ones: powers of it would be binomials."""
    m.k[:] = m.k[:1].clone()
    no_decay(x, m)
    beta_is_one(x, m)


def alternating_keys(x: DeltaInputs, m: Mixed) -> None:
    same_keys(x, m)
    m.k[::2] *= -1


def few_keys(x: DeltaInputs, m: Mixed) -> None:
    m.k[:] = m.k[torch.arange(len(m.k)) % 3]
    x.a[:] = -6.0


CHANGES: tuple[Change, ...] = (
    strong_decay, strong_then_weak, no_decay, beta_is_one, beta_is_zero, same_keys, alternating_keys, few_keys
)  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_hard_numbers(change: Change, rng: torch.Generator, device: torch.device) -> None:
    shape, count = SHAPES["one"], 150
    w = weights(shape, rng, BF16)
    x = inputs(shape, count, rng, BF16)
    m = rows_of(shape, x, w, rng)
    change(x, m)
    m = mixed_of(shape, m.q, m.k, m.v, x, w)  # gates anew
    state = poisoned_state(shape, 1, BF16)
    state = RecurrentState(state.rule.to(device), state.tail.to(device))
    seen = run(shape, m, x, w, state, ([count], [count]), [0], device)
    assert_ruled(seen, state.rule[0], m, None)


def test_bits_do_not_depend_on_other_sequences(rng: torch.Generator, device: torch.device) -> None:
    shape, count = SHAPES["one"], 100
    w = weights(shape, rng, BF16)
    x = inputs(shape, 2 * count, rng, BF16)
    m = rows_of(shape, x, w, rng)
    found = []
    for lens, first in (([count], 0), ([count], 0), ([7, count], 7)):
        rows = slice(count - first, 2 * count)
        state = poisoned_state(shape, 2, BF16)
        state = RecurrentState(state.rule.to(device), state.tail.to(device))
        of_rows = DeltaInputs(*(t[rows] for t in vars(x).values()))
        seen = run(shape, part_of(m, rows), of_rows, w, state, (lens, lens), list(range(len(lens))), device)
        found.append((seen[first:], state.rule[len(lens) - 1].cpu()))
    for seen, rule in found[1:]:
        assert torch.equal(seen, found[0][0])
        assert torch.equal(rule, found[0][1])


def test_what_does_not_fit_is_refused(rng: torch.Generator, device: torch.device) -> None:
    shape = SHAPES["one"]
    x, w, state = inputs(shape, 8, rng, BF16), weights(shape, rng, BF16), poisoned_state(shape, 1, BF16)
    at, mixed, seen = batch([8], [8], [0], device), torch.zeros(8, shape.channels), torch.zeros(8, 1, 16)
    chunks = chunks_of(8, 1, torch.device("cpu"))
    with pytest.raises(ValueError, match="float32 \\[1040\\]"):
        by_chunks(x, w, state, at, FEW, mixed, replace(chunks, workspace=chunks.workspace[1:]), seen)
    with pytest.raises(ValueError, match="few_rows >= 1"):
        by_chunks(x, w, state, at, 0, mixed, chunks, seen)
