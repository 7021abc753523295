"""Engines over tiny checkpoints whose experts are split over a GPU, real or simulated, and the CPU. Never: tests."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engines import COPIES, Loaded
from on_host import host_executor
from proa.cache.pool import KvStorage, allocate_pool
from proa.engine.building.gpu_plan import top_k
from proa.engine.engine import Engine
from proa.engine.executors.batch import StepLimits
from proa.engine.executors.eager import EagerExecutor, LikeGpu
from proa.engine.executors.executor import Executor
from proa.engine.executors.queues import Queues
from proa.hybrid.co_fetch import CoFetch
from proa.hybrid.copies import Copiers, GpuCopier, HostCopier
from proa.hybrid.model import HybridModel, Parts, Placement, PromptParts
from proa.hybrid.sim_experts import SimExperts
from proa.hybrid.transport import HostTransport, Transport
from proa.hybrid.uploads import GpuUploads, HostUploads, Uploads
from proa.layers.decoder import Decoder
from proa.machine.cost.prefill import CpuExpertCost, PrefillRates
from proa.models.ranks import CPU
from proa.models.spec import Model, Moe
from proa.native.doorbell import JobSize, Service, Way
from proa.native.pool import Pool
from proa.native.weights import Experts
from proa.ops.caches import Caches
from proa.ops.device_table import DeviceOps
from proa.ops.gpu_traits import traits_of
from proa.ops.packed import Memory
from proa.ops.reference import reference
from proa.ops.sizes import prompt_rows
from proa.ops.staging import DeviceRows, Staging
from proa.ops.table import Ops
from proa.weights.checkpoint import open_checkpoint
from proa.weights.load import load_weights

NewHost = Callable[[Pool, Sequence[Experts], JobSize, Service, Way], Transport]
RATES = PrefillRates(1e9, CpuExpertCost(1e-4, 1e-6))  # of streamed prefill at first


@dataclass(frozen=True)
class Split:
    """Placement of experts. share: fraction of each layer's experts on the device, spread over the ids. inclusive: RAM
    has a copy of them as well. in_place: the device reads half of the missed experts in RAM, rounded up. prefill: a
    value of --prefill, with a ring of ring_bytes; None: prompts are not streamed. deferred: --deferred-experts. beside:
    prompts that leave the CPU alone run beside decode steps, on a simulated device one after the other."""

    share: float
    inclusive: bool = False
    spare: int = 0
    in_place: bool = False
    way: Way = Way.NUMBER
    prefill: str | None = None
    ring_bytes: int = 1 << 20
    deferred: int = 0
    beside: bool = False

    def placement(self, spec: Model) -> Placement:
        owners = {}
        for number, moe in enumerate(block.ffn for block in spec.blocks):
            if isinstance(moe, Moe):
                count = round(moe.experts * self.share)
                resident = {i * moe.experts // count for i in range(count)}
                owners[number] = tuple(0 if e in resident else CPU for e in range(moe.experts))
        return Placement(owners, self.inclusive, self.spare, defers=self.deferred > 0)


@dataclass
class Kept:
    """Objects that a test may inspect. registered: RAM that is pinned with the driver."""

    hybrid: HybridModel
    registered: Any
    model: Decoder

    def close(self) -> None:
        self.hybrid.close()
        if self.registered is not None:
            torch.cuda.synchronize()
            self.registered.close()


SPLITS = {
    "all on the CPU": Split(0.0),
    "half": Split(0.5),
    "half, RAM has all": Split(0.5, inclusive=True),
    "all on the GPU": Split(1.0),
}


def _cuda_device_ops(at: torch.device) -> DeviceOps:
    made: DeviceOps = _cuda("ops.cuda_device").device_ops(at, traits_of(at).capability)
    return made


def _cuda_ops(at: torch.device, hybrid: HybridModel, staging: Staging) -> Ops:
    attention = _cuda("ops.cuda_attention").CudaAttention(traits_of(at))
    latent = _cuda("ops.cuda_latent").CudaLatentAttention(traits_of(at))
    made: Ops = _cuda("ops.cuda").CudaOps(at, hybrid.new_experts, staging, traits_of(at), attention, latent).table()
    return made


def hybrid_of(engine: Engine) -> HybridModel:
    """The model of a planned engine that has a GPU, real or simulated."""
    executor: Any = engine.runner.executor
    hybrid = executor._session._session  # the watched one
    assert isinstance(hybrid, HybridModel)
    return hybrid


def load_split(
    folder: Path, pool: Pool, split: Split, device: str, copiers: Callable[[], Copiers] | None = None,
    keep: list[Kept] | None = None, kv: KvStorage | None = None, new_host: NewHost = HostTransport, **override: object,
) -> Loaded:  # fmt: skip
    """device: "sim", "cuda", or "host" for the executor of a GPU, on the CPU. Each executor's experts are added to
    `keep`. new_host: makes the transport of "sim"."""
    checkpoint = open_checkpoint(folder, "auto", override)
    declared = checkpoint.declare()
    spec, cuda = declared.spec, device == "cuda"
    at = torch.device("cuda:0" if cuda else "cpu")

    def make(limits: StepLimits, num_pages: int) -> Executor[Any]:
        staging = Staging(pool, 1 << 20, pinned=cuda)
        ram = Memory(pool, [None] * pool.nodes)
        hybrid = HybridModel(split.placement(spec), at, ram, staging)
        ops = _cuda_ops(at, hybrid, staging) if cuda else reference(torch.bfloat16, hybrid.new_experts)
        model, device_ops = Decoder(spec, ops), _cuda_device_ops(at) if cuda else None
        targets = {
            name: DeviceRows(target, staging) if cuda and isinstance(target, torch.Tensor) else target
            for name, target in model.parameters()
        }
        load_weights(checkpoint, declared, targets, lambda done, total: None, pool, staging.flush)

        def transport(layers: Sequence[Experts], size: JobSize) -> Transport:
            service = Service(deferred=split.deferred)
            if not cuda:
                return new_host(pool, layers, size, service, split.way)
            doorbell: Transport = _cuda("hybrid.gpu_transport").GpuTransport(
                pool, layers, size, at, device_ops, service, split.way
            )
            return doorbell

        chosen = top_k(spec)
        if cuda:
            gpu = _cuda("hybrid.gpu_experts")
            spaces = gpu.GpuSpaces(device_ops, limits.rows, chosen, beside=split.prefill is not None)  # as the queues
            experts = lambda memory, residency, faults: gpu.GpuExperts(memory, residency, spaces, faults)  # noqa: E731
        else:
            experts = lambda memory, residency, faults: SimExperts(memory, residency, pool, faults)  # noqa: E731
        pin = cuda and (split.in_place or split.prefill is not None)
        registered = _cuda("hybrid.pinning").register(ram.spans(), at) if pin else None
        co_fetch = CoFetch(None) if split.in_place else None
        prompts = _prompts(split, at, limits.rows * chosen)
        parts = Parts(experts, transport, copiers or (lambda: _copiers(at)), co_fetch, prompts)
        hybrid.bind(limits.rows, chosen, parts, limits.pass_rows)
        if keep is not None:
            keep.append(Kept(hybrid, registered, model))
        caches = allocate_pool(
            spec, num_pages, limits.page_tokens, torch.bfloat16, at, sequences=limits.sequences + COPIES, kv=kv
        )
        if split.prefill is not None:
            limits = replace(limits, block_rows=prompt_rows(limits.rows))
        if device == "host":
            return host_executor(model, caches, limits, session=hybrid)
        if cuda:
            return _graph_executor(model, caches, limits, split, device_ops, hybrid)
        like = LikeGpu(overlap=True, chunk_rows=limits.rows, beside=split.beside)
        return EagerExecutor(model, caches, limits.page_tokens, hybrid, like=like)

    return Loaded(spec, make)


def _graph_executor(
    model: Decoder, caches: Caches, limits: StepLimits, split: Split, ops: DeviceOps | None, hybrid: HybridModel
) -> Executor[Any]:
    new_queue, at = _cuda("engine.executors.device_queue").CudaQueue, torch.device("cuda:0")
    queues = Queues(new_queue(at, first=True), new_queue(at) if split.prefill is not None else None)
    made: Executor[Any] = _cuda("engine.executors.graphs").GraphExecutor(model, caches, limits, queues, ops, hybrid)
    return made


def _copiers(device: torch.device) -> Copiers:
    if device.type == "cuda":
        return Copiers(GpuCopier(device), GpuCopier(device))
    return Copiers(HostCopier(), HostCopier())


MOST_EXPERTS = 256  # of a tiny model's layers, at least


def _prompts(split: Split, device: torch.device, most_ids: int) -> PromptParts | None:
    if split.prefill is None:
        return None
    most_ids = max(most_ids, MOST_EXPERTS)
    uploads: Uploads[Any] = GpuUploads(device, most_ids) if device.type == "cuda" else HostUploads()
    return PromptParts(uploads, split.ring_bytes, RATES, split.prefill)


def _cuda(module: str) -> object:
    """Import a module that needs Triton."""
    return importlib.import_module(f"proa.{module}")
