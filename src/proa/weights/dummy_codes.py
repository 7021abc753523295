"""Random quantised matrices: random codes (quantised values) and scales, packed directly. Never: other weights."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from proa.native.fill import Fill, StoredRows
from proa.native.formats import DUMMY, PANEL_ROWS, PackSource, Stored, facts, pack
from proa.native.pool import Pool
from proa.ops.table import Sink
from proa.weights import random_pool
from proa.weights.in_parts import in_parts
from proa.weights.random_pool import copies

_E2M1_RMS = math.sqrt((0 + 0.25 + 1 + 2.25 + 4 + 9 + 16 + 36) / 8)
_INT4_RMS = math.sqrt(2 * sum(q * q for q in range(8)) / 15)
_E4M3_RMS = 32.0
_BATCH_BYTES = 32 << 20  # codes per worker and batch
_COUNTED_BYTES = 4  # per element, in jobs whose rows are counted from address 0


@dataclass(frozen=True)
class _Job:
    """Rows of a matrix to pack: destination, codes and scales. alive: tensors that `source` points to."""

    to: Fill
    source: PackSource
    alive: tuple[Tensor, ...]


class CodedMatrices:
    """Fills sinks with random matrices in the format `dummy_format` (a name of DUMMY), in workers.threads threads."""

    def __init__(self, dummy_format: str, seed: int, workers: Pool, flush: Callable[[], None]) -> None:
        """flush: must call `pack`, then move what the sinks staged to its place, so that they have room again."""
        self.stored = f"dummy {dummy_format}"
        self._facts, self._group = facts(DUMMY[self.stored].format), DUMMY[self.stored].group
        self._generator = torch.Generator().manual_seed(seed)
        self._codes, self._zero, self._rms = self._random_codes()
        self._scales: dict[float, tuple[Tensor, float]] = {}
        self._workers, self._flush = workers, flush
        self._jobs: list[list[_Job]] = []
        self._waiting_bytes = 0

    def add(self, target: Sink, std: float, seed: int, zero_rows: int) -> None:
        """Queue a matrix whose weights have the standard deviation `std`, except for `zero_rows` leading zero rows.

        Raises ValueError if the sink has no room even when empty.
        """
        row_bytes, covered = target.shape[1] * _COUNTED_BYTES, 0
        for _, count, jobs in in_parts(target, StoredRows(Stored.F32, 0, row_bytes), self._flush):
            for job in jobs:
                for part in copies(job, row_bytes, target.shape, seed):
                    to = job.part(part.low, part.high - part.low)
                    made = [self._job(to, part.start, part.before, std)]
                    if zero_rows and job.rows.start == 0 and part.low == 0:
                        made.append(self._head(made[0], zero_rows))
                    self._jobs.append(made)
            covered += count
            self._waiting_bytes += count * target.shape[1]
            if self._waiting_bytes >= _BATCH_BYTES * self._workers.threads:
                self._flush()
        if not covered:
            raise ValueError(f"there is no room for a matrix of {target.shape}")

    def pack(self) -> None:
        """Pack all queued matrices."""
        with ThreadPoolExecutor(self._workers.threads, initializer=self._unbind) as threads:
            list(threads.map(_pack, self._jobs))
        self._jobs, self._waiting_bytes = [], 0

    def _unbind(self) -> None:
        """Let this thread run on the workers' CPUs: it inherited the caller's affinity, which may be a single CPU. The
        workers sleep meanwhile."""
        if self._workers.cpus:
            os.sched_setaffinity(0, os.sched_getaffinity(0) | self._workers.cpus)

    def _random_codes(self) -> tuple[Tensor, int, float]:
        """Random codes, one per byte; the code of zero; the root mean square of the decoded codes."""
        match self._facts.code:
            case "e4m3":
                numbers = torch.randn(random_pool.POOL, generator=self._generator) * _E4M3_RMS
                return numbers.to(torch.float8_e4m3fn).view(torch.uint8), 0, _E4M3_RMS
            case "int4":
                return self._integers(1, 16), 8, _INT4_RMS
        return self._integers(0, 16), 0, _E2M1_RMS

    def _integers(self, low: int, end: int) -> Tensor:
        return torch.randint(low, end, (random_pool.POOL,), dtype=torch.uint8, generator=self._generator)

    def _scales_for(self, std: float) -> tuple[Tensor, float]:
        """Random scales in their stored dtype, and the factor of the whole matrix, for weights of deviation `std`."""
        if std not in self._scales:
            scale, factor = std / self._rms, 1.0
            around = torch.rand(random_pool.POOL, generator=self._generator) * 0.2 + 0.9
            match self._facts.scale:
                case "f32_panel":
                    made = around * scale
                case "bf16":
                    made = (around * scale).bfloat16()
                case "e4m3":
                    made, factor = self._integers(0x37, 0x3A), scale  # E4M3 values near 1
                case _:
                    low = math.floor(math.log2(scale))
                    share = (scale**2 / 4.0**low - 1) / 3  # fraction of scales that are the next power of two
                    made = ((around - 0.9) / 0.2 < share).to(torch.uint8) + (127 + low)
            self._scales[std] = made, factor
        return self._scales[std]

    def _job(self, to: Fill, start: int, before: int, std: float) -> _Job:
        columns = to.to.columns
        scales, factor = self._scales_for(std)
        groups = -(-columns // self._group)
        scale_rows = PANEL_ROWS if self._facts.scale == "f32_panel" else 1  # one row of scales per panel
        first = start % (random_pool.POOL // 2) + before // scale_rows * groups
        source = PackSource(
            codes=self._codes.data_ptr() + start + before * columns, code_stride=columns,
            scales=scales.data_ptr() + first * scales.itemsize, scale_stride=groups * scales.itemsize,
            scale_rows=scale_rows, factor=factor,
        )  # fmt: skip
        return _Job(to, source, (self._codes, scales))

    def _head(self, job: _Job, zero_rows: int) -> _Job:
        """A job that packs the first panel of `job` again, with `zero_rows` leading zero rows."""
        rows, columns, source = min(PANEL_ROWS, job.to.to.rows), job.to.to.columns, job.source
        first = (source.codes or 0) - self._codes.data_ptr()
        codes = self._codes[first : first + rows * columns].view(rows, columns).clone()
        codes[:zero_rows] = self._zero
        same = PackSource(
            codes=codes.data_ptr(), code_stride=columns, scales=source.scales, scale_stride=source.scale_stride,
            scale_rows=source.scale_rows, factor=source.factor,
        )  # fmt: skip
        return _Job(job.to.part(0, rows), same, (codes, *job.alive))


def _pack(jobs: list[_Job]) -> None:
    for job in jobs:
        to = job.to
        pack(to.to, job.source, to.to.rows, to.step, to.address, to.nbytes)
