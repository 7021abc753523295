"""The pool from Python: lifetimes, errors, quiet when idle."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path

import pytest
import torch

from native_hooks import kill_worker
from proa.errors import NativeError
from proa.native.pool import Pool, select_isa
from proa.ops.cpu import CpuOps, Recorder
from proa.ops.packed import Memory


def recorded(pool: Pool, rows: int = 4) -> tuple[Recorder, torch.Tensor]:
    recorder = Recorder(pool, Memory(pool, [None]), rows, 1, 1)
    x = recorder.keep(torch.randn(rows, 512).bfloat16())
    linear = CpuOps(recorder).table().maps.linear({"a": 512}, 512, False)  # more than the caller does alone
    for _, sink in linear.parameters():
        sink.expect("BF16")
        sink.write(0, torch.randn(512, 512))
    return recorder, linear(x)


def test_a_program_outlives_its_pools_handle() -> None:
    with Pool([[0]], pin=False) as pool:
        recorder, _ = recorded(pool)
    recorder.program.run(0, 1, 4)  # its workers live on with it
    del recorder
    gc.collect()


def test_a_closed_pool_takes_no_more() -> None:
    pool = Pool([[]], pin=False)
    pool.close()
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        recorded(pool)


def run_often(recorder: Recorder) -> None:
    for _ in range(1000):
        recorder.program.run(0, 1, 4)
        time.sleep(0.001)


def test_a_dead_worker_is_an_error_at_the_caller() -> None:
    with Pool([[0]], pin=False, spin_us=0) as pool:
        recorder, _ = recorded(pool)
        kill_worker(pool)
        with pytest.raises(NativeError, match="worker thread"):
            run_often(recorder)


def test_idle_workers_use_no_cpu() -> None:
    with Pool([[0, 0, 0]], pin=False, spin_us=1000) as pool:
        recorder, _ = recorded(pool)
        recorder.program.run(0, 1, 4)
        time.sleep(0.05)
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.005  # 1 % of a core


def affinities() -> dict[int, set[int]]:
    return {int(task.name): os.sched_getaffinity(int(task.name)) for task in Path("/proc/self/task").iterdir()}


def test_workers_run_where_they_are_bound() -> None:
    mine = sorted(os.sched_getaffinity(0))
    for options, expected in (
        ({}, {mine[-1]}),
        ({"homes": [mine]}, set(mine)),
        ({"pin": False}, set(mine)),
    ):
        before = affinities()
        with Pool([[mine[-1]]], **options):  # type: ignore[arg-type]
            (cpus,) = [cpus for task, cpus in affinities().items() if task not in before]
            assert cpus == expected


def test_homes_are_given_for_every_team() -> None:
    with pytest.raises(ValueError, match="2 teams, but 1 homes"):
        Pool([[0], [0]], homes=[[0]])
    with pytest.raises(ValueError, match="CPUs 0 to 1023"):
        Pool([[0]], homes=[[-1]])


def test_only_workers_in_use_are_counted_and_wake() -> None:
    with Pool([[0, 0, 0], [0]], pin=False, spin_us=0) as pool:
        recorder, y = recorded(pool)
        recorder.program.run(0, 1, 4)
        exact = y.clone()
        for workers, threads in (((0, 1), 2), ((3, 1), 5), ((1, 1), 3)):
            pool.use(workers)
            assert pool.threads == threads
            recorder.program.run(0, 1, 4)
            assert torch.equal(y, exact)
        for wrong in ((4, 1), (1, 0), (1,), (1, 1, 1), (-1, 1)):
            with pytest.raises(ValueError, match="team"):
                pool.use(wrong)
        assert pool.threads == 3


@pytest.mark.parametrize("spin_us", [0, 50, 1000])
def test_inactive_workers_use_no_cpu(spin_us: int) -> None:
    """Three rest for good: what this process takes is the caller's time alone."""
    with Pool([[0, 0, 0]], pin=False, spin_us=spin_us) as pool:
        recorder, _ = recorded(pool)
        pool.use((0,))
        time.sleep(0.05)
        all_s, own_s = time.process_time(), time.thread_time()
        for _ in range(300):
            recorder.program.run(0, 1, 4)
        others_s = time.process_time() - all_s - (time.thread_time() - own_s)
        assert others_s < 0.002


@pytest.mark.parametrize("teams", [[], [[0]] * 65])
def test_impossible_teams(teams: list[list[int]]) -> None:
    with pytest.raises(ValueError, match="1 to 64 teams"):
        Pool(teams)


def test_unknown_kernels() -> None:
    with pytest.raises(ValueError, match=r"no kernels named sse9; there are .*scalar"):
        select_isa("sse9")


def test_more_rows_than_the_buffers_have() -> None:
    with Pool([[]], pin=False) as pool:
        recorder, _ = recorded(pool)
        with pytest.raises(ValueError, match="for 4 rows, not 5"):
            recorder.program.run(0, 1, 5)


def test_a_worker_that_cannot_be_bound_is_an_error() -> None:
    with pytest.raises(NativeError, match="could not be bound to CPU 1000"):
        Pool([[1000]])


@pytest.mark.parametrize("lanes", [1, 2, 3, 5])
def test_every_lane_has_its_own_caller(lanes: int) -> None:
    """Threads run programs on all lanes at once, with the results that each has alone."""
    with Pool([[0, 0]], pin=False, lanes=lanes) as pool:
        torch.manual_seed(lanes)
        made = [recorded(pool) for _ in range(lanes)]
        for recorder, _ in made:
            recorder.program.run(0, 1, 4)
        alone = [y.clone() for _, y in made]
        failures: list[str] = []

        def work(lane: int) -> None:
            recorder, y = made[lane]
            for _ in range(100):
                y.zero_()
                recorder.program.run(0, 1, 4, lane=lane)
                if not torch.equal(y, alone[lane]):
                    failures.append(f"lane {lane}")

        threads = [threading.Thread(target=work, args=(lane,)) for lane in range(lanes)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        with pytest.raises(ValueError, match=f"Lane {lanes} does not exist: the pool was created with {lanes} lanes"):
            made[0][0].program.run(0, 1, 4, lane=lanes)


def test_a_pool_has_a_lane() -> None:
    with pytest.raises(ValueError, match="at least one lane"):
        Pool([[]], pin=False, lanes=0)
