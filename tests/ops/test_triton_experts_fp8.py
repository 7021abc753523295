"""Experts in e4m3 with rounded activations: gate and up against float64 of the rounded rows, down against float64 of
the rounded h (test_triton_fp8_rows.py tests the rounding bit for bit).
"""

from __future__ import annotations

import functools

import pytest
import torch
from torch import Tensor

from ops.fp8_cases import NEEDS_FP8, NOT_FINITE, spec_round, sum_bound, values
from ops.triton_bounds import EPS32, assert_within, poisoned, rand, stored
from ops.triton_layers import Layer, choose
from packing import Packed, Weights, random_weights
from proa.native.formats import BF16_FORM, E4M3_FORMS, Form, Format, layout
from proa.native.weights import Activation
from proa.ops.residency import ExpertShape
from proa.ops.triton import experts as launcher
from proa.ops.triton.experts import ExpertSpace, expert_space, experts
from proa.ops.triton.experts_fp8 import FP8_BLOCKS, fp8_block_tokens, fp8_space, multiply_fp8, pays
from proa.ops.triton.experts_grouped import group, groups
from proa.ops.triton.fp8_rows import fp8_rows, round_rows
from proa.plan import fp8_activations

pytestmark = [NEEDS_FP8, NOT_FINITE]


@pytest.fixture
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Force blocks of this many tokens, also for few pairs."""
    monkeypatch.setattr(launcher, "fp8_block_tokens", lambda *_: request.param)
    monkeypatch.setattr(launcher, "pays", lambda *_: True)
    monkeypatch.setattr(launcher, "FEW_PAIRS", 0)
    size: int = request.param
    return size


def dequantised(x: Tensor, group: int) -> Tensor:
    """float64: x, rounded."""
    codes, scales = spec_round(x.cpu(), group)
    wide = codes.double().unflatten(1, (scales.shape[1], -1)) * scales.double()[..., None]
    return wide.flatten(1)[:, : x.shape[1]].to(x.device)


def run(layer: Layer, x: Tensor, ids: Tensor, rng: torch.Generator) -> tuple[ExpertSpace, Tensor]:
    """The launcher's outputs, and the pairs that it could read."""
    tokens, top_k = ids.shape
    room = expert_space(tokens + 1, top_k, layer.count, layer.shape, layer.device, fp8=True)
    h, partial = (poisoned(*t.shape, dtype=t.dtype).to(layer.device) for t in (room.h, room.partial))
    space = ExpertSpace(h, partial, room.groups, room.fp8)
    at = layer.routing(ids, rng).at
    experts(x, at, layer.shape, space, layer.biases)
    return space, at.up.flatten() != 0


def check(layer: Layer, x: Tensor, ids: Tensor, rng: torch.Generator) -> None:
    space, read = run(layer, x, ids, rng)
    again, _ = run(layer, x, ids, rng)
    of, to, top_k = layer.shape, layer.device, ids.shape[1]
    rows = dequantised(x, of.up_form.group).repeat_interleave(top_k, 0)
    pairs = ids.flatten().to(to).clamp(min=0)
    stored_h = space.h[: len(pairs), : of.width]
    seen = torch.where(read[:, None], dequantised(stored_h.nan_to_num(), of.down_form.group), 0)
    for pair in torch.where(read)[0].tolist():
        e = int(pairs[pair])
        gate, gate_bound = product(rows[pair], layer.gate[e].to(to), layer.gate_bias[e])
        up, up_bound = product(rows[pair], layer.up[e].to(to), layer.up_bias[e])
        want, bound = activation(of, gate, gate_bound, up, up_bound)
        assert_within(stored_h[pair], want, bound)
        want, bound = product(seen[pair], layer.down[e].to(to), layer.down_bias[e])
        assert_within(space.partial[pair], want, bound + stored(want.abs(), torch.float32))
    assert space.h[len(pairs) :].isnan().all()
    assert stored_h[~read].isnan().all()
    assert space.partial[: len(pairs)][~read].isnan().all()
    assert torch.equal(space.partial[: len(pairs)][read], again.partial[: len(pairs)][read])


def product(row: Tensor, weights: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """The exact product, and the kernel's error bound."""
    sizes = weights.abs() @ row.abs() + bias.abs()
    return weights @ row + bias, sum_bound(sizes, len(row), row.device)


def activation(
    of: ExpertShape, gate: Tensor, gate_bound: Tensor, up: Tensor, up_bound: Tensor
) -> tuple[Tensor, Tensor]:
    """silu's slope is at most 1.1; with 1.702 as its factor, too."""
    clamped = of.activation is Activation.CLAMPED_SWIGLU
    if clamped:
        gate, up = gate.clamp(max=of.limit), up.clamp(-of.limit, of.limit) + 1
    act = gate * (gate * (1.702 if clamped else 1)).sigmoid() * up
    error = 1.15 * gate_bound * (up.abs() + up_bound) + gate.abs() * up_bound
    error += (gate * up).abs() * (gate.abs() + 16) * EPS32 + up.abs() * EPS32
    return act, error + stored(act.abs() + error)


@pytest.mark.one_table
@pytest.mark.parametrize("size", FP8_BLOCKS, indirect=True)
@pytest.mark.parametrize("form", E4M3_FORMS, ids=str)
@pytest.mark.parametrize(("hidden", "width"), [(128, 128), (72, 150)])
def test_shapes(
    form: Form, hidden: int, width: int, size: int, rng: torch.Generator, device: torch.device
) -> None:  # fmt: skip
    layer = Layer(3, ExpertShape(hidden, width, form, form), device)
    check(layer, rand(rng, 4, hidden).to(device), choose(rng, 4, 3, 2), rng)


@pytest.mark.one_table
@pytest.mark.parametrize("size", FP8_BLOCKS, indirect=True)
def test_absent_experts_and_padding_rows(size: int, rng: torch.Generator, device: torch.device) -> None:
    """What padding rows hold does not matter."""
    layer = Layer(6, ExpertShape(40, 24, E4M3_FORMS[0], E4M3_FORMS[0]), device, absent=(0, 3))
    ids, x = choose(rng, 9, 6, 3), rand(rng, 9, 40)
    ids[2], ids[8] = -1, -1
    ids[4] = torch.tensor([0, 3, 1])
    check(layer, x.to(device), ids, rng)


@pytest.mark.one_table
@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, in the interpreter: exp of gates far below zero
@pytest.mark.parametrize("size", FP8_BLOCKS, indirect=True)
@pytest.mark.parametrize("form", E4M3_FORMS, ids=str)
def test_biases(form: Form, size: int, rng: torch.Generator, device: torch.device) -> None:
    shape = ExpertShape(72, 150, form, form, Activation.CLAMPED_SWIGLU, 0.5)
    layer = Layer(3, shape, device, biased=True)
    check(layer, rand(rng, 2, 72).to(device), choose(rng, 2, 3, 2), rng)


@pytest.mark.parametrize("form", E4M3_FORMS, ids=str)
def test_every_code(form: Form, device: torch.device) -> None:
    """Every code of a weight, subnormals included: rows pick single columns."""
    weights = random_weights(*form, 256, 128, seed=3, every_code=True)
    x = torch.zeros(4, 128)
    x[range(4), [0, 3, 70, 127]] = torch.tensor([1.0, -3.0, 0.5, 2.0])
    got, wide = products(weights, x, device)
    assert_within(got, want := wide @ torch.from_numpy(weights.values).T, want.abs() * 4 * EPS32)


@pytest.mark.parametrize("form", E4M3_FORMS, ids=str)
def test_a_nan_weight_affects_only_its_row(form: Form, rng: torch.Generator, device: torch.device) -> None:
    weights = random_weights(*form, 40, 256, seed=4)
    weights.arrays["codes"][3, 200] = 0x7F
    got, _ = products(weights, rand(rng, 5, 256), device)
    assert got.isnan().all(0).nonzero().flatten().tolist() == [3]
    assert got.isnan().any(0).nonzero().flatten().tolist() == [3]


def products(weights: Weights, x: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Products of one expert's down with the rounded rows, in float64."""
    packed = Packed([weights])
    memory = torch.frombuffer(packed.memory, dtype=torch.uint8).to(device)
    rows, ids = fp8_rows(len(x), weights.layout, device), torch.zeros(len(x), 1, dtype=torch.int32, device=device)
    round_rows(x.bfloat16().to(device), rows)
    by, out = groups(len(x), 1, device), poisoned(len(x), len(weights.values), dtype=torch.float32).to(device)
    group(ids, 1, 32, by)
    shape = ExpertShape(len(weights.values), x.shape[1], BF16_FORM, Form(weights.format, weights.group))
    multiply_fp8(rows, torch.full_like(ids, memory.data_ptr(), dtype=torch.int64), by, 32, shape, out, up=False)
    return out.cpu(), values(rows, x.shape[1])


@pytest.mark.parametrize(
    ("tokens", "count", "rounds"),
    [(17, 7, False), (17, 4, True), (20, 8, False), (21, 8, True), (46, 8, True), (130, 8, True)],
)
def test_the_launcher_rounds_activations_only_where_faster(
    tokens: int, count: int, rounds: bool, rng: torch.Generator, device: torch.device
) -> None:
    """Elsewhere nothing is rounded: the same bits as without room for rounded rows. 4 experts per token."""
    layer = Layer(count, ExpertShape(40, 24, E4M3_FORMS[0], E4M3_FORMS[0]), device)
    x, at = rand(rng, tokens, 40).to(device), layer.routing(choose(rng, tokens, count, 4), rng).at
    spaces = [expert_space(tokens, 4, count, layer.shape, device, fp8=fp8) for fp8 in (False, True)]
    for space in spaces:
        experts(x, at, layer.shape, space)
    assert torch.equal(spaces[0].partial, spaces[1].partial) is not rounds


def test_only_matrices_in_e4m3(rng: torch.Generator, device: torch.device) -> None:
    assert fp8_space(2, 2, ExpertShape(40, 24), device) is None
    assert fp8_space(2, 2, ExpertShape(40, 24, Form(Format.MXFP8, 32), BF16_FORM), device) is None
    for up, down in ((E4M3_FORMS[0], BF16_FORM), (BF16_FORM, E4M3_FORMS[0])):
        layer = Layer(4, ExpertShape(40, 24, up, down), device)
        x, at = rand(rng, 33, 40).to(device), layer.routing(choose(rng, 33, 4, 2), rng).at
        spaces = [expert_space(33, 2, 4, layer.shape, device, fp8=fp8) for fp8 in (False, True)]
        for space in spaces:
            experts(x, at, layer.shape, space)
        assert torch.equal(spaces[0].h[:, :24], spaces[1].h[:, :24]) is (up == BF16_FORM)
        assert not torch.equal(spaces[0].partial, spaces[1].partial)


def test_a_nan_activation_affects_only_its_row(rng: torch.Generator, device: torch.device) -> None:
    layer = Layer(1, ExpertShape(40, 24, E4M3_FORMS[0], E4M3_FORMS[0]), device)
    x = rand(rng, 70, 40)
    x[1, 3] = torch.nan
    space, _ = run(layer, x.to(device), torch.zeros(70, 1, dtype=torch.int64), rng)
    assert space.partial[:70].isnan().any(1).nonzero().flatten().tolist() == [1]
    assert space.partial[1].isnan().all()


@pytest.mark.parametrize("form", E4M3_FORMS, ids=str)
@pytest.mark.parametrize("columns", [128, 150, 2880])
def test_the_plan_has_room_for_rounded_rows(form: Form, columns: int, device: torch.device) -> None:
    rows = fp8_rows(7, layout(form.format, 16, columns, form.group), device)
    most = 7 * fp8_activations.row_bytes(columns)
    assert most - 7 * 4 * -(-columns // 128) <= rows.codes.nbytes + rows.scales.nbytes <= most


def test_block_sizes_in_use_are_compiled_ahead() -> None:
    assert {fp8_block_tokens(pairs, 100) for pairs in range(1, 30000) if pays(pairs, 100)} == set(FP8_BLOCKS)


@functools.cache
def model_layer(device: torch.device, form: Form) -> Layer:
    return Layer(6, ExpertShape(2048, 768, form, form), device, absent=(3,))


@pytest.mark.gpu
@pytest.mark.parametrize("size", FP8_BLOCKS, indirect=True)
@pytest.mark.parametrize("form", E4M3_FORMS, ids=str)
def test_shapes_of_models(form: Form, size: int, rng: torch.Generator, device: torch.device) -> None:
    check(model_layer(device, form), rand(rng, 200, 2048).to(device), choose(rng, 200, 6, 2), rng)


@pytest.mark.gpu
def test_a_graph_holds_it(rng: torch.Generator, device: torch.device) -> None:
    layer = model_layer(device, E4M3_FORMS[0])
    x, ids = rand(rng, 200, 2048).to(device), choose(rng, 200, 6, 4)
    at = layer.routing(ids, rng).at
    space = expert_space(200, 4, 6, layer.shape, device, fp8=True)
    experts(x, at, layer.shape, space)  # compiles
    eager = space.partial.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts(x, at, layer.shape, space)
    space.partial.fill_(torch.nan)
    graph.replay()
    read = at.up.flatten() != 0
    assert torch.equal(space.partial[read], eager[read])
