"""Arenas from Python: memory, views and their lifetime. csrc/tests/arena.cc tests the kinds of pages and the nodes."""

from __future__ import annotations

import gc
import mmap
import re
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from proa.errors import NativeError, ResourceError
from proa.machine.probe import probe
from proa.native import arena as arena_module
from proa.native.arena import Arena

MIB = 1 << 20
HEADER = (Path(__file__).parents[2] / "csrc" / "include" / "proa" / "native.h").read_text()


def mapped_bytes() -> int:
    """Bytes of addresses mapped for arenas; anonymous memory cannot be distinguished and is not counted."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    spans = (line.split()[0].split("-") for line in lines if "proa-arena" in line)
    return sum(int(last, 16) - int(first, 16) for first, last in spans)


def test_memory_is_there_aligned_and_zero() -> None:
    with Arena(3 * MIB + 5) as arena:
        assert arena.nbytes == 3 * MIB + 5
        assert arena.data % (2 * MIB) == 0
        values = np.frombuffer(arena.view(), dtype=np.uint8)
        assert values.shape == (3 * MIB + 5,)
        assert not values.any()
        values[:] = 7
        assert bytes(arena.view(3 * MIB, 5)) == b"\x07" * 5
        assert values.ctypes.data == arena.data


def test_views_are_parts() -> None:
    with Arena(4 * MIB) as arena:
        part = arena.view(2 * MIB - 8, 16)
        part[:] = bytes(range(16))
        assert np.frombuffer(arena.view(2 * MIB - 8, 8), dtype="<u2").tolist() == [256, 770, 1284, 1798]
        assert len(arena.view(4 * MIB)) == 0
        assert len(arena.view(nbytes=3)) == 3


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, None), (11, None), (0, 11), (5, 6), (5, -1), (1 << 64, 0)])
def test_parts_outside_are_refused(offset: int, nbytes: int | None) -> None:
    with Arena(10) as arena:
        for use in (arena.touch, arena.view):
            with pytest.raises(ValueError, match="10 bytes"):
                use(offset, nbytes)


@pytest.mark.parametrize(("nbytes", "node"), [(0, None), (-1, None), (1 << 64, None), (1, -1), (1, 1 << 32), (1, 5000)])
def test_impossible_arenas_are_refused(nbytes: int, node: int | None) -> None:
    with pytest.raises(ValueError, match=r"arena|node"):
        Arena(nbytes, node)


def test_more_than_there_is_is_refused_with_the_numbers() -> None:
    asked = 2 * probe().total_bytes
    with pytest.raises(ResourceError, match=re.escape(f"{asked / MIB:.1f} MiB")):
        Arena(asked)


def test_memory_comes_with_touching() -> None:
    with Arena(16 * MIB) as arena:
        assert arena.info.touched_bytes == 0
        arena.touch(4 * MIB, 2 * MIB)
        assert arena.info.touched_bytes == 2 * MIB
        arena.view(8 * MIB, 2 * MIB)[0] = 1
        assert arena.info.touched_bytes == 4 * MIB
        arena.touch()
        arena.touch()
        assert arena.info.touched_bytes == arena.info.mapped_bytes == 16 * MIB


def test_threads_touch_their_parts() -> None:
    with Arena(32 * MIB) as arena:
        threads = [threading.Thread(target=arena.touch, args=(8 * i * MIB, 8 * MIB)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert arena.info.touched_bytes == 32 * MIB


def test_info_describes_the_memory() -> None:
    with Arena(2 * MIB) as arena, Arena(2 * MIB, huge=False) as small:
        arena.touch()
        small.touch()
        assert arena.info.pages in ("hugetlb", "shmem-huge", "anon-huge", "small")
        assert (arena.info.pages == "hugetlb") == (arena.info.reason == "")
        assert (small.info.pages, small.huge_bytes) == ("small", 0)
        assert "requested" in small.info.reason
        assert small.info.node is None


def test_a_shared_arena_can_be_mapped_by_others() -> None:
    with Arena(2 * MIB, shared=True) as arena:
        assert arena.fd is not None
        arena.view(0, 4)[:] = b"proa"
        with mmap.mmap(arena.fd, 2 * MIB) as other:
            assert other[:4] == b"proa"


def test_binding_to_a_node() -> None:
    node = next((node.id for node in probe().numa if node.memory_bytes), None)
    if node is None:
        pytest.skip("no NUMA information here")
    with Arena(2 * MIB, node) as arena:
        arena.touch()
        assert arena.info.node == node or "not bound" in arena.info.reason


def test_an_unavailable_node() -> None:
    with Arena(2 * MIB, 1023) as arena:
        assert arena.info.node is None
        assert "not bound" in arena.info.reason
    with pytest.raises(NativeError, match="NUMA node 1023"):
        Arena(2 * MIB, 1023, strict=True)


def test_memory_outlives_the_arena_while_a_view_does() -> None:
    before = mapped_bytes()
    with Arena(2 * MIB, shared=True) as arena:
        numbers = np.frombuffer(arena.view(MIB, 8), dtype=np.int64)
        numbers[0] = 42
    del arena
    gc.collect()
    assert mapped_bytes() == before + 2 * MIB
    assert numbers[0] == 42
    del numbers
    assert mapped_bytes() == before


def test_closing_gives_the_memory_back_at_once() -> None:
    before = mapped_bytes()
    arena = Arena(2 * MIB, shared=True)
    arena.view()[0] = 1
    assert mapped_bytes() == before + 2 * MIB
    arena.close()
    arena.close()
    assert mapped_bytes() == before


def test_pages_are_interleaved() -> None:
    node = probe().numa[0].id if probe().numa else 0
    with Arena(3 * MIB, interleave=[node]) as arena:
        arena.view()[:3] = b"abc"
        assert arena.info.node is None


@pytest.mark.parametrize(
    ("nodes", "error", "text"),
    [([-1], ValueError, "0 to 1023"), ([0, 1024], ValueError, "0 to 1023"), ([1022, 1023], NativeError, "cpuset")],
)
def test_missing_nodes_are_refused(nodes: list[int], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        Arena(1, interleave=nodes)


@pytest.mark.parametrize(
    "use",
    [lambda a: a.view(), lambda a: a.touch(), lambda a: a.data, lambda a: a.info, lambda a: a.fd],
    ids=["view", "touch", "data", "info", "fd"],
)
def test_a_closed_arena_says_so(use: Callable[[Arena], object]) -> None:
    arena = Arena(1)
    arena.close()
    with pytest.raises(NativeError, match="closed"):
        use(arena)


def test_the_header_says_the_same() -> None:
    flags = {name: int(value) for name, value in re.findall(r"#define PROA_ARENA_(\w+) (\d+)u", HEADER)}
    assert flags == {name: vars(arena_module)[f"_{name}"] for name in ("SHARED", "STRICT_NODE", "SMALL_PAGES")}
    pages = sorted((int(value), name) for name, value in re.findall(r"#define PROA_PAGES_(\w+) (\d+)", HEADER))
    assert [name.lower().replace("_", "-") for _, name in pages] == list(arena_module._PAGES)
    struct = re.search(r"typedef struct proa_arena_info {(.*?)}", HEADER, re.DOTALL)
    assert struct is not None
    fields = re.findall(r"^\s*(\w+) (\w+)(?:\[\d+\])?;", struct[1], re.MULTILINE)
    kinds = {"uint64_t": "c_ulong", "int32_t": "c_int", "char": "c_char_Array_1000"}
    assert [(name, kinds[kind]) for kind, name in fields] == [
        (name, kind.__name__) for name, kind in arena_module._Info._fields_
    ]
