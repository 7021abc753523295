"""Experts over dequantised rows (ops/triton/experts_rows.py) against float64, as in test_triton_experts.py."""

from __future__ import annotations

import pytest
import torch

from ops.experts_bounds import expected
from ops.triton_bounds import assert_within, poisoned, rand
from ops.triton_layers import Layer, choose
from packing import CASES
from proa.native.formats import BF16_FORM, Form, Format
from proa.native.weights import Activation
from proa.ops.residency import ExpertShape
from proa.ops.triton.experts import expert_space, experts
from proa.ops.triton.experts_grouped import block_tokens, coded, group, groups
from proa.ops.triton.experts_rows import BLOCK, RowsSpace, Tile, down_rows, find, gate_up_rows, rows_space, tile_for

FORMS = [Form(*case) for case in CASES]
INT4 = Form(Format.INT4_F16, 32)
CLAMPED = {"activation": Activation.CLAMPED_SWIGLU, "limit": 0.5}
KIB = 1024


def room(layer: Layer, at_once: int, shared_kib: int = 64) -> RowsSpace:
    """Room for `at_once` experts, filled with NaN, which must not be read."""
    of = layer.shape
    nbytes = at_once * 2 * 16 * max(m.panels * m.columns for m in (of.up, of.down))
    space = rows_space(nbytes, layer.count, of, shared_kib * KIB, layer.device)
    assert space is not None
    space.rows.fill_(torch.nan)
    return space


def check(layer: Layer, x: torch.Tensor, ids: torch.Tensor, rng: torch.Generator, space: RowsSpace) -> None:
    """Check that the products of present experts are right, and that other rows are unchanged."""
    routing, of, pairs = layer.routing(ids, rng), layer.shape, ids.numel()
    by = groups(pairs, layer.count, layer.device)
    h, partial = poisoned(pairs + 2, of.down.padded_columns), poisoned(pairs + 2, of.hidden, dtype=torch.float32)
    h, partial = h.to(layer.device), partial.to(layer.device)
    up, down = layer.pair_biases(routing.at.ids)
    group(routing.at.ids, layer.count, BLOCK, by)
    find(routing.at, by, space)
    gate_up_rows(x, routing.at, by, of, space, h[1:-1], up)
    down_rows(h[1:-1], routing.at, by, of, space, partial[1:-1], down)
    assert all(t[[0, -1]].isnan().all() for t in (h, partial))
    want, read = expected(layer, x, ids, matrix_unit=True), routing.at.up.flatten() != 0
    assert_within(h[1:-1, : of.width][read], want.h[read], want.h_bound[read])
    assert_within(partial[1:-1][read], want.y[read], want.y_bound[read])
    assert h[1:-1][~read].isnan().all()
    assert partial[1:-1][~read].isnan().all()


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_format(form: Form, rng: torch.Generator, device: torch.device) -> None:
    layer = Layer(3, ExpertShape(64, 40, form, form), device, absent=(1,))
    check(layer, rand(rng, 3, 64).to(device), choose(rng, 3, 3, 2), rng, room(layer, 2))


@pytest.mark.parametrize("at_once", [1, 2, 6])
@pytest.mark.parametrize(("hidden", "width"), [(32, 16), (40, 24), (72, 150), (256, 128)])
def test_shapes(hidden: int, width: int, at_once: int, rng: torch.Generator, device: torch.device) -> None:
    """Experts without pairs, absent ones, padding rows; some or all at a time."""
    layer = Layer(6, ExpertShape(hidden, width, INT4, INT4), device, absent=(0, 3))
    ids, x = choose(rng, 9, 6, 3), rand(rng, 9, hidden)
    ids[ids == 4] = 5
    ids[2], x[2] = -1, torch.nan
    check(layer, x.to(device), ids, rng, room(layer, at_once))


def test_several_blocks_of_an_expert(rng: torch.Generator, device: torch.device) -> None:
    layer = Layer(3, ExpertShape(32, 16, INT4, INT4), device)
    ids = torch.randint(1, 3, (BLOCK + 70, 2), generator=rng)
    check(layer, rand(rng, len(ids), 32).to(device), ids, rng, room(layer, 1))


@pytest.mark.parametrize(("hidden", "width"), [(40, 24), (72, 150)])
def test_biases_and_clamps(hidden: int, width: int, rng: torch.Generator, device: torch.device) -> None:
    layer = Layer(4, ExpertShape(hidden, width, INT4, INT4, **CLAMPED), device, absent=(0,), biased=True)
    check(layer, rand(rng, 5, hidden).to(device), choose(rng, 5, 4, 3), rng, room(layer, 2))


def test_no_expert_fits(device: torch.device) -> None:
    of = ExpertShape(64, 40, INT4, INT4)
    assert rows_space(2 * 96 * 64 - 1, 3, of, 99 * KIB, device) is None
    assert rows_space(2 * 96 * 64, 3, of, 99 * KIB, device) is not None


@pytest.mark.parametrize(("shared_kib", "tile"), [(227, (256, 64)), (163, (128, 64)), (99, (128, 64)), (64, (128, 32))])
def test_tiles_fit_into_shared_memory(shared_kib: int, tile: tuple[int, int]) -> None:
    got: Tile = tile_for(shared_kib * KIB)
    assert (got.rows, got.columns) == tile
    assert got.shared_bytes <= shared_kib * KIB


@pytest.mark.parametrize("form", [INT4, BF16_FORM], ids=str)
def test_the_launcher_takes_rows_for_many_tokens_per_expert(
    form: Form, rng: torch.Generator, device: torch.device
) -> None:
    """Of quantised experts only, and with the same roundings of the weights as without rows."""
    layer = Layer(2, ExpertShape(32, 16, form, form), device)
    tokens = 2 * BLOCK + 3
    x, routing = rand(rng, tokens, 32).to(device), layer.routing(choose(rng, tokens, 2, 1), rng)
    with_rows = expert_space(tokens, 1, 2, layer.shape, device, rows_bytes=1 << 20, shared_bytes=64 * KIB)
    without = expert_space(tokens, 1, 2, layer.shape, device)
    assert (with_rows.rows is not None) == (form != BF16_FORM)
    assert block_tokens(tokens, 2, coded(layer.shape)) == BLOCK
    if with_rows.rows is not None:
        with_rows.rows.begins.fill_(-1)
    experts(x, routing.at, layer.shape, with_rows)
    experts(x, routing.at, layer.shape, without)
    if with_rows.rows is not None:
        assert with_rows.rows.begins[0] == 0
    torch.testing.assert_close(
        with_rows.partial, without.partial, rtol=0, atol=1e-2 * float(without.partial.abs().max())
    )


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize(("hidden", "width"), [(2048, 768), (2880, 2880)])
def test_shapes_of_models(hidden: int, width: int, form: Form, rng: torch.Generator, device: torch.device) -> None:
    layer = Layer(4, ExpertShape(hidden, width, form, form), device, absent=(1,))
    for shared_kib in (227, 99, 64):
        check(layer, rand(rng, 300, hidden).to(device), choose(rng, 300, 4, 2), rng, room(layer, 2, shared_kib))
