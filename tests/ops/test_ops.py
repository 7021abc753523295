"""Every op of every implementation against float64 written out by hand.

Bounds are derived: a sum of n products in float32, inputs rounded to a type with unit roundoff u, is off by at
most (n + c) * eps32 * sum|a||b| for the arithmetic plus u * |result| for storing it.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import router_cases as routers
from delta_cases import CASES as DELTA_CASES
from delta_cases import SHAPES, exact, joined, mostly_rounded_once, part, poisoned_state
from delta_cases import inputs as delta_inputs
from delta_cases import weights as delta_weights
from ops.op_cases import DTYPES, EPS32, OPS_AND_TYPES, TORCH, Run, assert_within, natives, rand, stored
from ops_run import NativeRun
from proa.models.spec import SILU, ExpertGroups, Gating, Router
from proa.ops.caches import KvPages
from proa.ops.reference import gated
from proa.ops.table import AttentionBatch, Chosen, DeltaInputs, RouterRule, batch_of

IMPLEMENTATIONS = [pytest.param(TORCH, id="torch"), *natives()]


@pytest.mark.parametrize(("ops", "dtype"), OPS_AND_TYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 7), (5, 576), (2, 4096)])
def test_rms_norm(ops: Run, dtype: torch.dtype, rows: int, width: int, offset: float, rng: torch.Generator) -> None:
    x, weight = rand(rng, rows, width, dtype=dtype), rand(rng, width, dtype=dtype)
    wide = x.double()
    want = (weight.double() + offset) * wide / (wide.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    got = ops.rms_norm(x, weight, 1e-6, offset)
    assert_within(got, want, want.abs() * (width / 2 + 9) * EPS32 + stored(want, dtype))


@pytest.mark.parametrize(("ops", "dtype"), OPS_AND_TYPES)
def test_norm_of_heads_that_lie_apart(ops: Run, dtype: torch.dtype, rng: torch.Generator) -> None:
    x, weight = rand(rng, 5, 6, 24, dtype=dtype), rand(rng, 24, dtype=dtype)
    assert torch.equal(ops.rms_norm(x[:, ::2], weight, 1e-6), ops.rms_norm(x[:, ::2].contiguous(), weight, 1e-6))


@pytest.mark.parametrize(("ops", "dtype"), OPS_AND_TYPES)
@pytest.mark.parametrize(("rows", "width"), [(1, 2), (3, 12), (5, 576)])
@pytest.mark.parametrize("factor", [0.22, 12.0])
def test_scale(ops: Run, dtype: torch.dtype, rows: int, width: int, factor: float, rng: torch.Generator) -> None:
    x = rand(rng, rows, width, dtype=dtype)
    want = x.double() * factor
    assert_within(ops.scale(x, factor), want, want.abs() * 2 * EPS32 + stored(want, dtype))


@pytest.mark.parametrize(("ops", "dtype"), OPS_AND_TYPES)
@pytest.mark.parametrize("apart", [1, 2])
def test_gate(ops: Run, dtype: torch.dtype, apart: int, rng: torch.Generator) -> None:
    x, other = rand(rng, 5, 3, 24, dtype=dtype), rand(rng, 5, 3 * apart, 24, dtype=dtype) * 4
    gate = other[:, ::apart]
    want = x.double() * torch.sigmoid(gate.double())
    # The sigmoid may be rounded, then the product.
    assert_within(ops.gate(x, gate), want, want.abs() * 8 * EPS32 + 2.01 * stored(want, dtype) + stored(x, dtype))


@pytest.mark.parametrize(("ops", "dtype"), OPS_AND_TYPES)
@pytest.mark.parametrize("case", DELTA_CASES)
@pytest.mark.parametrize("size", SHAPES)
def test_gated_delta(ops: Run, dtype: torch.dtype, case: str, size: str, rng: torch.Generator) -> None:
    shape, sequences = SHAPES[size], DELTA_CASES[case]
    weights = delta_weights(shape, rng, dtype)
    texts = [delta_inputs(shape, total, rng, dtype) for _, total in sequences]
    slots = torch.randperm(len(texts) + 2, generator=rng)[: len(texts)].tolist()
    state = poisoned_state(shape, len(texts) + 2, dtype)

    def run(x: DeltaInputs, q_lens: list[int], kv_lens: list[int], states: list[int]) -> Tensor:
        batch = batch_of(q_lens, kv_lens, [list(range(n)) for n in kv_lens], 1, states)
        return ops.gated_delta(x, weights, state, batch).view(len(x.q), shape.heads, shape.value_dim)

    before = [total - rows for rows, total in sequences]
    for text, past, slot in zip(texts, before, slots, strict=True):
        if past:
            run(part(text, slice(past)), [past], [past], [slot])
    step = joined(shape, [part(text, slice(past, None)) for text, past in zip(texts, before, strict=True)])
    got = run(step, [rows for rows, _ in sequences], [total for _, total in sequences], slots)
    first = 0
    for text, past, slot in zip(texts, before, slots, strict=True):
        want = exact(text, weights, shape)
        rows = slice(first, first := first + len(text.q) - past)
        assert_within(got[rows], want.out[past:], want.bound[past:] + stored(want.out[past:], dtype))
        assert dtype != torch.bfloat16 or mostly_rounded_once(got[rows], want.out[past:])
        assert ((state.rule[slot].double() - want.rule).flatten(1).norm(dim=1) <= want.rule_bound).all()
        assert torch.equal(state.tail[slot], want.tail)
    others = [i for i in range(len(texts) + 2) if i not in slots]
    assert state.rule[others].isnan().all()
    assert state.tail[others].isnan().all()


@pytest.mark.parametrize("ops", natives())
def test_a_state_slot_out_of_range_is_refused(ops: NativeRun, rng: torch.Generator) -> None:
    shape = SHAPES["small"]
    x, weights = delta_inputs(shape, 1, rng, torch.bfloat16), delta_weights(shape, rng, torch.bfloat16)
    with pytest.raises(ValueError, match="State slot 2 of sequence 0 does not exist: there are 2"):
        ops.gated_delta(x, weights, poisoned_state(shape, 2, torch.bfloat16), batch_of([1], [1], [[0]], 1, [2]))


@pytest.mark.parametrize(("ops", "dtype"), OPS_AND_TYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "dim", "rotary_dim"), [(1, 2, 2), (3, 16, 16), (4, 16, 8)])
def test_rotary(
    ops: Run, dtype: torch.dtype, interleaved: bool, heads: int, dim: int, rotary_dim: int, rng: torch.Generator
) -> None:
    x, angles = rand(rng, 5, heads, dim, dtype=dtype), rand(rng, 5, rotary_dim // 2) * 10
    want = x.double().clone()
    for i in range(rotary_dim // 2):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + rotary_dim // 2)
        turn = torch.polar(torch.ones(5, 1, dtype=torch.float64), angles[:, i : i + 1].double())
        out = torch.complex(x[..., a].double(), x[..., b].double()) * turn
        want[..., a], want[..., b] = out.real, out.imag
    got = ops.rotary(x, angles.cos(), angles.sin(), interleaved)
    size = x.double().abs().sum(-1, keepdim=True)
    assert_within(got, want, size * 4 * EPS32 + stored(want, dtype))
    assert torch.equal(got[..., rotary_dim:], x[..., rotary_dim:])


@pytest.mark.parametrize(("ops", "dtype"), OPS_AND_TYPES)
@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 1, 1), (1, 576, 33), (7, 129, 64), (64, 512, 17)])
@pytest.mark.parametrize("bias", [False, True])
def test_linear(
    ops: Run, dtype: torch.dtype, tokens: int, inputs: int, outputs: int, bias: bool, rng: torch.Generator
) -> None:
    x, weight = rand(rng, tokens, inputs, dtype=dtype), rand(rng, outputs, inputs, dtype=dtype)
    b = rand(rng, outputs, dtype=dtype) if bias else None
    offset = b.double() if b is not None else torch.zeros(outputs, dtype=torch.float64)
    want = x.double() @ weight.double().T + offset
    size = x.double().abs() @ weight.double().abs().T + offset.abs()
    # A library may round the product before it adds the bias: two roundings, of values no larger than `size`.
    storing = 2 * stored(size, dtype) if bias else stored(want, dtype)
    assert_within(ops.linear(x, weight, b), want, size * (inputs + 2) * EPS32 + storing)


@pytest.mark.parametrize(("ops", "dtype"), OPS_AND_TYPES)
@pytest.mark.parametrize("bias", [False, True])
def test_a_routers_logits_are_not_rounded(ops: Run, dtype: torch.dtype, bias: bool, rng: torch.Generator) -> None:
    x, weight = rand(rng, 7, 129, dtype=dtype), rand(rng, 33, 129, dtype=dtype)
    b = rand(rng, 33, dtype=dtype) if bias else None
    offset = b.double() if b is not None else torch.zeros(33, dtype=torch.float64)
    got = ops.router(x, weight, b)
    assert got.dtype == torch.float32
    size = x.double().abs() @ weight.double().abs().T + offset.abs()
    assert_within(got, x.double() @ weight.double().T + offset, size * (129 + 2) * EPS32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gated_by_silu(dtype: torch.dtype, rng: torch.Generator) -> None:
    x = rand(rng, 5, 2 * 33, dtype=dtype)
    gate, up = x.double().chunk(2, -1)
    want = gate / (1 + (-gate).exp()) * up
    silu = (want / up).nan_to_num()
    bound = want.abs() * 8 * EPS32 + stored(want, dtype) + stored(silu, dtype) * up.abs() * 1.01
    assert_within(gated(x, SILU), want, bound)


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
@pytest.mark.parametrize(("experts", "top_k"), [(8, 1), (8, 2), (128, 8), (16, 16), (60, 4)])
@pytest.mark.parametrize("router", routers.ROUTERS.values(), ids=routers.ROUTERS)
def test_route(ops: Run, router: Router, experts: int, top_k: int, rng: torch.Generator) -> None:
    if not routers.fits(experts, top_k, router):
        return
    logits, rule = routers.case(9, experts, top_k, router, rng)
    ids, weights = ops.route(logits, torch.arange(len(logits)), rule)
    routers.assert_right(logits, rule, ids, weights)


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
def test_among_equal_experts_and_groups_the_first_are_chosen(ops: Run) -> None:
    logits, slots = torch.zeros(1, 12), torch.zeros(1, dtype=torch.int64)
    logits[0, [11, 7, 4]] = 1.0
    for score in routers.SCORES:
        ids, _ = ops.route(logits, slots, RouterRule(6, Router(score, True)))
        assert ids.tolist() == [[4, 7, 11, 0, 1, 2]]
        ids, _ = ops.route(logits, slots, RouterRule(4, Router(score, True, groups=ExpertGroups(6, 2, 2))))
        assert ids.tolist() == [[4, 7, 5, 6]]
        ids, _ = ops.route(logits * 0, slots, RouterRule(4, Router(score, True, groups=ExpertGroups(6, 2, 1))))
        assert ids.tolist() == [[0, 1, 2, 3]]


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
def test_a_correction_affects_the_choice_but_not_the_weights(ops: Run) -> None:
    """Even if it makes all keys negative, and an expert that is not chosen has the highest score."""
    router = Router("sigmoid", False, correction=True, scale=2.0)
    correction = torch.tensor([-9.0, -8.0, -70.0, -8.5])
    logits = torch.tensor([[0.0, 0.0, 5.0, 0.0]])
    ids, weights = ops.route(logits, torch.zeros(1, dtype=torch.int64), RouterRule(2, router, correction))
    assert ids.tolist() == [[1, 3]]
    assert weights.tolist() == [[1.0, 1.0]]


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
def test_argmax(ops: Run, rng: torch.Generator) -> None:
    logits = rand(rng, 6, 2050) - 100
    logits[0, 2049] = logits[1, 0] = logits[2, 1030] = 50
    logits[3, [700, 1500]] = 50
    logits[4, 1999], logits[5, 3] = -math.inf, math.nan
    assert ops.argmax(logits).tolist() == [2049, 0, 1030, 700, -1, -1]


@pytest.mark.parametrize(("ops", "dtype"), OPS_AND_TYPES)
@pytest.mark.parametrize("routing", ["random", "one_expert", "empty_experts"])
@pytest.mark.parametrize("beside", ["alone", "shared", "gated"])
def test_moe_experts(ops: Run, dtype: torch.dtype, routing: str, beside: str, rng: torch.Generator) -> None:
    tokens, hidden, width, experts, top_k = 6, 40, 24, 8, 2
    x = rand(rng, tokens, hidden, dtype=dtype)
    gate_up = (rand(rng, experts, 2 * width, hidden) / math.sqrt(hidden)).to(dtype)
    down = (rand(rng, experts, hidden, width) / math.sqrt(width)).to(dtype)
    scores = torch.rand(tokens, experts, generator=rng)
    if routing == "empty_experts":
        scores[:, 3:] = 0
    ids = scores.topk(top_k).indices if routing != "one_expert" else torch.tensor([[4, 5]] * tokens)
    weights = torch.rand(tokens, top_k, generator=rng)
    shared = rand(rng, tokens, hidden, dtype=dtype) if beside != "alone" else None
    gate_logit = rand(rng, tokens, 1, dtype=dtype) if beside == "gated" else None

    want = torch.zeros(tokens, hidden, dtype=torch.float64)
    size = torch.zeros_like(want)
    for t in range(tokens):
        for e, w in zip(ids[t].tolist(), weights[t].double(), strict=True):
            gate, up = (gate_up[e].double() @ x[t].double()).chunk(2)
            act = gate / (1 + (-gate).exp()) * up
            want[t] += w * (down[e].double() @ act)
            # silu's slope is at most 1.1; sizes bound how the roundings of gate, up, act travel through down
            reach = gate_up[e].double().abs() @ x[t].double().abs()
            spread = (reach[:width] * 1.1 * up.abs() + gate.abs() * reach[width:]) * (hidden * EPS32) + (
                3.2 * (gate * up).abs() * torch.finfo(dtype).eps / 2 * 1.1
            )
            size[t] += w * (down[e].double().abs() @ (spread + act.abs() * torch.finfo(dtype).eps))
            size[t] += w * (down[e].double().abs() @ act.abs()) * (width * EPS32 + torch.finfo(dtype).eps / 2)
    bound = size + stored(want, dtype)
    if shared is not None:
        scale = torch.ones(1) if gate_logit is None else torch.sigmoid(gate_logit.double())
        part = scale * shared.double()
        want = want + part
        # The sum may be stored before the shared expert is added, and the scale and the scaled one be rounded too.
        bound = bound + 2 * stored(part, dtype) + part.abs() * 8 * EPS32 + stored(want.abs() + bound, dtype)
    got = ops.experts(x, ids, weights, gate_up, down, shared, gate_logit)
    assert got.dtype == dtype
    assert_within(got, want, bound)
    assert torch.equal(got, ops.experts(x, ids, weights, gate_up, down, shared, gate_logit)), "not the same bits twice"


CLAMPED = Gating("clamped_swiglu", 0.75)


def gated_values(
    prefix: str, hidden: int, width: int, rng: torch.Generator, dtype: torch.dtype
) -> dict[str, Tensor]:  # fmt: skip
    sizes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
    found = {
        f"{prefix}{name}.weight": (rand(rng, *size) / math.sqrt(size[1])).to(dtype) for name, size in sizes.items()
    }
    return found | {f"{prefix}{name}.bias": rand(rng, size[0], dtype=dtype) for name, size in sizes.items()}


def clamped(x: Tensor, values: dict[str, Tensor], prefix: str) -> tuple[Tensor, Tensor]:
    """down(clamped SwiGLU) of x [T, hidden] in float64, and its error bound: gate, up, their product and the result may
    each be stored in the dtype of x, and a library may round a product before it adds a bias."""
    wide, dtype = x.double(), x.dtype
    weight, bias = (
        [values[f"{prefix}{name}.{kind}"].double() for name in ("gate", "up", "down")] for kind in ("weight", "bias")
    )
    gate, up = (wide @ w.T + b for w, b in zip(weight[:2], bias[:2], strict=True))
    sizes = [wide.abs() @ w.abs().T + b.abs() for w, b in zip(weight[:2], bias[:2], strict=True)]
    off = [size * (x.shape[1] + 4) * EPS32 + 2 * stored(size, dtype) for size in sizes]
    g, u = gate.clamp(max=CLAMPED.limit), up.clamp(-CLAMPED.limit, CLAMPED.limit) + 1
    h = g * torch.sigmoid(1.702 * g) * u
    # The slope of g sigmoid(1.702 g) is at most 1.1; its argument, the sigmoid, up + 1 and two products may be rounded.
    h_off = 1.1 * off[0] * (u.abs() + off[1]) + g.abs() * off[1] + 5 * stored((g.abs() + off[0]) * (u.abs() + 1), dtype)
    y = h @ weight[2].T + bias[2]
    y_size = (h.abs() + h_off) @ weight[2].abs().T + bias[2].abs()
    return y, h_off @ weight[2].abs().T + y_size * (h.shape[1] + 4) * EPS32 + 2 * stored(y_size, dtype)


@pytest.mark.parametrize(("ops", "dtype"), OPS_AND_TYPES)
def test_experts_with_biases_and_a_clamp(ops: Run, dtype: torch.dtype, rng: torch.Generator) -> None:
    tokens, hidden, width, experts, top_k = 6, 40, 24, 5, 2
    x = rand(rng, tokens, hidden, dtype=dtype)
    values = {}
    for e in range(experts):
        values |= gated_values(f"{e}.", hidden, width, rng, dtype)
    ids, weights = torch.rand(tokens, experts, generator=rng).topk(top_k).indices, torch.rand(tokens, 2, generator=rng)
    want, bound = (torch.zeros(tokens, hidden, dtype=torch.float64) for _ in range(2))
    for e in range(experts):
        rows, choice = torch.where(ids == e)
        y, off = clamped(x[rows], values, f"{e}.")
        want.index_add_(0, rows, y * weights[rows, choice, None].double())
        bound.index_add_(0, rows, (off + y.abs() * 4 * EPS32) * weights[rows, choice, None].double())
    got = ops.biased_experts(x, Chosen(ids, weights), values, CLAMPED)
    assert_within(got, want, bound + stored(want.abs() + bound, dtype))


@pytest.mark.parametrize(("ops", "dtype"), OPS_AND_TYPES)
def test_a_clamped_mlp(ops: Run, dtype: torch.dtype, rng: torch.Generator) -> None:
    x, values = rand(rng, 5, 40, dtype=dtype), gated_values("", 40, 24, rng, dtype)
    want, bound = clamped(x, values, "")
    assert_within(ops.mlp(x, values, CLAMPED), want, bound + stored(want.abs() + bound, dtype))


@pytest.mark.parametrize(("ops", "dtype"), OPS_AND_TYPES)
@pytest.mark.parametrize("biased", [False, True])
def test_an_mlp_without_a_gate(ops: Run, dtype: torch.dtype, biased: bool, rng: torch.Generator) -> None:
    kinds = ("weight", "bias") if biased else ("weight",)
    every = gated_values("", 40, 24, rng, dtype)
    values = {name: every[name] for name in (f"{part}.{kind}" for part in ("up", "down") for kind in kinds)}
    x = rand(rng, 5, 40, dtype=dtype)
    (up, down), biases = (
        (values[f"{n}.weight"].double() for n in ("up", "down")),
        torch.zeros(2, 1, dtype=torch.float64),
    )
    up_bias, down_bias = (values[f"{n}.bias"].double() for n in ("up", "down")) if biased else biases
    u, size = x.double() @ up.T + up_bias, x.double().abs() @ up.abs().T + up_bias.abs()
    off = size * 44 * EPS32 + 2 * stored(size, dtype)
    h = u.clamp(min=0) ** 2
    h_off = 2 * u.abs() * off + off**2 + stored((u.abs() + off) ** 2, dtype)
    y_size = (h + h_off) @ down.abs().T + down_bias.abs()
    bound = h_off @ down.abs().T + y_size * 28 * EPS32 + 2 * stored(y_size, dtype)
    assert_within(ops.mlp(x, values, Gating("relu2")), h @ down.T + down_bias, bound)


@pytest.mark.parametrize("ops", IMPLEMENTATIONS)
@pytest.mark.parametrize("part", ["gate", "up"])
def test_nan_propagates_through_the_clamp(ops: Run, part: str, rng: torch.Generator) -> None:
    x, values = rand(rng, 3, 40, dtype=torch.bfloat16), gated_values("", 40, 24, rng, torch.bfloat16)
    # Loading refuses weights that are NaN: here it comes of infinities of both signs in one sum.
    x[:, 4:6] = math.inf
    values["gate.weight"][:, 4:6], values["up.weight"][:, 4:6] = 1.0, 1.0
    values[f"{part}.weight"][7, 5] = -1.0
    assert ops.mlp(x, values, CLAMPED).isnan().all()


CASES = {
    "one token": ([1], [1]),
    "prompt": ([9], [9]),
    "chunk after cached": ([5], [14]),
    "decode": ([1, 1, 1], [1, 7, 33]),
    "mixed": ([1, 6, 1, 11], [20, 6, 5, 27]),
}


@pytest.mark.parametrize("ops", natives())
@pytest.mark.parametrize(("new", "total"), [(1, 7), (1, 3000), (40, 90)], ids=["decode", "long", "prompt"])
@pytest.mark.parametrize("lost", [math.nan, math.inf])
def test_a_key_that_is_not_finite_shows(ops: Run, new: int, total: int, lost: float, rng: torch.Generator) -> None:
    """Each row that sees the key is NaN, so that its request ends with an error; other sequences are as without it."""
    page_tokens, dim, dtype = 4, 16, torch.bfloat16
    pages = -(-total // page_tokens)
    batch = batch_of([1, new], [5, total], [[0, 1], list(range(2, pages + 2))], page_tokens)
    shape = (pages + 2, page_tokens, 2, dim)
    cache = KvPages(rand(rng, *shape, dtype=dtype), rand(rng, *shape, dtype=dtype))
    q = rand(rng, 1 + new, 4, dim, dtype=dtype)
    q[1:, :, 3] = 1.0
    before = ops.attention(q, cache, batch, 0.25, None, None).clone()
    place = total - new + new // 2  # of the key, for one of the two heads
    cache.keys[2 + place // page_tokens, place % page_tokens, 1, 3] = lost
    got = ops.attention(q, cache, batch, 0.25, None, None)
    assert got[1 + new // 2 :, 2:].isnan().all()
    assert torch.equal(got[:, :2], before[:, :2])
    assert torch.equal(got[:1], before[:1])


@pytest.mark.parametrize(("ops", "dtype"), OPS_AND_TYPES)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("sunk", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_paged_attention(
    ops: Run,
    dtype: torch.dtype,
    case: str,
    window: int | None,
    sunk: bool,
    heads: int,
    kv_heads: int,
    rng: torch.Generator,
) -> None:
    q_lens, kv_lens = CASES[case]
    dim, page_tokens = 16, 4
    counts = [-(-n // page_tokens) for n in kv_lens]
    order = torch.randperm(sum(counts) + 3, generator=rng).tolist()  # pages lie anywhere
    pages = [[order.pop() for _ in range(n)] for n in counts]
    batch = batch_of(q_lens, kv_lens, pages, page_tokens)
    shape = (sum(counts) + 3, page_tokens, kv_heads, dim)
    cache = KvPages(torch.full(shape, torch.nan, dtype=dtype), torch.full(shape, torch.nan, dtype=dtype))
    scale = dim**-0.5
    q = rand(rng, sum(q_lens), heads, dim, dtype=dtype)
    keys = [rand(rng, n, kv_heads, dim, dtype=dtype) for n in kv_lens]
    values = [rand(rng, n, kv_heads, dim, dtype=dtype) for n in kv_lens]
    for s, n in enumerate(kv_lens):  # the history first, then the step's own rows, as in service
        old = n - q_lens[s]
        if old:
            ops.write_kv(keys[s][:old], values[s][:old], cache, batch_of([old], [old], [pages[s]], page_tokens).slots)
    new_k = torch.cat([k[n - q :] for k, n, q in zip(keys, kv_lens, q_lens, strict=True)])
    new_v = torch.cat([v[n - q :] for v, n, q in zip(values, kv_lens, q_lens, strict=True)])
    ops.write_kv(new_k, new_v, cache, batch.slots)
    # Slots past the end of a sequence hold old data; finite garbage must not matter.
    cache.keys[cache.keys.isnan()], cache.values[cache.values.isnan()] = 7.0, 1e4

    sinks = 2 * rand(rng, heads) if sunk else None
    got = ops.attention(q, cache, batch, scale, window, sinks)
    row = 0
    for s, (q_len, n) in enumerate(zip(q_lens, kv_lens, strict=True)):
        for i in range(q_len):
            position = n - q_len + i
            first = 0 if window is None else max(0, position - window + 1)
            for h in range(heads):
                k = keys[s][first : position + 1, h // (heads // kv_heads)].double()
                v = values[s][first : position + 1, h // (heads // kv_heads)].double()
                scores = k @ q[row, h].double() * scale
                sink = torch.empty(0).double() if sinks is None else sinks[h : h + 1].double()
                p = torch.softmax(torch.cat((scores, sink)), 0)[: len(scores)]
                want = p @ v
                # Probabilities may be stored in the value's type; scores err by eps32 of their terms.
                wobble = (k.abs() @ q[row, h].double().abs() * scale).max() * (dim + 4) * EPS32
                bound = (p @ v.abs()) * (4 * wobble + 3 * torch.finfo(dtype).eps + (len(p) + 8) * EPS32)
                assert_within(got[row, h], want, bound + stored(want, dtype))
            row += 1


def test_a_batch_without_device_tensors_is_refused() -> None:
    batch = AttentionBatch((1,), (1,), (torch.zeros(1, dtype=torch.int64),), torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="with device tensors"):
        batch.on_device  # noqa: B018 - looking is the test
