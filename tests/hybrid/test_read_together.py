"""Rates of GPU and CPU reading RAM together: invalid measurements are repeated, then given up."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from proa.hybrid.read_together import ATTEMPTS, GpuReader, Reads, read_together

GB = 1e9
FIRST = Reads(50 * GB)  # the rough rate of one round


class Scripted:
    """A GPU that reads 1 GB per round; each attempt measures a round, then the GPU alone, then beside the CPU."""

    nbytes = int(GB)

    def __init__(self, *attempts: tuple[float, float, float, float]) -> None:
        self._attempts = list(attempts)  # alone, GPU beside, CPU beside, overlap
        self.rounds: list[int] = []
        self._reads = 0

    def read(self, rounds: int = 1, meanwhile: Callable[[], int] | None = None) -> Reads:
        self.rounds.append(rounds)
        attempt, turn = divmod(self._reads, 3)
        self._reads += 1
        alone, gpu, cpu, overlap = self._attempts[attempt]
        assert (meanwhile is not None) == (turn == 2)
        return (FIRST, Reads(alone * GB), Reads(gpu * GB, cpu * GB, overlap))[turn]


def together(gpu: GpuReader) -> tuple[float, float, float] | None:
    found = read_together(gpu, lambda: 1)
    return None if found is None else (found.alone / GB, found.gpu / GB, found.cpu / GB)


GOOD = (50.0, 45.0, 80.0, 0.95)


def test_rates_and_their_text() -> None:
    gpu = Scripted(GOOD)
    found = read_together(gpu, lambda: 1)
    assert found is not None
    assert (found.rates.bus_bytes_per_s, found.rates.ram_bytes_per_s) == (50 * GB, 125 * GB)
    assert str(found) == "the GPU reads experts in RAM at 50.0 GB/s alone, at 45.0 GB/s beside the CPU's 80.0 GB/s"
    assert gpu.rounds == [1, 2, 10], "0.05 s alone, 0.2 s beside"


@pytest.mark.parametrize(
    "invalid",
    [
        (6.5, 11.1, 0.0, 0.0),  # seen: the GPU was done before the CPU began
        (50.0, 45.0, 0.0, 0.9),  # the CPU read nothing
        (50.0, 45.0, 80.0, 0.2),  # the CPU hardly overlapped the GPU
        (6.5, 11.1, 80.0, 0.9),  # the GPU was slower alone
    ],
)
def test_invalid_rates_are_measured_again_for_longer(invalid: tuple[float, float, float, float]) -> None:
    gpu = Scripted(invalid, GOOD)
    assert together(gpu) == GOOD[:3]
    assert gpu.rounds[3:] == [1, 5, 20]
    assert together(Scripted(*[invalid] * ATTEMPTS)) is None


def test_a_gpu_a_little_faster_beside_the_cpu_is_noise() -> None:
    assert together(Scripted((50.0, 55.0, 80.0, 0.9))) == (50.0, 55.0, 80.0)
