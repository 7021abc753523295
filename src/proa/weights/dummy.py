"""Random weights of the true shapes, for benchmarks. Never: files.

Channel 0 of the residual stream is the constant 1: every token's embedding has it and no layer writes it. A router's
weight on it acts as a bias, which sets how often each expert is chosen. For router "drift", channel 1 is constant too:
1 for tokens of the upper half of the vocabulary, else 0. All other values are random, so that no kernel is faster on
them than on real weights.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import NormalDist

import torch
from torch import Tensor

from proa.errors import UsageError
from proa.models.spec import Model, Moe
from proa.native.fill import Fill, StoredRows, fill
from proa.native.formats import PANEL_ROWS, Stored
from proa.native.pool import Pool
from proa.ops.table import Sink, Target
from proa.weights import random_pool
from proa.weights.dummy_codes import CodedMatrices
from proa.weights.dummy_names import is_coded
from proa.weights.frequencies import ALMOST_ALWAYS, frequencies
from proa.weights.in_parts import in_parts
from proa.weights.random_pool import copies, offset, rows_at_once

_BATCH_BYTES = 32 << 20  # random numbers per worker and batch
_ROUTER_SPREAD = 1.0  # standard deviation of router logits over tokens
_RARELY = 1e-4  # lowest frequency of an expert
_TOPIC_LOGIT = 64.0  # a token of either half of the vocabulary adds this to the logits of that half


def fill_dummy(
    spec: Model, targets: Mapping[str, Target], seed: int, router: str,
    workers: Pool | None = None, flush: Callable[[], None] | None = None, form: str = "bf16",
) -> None:  # fmt: skip
    """Fill `targets` (by Proa's names, any float type) so that activations stay finite and near 1.

    router: "uniform" (all experts equally likely), "zipf" (in each layer the n-th hottest expert is chosen with a
    frequency proportional to 1/n, capped near 1) or "drift" (zipf, but tokens of the vocabulary's upper half have
    other hot experts than those of the lower half, and generation stays in its half). The same seed gives the same
    weights, with `workers` or without; `flush` is called as load_weights calls it. form: weight format of those routed
    experts and linear layers that are sinks; any but bf16 needs workers. Raises UsageError for "drift" if the head
    is tied to the embedding.
    """
    if router == "drift" and spec.tied:
        raise UsageError("The dummy router drift needs an untied head, but this model's is tied.", "Use zipf.")
    pool = torch.randn(random_pool.POOL, generator=torch.Generator().manual_seed(seed))
    depth = 2 * len(spec.blocks)
    numbers = _Numbers(pool, depth, seed, spec.norm_offset, 2 if router == "drift" else 1)
    filling = _Filling(numbers, workers, flush, form) if workers else None
    if form != "bf16":
        _expect_codes(targets, form, filling)
    for name, shape in spec.params():
        target, routes = targets[name], name.endswith(".router.weight")
        if isinstance(target, Tensor) or routes or len(shape) != 2:
            whole = target if isinstance(target, Tensor) else torch.empty(shape)
            if routes:
                _fill_router(whole, spec.routed[int(name.split(".")[1])], router, _seed(seed, name))
            else:
                _fill_rows(whole, name, 0, numbers, len(whole))
            if not isinstance(target, Tensor):
                target.write(0, whole)
            continue
        if filling and filling.add(target, name, _scale(name, shape[1], depth)):
            continue
        step = rows_at_once(shape[1])
        place = torch.empty(min(step, shape[0]), shape[1])
        for first in range(0, shape[0], step):
            rows = place[: shape[0] - first]
            _fill_rows(rows, name, first, numbers, shape[0])
            target.write(first, rows)
    if filling:
        filling.run()


@dataclass(frozen=True)
class _Numbers:
    """The random numbers that parameters are filled from. constants: number of constant residual channels (1 or 2)."""

    pool: Tensor
    depth: int
    seed: int
    norm_offset: float
    constants: int

    def zero_rows(self, name: str) -> int:
        """Number of leading rows to zero, because they would write the constant channels."""
        return self.constants if _writes_residual(name) else 0

    def has_topics(self, name: str) -> bool:
        """True for embedding and head with router "drift", whose rows depend on the token's half of the vocabulary."""
        return self.constants > 1 and name.split(".")[-2] in ("embed", "head")


class _Filling:
    """Collects the parameters that workers fill, as floats or quantised, and runs both batches before one flush."""

    def __init__(self, numbers: _Numbers, workers: Pool, flush: Callable[[], None] | None, form: str) -> None:
        self._flush, self._numbers = flush, numbers
        self._batch = _Batch(numbers.pool, workers, self.run)
        self.coded = CodedMatrices(form, numbers.seed, workers, self.run) if form != "bf16" else None

    def add(self, target: Sink, name: str, scale: float) -> bool:
        """Queue a parameter; False if workers cannot fill it."""
        seed, zero_rows = _seed(self._numbers.seed, name), self._numbers.zero_rows(name)
        if self.coded and is_coded(name):
            self.coded.add(target, scale, seed, zero_rows)
            return True
        if name.endswith("embed.weight") or self._numbers.has_topics(name):
            return False
        return self._batch.add(target, zero_rows, scale, seed)

    def run(self) -> None:
        self._batch.fill()
        if self.coded:
            self.coded.pack()
        if self._flush:
            self._flush()
        self._batch.clear_rows()


def _expect_codes(targets: Mapping[str, Target], form: str, filling: _Filling | None) -> None:
    if filling is None or filling.coded is None:
        raise ValueError(f"random weights in {form} are packed by workers, and there are none")
    for name, target in targets.items():
        if is_coded(name) and not isinstance(target, Tensor):
            target.expect(filling.coded.stored)


class _Batch:
    """Collects jobs that fill sinks from the random numbers, and runs them once they are a batch."""

    def __init__(self, numbers: Tensor, workers: Pool, flush: Callable[[], None]) -> None:
        """flush: calls `fill`, then `clear_rows`."""
        self._numbers, self._workers, self._flush = numbers, workers, flush
        self._scaled: dict[float, Tensor] = {}
        self._jobs: list[Fill] = []
        self._zeroed: list[tuple[Sink, Tensor]] = []
        self._waiting_bytes = 0

    def add(self, target: Sink, zero_rows: int, scale: float, seed: int) -> bool:
        """Queue a matrix of copies of the numbers, see _fill, with `zero_rows` leading zero rows; False if only `write`
        fills the sink."""
        rows, cols = target.shape
        # Jobs are made for rows counted from address 0; _of_copies replaces the addresses, copy by copy.
        counted, covered = StoredRows(Stored.F32, 0, cols * 4), 0
        if scale not in self._scaled:
            self._scaled[scale] = self._numbers * scale
        numbers = self._scaled[scale]
        for _, part, jobs in in_parts(target, counted, self._flush):
            for job in jobs:
                self._jobs += _of_copies(job, numbers, (rows, cols), seed)
            covered += part
            self._waiting_bytes += part * cols * 4
        if not covered:
            return False
        if zero_rows:
            start, count = offset(0, min(rows, rows_at_once(cols)) * cols, seed), min(rows, PANEL_ROWS)
            head = numbers[start : start + count * cols].view(-1, cols).clone()
            head[:zero_rows] = 0.0
            self._zeroed.append((target, head))
        if self._waiting_bytes >= _BATCH_BYTES * self._workers.threads:
            self._flush()
        return True

    def fill(self) -> None:
        if self._jobs:
            fill(self._workers, self._jobs)
        self._jobs, self._waiting_bytes = [], 0

    def clear_rows(self) -> None:
        for target, head in self._zeroed:
            target.write(0, head)
        self._zeroed = []


def _of_copies(job: Fill, numbers: Tensor, shape: tuple[int, ...], seed: int) -> Iterator[Fill]:
    """Split a job, whose rows are counted from address 0, where _fill would begin another copy of the numbers."""
    columns, row_bytes = shape[1], shape[1] * 4
    for part in copies(job, row_bytes, shape, seed):
        start = part.start + part.before * columns
        stored = StoredRows(Stored.F32, numbers.data_ptr() + start * 4, row_bytes)
        yield replace(job.part(part.low, part.high - part.low), rows=stored)


def _writes_residual(name: str) -> bool:
    return name.split(".")[-2] in ("o", "out", "down")


def _scale(name: str, cols: int, depth: int) -> float:
    """Standard deviation of a parameter, such that what layers add to the residual stream stays small beside the
    embedding, whose elements are near 1."""
    if name.endswith("embed.weight"):
        return 1.0
    return (0.5 / math.sqrt(depth) if _writes_residual(name) else 1.0) / math.sqrt(cols)


def _fill_rows(rows: Tensor, name: str, first: int, of: _Numbers, count: int) -> None:
    """Fill rows of a parameter from `first` on, a multiple of rows_at_once; count: rows of the whole parameter."""
    kind = name.split(".")[-2]
    if name.endswith((".bias", ".correction")):
        rows.zero_()
    elif kind.startswith("norm") or kind.endswith("_norm"):
        rows.fill_(1.0 if name.endswith("mixer.norm.weight") else 1.0 - of.norm_offset)
    else:
        _fill(rows, first, of.pool, _scale(name, rows.shape[-1], of.depth), _seed(of.seed, name))
    if kind == "embed":
        rows[:, 0] = 1.0
    if of.has_topics(name):
        upper = (torch.arange(first, first + len(rows)) >= count // 2).to(rows.dtype)
        if kind == "embed":
            rows[:, 1] = upper
        else:  # logits of the upper half: -LOGIT after a token of the lower half, +LOGIT after one of the upper half
            rows[:, 0], rows[:, 1] = -_TOPIC_LOGIT * upper, 2 * _TOPIC_LOGIT * upper
    if first == 0:
        rows[: of.zero_rows(name)] = 0.0


def _seed(seed: int, name: str) -> int:
    return zlib.crc32(f"{seed} {name}".encode())


def _fill(target: Tensor, at: int, pool: Tensor, scale: float, seed: int) -> None:
    """Fill with whole rows of the pool from a random offset; a prime stride keeps rows from repeating soon."""
    rows, cols = target.shape[0], target[0].numel()
    per_copy = rows_at_once(cols)
    for first in range(0, rows, per_copy):
        part = target[first : first + per_copy]
        start = offset(at + first, part.numel(), seed)
        part.copy_(pool[start : start + part.numel()].view(part.shape)).mul_(scale)


def _fill_router(target: Tensor, moe: Moe, router: str, seed: int) -> None:
    """Fill a router: rows of equal norm in random directions, biases on channel 0 that give the wanted frequencies, and
    for "drift" on channel 1 the difference to the other half's biases.

    A token chooses expert e when its logit, normally distributed around bias[e], exceeds a threshold that hardly varies
    between tokens, so bias[e] is the normal quantile of the wanted frequency (up to a constant).
    """
    generator = torch.Generator().manual_seed(seed)
    directions = torch.randn(moe.experts, moe.hidden, generator=generator)
    directions[:, : 2 if router == "drift" else 1] = 0.0
    directions *= _ROUTER_SPREAD / directions.norm(dim=1, keepdim=True)
    normal = NormalDist()
    wanted = [min(max(p, _RARELY), ALMOST_ALWAYS) for p in frequencies(router, moe.experts, moe.top_k)]
    biases = _ROUTER_SPREAD * torch.tensor([normal.inv_cdf(p) for p in wanted])
    if router == "uniform":
        directions[:, 0] = biases
    else:
        directions[:, 0] = biases[torch.randperm(moe.experts, generator=generator)]
    if router == "drift":
        directions[:, 1] = biases[torch.randperm(moe.experts, generator=generator)] - directions[:, 0]
    target.copy_(directions)
