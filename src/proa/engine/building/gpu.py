"""Builds a planned model on a GPU, its routed experts split with the CPU, and binds it after loading. Never: decisions,
steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from proa.cache.pool import KvStorage, allocate_pool
from proa.engine.building import latent_trial
from proa.engine.building.attention_trial import AttentionTrial
from proa.engine.building.bound import Bound
from proa.engine.building.compile_ahead import compile_ahead
from proa.engine.building.compiling import Compiling
from proa.engine.building.cpu_side import CpuSide
from proa.engine.building.gpu_plan import (
    HALF_READ,
    STEP_AHEAD,
    cuda_index,
    decode_tokens,
    first_shared,
    least_rows,
    needed,
    pass_mode,
    placement_of,
    rates_row,
    ready,
    saver_of,
    top_k,
)
from proa.engine.building.lending import new_lender
from proa.engine.building.plan_trial import PlanTrial, with_trial
from proa.engine.building.start_time import WARM_UP_S, within
from proa.engine.building.timeline import Timeline
from proa.engine.building.warm_up import warm_up
from proa.engine.executors.batch import step_limits
from proa.engine.executors.device_queue import CudaQueue
from proa.engine.executors.graphs import GraphExecutor
from proa.engine.executors.queues import Queues
from proa.engine.ipc import Loading, Ready
from proa.hybrid.co_fetch import CoFetch
from proa.hybrid.copies import Copiers, GpuCopier
from proa.hybrid.cpu_reads import CpuReads
from proa.hybrid.cpu_trial import try_cpu
from proa.hybrid.gpu_experts import GpuExperts, GpuSpaces, ReadInPlace
from proa.hybrid.gpu_transport import GpuTransport
from proa.hybrid.model import HybridModel, Parts, PromptParts
from proa.hybrid.pinning import Registered, register
from proa.hybrid.read_together import read_together
from proa.hybrid.transport import Transport
from proa.hybrid.uploads import GpuUploads, measured_upload
from proa.hybrid.ways import take
from proa.layers.decoder import Decoder
from proa.machine.cost.prefill import PrefillRates
from proa.models.names import Declared
from proa.native.doorbell import JobSize, Service
from proa.native.weights import Experts
from proa.obs.units import format_bytes
from proa.ops.ahead import load, settle, watch
from proa.ops.caches import Caches
from proa.ops.cuda import CudaOps
from proa.ops.cuda_attention import CudaAttention
from proa.ops.cuda_device import device_ops
from proa.ops.cuda_latent import CudaLatentAttention
from proa.ops.gpu_traits import traits_of
from proa.ops.staging import DeviceRows, Staging
from proa.ops.table import Target
from proa.plan.plan import Plan
from proa.types import Decision
from proa.weights.checkpoint import Checkpoint

log = logging.getLogger(__name__)

PROBE_ROUNDS = 200  # empty jobs in one graph that measure the doorbell's round trip
STAGING_BYTES_PER_THREAD = 32 << 20  # twice the loader's batch per worker


class GpuBuild:
    """Attention, norms, routers, shared experts and resident experts on the GPU, the other experts on the CPU."""

    recorder: None = None

    def __init__(
        self, plan: Plan, checkpoint: Checkpoint, declared: Declared, kv: KvStorage, timeline: Timeline
    ) -> None:  # fmt: skip
        self._timeline = timeline
        timeline.mark("Triton")
        settle()
        ahead = partial(compile_ahead, plan, checkpoint, declared, launchers=True)
        self._compiling = Compiling(ahead, load)  # before CUDA is initialised
        self._plan, self._spec, self._kv = plan, declared.spec, kv
        spec = declared.spec
        self._gpu, self._workers = needed(plan)
        uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
        index = cuda_index(self._gpu, uuids)
        self._device = torch.device("cuda", index)
        # Prompts of all lengths reuse each other's memory. With segments of fixed size torch reserved 1.4 GiB more than
        # planned after prompts of 2048, 8192 and 16384 tokens (DeepSeek-V3, 6 layers, H200).
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
        torch.cuda.set_device(self._device)
        self._compiling.load_after(partial(torch.cuda.set_device, self._device))
        timeline.mark("CUDA")
        share = self._gpu.vram.used_bytes / torch.cuda.get_device_properties(self._device).total_memory
        torch.cuda.memory.set_per_process_memory_fraction(min(1.0, share), self._device)
        torch.set_num_threads(1)
        self._cpu = CpuSide(self._workers, plan.isa)
        self.pool = self._cpu.pool
        self._staging = Staging(self.pool, STAGING_BYTES_PER_THREAD * self.pool.threads, pinned=True)
        self.flush = self._staging.flush
        self._hybrid = HybridModel(placement_of(self._gpu), self._device, self._cpu.memory, self._staging)
        self._traits = traits_of(self._device)
        self._trial = AttentionTrial(plan, spec, self._device, self._traits)
        least = least_rows(plan)
        self._attention = CudaAttention(self._traits, least, deterministic=plan.deterministic)
        self._latent = CudaLatentAttention(self._traits, least)
        ops = CudaOps(
            self._device, self._hybrid.new_experts, self._staging, self._traits, self._attention, self._latent, least
        )
        self.model, self._ops = Decoder(spec, ops.table()), device_ops(self._device, self._traits.capability)
        self._decisions: list[Decision] = []
        self._round_trip_us: float | None = None
        if index != self._gpu.index:
            why = "CUDA numbers GPUs in another order than the driver: this device has the planned GPU's UUID"
            self._decisions.append(Decision("GPU", self._gpu.device, str(self._device), why))

    def targets(self) -> dict[str, Target]:
        """Targets of the loader, by parameter; tensors on the GPU are filled through the staging buffer."""
        return {
            name: DeviceRows(target, self._staging) if isinstance(target, Tensor) else target
            for name, target in self.model.parameters()
        }

    def bind(self, report: Callable[[Loading], None]) -> Bound:
        plan = self._plan
        self._cpu.note_unbound()
        self._decisions.append(self._compiling.wait(report))  # before the measurements below, which it would disturb
        self._timeline.mark("kernels")
        chosen = top_k(self._spec)
        spaces = GpuSpaces(
            self._ops, plan.max_batch_tokens, chosen, fp8=self._gpu.fp8_activations,
            beside=plan.prompts_may_run_beside, least_rows=least_rows(plan),
        )  # fmt: skip
        co_fetch, registered = None, self._register()
        if registered is not None:
            co_fetch = self._co_fetch(spaces, registered)
        parts = Parts(
            lambda memory, residency, faults: GpuExperts(memory, residency, spaces, faults),
            self._transport,
            lambda: Copiers(GpuCopier(self._device), GpuCopier(self._device)),
            co_fetch,
            None if registered is None else self._prompts(registered),
        )
        self._timeline.mark("read in place")
        self._hybrid.bind(plan.max_batch_tokens, chosen, parts, plan.pass_tokens)
        self._timeline.mark("doorbell")
        trial = PlanTrial(plan, self._spec, self._cpu.memory.bytes_by_format, self._hybrid)
        caches = allocate_pool(
            self._spec, plan.num_pages, plan.page_tokens, torch.bfloat16, self._device, sequences=plan.state_slots,
            kv=self._kv,
        )  # fmt: skip
        self._choose_attention(caches)
        executor = GraphExecutor(
            self.model, caches, step_limits(plan), self._queues(), self._ops, self._hybrid,
            deterministic=plan.deterministic,
        )  # fmt: skip
        self._timeline.mark("caches")
        tasks = executor.warm_ups(compiled=self._compiling.progress.complete)
        self._decisions.append(warm_up(tasks, report, within(WARM_UP_S)))
        watch(_note_late)
        self._decisions.append(STEP_AHEAD)
        tried = trial.result(executor, report, executor.keep_graphs)
        self._decisions = with_trial(self._decisions, tried, self._hybrid.choices)
        self._timeline.mark("plan trial")
        lender, rows = new_lender(plan, self._hybrid, caches)
        self._decisions += rows
        return Bound(executor, saver_of(plan, self._hybrid), lender)

    def _queues(self) -> Queues:
        """Prompts have a queue of their own if they can run beside decode steps, whose kernels then come first."""
        sleeps = not self._gpu.gpu_only
        if self._hybrid.streaming is None or not self._plan.prompts_may_run_beside:
            return Queues(CudaQueue(self._device, sleeps=sleeps))
        return Queues(CudaQueue(self._device, sleeps=sleeps, first=True), CudaQueue(self._device, sleeps=sleeps))

    def _choose_attention(self, caches: Caches) -> None:
        segmented, row = self._trial.result(caches)
        if segmented is not None:
            self._attention.bind(segmented)
        expanded, latent_row = latent_trial.result(self._plan, self._spec, caches, self._traits)
        if expanded is not None:
            self._latent.bind(expanded)
        self._decisions += filter(None, (row, latent_row))

    def _register(self) -> Registered | None:
        """Pin the experts in RAM with the driver, if they are copied or read in place."""
        if not self._gpu.spare and not self._gpu.co_fetch and not self._gpu.ring_bytes:
            return None
        registered = register(self._cpu.memory.spans(), self._device)
        self._decisions.append(Decision("pinned RAM", "auto", format_bytes(registered.nbytes), registered.why))
        return registered

    def _prompts(self, registered: Registered) -> PromptParts | None:
        """The parts of streamed prefill, with measured rates; None if the plan has no ring."""
        gpu = self._gpu
        if not gpu.ring_bytes:
            return None
        if not registered.complete:
            why = f"experts in RAM are computed by the CPU: {registered.why}"
            self._decisions.append(Decision("prefill", gpu.prefill, "cpu", why))
            return None
        memory = first_shared(self._hybrid)
        rates = PrefillRates(measured_upload(memory, self._device), try_cpu(memory, self.pool, top_k(self._spec)))
        self._decisions.append(rates_row(rates, memory))
        layers = self._hybrid.layers
        counts = len(layers) * max(layer.memory.experts for layer in layers)  # fetched too
        most_ids = max(counts, self._plan.max_batch_tokens * top_k(self._spec))
        uploads = GpuUploads(self._device, most_ids)
        return PromptParts(uploads, gpu.ring_bytes, rates, pass_mode(self._plan))

    def _co_fetch(self, spaces: GpuSpaces, registered: Registered) -> CoFetch | None:
        """Measure how fast the GPU reads pinned experts in place, unless the plan fixes how many it reads."""
        if not self._gpu.co_fetch:
            return None
        if not registered.in_place:
            why = f"the GPU cannot read pinned RAM at the CPU's addresses: {registered.why}"
            self._decisions.append(Decision("co-fetch", "auto", "off", why))
            return None
        if self._gpu.co_fetch_half:
            self._decisions.append(HALF_READ)
            return CoFetch(None)
        memory = first_shared(self._hybrid)
        cpu = CpuReads(memory, self.pool, top_k(self._spec))
        together = read_together(ReadInPlace(memory, spaces), cpu)
        if together is None:
            why = "the rates at which GPU and CPU read RAM at the same time could not be measured"
            self._decisions.append(Decision("co-fetch", "auto", "off", why))
            return None
        why = f"{together}; the number of experts depends on the CPU's rate in service"
        self._decisions.append(Decision("co-fetch", "auto", "on", why))
        return CoFetch(together.rates)

    def _transport(self, layers: Sequence[Experts], size: JobSize) -> Transport:
        service = Service(
            spin_us=self._workers.spin_us, cpus=self._cpu.caller_cpus, read_ahead=self._gpu.read_ahead,
            decode_tokens=decode_tokens(self._plan), deferred=self._gpu.deferred,
        )  # fmt: skip
        taken = take(
            self._gpu.doorbell,
            lambda way: GpuTransport(self.pool, layers, size, self._device, self._ops, service, way),
            PROBE_ROUNDS,
        )
        self._round_trip_us = taken.round_trip_us
        self._decisions += taken.rows(read_ahead=self._gpu.read_ahead)
        return taken.transport

    def ready(self, load_seconds: float) -> Ready:
        ops = f"triton sm_{self._traits.capability}"
        return ready(self._plan, self._cpu, load_seconds, ops, self._round_trip_us, self._decisions)


def _note_late(kernel: str, seconds: float) -> None:
    log.warning("The kernel %s was not ready: a step waited %.2f s for it. Please report this model.", kernel, seconds)
