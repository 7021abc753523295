"""The device's residency tables for layers of any sizes, before and after changes."""

from __future__ import annotations

import torch

from hybrid.table_cases import CPU, layers
from proa.hybrid.tables import Tables
from proa.native.pool import Pool


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
