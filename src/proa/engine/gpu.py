"""A planned model on a GPU, routed experts shared with the CPU; or on a CPU that stands in for the GPU. Belongs here:
building, loading's other end, binding. Never: decisions, steps.
"""

from __future__ import annotations

import resource
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from proa.cache.pool import allocate_pool
from proa.engine.cpu_side import CpuSide
from proa.engine.executor import EagerExecutor
from proa.engine.graphs import GraphExecutor
from proa.engine.ipc import Ready
from proa.engine.runner import Runner
from proa.engine.spans import step_limits
from proa.hybrid.gpu_experts import GpuExperts, GpuSpaces
from proa.hybrid.model import HybridModel, Placement
from proa.hybrid.sim_experts import SimExperts
from proa.hybrid.transport import GpuTransport, HostTransport, Transport
from proa.layers.decoder import Decoder
from proa.models.spec import Model, Moe
from proa.native.doorbell import JobSize
from proa.native.weights import Experts
from proa.ops.cuda import CudaOps
from proa.ops.reference import reference
from proa.ops.staging import DeviceRows, Staging
from proa.ops.table import Ops, Target
from proa.plan.plan import GpuPlan, Plan, Workers
from proa.types import Decision

STAGING_BYTES_PER_THREAD = 32 << 20  # twice what the loader gives each worker at a time


class GpuBuild:
    """Attention, norms, routers, shared experts and resident experts on the GPU, the other experts on the CPU."""

    def __init__(self, plan: Plan, spec: Model) -> None:
        self._plan, self._spec = plan, spec
        self._gpu, self._workers = _needed(plan)
        self._device = torch.device(self._gpu.device)
        torch.cuda.set_device(self._device)
        share = self._gpu.vram.used_bytes / torch.cuda.get_device_properties(self._device).total_memory
        torch.cuda.memory.set_per_process_memory_fraction(min(1.0, share), self._device)
        torch.set_num_threads(1)
        self._cpu = CpuSide(self._workers, plan.isa, launcher=True)
        self.pool = self._cpu.pool
        self._staging = Staging(self.pool, STAGING_BYTES_PER_THREAD * self.pool.threads, pinned=True)
        self.flush = self._staging.flush
        self._hybrid = HybridModel(_placement(self._gpu), self._device, self._cpu.memory, self._staging)
        self.model = Decoder(spec, CudaOps(self._device, self._hybrid.new_experts).table())
        self._decisions: list[Decision] = []

    def targets(self) -> dict[str, Target]:
        """Tensors of the GPU are filled through the staging."""
        return {
            name: DeviceRows(target, self._staging) if isinstance(target, Tensor) else target
            for name, target in self.model.parameters()
        }

    def runner(self) -> Runner:
        plan = self._plan
        self._cpu.note_unbound()
        chosen = top_k(self._spec)
        spaces = GpuSpaces(plan.max_batch_tokens, chosen)
        self._hybrid.bind(
            plan.max_batch_tokens, chosen, lambda memory: GpuExperts(memory, spaces.of(memory)), self._transport
        )
        if self._cpu.launcher_cpus:
            self.pool.bind_caller(self._cpu.launcher_cpus)
        caches = allocate_pool(self._spec, plan.num_pages, plan.page_tokens, torch.bfloat16, self._device)
        for cache in caches:  # no slot is read before it is written, but masked ones are multiplied with 0
            cache.keys.zero_()
            cache.values.zero_()
        return Runner(
            GraphExecutor(self.model, caches, step_limits(plan), self._device, self._hybrid), plan.page_tokens
        )

    def _transport(self, layers: Sequence[Experts], size: JobSize) -> Transport:
        transport = GpuTransport(
            self.pool, layers, size, self._device, spin_us=self._workers.spin_us, cpus=self._cpu.caller_cpus
        )
        why = f"an empty round trip takes {transport.probe_us():.1f} us"
        self._decisions.append(Decision("CPU and GPU", "auto", "doorbells", why))
        return transport

    def ready(self, load_seconds: float) -> Ready:
        major, minor = torch.cuda.get_device_capability(self._device)
        return _ready(self._plan, self._cpu, load_seconds, f"triton sm_{major}{minor}", self._decisions)


class SimBuild:
    """The same with a CPU in the GPU's place: plain torch, and native kernels for its experts."""

    def __init__(self, plan: Plan, spec: Model) -> None:
        self._plan, self._spec = plan, spec
        self._gpu, self._workers = _needed(plan)
        torch.set_num_threads(1)
        self._cpu = CpuSide(self._workers, plan.isa)
        self.pool = self._cpu.pool
        staging = Staging(self.pool, STAGING_BYTES_PER_THREAD, pinned=False)
        self.flush = staging.flush
        self._hybrid = HybridModel(_placement(self._gpu), torch.device("cpu"), self._cpu.memory, staging)
        self.model = Decoder(spec, reference(torch.bfloat16, self._hybrid.new_experts))

    def targets(self) -> dict[str, Target]:
        return dict(self.model.parameters())

    def runner(self) -> Runner:
        plan = self._plan
        self._hybrid.bind(
            plan.max_batch_tokens, top_k(self._spec), lambda memory: SimExperts(memory, self.pool), self._transport
        )
        caches = allocate_pool(self._spec, plan.num_pages, plan.page_tokens, torch.bfloat16)
        return Runner(EagerExecutor(self.model, caches, plan.page_tokens, self._hybrid), plan.page_tokens)

    def _transport(self, layers: Sequence[Experts], size: JobSize) -> Transport:
        return HostTransport(self.pool, layers, size, spin_us=self._workers.spin_us)

    def ready(self, load_seconds: float) -> Ready:
        return _ready(self._plan, self._cpu, load_seconds, "torch, for a simulated GPU", [])


def top_k(spec: Model) -> int:
    """Of the layers' experts a token, the most."""
    return max((block.ffn.top_k for block in spec.blocks if isinstance(block.ffn, Moe)), default=1)


def _needed(plan: Plan) -> tuple[GpuPlan, Workers]:
    if plan.gpu is None or plan.workers is None:
        raise ValueError("this plan has no GPU, or no workers to pack weights for it")
    return plan.gpu, plan.workers


def _placement(gpu: GpuPlan) -> Placement:
    return Placement(gpu.resident, gpu.inclusive)


def _ready(plan: Plan, cpu: CpuSide, load_seconds: float, ops: str, decisions: Sequence[Decision]) -> Ready:
    gpu, _ = _needed(plan)
    formats = dict(cpu.memory.bytes_by_format)
    vram_bytes = gpu.vram.dense_bytes + gpu.vram.experts_bytes
    return Ready(
        load_seconds=load_seconds,
        weights_bytes=sum(formats.values()) + vram_bytes,
        ops={field.name: ops for field in fields(Ops)},
        decode_threads=sum(cpu.crew.few),
        prefill_threads=sum(cpu.crew.many),
        peak_rss_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        formats=formats,
        pages=cpu.memory.pages(),
        decisions=(*cpu.decisions, *decisions),
    )
