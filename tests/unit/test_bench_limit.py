"""RAM bandwidth readings before and after timed runs, and the notes on them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from proa.bench import limit
from proa.bench.limit import AGAIN_S, RamReadings, busy_notes, excess_notes, ram_meter
from proa.config.options import MachineOptions
from proa.machine.load import Load
from quick_plan import ram_of


class Clock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def play(rates: list[float], runs_s: list[float], others: float = 0.0) -> RamReadings:
    clock = Clock()
    coming: Iterator[float] = iter(rates)
    readings = RamReadings(lambda: ram_of(next(coming), others), clock)

    async def timed(seconds: float) -> str:
        clock.now_s += seconds
        return f"took {seconds}"

    async def go() -> None:
        for seconds in runs_s:
            assert await readings.measure_run(lambda s=seconds: timed(s)) == f"took {seconds}"
        await readings.read()

    asyncio.run(go())
    return readings


def test_a_run_uses_the_readings_before_and_after_it() -> None:
    """Runs take longer than AGAIN_S, so each has its own reading before and after it."""
    readings = play([100e9, 160e9, 110e9, 120e9], [2 * AGAIN_S] * 3)
    assert [readings.of_run(run) for run in range(3)] == [160e9, 160e9, 120e9]
    assert readings.typical == 160e9
    assert readings.all_bytes_per_s == (100e9, 160e9, 110e9, 120e9)
    assert readings.notes() == ()


def test_short_runs_share_their_readings() -> None:
    readings = play([50e9, 40e9, 45e9], [0.4 * AGAIN_S] * 4)
    assert [readings.of_run(run) for run in range(4)] == [50e9, 50e9, 50e9, 45e9]


def test_a_busy_reading_gives_a_note() -> None:
    (note,) = play([50e9, 40e9], [1.0], others=1.5).notes()
    assert "other programs kept 1.5 of 2 CPUs busy during a RAM reading" in note


@pytest.mark.parametrize("share", [None, 0.3, 1.0])
def test_a_share_of_a_limit_needs_no_note(share: float | None) -> None:
    assert excess_notes(share, (40e9, 41e9)) == ()


def test_a_share_above_one_gives_a_note() -> None:
    (note,) = excess_notes(1.123, (40e9, 41e9))
    assert note == (
        "112.3% of the roof is impossible: a limit was measured too low (RAM readings: 40.0 GB/s, 41.0 GB/s)"
    )


@pytest.mark.parametrize(("others", "told"), [(0.05, ()), (1.4, ("1.4 of 2 CPUs",)), (None, ())])
def test_only_current_load_makes_the_machine_busy(
    others: float | None, told: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The load average must not count: it may stem from a benchmark that ended a minute ago."""
    monkeypatch.setattr("os.getloadavg", lambda: (99.0, 99.0, 99.0))
    monkeypatch.setattr(limit, "load_now", lambda: Load(others, 2))
    notes = busy_notes()
    assert len(notes) == len(told)
    assert all(words in note for words, note in zip(told, notes, strict=True))


def test_the_meter_reads_ram() -> None:
    assert ram_meter(MachineOptions(threads=1))().bytes_per_s > 1e8
