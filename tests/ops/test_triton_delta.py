"""The kernels of the gated delta rule against float64; padding rows and slots of other sequences are unchanged."""

from __future__ import annotations

import pytest
import torch

from delta_cases import (
    CASES,
    LONG,
    QWEN3_NEXT,
    SHAPES,
    exact,
    inputs,
    joined,
    mostly_rounded_once,
    part,
    poisoned_state,
    weights,
)
from ops.delta_inputs import batch, chunks_of, on
from ops.triton_bounds import BF16, assert_within, poisoned, stored
from proa.models.spec import Attention, Block, GatedDeltaNet, Mlp, Model, Rope
from proa.ops.caches import RecurrentState
from proa.ops.sizes import delta_chunk_floats
from proa.ops.table import DeltaInputs, DeltaWeights, DeviceBatch
from proa.ops.triton.delta import FEW_ROWS, FEW_STATES, DeltaSpace, gated_delta, takes_chunks
from proa.ops.triton.delta_chunks import shape_for
from proa.plan.kernels import chunks_bytes


def run(
    x: DeltaInputs, w: DeltaWeights, state: RecurrentState, at: DeviceBatch, padding: int, device: torch.device,
    least_rows: int = 1,
) -> torch.Tensor:  # fmt: skip
    """The result for x's rows, of which the last `padding` are padding."""
    rows, groups = x.q.shape[:2]
    heads, dim = groups * x.v.shape[2], x.v.shape[3]
    slots = torch.arange(rows, device=device)
    slots[rows - padding :] = -1
    out = poisoned(rows, heads * dim).to(device)
    mixed, seen = (poisoned(rows, n, dtype=torch.float32).to(device) for n in (len(w.conv), heads * dim))
    chunks = chunks_of(rows, heads, device) if takes_chunks(rows, x.q.shape[2], one_each=at.rows_each == 1) else None
    gated_delta(
        on(x, device),
        DeltaWeights(w.conv.to(device), w.a_log.to(device), w.dt_bias.to(device), w.norm.to(device), w.eps),
        state, at, slots, DeltaSpace(mixed, seen.view(rows, heads, dim), chunks), out, least_rows,
    )  # fmt: skip
    return out.cpu().view(rows, heads, dim)


@pytest.mark.parametrize(
    ("size", "case"), [*(("small", case) for case in CASES), ("one", "mixed"), ("one", "long"), ("wide", "decode")]
)
def test_gated_delta(size: str, case: str, rng: torch.Generator, device: torch.device) -> None:
    shape, sequences = SHAPES[size], (CASES | {"long": LONG})[case]
    w = weights(shape, rng, BF16)
    texts = [inputs(shape, total, rng, BF16) for _, total in sequences]
    slots = torch.randperm(len(texts) + 2, generator=rng)[: len(texts)].tolist()
    state = poisoned_state(shape, len(texts) + 2, BF16)
    state = RecurrentState(state.rule.to(device), state.tail.to(device))
    before = [total - rows for rows, total in sequences]
    for text, past, slot in zip(texts, before, slots, strict=True):
        if past:
            run(part(text, slice(past)), w, state, batch([past], [past], [slot], device), 0, device)
    padding = 2
    step = [part(text, slice(past, None)) for text, past in zip(texts, before, strict=True)]
    step.append(inputs(shape, padding, rng, BF16))
    x = joined(shape, step)
    q_lens, kv_lens = [rows for rows, _ in sequences] + [0], [total for _, total in sequences] + [0]
    got = run(x, w, state, batch(q_lens, kv_lens, [*slots, 0], device), padding, device)
    assert not got[len(got) - padding :].any()
    first = 0
    for text, past, slot in zip(texts, before, slots, strict=True):
        rows = len(text.q) - past
        steps = [(first, end) for first, end in ((0, past), (past, len(text.q))) if end - first > FEW_ROWS]
        want = exact(text, w, shape, steps)
        assert_within(got[first : first + rows], want.out[past:], want.bound[past:] + stored(want.out[past:]))
        assert mostly_rounded_once(got[first : first + rows], want.out[past:])
        off = (state.rule[slot].cpu().double() - want.rule).flatten(1).norm(dim=1)
        assert (off <= want.rule_bound).all()
        assert torch.equal(state.tail[slot].cpu(), want.tail)
        first += rows
    others = [i for i in range(len(texts) + 2) if i not in slots]
    assert state.rule[others].isnan().all()
    assert state.tail[others].isnan().all()


def test_fewer_rows_have_the_bits_of_least_rows(rng: torch.Generator, device: torch.device) -> None:
    shape, many = SHAPES["small"], FEW_STATES + 2
    w, rows = weights(shape, rng, BF16), [inputs(shape, 1, rng, BF16) for _ in range(many)]
    made, found = poisoned_state(shape, many, BF16), []
    for count in (many, 1, 3):
        state = RecurrentState(made.rule.clone().to(device), made.tail.clone().to(device))
        at = batch([1] * count, [1] * count, list(range(count)), device)
        got = run(joined(shape, rows[:count]), w, state, at, 0, device, least_rows=many)
        found.append((got, state.rule.cpu()))
    for got, rule in found[1:]:
        assert torch.equal(got, found[0][0][: len(got)])
        assert torch.equal(rule[: len(got)], found[0][1][: len(got)])


@pytest.mark.gpu
def test_qwen3_next_by_chunks(rng: torch.Generator, device: torch.device) -> None:
    """A step of a prompt, one that goes on, a decoded token and a short prompt, twice: its bits are always the same."""
    sequences = [(1100, 1100), (300, 577), (1, 30), (20, 20)]
    x = [on(inputs(QWEN3_NEXT, total, rng, BF16), device) for _, total in sequences]
    w = weights(QWEN3_NEXT, rng, BF16)
    w = DeltaWeights(*(t.to(device) for t in (w.conv, w.a_log, w.dt_bias, w.norm)), w.eps)
    found = []
    for _ in range(2):
        state = poisoned_state(QWEN3_NEXT, len(x), BF16)
        state = RecurrentState(state.rule.to(device), state.tail.to(device))
        for slot, (rows, total) in enumerate(sequences):
            if past := total - rows:
                run(part(x[slot], slice(past)), w, state, batch([past], [past], [slot], device), 0, device)
        step = joined(
            QWEN3_NEXT, [part(t, slice(total - rows, None)) for t, (rows, total) in zip(x, sequences, strict=True)]
        )
        q_lens, kv_lens = ([s[i] for s in sequences] for i in range(2))
        found.append((run(step, w, state, batch(q_lens, kv_lens, list(range(len(x))), device), 0, device), state))
    (got, state), (again, other) = found
    assert torch.equal(got, again)
    assert torch.equal(state.rule, other.rule)
    first = 0
    for slot, (rows, total) in enumerate(sequences):
        past, mine = total - rows, got[first : first + rows]
        want = exact(x[slot], w, QWEN3_NEXT, [s for s in ((0, past), (past, total)) if s[1] - s[0] > FEW_ROWS])
        bound = want.bound[past:] + stored(want.out[past:])
        assert_within(mine, want.out[past:], bound)
        assert mostly_rounded_once(mine, want.out[past:].cpu())
        assert ((state.rule[slot].double() - want.rule).flatten(1).norm(dim=1) <= want.rule_bound).all()
        first += rows


def test_short_steps_and_old_devices_go_token_by_token() -> None:
    assert takes_chunks(FEW_ROWS + 1, 128, one_each=False)
    assert not takes_chunks(FEW_ROWS, 128, one_each=False)
    assert not takes_chunks(FEW_ROWS + 1, 128, one_each=True)
    assert not takes_chunks(FEW_ROWS + 1, 256, one_each=False)
    assert shape_for(75, 64 << 10) is None
    assert shape_for(120, 99 << 10) == shape_for(80, 163 << 10) != shape_for(90, 227 << 10)


def test_the_plan_has_room_for_chunks() -> None:
    mixer = GatedDeltaNet(64, 2, 6, 24, 16, 4)
    spec = Model(64, 100, (Block(mixer, Mlp(64, 96)), Block(Attention(64, 4, 2, 16, Rope(16)), Mlp(64, 96))), 1e-6, 512)
    for rows in (1, 33, 512):
        assert 4 * delta_chunk_floats(rows, 6) <= chunks_bytes(spec, rows)


def test_what_does_not_fit_is_refused(rng: torch.Generator, device: torch.device) -> None:
    shape = SHAPES["small"]
    x, w, state = inputs(shape, 2, rng, BF16), weights(shape, rng, BF16), poisoned_state(shape, 2, BF16)
    at, slots, out = batch([2], [2], [0], device), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 6 * 16, dtype=BF16)
    mixed, seen = torch.zeros(2, shape.channels), torch.zeros(2, 6, 16)
    with pytest.raises(ValueError, match="must be contiguous"):
        gated_delta(x, w, state, at, slots, DeltaSpace(mixed[:1], seen), out)
    with pytest.raises(ValueError, match="out"):
        gated_delta(x, w, state, at, slots, DeltaSpace(mixed, seen), out[:, 1:])
    with pytest.raises(ValueError, match="channels"):
        gated_delta(x, weights(SHAPES["wide"], rng, BF16), state, at, slots, DeltaSpace(mixed, seen), out)
