"""Expert deferral without the doorbell: the semantics in plain torch, for a layer's pairs and for a whole model, and a
transport that calls the native kernels directly. Never: tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from engines import Loaded, load_decoder
from hybrid_engines import Split
from proa.engine.executors.session import NoSession
from proa.models.ranks import CPU
from proa.models.spec import SILU, Gating, Model
from proa.native.doorbell import DECODE_JOB, NOTHING_COUNTED, Counters, JobSize, Service, Way
from proa.native.pool import Pool
from proa.native.weights import Experts, Rows, moe
from proa.ops.bell_block import Bell
from proa.ops.reference import TorchExperts, TorchUnderway
from proa.ops.table import Chosen, NextRouter
from proa.weights.checkpoint import open_checkpoint


def lightest(weights: Tensor, count: int) -> Tensor:
    """bool [T, k]: the `count` choices of least weight of each token, the later ones of equal weights."""
    order = torch.sort(weights, dim=1, descending=True, stable=True).indices
    late = torch.zeros(weights.shape, dtype=torch.bool)
    return late.scatter_(1, order[:, weights.shape[1] - count :], True)


class LateModel(NoSession):
    """The experts of a model in plain torch, and the session that says which steps are decode steps."""

    def __init__(self, spec: Model, split: Split, dtype: torch.dtype) -> None:
        self.owners = {
            block: torch.tensor(owners) for block, owners in split.placement(spec).owners.items() if CPU in owners
        }
        self.deferred, self._dtype = split.deferred, dtype
        self.owed: Tensor | None = None
        self.decodes = False

    @contextmanager
    def decoding(self) -> Iterator[None]:
        self.owed, self.decodes = None, True
        yield
        self.decodes = False
        assert self.owed is None, "the last layer defers nothing"

    def new_experts(
        self, experts: int, hidden: int, width: int, bias: bool = False, gating: Gating = SILU, *, block: int = 0
    ) -> LateExperts:
        return LateExperts(TorchExperts(experts, hidden, width, bias, gating, self._dtype), self, block)


class LateExperts:
    """Implements Experts of ops/table.py."""

    residency = None

    def __init__(self, plain: TorchExperts, model: LateModel, block: int) -> None:
        self._plain, self._model, self._block = plain, model, block
        self.parameters = plain.parameters

    def start(self, x: Tensor, chosen: Chosen) -> TorchUnderway:
        model, ids = self._model, chosen.ids
        if not model.decodes or self._block not in model.owners:
            return self._plain.start(x, chosen)
        late = (ids >= 0) & (model.owners[self._block][ids.clamp(min=0).long()] == CPU)
        late &= lightest(chosen.weights, model.deferred)
        if self._block == max(model.owners):
            late[:] = False
        total = self._of(x, chosen, ~late)
        if model.owed is not None:
            total = (total.float() + model.owed.float()).to(x.dtype)
        model.owed = self._of(x, chosen, late) if self._block != max(model.owners) else None
        return TorchUnderway(total)

    def _of(self, x: Tensor, chosen: Chosen, pairs: Tensor) -> Tensor:
        return self._plain.start(x, Chosen(chosen.ids.where(pairs, -1), chosen.weights)).finish(None, None)

    def foresee(self, x: Tensor, slots: Tensor, following: NextRouter) -> None:
        """Do nothing: these experts' weights need no prefetch."""


def load_late(folder: Path, split: Split, dtype: torch.dtype, **override: object) -> Loaded:
    """A model in plain torch with `split.deferred` experts deferred."""
    spec = open_checkpoint(folder, "auto", override).declare().spec
    late = LateModel(spec, split, dtype)
    return load_decoder(folder, dtype, new_experts=late.new_experts, session=late, **override)


class LateTransport:
    """Implements Transport: experts in RAM are called directly, with the kernels that the doorbell uses."""

    def __init__(
        self, pool: Pool, layers: Sequence[Experts], size: JobSize, service: Service, way: Way = Way.NUMBER
    ) -> None:  # fmt: skip
        self._pool, self._layers, self._deferred = pool, layers, service.deferred
        self._sum = self._owed = torch.zeros(0)

    def push(self, x: Tensor, ids: Tensor, weights: Tensor, up_address: Tensor, layer: int) -> None:
        decode, layer = layer >= DECODE_JOB, layer % DECODE_JOB
        on_cpu = (ids >= 0) & (up_address == 0)
        late = on_cpu & lightest(weights, self._deferred)
        if not decode or layer == len(self._layers) - 1:
            late[:] = False
        self._sum = self._experts(layer, x, ids.where(on_cpu & ~late, -1), weights)
        if decode and layer:
            self._sum += self._owed
        if decode:
            self._owed = self._experts(layer, x, ids.where(late, -1), weights)

    def _experts(self, layer: int, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        y, ids = torch.zeros(x.shape), ids.int().contiguous()
        if bool((ids >= 0).any()):
            rows, out = Rows(x.data_ptr(), x.shape[1]), Rows(y.data_ptr(), y.shape[1], True)
            at = {"ids": ids.data_ptr(), "weights": weights.data_ptr()}
            moe(self._pool, self._layers[layer], rows, out, len(x), top_k=ids.shape[1], **at)
        return y

    def pull(self, out: Tensor) -> None:
        out.copy_(self._sum)

    def foresee(self, x: Tensor, slots: Tensor, following: NextRouter, cpu: Tensor, layer: int) -> None:
        """Do nothing: nothing is prefetched."""

    def arm(self) -> None:
        """Do nothing: nothing sleeps."""

    disarm = check = close = arm

    def bell(self, layer: int) -> Bell | None:
        return None

    def probe_us(self, rounds: int = 200) -> float:
        return 0.0

    def counters(self) -> Counters:
        return NOTHING_COUNTED
