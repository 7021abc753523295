"""The doorbell from Python: refusals, errors, counters, and sleeping threads while no step is armed."""

from __future__ import annotations

import ctypes
import functools
import gc
import os
import threading
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bell_cases import EXPERTS, WIDTH, Layer
from native_hooks import kill_worker
from proa.errors import NativeError, NumericsError
from proa.native.doorbell import FORESEEN_ROWS, PROBE_LAYER, Doorbell, JobSize, Memory, Service, Way, block_layout
from proa.native.pool import Pool

SIZE = JobSize(most_tokens=5, top_k=2, hidden=64)


@functools.cache
def layers_of(poisoned: tuple[int, ...]) -> list[Layer]:
    return [Layer(SIZE.hidden, seed, poisoned) for seed in range(2)]


class Rig:
    """A doorbell over two layers, and a GPU's writes to its block."""

    def __init__(self, pool: Pool, poisoned: tuple[int, ...] = (), service: Service | None = None,
                 way: Way = Way.NUMBER) -> None:  # fmt: skip
        self.layout = block_layout(SIZE)
        self.block = torch.zeros(self.layout.bytes, dtype=torch.uint8)
        memory = Memory(self.block.data_ptr(), self.layout.bytes, self.block)
        experts = [layer.experts for layer in layers_of(poisoned)]
        self.bell = Doorbell(pool, experts, SIZE, memory, service or Service(spin_us=100), way)
        self.number = 0

    def words(self, at: int) -> torch.Tensor:
        return self.block[at : at + 64].view(torch.int32)

    def ring(self, layer: int = 0, tokens: int = 1, ids: tuple[int, ...] = (0, 1)) -> bool:
        """Ring and wait; True if the job was answered."""
        self.words(self.layout.header)[:2] = torch.tensor([layer, tokens])
        self.words(self.layout.ids)[: len(ids)] = torch.tensor(ids)
        self.block[self.layout.weights :][: 4 * len(ids)].view(torch.float32)[:] = 1.0
        self.number += 1
        self.bell.ring(self.number)
        return self.bell.wait(self.number, 60)


def test_parts_of_the_block_do_not_overlap() -> None:
    layout = block_layout(SIZE)
    assert (layout.rung, layout.answered, layout.dead, layout.foreseen) == (0, 64, 68, 128)
    assert (layout.done, layout.ready) == (72, 76), "in the line of the CPU's other words"
    assert (layout.foreseen_layer, layout.foreseen_rows) == (132, 136), "directly after `foreseen`"
    parts = [(layout.foreseen_ids, FORESEEN_ROWS * 2 * 4), (layout.header, 12)]
    parts += [(layout.ids, 5 * 2 * 4), (layout.weights, 5 * 2 * 4), (layout.x, 5 * 64 * 2), (layout.y, 5 * 64 * 4)]
    ends = [at + size for at, size in parts]
    assert all(at % 64 == 0 for at, _ in parts)
    assert all(end <= at for end, (at, _) in zip([140, *ends], [*parts, (layout.bytes, 0)], strict=True))


class Owner:
    """Owner of a block's memory, which is freed with it."""


def test_garbage_collection_closes_it_before_its_memory() -> None:
    """The doorbell closes before its memory is freed if both are collected together, in any order."""
    layout, gone = block_layout(SIZE), []
    block = torch.zeros(layout.bytes, dtype=torch.uint8)
    with Pool([[0]], pin=False) as pool:
        experts = [layer.experts for layer in layers_of(())]
        owners = [Owner()]
        bell = Doorbell(pool, experts, SIZE, Memory(block.data_ptr(), layout.bytes, owners))
        owners.append(Owner())
        for owner in owners:
            weakref.finalize(owner, lambda end=bell._end: gone.append(end.alive))
        ring: list[object] = [owners, bell]
        ring.append(ring)
        del owner, owners, bell, ring
        gc.collect()
        gc.collect()
    assert gone == [False, False]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"size": JobSize(0, 2, 64)}, r"1 to 2\^20 tokens"),
        ({"size": JobSize(5, 2, 63)}, "rows must be as long"),
        ({"size": JobSize(6, 2, 64)}, "too small"),
        ({"offset": 4}, "aligned to 64"),
        ({"layers": 0}, "1 to 65536 layers"),
        ({"service": Service(lane=2)}, "Lane 2 does not exist"),
        ({"service": Service(cpus=(-1,))}, "CPUs 0 to 1023"),
        ({"service": Service(spin_us=-1)}, "spin time must not be negative"),
    ],
)
def test_impossible_doorbells_are_refused(change: dict[str, object], text: str) -> None:
    options = {"size": SIZE, "offset": 0, "layers": 1, "service": Service()} | change
    layer = Layer(64, 0)
    nbytes = block_layout(SIZE).bytes
    block = torch.zeros(nbytes + 64, dtype=torch.uint8)
    memory = Memory(block.data_ptr() + options["offset"], nbytes, block)
    with Pool([[]], pin=False) as pool, pytest.raises(ValueError, match=text):
        Doorbell(pool, [layer.experts] * options["layers"], options["size"], memory, options["service"])


@pytest.mark.parametrize("dies", [False, True])
def test_functions_that_a_driver_calls(dies: bool) -> None:
    """The functions always return; a job number that was answered before means no job."""
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    with Pool([[0]], pin=False) as pool:
        rig = Rig(pool, way=Way.CALLS)
        calls = rig.bell.calls
        rig.bell.arm()
        if dies:
            kill_worker(pool)
            time.sleep(0.01)
        for number in (1, 2, 2, 3):
            rig.words(rig.layout.header)[:3] = torch.tensor([0, 1, number])
            rig.words(rig.layout.ids)[:2] = torch.tensor([0, 1])
            function(calls.ring)(calls.doorbell)
            function(calls.wait)(calls.doorbell)
            assert rig.words(rig.layout.answered)[0] == (0 if dies else number)
        if dies:
            with pytest.raises(NativeError, match="worker thread"):
                rig.bell.check()
        rig.bell.close()
        with pytest.raises(ValueError, match="closed"):
            _ = rig.bell.calls


@pytest.mark.parametrize("more", [0, 5])
def test_the_nice_value_of_workers_and_the_doorbell(more: int) -> None:
    def threads() -> set[int]:
        return set(map(int, os.listdir("/proc/self/task")))

    def nice(thread: int = 0) -> int:
        return os.getpriority(os.PRIO_PROCESS, thread)

    own, before = nice(), threads()
    with Pool([[0, 0]], pin=False, nice=more) as pool:
        rig = Rig(pool)
        rig.bell.arm()
        assert rig.ring(), "its thread has begun"
        lowered, began = [own + more] * 3, time.monotonic()
        while [nice(thread) for thread in threads() - before] != lowered:
            assert time.monotonic() - began < 10
        rig.bell.close()
    assert nice() == own


def test_binding_to_a_missing_cpu_is_an_error() -> None:
    with Pool([[]], pin=False) as pool, pytest.raises(NativeError, match="could not be bound to its CPUs"):
        Rig(pool, service=Service(cpus=(1000,)))


def test_its_thread_runs_where_it_is_bound() -> None:
    mine = sorted(os.sched_getaffinity(0))
    with Pool([[]], pin=False) as pool:
        before = set(os.listdir("/proc/self/task"))
        rig = Rig(pool, service=Service(cpus=(mine[-1],)))
        (thread,) = set(os.listdir("/proc/self/task")) - before
        assert os.sched_getaffinity(int(thread)) == {mine[-1]}
        rig.bell.close()
        assert not Path(f"/proc/self/task/{thread}").exists()


def test_counters() -> None:
    with Pool([[0]], pin=False) as pool:
        rig = Rig(pool)
        rig.bell.arm()
        assert rig.ring(0, 2, (0, -1, 0, 3))
        assert rig.ring(PROBE_LAYER)
        assert rig.ring(1, 1, (-1, 5))
        rig.bell.check()  # counters are updated with the results, after the answer
        found = rig.bell.counters()
        panels = -(-WIDTH // 16) * 2
        expert_bytes = panels * 64 * 32 + (64 // 16) * 64 * 32  # down: 48 columns, padded to 64
        assert (found.jobs, found.pairs, found.weight_bytes) == (2, 4, 3 * expert_bytes)
        assert found.moe_s > 0 and found.waiting_s > 0  # noqa: PT018


@pytest.mark.parametrize(
    ("job", "text"),
    [
        ((2, 1, (0, 0)), "layer 2, but there are 2"),
        ((0, 6, (0, 0)), "6 tokens; 1 to 5"),
        ((0, 1, (0, EXPERTS)), f"Expert id {EXPERTS}"),
        ((0, 1, (-2, 0)), "Expert id -2"),
    ],
)
def test_malformed_jobs_fail_for_good(job: tuple[int, int, tuple[int, ...]], text: str) -> None:
    with Pool([[0]], pin=False) as pool:
        rig = Rig(pool)
        rig.bell.arm()
        assert rig.ring()
        assert not rig.ring(*job)
        assert not rig.ring()
        for _ in range(2):
            with pytest.raises(ValueError, match=text):
                rig.bell.check()
        assert rig.words(rig.layout.answered)[:2].tolist() == [1, 1]


def test_a_dead_worker_ends_the_wait() -> None:
    with Pool([[0]], pin=False) as pool:
        rig = Rig(pool)
        rig.bell.arm()
        assert rig.ring()
        begin = time.perf_counter()
        kill_worker(pool)
        while rig.ring():
            time.sleep(0.001)
        assert time.perf_counter() - begin < 2
        with pytest.raises(NativeError, match="worker thread of the CPU pool on CPU 0 has ended"):
            rig.bell.check()


def test_a_non_finite_sum_is_answered_and_reported_once() -> None:
    with Pool([[0]], pin=False) as pool:
        rig = Rig(pool, poisoned=(4,))
        rig.bell.arm()
        assert rig.ring(1, 2, (0, 1, 4, -1))
        assert rig.ring(0, 1, (0, 1))
        with pytest.raises(NumericsError, match=r"layer 1, row 1 of 2, experts 4\."):
            rig.bell.check()
        rig.bell.check()


def test_failing_from_outside() -> None:
    with Pool([[]], pin=False) as pool:
        rig = Rig(pool)
        rig.bell.arm()
        rig.bell.fail("The GPU has left.")
        assert not rig.ring()
        with pytest.raises(NativeError, match="The GPU has left"):
            rig.bell.check()


def test_wait_times_out() -> None:
    with Pool([[]], pin=False) as pool:
        rig = Rig(pool)
        begin = time.perf_counter()
        assert not rig.bell.wait(1, 0.05)
        assert 0.05 <= time.perf_counter() - begin < 2


def test_ringing_without_arming_is_an_error_and_no_hang() -> None:
    with Pool([[]], pin=False) as pool:
        rig = Rig(pool, service=Service(spin_us=0))
        time.sleep(0.01)  # it sleeps
        begin = time.perf_counter()
        assert not rig.ring()
        assert time.perf_counter() - begin < 2
        with pytest.raises(ValueError, match="while none was armed"):
            rig.bell.check()


def test_disarming_without_arming_is_an_error() -> None:
    with Pool([[]], pin=False) as pool:
        rig = Rig(pool)
        rig.bell.arm()
        rig.bell.arm()  # the next step is launched before the former has ended
        rig.bell.disarm()
        assert rig.ring()
        rig.bell.disarm()
        with pytest.raises(ValueError, match="not armed"):
            rig.bell.disarm()


def cpu_ns_of_threads() -> dict[str, int]:
    """CPU time of this process's threads, except the calling one."""
    own = threading.get_native_id()
    tasks = (task for task in Path("/proc/self/task").iterdir() if int(task.name) != own)
    return {task.name: int((task / "schedstat").read_text().split()[0]) for task in tasks}


def test_threads_sleep_while_disarmed_and_stay_awake_while_armed() -> None:
    with Pool([[0]], pin=False, spin_us=100) as pool:
        rig = Rig(pool)
        for _ in range(2):
            rig.bell.arm()
            assert rig.ring()
            before, deadline_s = cpu_ns_of_threads(), time.perf_counter() + 10
            while sum(now - before.get(task, now) > 20e6 for task, now in cpu_ns_of_threads().items()) < 2:
                assert time.perf_counter() < deadline_s, "the worker or the doorbell's thread sleeps"
                time.sleep(0.01)
            rig.bell.disarm()
            time.sleep(0.05)
            before = cpu_ns_of_threads()
            time.sleep(0.5)
            busy_ns = max(now - before.get(task, now) for task, now in cpu_ns_of_threads().items())
            assert busy_ns < 50e6  # a tenth of what a thread that spins would use


def test_it_can_be_closed_in_any_state() -> None:
    with Pool([[0]], pin=False) as pool:
        for armed in (False, True):
            for _ in range(10):
                rig = Rig(pool)
                if armed:
                    rig.bell.arm()
                    rig.bell.ring(1)
                del rig
                gc.collect(0)
    gc.collect()


def test_it_outlives_its_pools_handle() -> None:
    pool = Pool([[0]], pin=False)
    rig = Rig(pool)
    pool.close()
    rig.bell.arm()
    assert rig.ring()


def test_sizes_are_checked_before_memory_is_made() -> None:
    with pytest.raises(ValueError, match="elements"):
        block_layout(replace(SIZE, hidden=0))
