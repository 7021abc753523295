"""`proa bench kernels`: measures the CPU's expert kernels and compares them with the machine's limits.

A cell is a weight format, an expert shape and a number of tokens. It calls the routed experts of one layer repeatedly,
each time with other experts of another layer, so that weights are read from memory, not from a cache. The limits are
measured before and after each cell.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec
import numpy as np

from proa.bench.kernel_cases import ExpertShape, WeightFormat
from proa.bench.kernel_ceilings import CeilingMeter, CeilingRates, Ceilings
from proa.bench.kernel_plan import KernelOptions, KernelPlan, PlannedShape, plan_kernels
from proa.bench.kernel_weights import ExpertLayers, bf16_bits, expert_bytes
from proa.bench.limit import busy_notes
from proa.bench.result import commit
from proa.errors import NativeError
from proa.machine.probe import probe
from proa.machine.topology import Team, teams
from proa.native.ceilings import Routings, Trial
from proa.native.pool import Pool
from proa.native.weights import Rows
from proa.obs.version import proa_version
from proa.plan.attained import ADDS, CPU_SHARES, RAM_PACKED, RAM_SHARE, packed_share

LEAST_CALLS, MOST_CALLS = 5, 20_000
_BATCH_S = 0.25  # seconds of native calls between two checks for Ctrl-C
_ROUTED_TOKENS = 4096  # tokens of a cell, over all its routings
_UNWRITTEN = 0xFFFF  # a bfloat16 NaN
_EXPONENT = 0x7F80  # exponent bits of bfloat16; all set in Inf and NaN


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Facts common to all cells of a run."""

    cpu: str
    threads: int
    isa_reason: str  # why a better instruction set is not used
    version: str
    commit: str | None
    date: str  # UTC, ISO 8601
    notes: tuple[str, ...]


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """The result for one format, shape and number of tokens. GB are 1e9 bytes; shares are fractions of 1."""

    format: str
    shape: str
    tokens: int
    us: float  # median time of a call
    us_p10: float
    us_p90: float
    predicted_us: float  # by the shares of both limits that kernels reach (plan/attained.py)
    gbytes_per_s: float  # packed weights of the selected experts / time
    gflops: float
    bound: str  # "memory" or "compute": the limit that takes longer
    roof_us: float  # time of a call at that limit
    roof_share: float
    isa: str
    hidden: int
    width: int
    experts: int
    top_k: int
    layers: int
    touched_experts: float  # mean number of distinct experts per call
    weights_bytes: int  # of all layers
    pages: str
    calls: int
    redone_tasks: int  # tasks repeated because a worker was preempted: a sign of other programs' load
    before: CeilingRates
    after: CeilingRates
    notes: tuple[str, ...]
    ceilings: Ceilings
    run: RunFacts

    def json(self) -> str:
        """Format as one line of JSON."""
        return msgspec.json.encode(self).decode()


class RoutedBatch:
    """Random activations and uniform routings, equal for every format and in every run."""

    def __init__(self, shape: ExpertShape, tokens: int) -> None:
        rng = np.random.default_rng(tokens)
        count = min(max(_ROUTED_TOKENS // tokens, 2), 256)
        order = rng.random((count, tokens, shape.experts), np.float32).argpartition(shape.top_k - 1)
        self.ids = np.ascontiguousarray(order[..., : shape.top_k], np.int32)
        weights = rng.random(self.ids.shape, np.float32) + np.float32(0.1)
        self.weights = weights / weights.sum(-1, keepdims=True)
        self.x = bf16_bits(rng.standard_normal((tokens, shape.hidden), np.float32))
        self.y = np.full_like(self.x, _UNWRITTEN)
        self.touched = np.array([len(np.unique(ids)) for ids in self.ids])

    def trial(self, pool: Pool, weights: ExpertLayers) -> Trial:
        count, tokens, top_k = self.ids.shape
        routings = Routings(self.ids.ctypes.data, self.weights.ctypes.data, count, tokens, top_k)
        x, y = (Rows(rows.ctypes.data, rows.shape[1]) for rows in (self.x, self.y))
        return Trial(pool, weights.layers, routings, x, y)

    def result(self, trial: Trial) -> bytes:
        """Run call 0 and return its output. Raises NativeError unless every value is written and finite."""
        self.y.fill(_UNWRITTEN)
        trial.run(0, 1)
        if ((self.y & _EXPONENT) == _EXPONENT).any() or not self.y.any():
            raise NativeError("The experts' result is non-finite, or all zero.", "Report this as a bug.")
        return self.y.tobytes()


@dataclass(frozen=True)
class KernelBench:
    """A plan, the worker threads, and the limits measured at the start."""

    plan: KernelPlan
    run: RunFacts
    pool: Pool
    teams: Sequence[Team]
    meter: CeilingMeter

    def cells(self) -> Iterator[Cell]:
        """Measure and yield the cells, ordered by shape, then format. Raises NativeError if two equal calls give
        different results."""
        for planned in self.plan.shapes:
            for of in self.plan.formats:
                count = self.plan.layers(of, planned.shape)
                with closing(ExpertLayers(of, planned.shape, count, self.teams)) as weights:
                    for tokens in self.plan.tokens:
                        yield self._cell(of, planned, weights, tokens)

    def _cell(self, of: WeightFormat, planned: PlannedShape, weights: ExpertLayers, tokens: int) -> Cell:
        shape = planned.shape
        batch = RoutedBatch(shape, tokens)
        trial = batch.trial(self.pool, weights)
        first = batch.result(trial)
        estimate_s, redone = min(trial.run(1, 2)), self.pool.redone()
        before = self.meter.now()
        times = _timed(trial, estimate_s, self.plan.seconds)
        after = self.meter.now()
        redone = self.pool.redone() - redone
        if batch.result(trial) != first:
            raise NativeError(
                f"{of.name}, {shape.name}, {tokens} tokens: the same call gave two different results.",
                "Discard the figures, and report this as a bug.",
            )
        touched = float(np.mean(batch.touched[np.arange(3, 3 + len(times)) % len(batch.touched)]))
        us_p10, us, us_p90 = (1e6 * np.percentile(times, (10, 50, 90))).tolist()
        each_bytes = expert_bytes(of, shape)
        nbytes, weight_bytes = touched * each_bytes, each_bytes / shape.expert_parameters
        flops = 2.0 * tokens * shape.top_k * shape.expert_parameters
        bound, roof_us = roof(nbytes, flops, before, after)
        return Cell(
            format=of.name, shape=shape.name, tokens=tokens, us=us, us_p10=us_p10, us_p90=us_p90,
            predicted_us=predicted_us(nbytes, flops, before, after, self.pool.isa, weight_bytes),
            gbytes_per_s=nbytes / us / 1e3, gflops=flops / us / 1e3,
            bound=bound, roof_us=roof_us, roof_share=roof_us / us, isa=self.pool.isa, hidden=shape.hidden,
            width=shape.width, experts=shape.experts, top_k=shape.top_k, layers=len(weights.layers),
            touched_experts=touched, weights_bytes=weights.nbytes, pages=weights.pages, calls=len(times),
            redone_tasks=redone, before=before, after=after,
            notes=(*planned.notes, *self.plan.cache_notes(weights.nbytes)), ceilings=self.meter.start, run=self.run,
        )  # fmt: skip


def roof(nbytes: float, flops: float, before: CeilingRates, after: CeilingRates) -> tuple[str, float]:
    """Return (the binding limit, the time in us at that limit); each limit is the mean of both measurements."""
    memory_us, compute_us = _limits_us(nbytes, flops, before, after)
    return ("memory", memory_us) if memory_us >= compute_us else ("compute", compute_us)


def predicted_us(
    nbytes: float, flops: float, before: CeilingRates, after: CeilingRates, isa: str, weight_bytes: float
) -> float:  # fmt: skip
    """The time of a call as `proa plan` predicts it: for any number of tokens by the same shares. weight_bytes: of one
    weight, with its share of the scales."""
    memory_us, compute_us = _limits_us(nbytes, flops, before, after)
    read_share = RAM_SHARE * packed_share(RAM_PACKED, weight_bytes)
    parts = memory_us / read_share, compute_us / CPU_SHARES[isa]
    return sum(parts) if isa in ADDS else max(parts)


def _limits_us(nbytes: float, flops: float, before: CeilingRates, after: CeilingRates) -> tuple[float, float]:
    memory_us = nbytes / (before.read_gbytes_per_s + after.read_gbytes_per_s) * 2 / 1e3
    return memory_us, flops / (before.peak_gflops + after.peak_gflops) * 2 / 1e3


@contextmanager
def open_bench(options: KernelOptions) -> Iterator[KernelBench]:
    """Check the options, start the worker threads, measure the limits. Raises UsageError, ResourceError,
    NativeError."""
    machine = probe()
    notes = busy_notes()
    plan = plan_kernels(options, machine)
    of_teams = teams(machine, plan.threads)
    own, *others = of_teams[0].cpus
    with (
        Pool([others, *(team.cpus for team in of_teams[1:])], isa=plan.isa) as pool,
        _bound_to(own),
        closing(CeilingMeter(pool, of_teams, machine)) as meter,
    ):
        run = RunFacts(
            cpu=machine.cpu, threads=pool.threads, isa_reason=plan.isa_reason, version=proa_version(),
            commit=commit(), date=datetime.now(UTC).isoformat(timespec="seconds"), notes=notes,
        )  # fmt: skip
        yield KernelBench(plan, run, pool, of_teams, meter)


@contextmanager
def _bound_to(cpu: int) -> Iterator[None]:
    """Bind the calling thread to `cpu`: it is a worker too, and must not share a core with another."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _timed(trial: Trial, estimate_s: float, seconds: float) -> list[float]:
    """Time as many calls as take about `seconds`; return the seconds of each."""
    wanted = min(max(int(seconds / estimate_s), LEAST_CALLS), MOST_CALLS)
    at_once = max(1, int(_BATCH_S / estimate_s))
    times: list[float] = []
    while len(times) < wanted:
        times += trial.run(3 + len(times), min(at_once, wanted - len(times)))
    return times
