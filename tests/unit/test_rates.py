"""The RAM measurement: honest numbers, short, without leftovers."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from proa.machine.machine import Machine
from proa.machine.probe import probe
from proa.machine.rates import CHUNK_BYTES, buffer_bytes, read_bandwidth

MIB = 1 << 20


@pytest.mark.parametrize(
    ("available_mib", "l3_mib", "expected_mib"),
    [
        (64 << 10, 32, 256),  # four times L3 would still be less than the least
        (64 << 10, 384, 1536),  # four times L3
        (64 << 10, None, 256),
        (1024, 32, 128),  # an eighth of what is free
        (8, 32, 4),  # one chunk at least
    ],
)
def test_buffer_is_larger_than_caches_and_small_beside_free_ram(
    monkeypatch: pytest.MonkeyPatch, available_mib: int, l3_mib: int | None, expected_mib: int
) -> None:
    monkeypatch.delenv("PROA_RAM_PROBE")
    machine = Machine(
        cpu="x",
        online_cpus=1,
        usable_cpus=(0,),
        total_bytes=1 << 40,
        available_bytes=available_mib * MIB,
        l3_bytes=l3_mib and l3_mib * MIB,
    )
    assert buffer_bytes(machine) == expected_mib * MIB
    monkeypatch.setenv("PROA_RAM_PROBE", "18MiB")
    assert buffer_bytes(machine) == min(16, max(4, available_mib // 8)) * MIB, "in whole chunks"


def test_reads_at_least_what_numpy_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The measurement must see the real limit: a plain numpy reduction over the same amount cannot beat it by much.
    Others on the machine take bandwidth from one or the other: a reader that is slow is so five times."""
    monkeypatch.delenv("PROA_RAM_PROBE")
    machine = probe()
    values = np.ones(buffer_bytes(machine) // 8, dtype=np.uint64)
    np.bitwise_or.reduce(values)
    shares = []
    while len(shares) < 5 and not any(share > 0.7 for share in shares):
        begin = time.perf_counter()
        np.bitwise_or.reduce(values)
        numpy_rate = values.nbytes / (time.perf_counter() - begin)
        shares.append(read_bandwidth(machine.usable_cores) / numpy_rate)
    assert max(shares) > 0.7, shares


def test_is_short_and_leaves_no_thread() -> None:
    before = threading.active_count()
    begin = time.perf_counter()
    rate = read_bandwidth(2, seconds=0.1, size_bytes=16 * CHUNK_BYTES)
    assert time.perf_counter() - begin < 2.0  # 0.1 s on a quiet machine
    assert rate > 1e8
    assert threading.active_count() == before


def test_needs_neither_torch_nor_numpy() -> None:
    code = "import sys, proa.machine.probe, proa.machine.rates; sys.exit(bool({'torch', 'numpy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
