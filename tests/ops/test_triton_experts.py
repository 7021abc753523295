"""Experts on the GPU against float64, from the bytes that the CPU's kernels read.

The error of a sum of n products in float32 is n + c roundings; silu's slope is at most 1.1; gate_up's output is
rounded.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from ops.triton_bounds import EPS32, assert_within, poisoned, rand, stored
from ops.triton_layers import Layer, Routing, capability_of, choose
from packing import CASES
from proa.models.spec import Router
from proa.native.formats import BF16_FORM, Form, Format, Layout
from proa.native.weights import Activation, Piece
from proa.ops.added import Added
from proa.ops.pieces import TAG, UNIT_PANELS, row_of
from proa.ops.residency import Biases, ExpertShape, Located, Residency
from proa.ops.sizes import BLOCK_TOKENS, WIDE_BLOCK, most_blocks
from proa.ops.table import RouterRule
from proa.ops.triton import experts_few, experts_grouped
from proa.ops.triton.expert_sum import Into, combine
from proa.ops.triton.expert_tiles import HOPPER, block_tokens, tile_of
from proa.ops.triton.experts import ExpertSpace, expert_space, experts
from proa.ops.triton.locate import locate
from proa.ops.triton.route import route

FORMS = [Form(*case) for case in CASES]
BF16_ROUNDING = 2.0**-8 * 1.01  # half a unit in the last of 8 places


@dataclass
class Expected:
    """Each pair's output in float64, with the error bound of a kernel."""

    h: Tensor
    h_bound: Tensor
    y: Tensor
    y_bound: Tensor


def expected(layer: Layer, x: Tensor, ids: Tensor, matrix_unit: bool = False) -> Expected:
    """Expected outputs. matrix_unit: weights of formats other than bfloat16 may be rounded to it, once."""
    forms = layer.shape.up_form, layer.shape.down_form
    rounding = [BF16_ROUNDING if matrix_unit and form != BF16_FORM else 0.0 for form in forms]
    hidden, width = layer.shape.hidden, layer.shape.width
    pairs, top_k, to = ids.numel(), ids.shape[1], layer.device
    of = Expected(*(torch.zeros(pairs, n, dtype=torch.float64, device=to) for n in (width, width, hidden, hidden)))
    for e in set(ids.flatten().tolist()) - {-1}:
        mine = torch.where(ids.flatten() == e)[0].to(to)
        rows, weights = x[mine // top_k].double(), [w[e].to(to) for w in (layer.gate, layer.up, layer.down)]
        scaled = [of_part[e].to(to) for of_part in layer.scaled]
        biases = layer.gate_bias[e], layer.up_bias[e]
        gate, up = (rows @ w.T + bias for w, bias in zip(weights[:2], biases, strict=True))
        gate_error, up_error = (
            (rows.abs() @ size.T + bias.abs()) * (hidden + 8) * EPS32 + rows.abs() @ w.abs().T * rounding[0]
            for w, size, bias in zip(weights[:2], scaled[:2], biases, strict=True)
        )
        if layer.shape.activation is Activation.CLAMPED_SWIGLU:  # as silu of 1.702 times, with one more added to up
            gate, up = gate.clamp(max=layer.shape.limit), up.clamp(-layer.shape.limit, layer.shape.limit) + 1
            up_error = up_error + up.abs() * EPS32
        act = gate * (gate * (1.702 if layer.shape.activation is Activation.CLAMPED_SWIGLU else 1)).sigmoid() * up
        error = 1.15 * gate_error * (up.abs() + up_error) + gate.abs() * up_error
        error += (gate * up).abs() * (gate.abs() + gate.abs() ** 3 + 16) * EPS32  # exp errs by its argument's rounding
        h_bound = error + stored(act.abs() + error)
        sizes = scaled[2].T
        low = layer.down_bias[e]
        of.h[mine], of.h_bound[mine], of.y[mine] = act, h_bound, act @ weights[2].T + low
        of.y_bound[mine] = h_bound @ sizes + (act.abs() + h_bound) @ sizes * ((width + 8) * EPS32 + rounding[1])
        of.y_bound[mine] += low.abs() * (width + 8) * EPS32
    return of


def run(layer: Layer, x: Tensor, routing: Routing, kind: int | None) -> ExpertSpace:
    """Run the launcher, or the kernels for few pairs (0), or those for blocks of `kind`; check that nothing before or
    after the pairs is written."""
    tokens, top_k = routing.at.ids.shape
    room = expert_space(tokens, top_k, layer.count, layer.shape, layer.device, capability=capability_of(layer.device))
    for tensor in (room.groups.counts, room.groups.blocks, room.groups.order):
        tensor.fill_(1 << 30)
    h, partial = (poisoned(len(t) + 2, t.shape[1], dtype=t.dtype).to(layer.device) for t in (room.h, room.partial))
    space = replace(room, h=h[1:-1], partial=partial[1:-1])
    launch(layer, x, routing, kind, space)
    assert all(t[[0, -1]].isnan().all() for t in (h, partial))
    return space


def launch(layer: Layer, x: Tensor, routing: Routing, kind: int | None, space: ExpertSpace) -> None:
    at = routing.at
    if kind is None:
        experts(x, routing.at, layer.shape, space, layer.biases)
        return
    up, down = layer.pair_biases(at.ids)
    if kind == 0:
        experts_few.multiply_pairs(x, at.up, layer.shape, space.h, up, up=True)
        experts_few.multiply_pairs(space.h, at.down, layer.shape, space.partial, down, up=False)
    else:
        experts_grouped.group(routing.at.ids, layer.count, kind, space.groups)
        by, of = space.groups, layer.shape
        up_tile, down_tile = (tile_of(packed, kind, capability_of(layer.device)) for packed in (of.up, of.down))
        experts_grouped.multiply_blocks(x, at.up, by, up_tile, of, space.h, up, up=True)
        experts_grouped.multiply_blocks(space.h, at.down, by, down_tile, of, space.partial, down, up=False)


def check(layer: Layer, x: Tensor, ids: Tensor, rng: torch.Generator, kind: int | None) -> None:
    """Check that readable pairs are right, other rows unchanged, and results reproducible."""
    routing = layer.routing(ids, rng)
    space, again = run(layer, x, routing, kind), run(layer, x, routing, kind)
    want, read = expected(layer, x, ids, kind != 0), routing.at.up.flatten() != 0
    h, partial = space.h[:, : layer.shape.width], space.partial
    assert_within(h[read], want.h[read], want.h_bound[read])
    assert_within(partial[read], want.y[read], want.y_bound[read])
    assert h[~read].isnan().all()
    assert partial[~read].isnan().all()
    assert torch.equal(partial[read], again.partial[read])


SHAPES = [(32, 16), (40, 24), (256, 128), (72, 150)]


@pytest.mark.one_table
@pytest.mark.parametrize("kind", [0, 16, 64])
@pytest.mark.parametrize(("hidden", "width"), SHAPES)
@pytest.mark.parametrize(("tokens", "count", "top_k"), [(1, 1, 1), (3, 5, 2)])
def test_shapes(
    kind: int, hidden: int, width: int, tokens: int, count: int, top_k: int, rng: torch.Generator, device: torch.device
) -> None:
    layer = Layer(count, ExpertShape(hidden, width), device)
    check(layer, rand(rng, tokens, hidden).to(device), choose(rng, tokens, count, top_k), rng, kind)


@pytest.mark.one_table
@pytest.mark.parametrize("kind", [0, 16, 32, 64, 128])
def test_absent_experts_and_padding_rows(kind: int, rng: torch.Generator, device: torch.device) -> None:
    """Neither is computed, and what padding rows hold does not matter."""
    layer = Layer(6, ExpertShape(40, 24), device, absent=(0, 3))
    ids, x = choose(rng, 9, 6, 3), rand(rng, 9, 40)
    ids[2], x[2], ids[8], x[8] = -1, torch.nan, -1, torch.inf
    ids[4] = torch.tensor([0, 3, 1])
    check(layer, x.to(device), ids, rng, kind)


@pytest.mark.one_table
@pytest.mark.parametrize("kind", [0, 16, 32])
def test_all_tokens_on_one_expert(kind: int, rng: torch.Generator, device: torch.device) -> None:
    layer = Layer(60, ExpertShape(32, 16), device)
    check(layer, rand(rng, 33, 32).to(device), torch.full((33, 1), 59), rng, kind)


CLAMPED = {"activation": Activation.CLAMPED_SWIGLU, "limit": 0.5}


@pytest.mark.one_table
@pytest.mark.parametrize("kind", [0, 16, 32, 64, 128])
@pytest.mark.parametrize(("hidden", "width"), [(40, 24), (72, 150)])
def test_biases(kind: int, hidden: int, width: int, rng: torch.Generator, device: torch.device) -> None:
    """Each expert has its own biases; those of absent experts and of padding are not read."""
    layer = Layer(6, ExpertShape(hidden, width, **CLAMPED), device, absent=(0, 3), biased=True)
    ids, x = choose(rng, 9, 6, 3), rand(rng, 9, hidden)
    ids[2], x[2] = -1, torch.nan
    check(layer, x.to(device), ids, rng, kind)


@pytest.mark.filterwarnings("ignore:overflow")  # numpy's, in the interpreter: exp of gates far below zero
@pytest.mark.parametrize("kind", [0, 16])
@pytest.mark.parametrize("form", [form for form in FORMS if form.format != Format.BF16], ids=str)
def test_biases_of_every_format(form: Form, kind: int, rng: torch.Generator, device: torch.device) -> None:
    layer = Layer(2, ExpertShape(64, 40, form, form, **CLAMPED), device, biased=True)
    check(layer, rand(rng, 1, 64).to(device), torch.tensor([[1, 0]]), rng, kind)


@pytest.mark.one_table
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", [0, 16, 64])
def test_clamped(kind: int, biased: bool, rng: torch.Generator, device: torch.device) -> None:
    layer = Layer(3, ExpertShape(40, 24, **CLAMPED), device, biased=biased)
    check(layer, rand(rng, 2, 40).to(device), choose(rng, 2, 3, 2), rng, kind)


@pytest.mark.one_table
@pytest.mark.parametrize("kind", [0, 16, 64])
def test_nan_propagates_through_the_clamp(kind: int, rng: torch.Generator, device: torch.device) -> None:
    layer = Layer(1, ExpertShape(40, 24, **CLAMPED), device)
    x = rand(rng, 2, 40)
    x[1, 3] = torch.nan
    space = run(layer, x.to(device), layer.routing(torch.zeros(2, 1, dtype=torch.int64), rng), kind)
    assert space.partial[0].isfinite().all()
    assert space.partial[1].isnan().all()


@pytest.mark.parametrize("tokens", [2, 40])
def test_the_launcher_takes_biases(tokens: int, rng: torch.Generator, device: torch.device) -> None:
    layer = Layer(7, ExpertShape(40, 24, **CLAMPED), device, absent=(2,), biased=True)
    check(layer, rand(rng, tokens, 40).to(device), choose(rng, tokens, 7, 4), rng, None)


@pytest.mark.parametrize("tokens", [1, 2, 16, 33])
def test_the_launcher_takes_any_batch(tokens: int, rng: torch.Generator, device: torch.device) -> None:
    layer = Layer(7, ExpertShape(40, 24), device, absent=(2,))
    check(layer, rand(rng, tokens, 48)[:, :40].to(device), choose(rng, tokens, 7, 4), rng, None)


@pytest.mark.parametrize("form", [BF16_FORM, Form(Format.Q4_K, 32)], ids=str)
@pytest.mark.parametrize("least", [6, 24])
def test_fewer_rows_have_the_bits_of_least_rows(
    form: Form, least: int, rng: torch.Generator, device: torch.device
) -> None:
    """24 pairs are computed singly, but with another tile than 4; 96 pairs are grouped."""
    layer, top_k = Layer(9, ExpertShape(256, 128, form, form), device), 4
    x, ids = rand(rng, least, 256).to(device), choose(rng, least, 9, top_k)
    found = []
    for tokens in (least, 1, 5):
        space = expert_space(tokens, top_k, layer.count, layer.shape, device, least_rows=least)
        experts(x[:tokens], layer.routing(ids[:tokens], rng).at, layer.shape, space)
        found.append(space.partial)
    for some in found[1:]:
        assert torch.equal(some, found[0][: len(some)])


@pytest.mark.parametrize("pairs", [(1, 1), (5, 3), (40, 8), (300, 2)])
@pytest.mark.parametrize("size", [16, 32])
def test_groups(pairs: tuple[int, int], size: int, rng: torch.Generator, device: torch.device) -> None:
    """Every pair once, by expert, ascending; no more blocks than needed."""
    experts_, (tokens, top_k) = 11, pairs
    ids = torch.randint(-1, experts_, (tokens, top_k), generator=rng)
    ids[ids == 4] = 5  # an expert without tokens
    to = experts_grouped.groups(tokens * top_k, experts_, device)
    experts_grouped.group(ids.int().to(device), experts_, size, to)
    want: list[list[int]] = []
    for expert in range(experts_):
        mine = torch.where(ids.flatten() == expert)[0].tolist()
        want += [mine[i : i + size] for i in range(0, len(mine), size)]
    blocks = int(to.blocks)
    assert blocks <= most_blocks(tokens * top_k, experts_, size)
    got = to.order.cpu()[: blocks * size].view(-1, size).tolist()
    assert got == [block + [-1] * (size - len(block)) for block in want]


@pytest.mark.parametrize("experts_", [1, 3, 128])
@pytest.mark.parametrize("size", BLOCK_TOKENS)
def test_the_bound_on_blocks_is_reached_and_never_passed(experts_: int, size: int) -> None:
    for pairs in (1, 2, 40, 300, 4096):
        one_each = [1] * (min(pairs, experts_) - 1)
        worst = [*one_each, pairs - len(one_each)]
        used = sum(-(-n // size) for n in worst)
        assert used <= most_blocks(pairs, experts_, size)
        even = [pairs // experts_ + (i < pairs % experts_) for i in range(experts_)]
        assert sum(-(-n // size) for n in even) <= most_blocks(pairs, experts_, size)


@pytest.mark.parametrize("capability", [0, 75, 80, 89, 90, 100, 120])
@pytest.mark.parametrize(("up", "down"), [(form, form) for form in FORMS] + [(FORMS[1], BF16_FORM)], ids=str)
def test_every_block_size_has_tiles(up: Form, down: Form, capability: int) -> None:
    """Blocks grow with the number of pairs, and both matrices have tiles of the same size."""
    shape, sizes = ExpertShape(256, 512, up, down), list[int]()
    for pairs in range(1, 40_000, 7):
        size = block_tokens(pairs, shape, 128, capability)
        tiles = [tile_of(packed, size, capability) for packed in (shape.up, shape.down)]
        assert {tile.tokens for tile in tiles} == {size}
        assert all(tile.least in (size, size // 2, size // 4) for tile in tiles)
        sizes.append(size)
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("form", [BF16_FORM, Form(Format.INT4_F16, 32)], ids=str)
@pytest.mark.parametrize("block", [64, 128])
def test_a_row_has_the_same_bits_in_a_full_block(
    form: Form, block: int, rng: torch.Generator, device: torch.device
) -> None:
    """Blocks with few pairs are multiplied by kernels of a half or a quarter of their size."""
    check_bits(Layer(1, ExpertShape(64, 32, form, form), device), block, rng)


def check_bits(layer: Layer, block: int, rng: torch.Generator) -> None:
    x = rand(rng, block, layer.shape.hidden).to(layer.device)
    ids = torch.zeros(block, 1, dtype=torch.int64)
    full = run(layer, x, layer.routing(ids, rng), block)
    for tokens in (1, block // 4, block // 4 + 1, block // 2, block // 2 + 1):
        part = run(layer, x[:tokens], layer.routing(ids[:tokens], rng), block)
        assert torch.equal(part.h[:, : layer.shape.width], full.h[:tokens, : layer.shape.width])
        assert torch.equal(part.partial, full.partial[:tokens])


@pytest.mark.parametrize("tokens", [2, 20])
def test_a_whole_layer(tokens: int, rng: torch.Generator, device: torch.device) -> None:
    """Router, experts of the GPU, a sum from the CPU for the others: together every expert once."""
    layer, top_k = Layer(9, ExpertShape(40, 24), device, absent=(1, 4, 8)), 4
    x, logits = rand(rng, tokens, 40).to(device), torch.randn(tokens, 9, generator=rng).to(device)
    ids, weights = (torch.empty(tokens, top_k, dtype=t, device=device) for t in (torch.int32, torch.float32))
    up, down = (torch.empty(tokens, top_k, dtype=torch.int64, device=device) for _ in range(2))
    at = Located(ids, up, down, torch.empty_like(ids))
    slots = torch.arange(tokens, device=device)
    slots[1] = -1
    route(logits, slots, RouterRule(top_k, Router("softmax", True)), ids, weights)
    numbers = torch.where(layer.up_table == 0, torch.arange(9, device=device), -1).int()
    locate(ids, Residency(layer.up_table, layer.down_table, numbers), at)
    assert torch.equal(at.cpu, torch.where(up == 0, ids, -1))
    routing = Routing(at, weights)
    space, out = run(layer, x, routing, None), poisoned(tokens, 40).to(device)
    want, share = expected(layer, x, ids.long()), weights.double()[..., None]
    y, bound = (t.view(tokens, top_k, 40) for t in (want.y, want.y_bound))
    elsewhere = (at.down == 0)[..., None]
    cpu = torch.where(elsewhere, y * share, 0).sum(1).float()
    combine(space.partial, weights, at.down, Added(cpu=cpu), Into(out))
    total, size = (y * share).sum(1), (y.abs() * share).sum(1)
    error = (bound * share).sum(1) + size * (top_k + 16) * EPS32
    assert_within(out, total, error + stored(total.abs() + error))
    assert not out[1].any()


def test_unsupported_arguments_are_refused(rng: torch.Generator, device: torch.device) -> None:
    with pytest.raises(ValueError, match="SILU"):
        ExpertShape(64, 32, activation=Activation.RELU2)
    layer = Layer(3, ExpertShape(32, 16), device)
    routing = layer.routing(choose(rng, 4, 3, 2), rng)
    with pytest.raises(ValueError, match="no room"):
        experts(rand(rng, 4, 32).to(device), routing.at, layer.shape, expert_space(3, 2, 3, layer.shape, device))
    with pytest.raises(ValueError, match="x must be"):
        experts(rand(rng, 4, 40).to(device), routing.at, layer.shape, expert_space(4, 2, 3, layer.shape, device))
    biases = Biases(torch.zeros(3, 32, device=device), torch.zeros(3, 16, device=device))  # of 16 rows of down, not 32
    with pytest.raises(ValueError, match="biases must be"):
        experts(
            rand(rng, 4, 32).to(device), routing.at, layer.shape, expert_space(4, 2, 3, layer.shape, device), biases
        )


def in_pieces(addresses: Tensor, packed: Tensor, of: Layout, count: int, kept: list[Tensor]) -> Tensor:
    """Addresses of the same matrices, where some pairs' lie in `count` separate pieces. kept: owns the memory of the
    pieces."""
    device = packed.device
    found = addresses.clone()
    for pair, address in enumerate(addresses.flatten().tolist()):
        if not address or pair % 3 == 2:
            continue
        units = -(-of.panels // UNIT_PANELS)
        firsts = sorted({units * i // count * UNIT_PANELS for i in range(count)})
        pieces = []
        for first, end in zip(firsts, [*firsts[1:], of.panels], strict=True):
            nbytes = (end - first) * of.panel_bytes
            memory = torch.empty(nbytes + 256, dtype=torch.uint8, device=device)
            begin = -memory.data_ptr() % 128
            at = address - packed.data_ptr() + first * of.panel_bytes
            memory[begin : begin + nbytes] = packed[at : at + nbytes]
            pieces.append(Piece(first, memory.data_ptr() + begin, nbytes, nbytes))
            kept.append(memory)
        kept.append(torch.tensor(row_of(pieces, of), device=device))
        found.view(-1)[pair] = kept[-1].data_ptr() + TAG
    return found


@pytest.mark.parametrize(
    ("form", "count"), [(BF16_FORM, 3), (Form(Format.INT4_F16, 32), 2), (Form(Format.Q6_K, 16), 8)]
)
def test_an_expert_may_lie_in_pieces(count: int, form: Form, rng: torch.Generator, device: torch.device) -> None:
    """On several memory nodes: the same bits."""
    layer = Layer(3, ExpertShape(64, 144, form, form), device, absent=(2,))
    x, routing = rand(rng, 2, 64).to(device), layer.routing(torch.tensor([[0, 1], [2, 1]]), rng)
    whole, cut = (expert_space(2, 2, 3, layer.shape, device) for _ in range(2))
    experts(x, routing.at, layer.shape, whole)
    kept: list[Tensor] = []
    up, down = (
        in_pieces(of, packed, shape, count, kept)
        for of, packed, shape in zip(
            (routing.at.up, routing.at.down), layer.packed, (layer.shape.up, layer.shape.down), strict=True
        )
    )
    experts(x, replace(routing.at, up=up, down=down), layer.shape, cut, in_pieces=True)
    mine = routing.at.up.flatten() != 0
    assert (up.flatten()[mine] & TAG).sum() >= 2
    assert torch.equal(cut.partial[mine], whole.partial[mine])
    assert whole.partial[mine].abs().max() > 0


@functools.cache
def model_layer(device: torch.device) -> Layer:
    return Layer(16, ExpertShape(2048, 768), device, absent=(3,))


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_bits_in_full_blocks_of_every_format(form: Form, rng: torch.Generator, device: torch.device) -> None:
    layer = Layer(1, ExpertShape(1024, 256, form, form), device)
    sizes = (64, 128, WIDE_BLOCK) if form == BF16_FORM and capability_of(device) in HOPPER else (64, 128)
    for block in sizes:
        check_bits(layer, block, rng)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [None, 0, *BLOCK_TOKENS])
@pytest.mark.parametrize("tokens", [1, 8, 32, 200, 1024, 4096])
def test_shapes_of_models(tokens: int, kind: int | None, rng: torch.Generator, device: torch.device) -> None:
    layer = model_layer(device)
    check(layer, rand(rng, tokens, 2048).to(device), choose(rng, tokens, 16, 8), rng, kind)


@functools.cache
def gpt_oss_layer(device: torch.device, form: Form) -> Layer:
    shape = ExpertShape(2880, 2880, form, form, Activation.CLAMPED_SWIGLU, 7.0)
    return Layer(3, shape, device, absent=(1,), biased=True)


@pytest.mark.gpu
@pytest.mark.parametrize("form", [BF16_FORM, Form(Format.MXFP4, 32)], ids=str)
@pytest.mark.parametrize("kind", [None, 0, *BLOCK_TOKENS])
@pytest.mark.parametrize("tokens", [1, 8, 200])
def test_shapes_of_gpt_oss(
    tokens: int, kind: int | None, form: Form, rng: torch.Generator, device: torch.device
) -> None:
    layer = gpt_oss_layer(device, form)
    check(layer, rand(rng, tokens, 2880).to(device), choose(rng, tokens, 3, 2), rng, kind)


@pytest.mark.gpu
def test_a_graph_holds_the_layer(rng: torch.Generator, device: torch.device) -> None:
    """Captured once, replayed with other experts in place of those at capture."""
    layer, tokens = model_layer(device), 4
    x, first, second = rand(rng, tokens, 2048).to(device), *(choose(rng, tokens, 16, 8) for _ in range(2))
    routing, other = layer.routing(first, rng), layer.routing(second, rng)
    eager = run(layer, x, other, None).partial
    space = run(layer, x, routing, None)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts(x, routing.at, layer.shape, space)
    for to, of in ((routing.at.ids, other.at.ids), (routing.at.up, other.at.up),
                   (routing.at.down, other.at.down)):  # fmt: skip
        to.copy_(of)
    graph.replay()
    read = other.at.up.flatten() != 0
    assert torch.equal(space.partial[read], eager[read])
