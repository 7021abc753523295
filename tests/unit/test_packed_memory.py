"""The NUMA placement of packed weights, and the messages if it fails."""

from __future__ import annotations

import ctypes

import pytest

from proa.errors import NativeError
from proa.machine.probe import probe
from proa.native.pool import Pool
from proa.ops.packed import Memory

NOWHERE = 1022  # no machine has that many nodes


def test_memory_without_a_node() -> None:
    with Pool([[], []], pin=False) as pool:
        memory = Memory(pool, [None, None])
        addresses = [*memory.take([100, 100]), *memory.take([100, 0])]
        assert len(set(addresses)) == 4
        assert addresses[3] == 0
        assert ctypes.string_at(addresses[2], 100) == bytes(100)
        assert memory.unbound() == ""


def test_memory_that_cannot_be_bound_says_why() -> None:
    with Pool([[], []], pin=False) as pool:
        memory = Memory(pool, [None, NOWHERE])
        memory.take([100, 0])
        assert memory.unbound() == ""
        memory.take([0, 100])
        assert "not bound" in memory.unbound()


def test_interleaved_memory() -> None:
    nodes = [node.id for node in probe().numa if node.memory_bytes] or [0]
    with Pool([[]], pin=False) as pool:
        memory = Memory(pool, [NOWHERE], nodes)  # the team's own node does not matter
        assert ctypes.string_at(memory.take([100])[0], 100) == bytes(100)
        assert memory.unbound() == ""


def test_memory_that_cannot_be_interleaved_is_an_error_with_a_remedy() -> None:
    with Pool([[]], pin=False) as pool, pytest.raises(NativeError, match="cannot be interleaved") as refused:
        Memory(pool, [None], [NOWHERE, NOWHERE + 1]).take([100])
    assert refused.value.remedy == "Use --numa-memory bind."
