"""The device's residency tables for layers of any sizes, before and after changes."""

from __future__ import annotations

import pytest
import torch

from hybrid.table_cases import CPU, layers, owners
from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.model import HybridModel, Placement
from proa.hybrid.tables import Tables
from proa.models import ranks
from proa.models.spec import Mlp
from proa.native.pool import Pool
from proa.ops.packed import Memory
from proa.ops.staging import Staging


def test_tables_of_a_model_without_routed_experts() -> None:
    tables = Tables([], CPU, counted=False, in_place=False)
    tables.publish()
    assert tables.residency == []


def test_rows_locate_experts() -> None:
    with Pool([[]], pin=False) as pool:
        memory = layers(pool)
        tables = Tables(memory, CPU, counted=True, in_place=True)
        first, second, third = tables.residency
        assert first.cpu.tolist() == [0, -1, 2, 3, -1, 5, 6]
        assert second.cpu.tolist() == [0, 1, -1]
        assert third.cpu.tolist() == [0, 1, 2, 3, 4]
        slots = [memory[0].slots.slot(i) for i in range(2)]
        assert first.up.tolist() == [0, slots[0].up.data_ptr(), 0, 0, slots[1].up.data_ptr(), 0, 0]
        assert first.down.tolist() == [0, slots[0].down.data_ptr(), 0, 0, slots[1].down.data_ptr(), 0, 0]
        for layer, of in zip(memory, tables.residency, strict=True):
            assert of.in_place is not None
            there = list(zip(of.in_place.up.tolist(), of.in_place.down.tolist(), strict=True))
            assert there == [layer.addresses(n) if n >= 0 else (0, 0) for n in of.cpu.tolist()]
            assert of.counts is not None
            assert of.counts.tolist() == [0] * layer.experts


def test_changes_are_seen_once_published() -> None:
    with Pool([[]], pin=False) as pool:
        memory = layers(pool)
        tables = Tables(memory, CPU, counted=False, in_place=False)
        first, _, third = tables.residency
        assert first.counts is first.in_place is None
        before = [t.clone() for of in tables.residency for t in (of.up, of.down, of.cpu)]
        slot = memory[0].slots.slot(0)
        tables.to_gpu(0, 6, slot)
        tables.to_cpu(0, 1, 1)
        assert all(torch.equal(a, b) for a, b in zip(before, [t for of in tables.residency for t in
                                                              (of.up, of.down, of.cpu)], strict=True))  # fmt: skip
        tables.publish()
        assert first.cpu.tolist() == [0, 1, 2, 3, -1, 5, -1]
        assert first.up[[1, 6]].tolist() == [0, slot.up.data_ptr()]
        assert torch.equal(third.cpu, before[8])


@pytest.mark.parametrize("inclusive", [False, True])
def test_experts_of_other_ranks_are_computed_neither_here_nor_by_the_cpu(inclusive: bool) -> None:
    placed = (1, ranks.CPU, 0, 1, ranks.CPU, 2)
    with Pool([[]], pin=False) as pool:
        ram, staging = Memory(pool, [None]), Staging(pool, 1 << 20, pinned=False)
        memory = LayerMemory(Mlp(32, 16), placed, inclusive, CPU, ram, staging, rank=1)
        assert list(memory.slots.slot_of) == [0, 3]
        assert memory.in_ram == (list(range(6)) if inclusive else [1, 4])
        names = {name.split(".")[0] for name, _ in memory.parameters()}
        assert names == ({*"012345"} if inclusive else {*"0134"})
        tables = Tables([memory], CPU, counted=False, in_place=True)
        (of,) = tables.residency
        assert tables.owners.tolist() == [list(placed)]
        assert of.cpu.tolist() == [-1, memory.number_of[1], -1, -1, memory.number_of[4], -1]
        assert [bool(up) for up in of.up.tolist()] == [True, False, False, True, False, False]
        assert of.in_place is not None
        assert [bool(up) for up in of.in_place.up.tolist()] == [False, True, False, False, True, False]


def test_experts_are_made_for_a_block() -> None:
    """In any order; each block once, with the number of experts that is placed there."""
    placed = {3: owners(5, 0), 1: owners(4), 7: owners(2, 0, 1)}
    with Pool([[]], pin=False) as pool:
        hybrid = HybridModel(Placement(placed, True), CPU, Memory(pool, [None]), Staging(pool, 1 << 20, pinned=False))
        made = {block: hybrid.new_experts(len(placed[block]), 32, 16, block=block) for block in (7, 1, 3)}
        assert hybrid.layers == [made[1], made[3], made[7]]
        assert [layer.memory.cpu_computes for layer in hybrid.layers] == [True, True, False]
        with pytest.raises(ValueError, match="block 2 has 4 experts, but the placement has 0 there"):
            hybrid.new_experts(4, 32, 16, block=2)
        with pytest.raises(ValueError, match="of block 3 were made before"):
            hybrid.new_experts(5, 32, 16, block=3)
