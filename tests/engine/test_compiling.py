"""Kernels compiled ahead: by several processes, some of which die; and the start-up table's row."""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from proa.engine.ipc import Loading

pytest.importorskip("triton")

from proa.engine.building.compile_ahead import (
    Done,
    Event,
    Listed,
    Rehearsing,
    Waiting,
    begin_forked,
    compile_all,
    start_forked,
)
from proa.engine.building.compiling import Compiling
from proa.ops.ahead import Compiled, Variant


def variant(name: str) -> Variant:
    return Variant(f"proa.ops.triton.{name}", name, {}, {}, {}, {})


class FakeCompiler:
    """Acts as the variant's name says: compiles, fails or dies."""

    def compile(self, variant: Variant) -> Compiled:
        if "dies" in variant.name:
            os.kill(os.getpid(), signal.SIGKILL)
        if "fails" in variant.name:
            return Compiled(False, 0.1, "CompilationError: at 3:1\nmore")
        if "slow" in variant.name:
            time.sleep(30)
        return Compiled("kept" in variant.name, 0.1)


def compiled(names: list[str], processes: int) -> dict[str, str]:
    found = compile_all(Waiting([variant(name) for name in names]), FakeCompiler(), processes)  # type: ignore[arg-type]
    return {event.variant.name: event.compiled.error for event in found if isinstance(event, Done)}


@pytest.mark.parametrize("processes", [1, 3, 8])
def test_every_variant_is_reported_once(processes: int) -> None:
    names = [f"m.k{i}" for i in range(7)]
    assert compiled(names, min(processes, len(names))) == dict.fromkeys(names, "")


@pytest.mark.parametrize("processes", [1, 2])
def test_a_dying_process_fails_only_its_kernel(processes: int) -> None:
    found = compiled(["m.a", "m.dies", "m.b", "m.dies_too", "m.c"], processes)
    assert found.keys() == {"m.a", "m.dies", "m.b", "m.dies_too", "m.c"}
    assert {name for name, error in found.items() if error} == {"m.dies", "m.dies_too"}
    assert found["m.dies"] == f"the process that compiled it ended with exit code {-signal.SIGKILL}"


def test_closing_the_iterator_ends_all_processes() -> None:
    waiting = Waiting([variant(f"m.{n}") for n in ("k", "slow1", "slow2")])
    found = compile_all(waiting, FakeCompiler(), 3)  # type: ignore[arg-type]
    assert next(found) == Listed(waiting.known, 3, "")
    assert next(found) == Done(variant("m.k"), Compiled(False, 0.1))
    mine = children(os.getpid())
    begin = time.monotonic()
    found.close()
    assert time.monotonic() - begin < 10
    assert len(mine) > len(children(os.getpid()))


def rehearsal(*found: str | float, error: str = "") -> Rehearsing:
    """Finds variants of these names, one by one, with breaks of so many seconds; then raises an error or dies."""

    def find() -> Iterator[list[Variant]]:
        for each in found:
            if isinstance(each, str):
                yield [variant(each)]
            else:
                time.sleep(each)
        if error == "dies":
            os._exit(3)
        if error:
            raise ValueError(error)

    return Rehearsing(find)


def test_kernels_are_compiled_while_others_are_found() -> None:
    waiting = Waiting([], rehearsal("m.a", "m.b", 2.0, "m.c"))
    events = list(compile_all(waiting, FakeCompiler(), 2))  # type: ignore[arg-type]
    names = ["listed" if isinstance(event, Listed) else event.variant.name for event in events]
    assert sorted(names[:2]) == ["m.a", "m.b"]
    assert sorted(names[2:]) == ["listed", "m.c"]
    assert [each.name for each in waiting.known] == ["m.a", "m.b", "m.c"]


@pytest.mark.parametrize(
    ("error", "words"), [("no such layer", "ValueError: no such layer"), ("dies", "ended with exit code 3")]
)
def test_a_rehearsal_that_fails(error: str, words: str) -> None:
    waiting, before = Waiting([], rehearsal("m.a", error=error)), children(os.getpid())
    with pytest.raises(RuntimeError, match=words):
        list(compile_all(waiting, FakeCompiler(), 2))  # type: ignore[arg-type]
    waiting.end()
    assert len(children(os.getpid())) < len(before)


@pytest.mark.parametrize(("slowest_first", "order"), [(True, "dbac"), (False, "abcd")])
def test_the_slowest_kernels_may_come_first(slowest_first: bool, order: str) -> None:
    names = {"a": "m.a", "b": "experts_grouped._block", "c": "m.c", "d": "attention._prefill"}
    waiting = Waiting([variant(name) for name in names.values()])
    taken = [waiting.next(slowest_first=slowest_first) for _ in names]
    assert [each and each.name for each in taken] == [names[letter] for letter in order]
    assert waiting.next(slowest_first=slowest_first) is None


def children(pid: int) -> set[int]:
    return {int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()}


def compiling(events: list[Event], end: Callable[[], None] = lambda: None) -> tuple[Compiling, list[str]]:
    loaded: list[str] = []

    def all_events() -> Iterator[Event]:
        yield from events
        end()

    def load(variant: Variant) -> None:
        if "unloadable" in variant.name:
            raise RuntimeError("out of resource")
        loaded.append(variant.name)

    return Compiling(all_events, load), loaded


def listed(*names: str, errors: bool = True) -> list[Event]:
    variants = [variant(name) for name in names]
    return [Listed(variants, 15, ""), *(Done(v, FakeCompiler().compile(v)) for v in variants)]


ROWS = {
    "compiled": (listed("m.a", "m.b"), ["m.a", "m.b"], ("compiled", ["2 compiled in", "by 15 processes"])),
    "kept": (listed("m.kept1", "m.kept2"), ["m.kept1", "m.kept2"], ("kept", ["2 of 2 kept from earlier starts"])),
    "both": (listed("m.kept", "m.b"), ["m.kept", "m.b"], ("compiled", ["1 compiled in", "1 of 2 kept"])),
    "failed": (
        listed("m.a", "m.fails"), ["m.a"], ("in part", ["1 failed (m.fails: CompilationError: at 3:1)"])
    ),
    "not loaded": (
        listed("m.a", "m.unloadable"), ["m.a"], ("in part", ["1 failed (m.unloadable: out of resource)"])
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_the_row_counts_kernels(name: str) -> None:
    events, loads, (got, words) = ROWS[name]
    entered = threading.Event()
    ahead, loaded = compiling(events)
    assert ahead.wait(lambda loading: None, 0.0).got in ("compiled late", got)
    ahead.load_after(entered.set)
    reports: list[Loading] = []
    row = ahead.wait(reports.append, 30.0)
    assert loaded == loads
    assert entered.is_set()
    assert row.got == got
    for word in words:
        assert word in row.why
    assert ahead.progress.complete == (len(loads) == len(events) - 1)


@pytest.mark.parametrize(
    ("end", "words"),
    [
        (lambda: os._exit(3), "the compiling process ended with exit code 3"),
        (lambda: (_ for _ in ()).throw(ValueError("no such layer")), "ValueError: no such layer"),
    ],
    ids=["dies", "raises"],
)
@pytest.mark.parametrize("before", [[], listed("m.a", "m.b", "m.c")[:3]], ids=["at once", "on its way"])
def test_an_early_end_is_reported(end: Callable[[], None], words: str, before: list[Event]) -> None:
    ahead, loaded = compiling(before, end)
    ahead.load_after(lambda: None)
    row = ahead.wait(lambda loading: None, 30.0)
    assert row.got == ("in part" if before else "compiled late")
    assert words in row.why
    assert loaded == (["m.a", "m.b"] if before else [])
    assert not ahead.progress.complete


def test_wait_returns_after_its_limit() -> None:
    ahead, loaded = compiling(listed("m.a", "m.b")[:2], lambda: time.sleep(60))
    ahead.load_after(lambda: None)
    begin = time.monotonic()
    row = ahead.wait(lambda loading: None, 2.0)
    assert time.monotonic() - begin < 20
    assert (row.got, loaded) == ("in part", ["m.a"])
    assert "1 are compiled beside the first requests" in row.why


def test_processes_end_with_the_engine() -> None:
    program = """
import time
from proa.engine.building.compile_ahead import Waiting, compile_all
from proa.engine.building.compiling import Compiling

class Slow:
    def compile(self, variant):
        time.sleep(120)

ahead = Compiling(lambda: compile_all(Waiting([1, 2]), Slow(), 2), print)
print(ahead._process.pid, flush=True)
time.sleep(120)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        forked = int(engine.stdout.readline())
        end = time.monotonic() + 30
        while len(workers := children(forked)) < 2:
            assert time.monotonic() < end
            time.sleep(0.05)
        engine.kill()
        engine.wait()
        while any(Path(f"/proc/{pid}/stat").exists() for pid in {forked, *workers}):
            assert time.monotonic() < end
            time.sleep(0.05)


def _collect(parent: int, to: Connection) -> None:
    begin_forked(parent)
    gc.collect()
    to.send("collected")


def test_a_forked_process_collects_no_garbage_of_its_parent() -> None:
    """On a GPU its destructors reach for pinned memory and threads that only the parent has: a segmentation fault."""

    class Cycle:
        def __init__(self) -> None:
            self.itself = self

    garbage, (mine, its) = Cycle(), multiprocessing.Pipe()
    weakref.finalize(garbage, its.send, "destroyed")
    gc.disable()
    try:
        del garbage
        process = multiprocessing.get_context("fork").Process(target=_collect, args=(os.getpid(), its))
        start_forked(process)
        assert mine.recv() == "collected"
        process.join()
    finally:
        gc.enable()
    gc.collect()
    assert mine.recv() == "destroyed"
