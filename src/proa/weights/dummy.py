"""Random weights of the true shapes, for benchmarks. Never: files.

Channel 0 of the residual stream is made the constant 1: every token's embedding has it and no layer writes
it. A router reads it as a bias, so that the experts' frequencies can be chosen, which weights alone that act
on random inputs cannot do. Where routing drifts, channel 1 is as constant and tells two halves of the vocabulary apart.
All other numbers are random, so that nothing is accidentally easy to compute.
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
from proa.weights.frequencies import ALMOST_ALWAYS, ROUTERS, frequencies
from proa.weights.in_parts import in_parts
from proa.weights.random_pool import copies, offset, rows_at_once

_BATCH_BYTES = 32 << 20  # of random numbers for each worker
_ROUTER_SPREAD = 1.0  # standard deviation of router logits over tokens
_RARELY = 1e-4
_TOPIC_LOGIT = 64.0  # by so much tokens of one half of the vocabulary are likelier after tokens of that half


def fill_dummy(
    spec: Model, targets: Mapping[str, Target], seed: int, router: str,
    workers: Pool | None = None, flush: Callable[[], None] | None = None, form: str = "bf16",
) -> None:  # fmt: skip
    """Fill `targets` (by our names, any float type) so that activations stay finite and near 1.

    router: "uniform" (all experts alike), "zipf" (in each layer the n-th hottest expert is chosen with a
    frequency proportional to 1/n, capped near 1) or "drift" (the same, but tokens of the vocabulary's upper half have
    other hot experts than those of the lower half, and each half is followed by its own). The same seed gives the same
    weights, whether `workers` fill sinks or not; `flush` is called as load_weights calls it. form: of routed experts
    and linear layers, as far as they are sinks; others than bf16 need workers. Raises UsageError for another router,
    and for one that drifts where the head is the embedding.
    """
    if router not in ROUTERS:
        raise UsageError(f"There is no dummy router {router!r}.", "Use uniform, zipf or drift.", param="dummy_router")
    if router == "drift" and spec.tied:
        raise UsageError("Dummy routing drifts by the head, which is the embedding here.", "Use zipf.")
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
                _fill_router(whole, _moe(spec, name), router, _seed(seed, name))
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
    """Where parameters take their numbers from; `constants`: so many channels of the residual stream are constant."""

    pool: Tensor
    depth: int
    seed: int
    norm_offset: float
    constants: int

    def zero_rows(self, name: str) -> int:
        """How many rows, the first ones, would write these channels."""
        return self.constants if _writes_residual(name) else 0

    def has_topics(self, name: str) -> bool:
        """Its rows are tokens, whose half of the vocabulary matters."""
        return self.constants > 1 and name.split(".")[-2] in ("embed", "head")


class _Filling:
    """What workers fill: numbers and codes. Both wait in one staging, so that all is there before it is flushed."""

    def __init__(self, numbers: _Numbers, workers: Pool, flush: Callable[[], None] | None, form: str) -> None:
        self._flush, self._numbers = flush, numbers
        self._batch = _Batch(numbers.pool, workers, self.run)
        self.coded = CodedMatrices(form, numbers.seed, workers, self.run) if form != "bf16" else None

    def add(self, target: Sink, name: str, scale: float) -> bool:
        """Whether it will be filled."""
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
    """Sinks that workers fill from the random numbers, once enough have come together."""

    def __init__(self, numbers: Tensor, workers: Pool, flush: Callable[[], None]) -> None:
        """flush: calls `fill`, then `clear_rows`."""
        self._numbers, self._workers, self._flush = numbers, workers, flush
        self._scaled: dict[float, Tensor] = {}
        self._jobs: list[Fill] = []
        self._zeroed: list[tuple[Sink, Tensor]] = []
        self._waiting_bytes = 0

    def add(self, target: Sink, zero_rows: int, scale: float, seed: int) -> bool:
        """Whether it will be filled: a matrix of copies of the numbers, see _fill; the first `zero_rows` are zero."""
        rows, cols = target.shape
        # Rows are asked for as if they followed one another from address 0, then looked up copy by copy.
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
    """The job, whose rows are counted from address 0, cut where _fill begins another copy of the numbers."""
    columns, row_bytes = shape[1], shape[1] * 4
    for part in copies(job, row_bytes, shape, seed):
        start = part.start + part.before * columns
        stored = StoredRows(Stored.F32, numbers.data_ptr() + start * 4, row_bytes)
        yield replace(job.part(part.low, part.high - part.low), rows=stored)


def _writes_residual(name: str) -> bool:
    return name.split(".")[-2] in ("o", "out", "down")


def _scale(name: str, cols: int, depth: int) -> float:
    """What layers add to the residual stays small beside the embedding, whose elements are near 1."""
    if name.endswith("embed.weight"):
        return 1.0
    return (0.5 / math.sqrt(depth) if _writes_residual(name) else 1.0) / math.sqrt(cols)


def _fill_rows(rows: Tensor, name: str, first: int, of: _Numbers, count: int) -> None:
    """Rows of a parameter of `count` from `first` on; `first` is a multiple of rows_at_once."""
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
        else:  # after a token of the lower half -LOGIT for the upper ones, after one of the upper half +LOGIT
            rows[:, 0], rows[:, 1] = -_TOPIC_LOGIT * upper, 2 * _TOPIC_LOGIT * upper
    if first == 0:
        rows[: of.zero_rows(name)] = 0.0


def _seed(seed: int, name: str) -> int:
    return zlib.crc32(f"{seed} {name}".encode())


def _fill(target: Tensor, at: int, pool: Tensor, scale: float, seed: int) -> None:
    """Whole rows from the pool, starting anywhere; a prime stride keeps rows from repeating soon."""
    rows, cols = target.shape[0], target[0].numel()
    per_copy = rows_at_once(cols)
    for first in range(0, rows, per_copy):
        part = target[first : first + per_copy]
        start = offset(at + first, part.numel(), seed)
        part.copy_(pool[start : start + part.numel()].view(part.shape)).mul_(scale)


def _moe(spec: Model, name: str) -> Moe:
    ffn = spec.blocks[int(name.split(".")[1])].ffn
    if not isinstance(ffn, Moe):
        raise TypeError(f"{name} is a router, but {ffn} has none")
    return ffn


def _fill_router(target: Tensor, moe: Moe, router: str, seed: int) -> None:
    """Rows of one length in random directions, and the biases that give the frequencies, on channel 0; on channel 1
    what they differ by where that is 1.

    A token chooses expert e when its logit, normal around bias[e], exceeds a threshold that hardly varies
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
