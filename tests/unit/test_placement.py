"""Placement of experts in VRAM: goldens, and invariants for any sizes and budget."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.models.ranks import CPU
from proa.models.spec import Moe, Router
from proa.native.formats import Form, Format
from proa.plan.placement import (
    MoeLayer,
    bias_bytes,
    expert_bytes,
    place,
    resident_bytes,
    spare_bytes,
    spare_slots,
)
from proa.plan.plan import held_by

# Four layers of eight experts of 10 bytes, as blocks 1 to 4 of a model.
LAYERS = tuple(MoeLayer(block, 8, 2, 10) for block in range(1, 5))
ALL = (8, 8, 8, 8)


def resident(layers: Sequence[MoeLayer], budget: int, *more: Any) -> tuple[tuple[int, ...], ...]:
    """The experts of a single rank, by layer."""
    return held_by(place(layers, [budget], *more), 0)


def counts(
    budget: int, strategy: str = "uniform", wanted: tuple[int, ...] = ALL, whole: tuple[int, ...] = ()
) -> list[int]:
    placed = resident(LAYERS, budget, strategy, wanted, frozenset(whole))
    assert all(ids == tuple(range(len(ids))) for ids in placed)
    return [len(ids) for ids in placed]


@pytest.mark.parametrize(
    ("budget", "uniform", "front_loading"),
    [
        (320, [8, 8, 8, 8], [8, 8, 8, 8]),
        (1000, [8, 8, 8, 8], [8, 8, 8, 8]),
        (319, [8, 8, 8, 7], [8, 8, 8, 7]),
        (160, [4, 4, 4, 4], [8, 8, 0, 0]),
        (180, [5, 5, 4, 4], [8, 8, 2, 0]),
        (29, [1, 1, 0, 0], [2, 0, 0, 0]),
        (9, [0, 0, 0, 0], [0, 0, 0, 0]),
        (0, [0, 0, 0, 0], [0, 0, 0, 0]),
        (-50, [0, 0, 0, 0], [0, 0, 0, 0]),
    ],
)
def test_strategies(budget: int, uniform: list[int], front_loading: list[int]) -> None:
    assert counts(budget) == uniform
    assert counts(budget, "front-loading") == front_loading


def test_wanted_numbers_are_limits() -> None:
    assert counts(1000, wanted=(3, 3, 3, 3)) == [3, 3, 3, 3]
    assert counts(50, wanted=(3, 3, 3, 3)) == [2, 1, 1, 1]


def test_whole_layers_come_first() -> None:
    assert counts(200, whole=(3,)) == [4, 4, 8, 4]
    assert counts(1000, wanted=(0, 0, 0, 0), whole=(2, 4)) == [0, 8, 0, 8]
    assert counts(120, wanted=(0, 0, 0, 0), whole=(2, 4)) == [0, 8, 0, 4]  # the caller raises: layer 4 does not fit
    assert counts(1000, wanted=(0, 0, 0, 0), whole=(0, 1)) == [8, 0, 0, 0]  # block 0 is dense


@pytest.mark.parametrize(
    ("expert_bytes", "resident", "spare"),
    [(9 << 20, 3000, 16), (9 << 20, 768, 12), (9 << 20, 500, 8), (9 << 20, 64, 4), (9 << 20, 15, 1),
     (20 << 20, 3000, 8), (88 << 20, 3000, 1), (200 << 20, 3000, 1), (1000, 3000, 16)],
)  # fmt: skip
def test_spare_slots(expert_bytes: int, resident: int, spare: int) -> None:
    """Bounds: 160 MiB, 16 slots, 1/64 of the residents, or 1/16 up to 8; at least one. Each size has its own slots."""
    assert spare_slots(expert_bytes, resident) == spare
    assert spare_bytes(LAYERS, spare) == 10 * spare
    assert spare_bytes([*LAYERS, MoeLayer(5, 8, 2, 30), MoeLayer(6, 8, 2, 30)], 3) == 120


def test_each_format_has_its_own_spare_slots() -> None:
    """Experts of equal size may differ in the sizes of gate and up, and of down."""
    forms = (Form(Format.INT4_F16, 32), Form(Format.INT8_F16, 32))
    mixed = [*LAYERS, MoeLayer(5, 8, 2, 10, forms), MoeLayer(6, 8, 2, 10, forms)]
    assert spare_bytes(mixed, 3) == 60


USED = ((0, 9, 1, 8, 2, 7, 3, 6), (50, 50, 0, 0, 0, 0, 0, 0), (0,) * 8, (5,) * 8)


@pytest.mark.parametrize(
    ("strategy", "budget", "wanted", "expected"),
    [
        ("uniform", 80, ALL, [(1, 3), (0, 1), (0, 1), (0, 1)]),
        ("dynamic", 80, ALL, [(1, 3), (0, 1), (0, 1), (0, 1)]),
        ("front-loading", 30, ALL, [(1, 3, 5), (), (), ()]),
        ("frequency", 60, ALL, [(1, 3, 5, 7), (0, 1), (), ()]),
        ("frequency", 80, ALL, [(1, 3, 5, 7), (0, 1), (), (0, 1)]),
        ("frequency", 80, (2, 2, 2, 2), [(1, 3), (0, 1), (0, 1), (0, 1)]),
    ],
)
def test_most_used_experts_first(
    strategy: str, budget: int, wanted: tuple[int, ...], expected: list[tuple[int, ...]]
) -> None:
    assert list(resident(LAYERS, budget, strategy, wanted, frozenset(), USED)) == expected


def test_frequency_counts_choices_per_byte() -> None:
    layers = (MoeLayer(0, 2, 1, 10), MoeLayer(1, 2, 1, 30))
    assert resident(layers, 30, "frequency", (2, 2), frozenset(), ((4, 3), (11, 0))) == ((0, 1), ())
    assert resident(layers, 30, "frequency", (2, 2), frozenset(), ((4, 3), (13, 0))) == ((), (0,))


@given(
    budget=st.integers(0, 320),
    used=st.lists(st.lists(st.integers(0, 20), min_size=8, max_size=8), min_size=4, max_size=4),
)
def test_frequency_takes_the_most_used(budget: int, used: list[list[int]]) -> None:
    """With experts of one size, no expert outside is used more often than a resident one."""
    placed = resident(LAYERS, budget, "frequency", ALL, frozenset(), tuple(map(tuple, used)))
    found = sum(used[i][e] for i, ids in enumerate(placed) for e in ids)
    assert found == sum(sorted((count for of in used for count in of), reverse=True)[: budget // 10])
    assert all(list(ids) == sorted(set(ids)) for ids in placed)


def test_frequency_needs_counts() -> None:
    with pytest.raises(ValueError, match="needs expert counts"):
        resident(LAYERS, 80, "frequency", ALL, frozenset())


@given(
    layers=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 50)), max_size=6),
    budget=st.integers(-10, 4000),
    strategy=st.sampled_from(["uniform", "front-loading"]),
    data=st.data(),
)
def test_any_budget(layers: list[tuple[int, int]], budget: int, strategy: str, data: st.DataObject) -> None:
    made = [MoeLayer(i, experts, 1, nbytes) for i, (experts, nbytes) in enumerate(layers)]
    wanted = [data.draw(st.integers(0, layer.experts)) for layer in made]
    whole = data.draw(st.frozensets(st.integers(0, 6), max_size=2))
    placed = resident(made, budget, strategy, wanted, whole)
    most = [layer.experts if layer.block in whole else n for layer, n in zip(made, wanted, strict=True)]
    assert resident(made, budget, strategy, wanted, whole) == placed
    assert all(ids == tuple(range(len(ids))) for ids in placed)
    assert all(len(ids) <= limit for ids, limit in zip(placed, most, strict=True))
    used = resident_bytes(made, placed)
    assert used <= max(0, budget)
    missing = [layer.expert_bytes for layer, ids, n in zip(made, placed, most, strict=True) if len(ids) < n]
    assert all(used + nbytes > budget for nbytes in missing)  # no further wanted expert would fit
    if sum(n * layer.expert_bytes for layer, n in zip(made, most, strict=True)) <= budget:
        assert not missing


def test_expert_bytes() -> None:
    ffn = Moe(hidden=100, experts=4, top_k=2, width=40, router=Router("softmax", True))
    assert expert_bytes(ffn) == 2 * (48 * 128 * 2) + 112 * 64 * 2
    assert bias_bytes(ffn) == 0
    assert bias_bytes(replace(ffn, bias=True)) == 4 * (2 * 48 + 112)


@given(
    budgets=st.lists(st.integers(-10, 200), min_size=1, max_size=4),
    strategy=st.sampled_from(["uniform", "front-loading"]),
    wanted=st.tuples(*[st.integers(0, 8)] * 4),
)
def test_any_number_of_ranks(budgets: list[int], strategy: str, wanted: tuple[int, ...]) -> None:
    """Each expert has one owner, no rank is over its budget, and none has room for an expert that is left out."""
    owners = place(LAYERS, budgets, strategy, wanted, frozenset())
    assert {owner for layer in owners for owner in layer} <= {CPU, *range(len(budgets))}
    used = [resident_bytes(LAYERS, held_by(owners, rank)) for rank in range(len(budgets))]
    assert all(nbytes <= max(0, budget) for nbytes, budget in zip(used, budgets, strict=True))
    held = [sum(owner != CPU for owner in layer) for layer in owners]
    assert all(n <= most for n, most in zip(held, wanted, strict=True))
    if held != list(wanted):
        assert all(nbytes + 10 > budget for nbytes, budget in zip(used, budgets, strict=True))


def test_owners_by_room() -> None:
    """The rank with most room takes the next expert: here two ranks of 3 and 1 experts."""
    owners = place(LAYERS[:1], [30, 10], "uniform", (4,), frozenset())
    assert owners == ((0, 0, 0, 1, CPU, CPU, CPU, CPU),)
