"""Where packed weights lie, and what is said if they cannot lie there."""

from __future__ import annotations

import ctypes

import pytest

from proa.errors import NativeError
from proa.machine.probe import probe
from proa.ops.packed import Memory

NOWHERE = 1022  # no machine has that many nodes


def test_memory_without_a_node() -> None:
    memory = Memory([None, None])
    addresses = [memory.take(piece, 100) for piece in (0, 1, 0)]
    assert len(set(addresses)) == 3
    assert ctypes.string_at(addresses[2], 100) == bytes(100)
    assert memory.unbound() == ""


def test_memory_that_cannot_be_bound_says_why() -> None:
    memory = Memory([None, NOWHERE])
    memory.take(0, 100)
    assert memory.unbound() == ""
    memory.take(1, 100)
    assert "not bound" in memory.unbound()


def test_interleaved_memory() -> None:
    nodes = [node.id for node in probe().numa if node.memory_bytes] or [0]
    memory = Memory([NOWHERE], nodes)  # the team's own node does not matter
    assert ctypes.string_at(memory.take(0, 100), 100) == bytes(100)
    assert memory.unbound() == ""


def test_memory_that_cannot_be_interleaved_is_an_error_with_a_remedy() -> None:
    with pytest.raises(NativeError, match="cannot be dealt out") as refused:
        Memory([None], [NOWHERE, NOWHERE + 1]).take(0, 100)
    assert refused.value.remedy == "Use --numa-memory bind."
