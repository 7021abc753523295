"""The pool from Python: lifetimes, errors, quiet when idle."""

from __future__ import annotations

import gc
import time

import pytest
import torch

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
        pool.kill_worker_for_test()
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
