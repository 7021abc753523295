"""The kernels of the gated delta rule against float64; rows of padding and foreign slots stay as they are."""

from __future__ import annotations

import pytest
import torch

from delta_cases import CASES, SHAPES, exact, inputs, joined, mostly_rounded_once, part, poisoned_state, weights
from ops.triton_bounds import BF16, assert_within, poisoned, stored
from proa.ops.table import DeltaInputs, DeltaWeights, DeviceBatch, RecurrentState
from proa.ops.triton.delta import gated_delta


def batch(q_lens: list[int], kv_lens: list[int], states: list[int], device: torch.device) -> DeviceBatch:
    starts = [sum(q_lens[:i]) for i in range(len(q_lens) + 1)]
    numbers = (torch.tensor(n, dtype=torch.int32, device=device) for n in (starts, kv_lens, states))
    starts_t, kv_t, states_t = numbers
    return DeviceBatch(max(q_lens) == 1, starts_t, kv_t, torch.zeros(len(q_lens), 1, dtype=torch.int32), states_t)


def run(
    x: DeltaInputs, w: DeltaWeights, state: RecurrentState, at: DeviceBatch, padding: int, device: torch.device
) -> torch.Tensor:
    """The rows' result; `padding` of x's rows are."""
    rows, groups = x.q.shape[:2]
    heads, dim = groups * x.v.shape[2], x.v.shape[3]
    slots = torch.arange(rows, device=device)
    slots[rows - padding :] = -1
    out = poisoned(rows, heads * dim).to(device)
    mixed, seen = (poisoned(rows, n, dtype=torch.float32).to(device) for n in (len(w.conv), heads * dim))
    gated_delta(
        on(x, device),
        DeltaWeights(w.conv.to(device), w.a_log.to(device), w.dt_bias.to(device), w.norm.to(device), w.eps),
        state, at, slots, mixed, seen.view(rows, heads, dim), out,
    )  # fmt: skip
    return out.cpu().view(rows, heads, dim)


def on(x: DeltaInputs, device: torch.device) -> DeltaInputs:
    """Views of the same strides."""
    return DeltaInputs(*(_like(t, device) for t in vars(x).values()))


def _like(t: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device).copy_(t)


@pytest.mark.parametrize(("size", "case"), [*(("small", case) for case in CASES), ("one", "mixed"), ("wide", "decode")])
def test_gated_delta(size: str, case: str, rng: torch.Generator, device: torch.device) -> None:
    shape, sequences = SHAPES[size], CASES[case]
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
        want = exact(text, w, shape)
        rows = len(text.q) - past
        assert_within(got[first : first + rows], want.out[past:], want.bound[past:] + stored(want.out[past:]))
        assert mostly_rounded_once(got[first : first + rows], want.out[past:])
        off = (state.rule[slot].cpu().double() - want.rule).flatten(1).norm(dim=1)
        assert (off <= want.rule_bound).all()
        assert torch.equal(state.tail[slot].cpu(), want.tail)
        first += rows
    others = [i for i in range(len(texts) + 2) if i not in slots]
    assert state.rule[others].isnan().all()
    assert state.tail[others].isnan().all()


def test_what_does_not_fit_is_refused(rng: torch.Generator, device: torch.device) -> None:
    shape = SHAPES["small"]
    x, w, state = inputs(shape, 2, rng, BF16), weights(shape, rng, BF16), poisoned_state(shape, 2, BF16)
    at, slots, out = batch([2], [2], [0], device), torch.zeros(2, dtype=torch.int64), torch.zeros(2, 6 * 16, dtype=BF16)
    mixed, seen = torch.zeros(2, shape.channels), torch.zeros(2, 6, 16)
    with pytest.raises(ValueError, match="without gaps"):
        gated_delta(x, w, state, at, slots, mixed[:1], seen, out)
    with pytest.raises(ValueError, match="out"):
        gated_delta(x, w, state, at, slots, mixed, seen, out[:, 1:])
    with pytest.raises(ValueError, match="channels"):
        gated_delta(part(x, slice(None)), weights(SHAPES["wide"], rng, BF16), state, at, slots, mixed, seen, out)
