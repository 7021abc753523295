"""Builds a planned model on a simulated GPU, that is on the CPU. Never: Triton, which CPU builds of torch lack."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from proa.cache.pool import KvStorage, allocate_pool
from proa.engine.building.bound import Bound
from proa.engine.building.cpu_side import CpuSide
from proa.engine.building.gpu_plan import (
    HALF_READ,
    STEP_AHEAD,
    decode_tokens,
    first_shared,
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
from proa.engine.executors.eager import EagerExecutor, LikeGpu
from proa.engine.ipc import Loading, Ready
from proa.hybrid.co_fetch import CoFetch
from proa.hybrid.copies import Copiers, HostCopier
from proa.hybrid.cpu_trial import try_cpu
from proa.hybrid.model import HybridModel, Parts, PromptParts
from proa.hybrid.sim_experts import SimExperts
from proa.hybrid.transport import HostTransport, Transport
from proa.hybrid.uploads import HostUploads
from proa.hybrid.ways import take
from proa.layers.decoder import Decoder
from proa.machine.cost.co_fetch import InPlaceRates
from proa.machine.cost.prefill import PrefillRates
from proa.models.spec import Model
from proa.native.doorbell import JobSize, Service
from proa.native.weights import Experts
from proa.obs.units import format_rate
from proa.ops.reference import reference
from proa.ops.staging import Staging
from proa.ops.table import Target
from proa.plan.plan import Plan
from proa.types import Decision

STAGING_BYTES = 32 << 20
PROBE_ROUNDS = 50


class SimBuild:
    """GpuBuild with the CPU in the GPU's place: plain torch, and native kernels for the experts."""

    recorder: None = None

    def __init__(self, plan: Plan, spec: Model, kv: KvStorage) -> None:
        self._plan, self._spec, self._kv = plan, spec, kv
        self._gpu, self._workers = needed(plan)
        torch.set_num_threads(1)
        self._cpu = CpuSide(self._workers, plan.isa)
        self.pool = self._cpu.pool
        staging = Staging(self.pool, STAGING_BYTES, pinned=False)
        self.flush = staging.flush
        self._hybrid = HybridModel(placement_of(self._gpu), torch.device("cpu"), self._cpu.memory, staging)
        self._decisions: list[Decision] = []
        self.model = Decoder(spec, reference(torch.bfloat16, self._hybrid.new_experts))
        self._round_trip_us: float | None = None

    def targets(self) -> dict[str, Target]:
        return dict(self.model.parameters())

    def bind(self, report: Callable[[Loading], None]) -> Bound:
        plan, ram = self._plan, self._plan.roof.bandwidth_bytes_per_s
        parts = Parts(
            lambda memory, residency, faults: SimExperts(
                memory, residency, self.pool, faults, self._gpu.pcie_bytes_per_s
            ),
            self._transport,
            lambda: Copiers(HostCopier(self._gpu.pcie_bytes_per_s), HostCopier()),
            self._co_fetch(ram) if self._gpu.co_fetch else None,
            self._prompts(self._gpu.pcie_bytes_per_s or ram) if self._gpu.ring_bytes else None,
        )
        self._hybrid.bind(plan.max_batch_tokens, top_k(self._spec), parts, plan.pass_tokens)
        trial = PlanTrial(plan, self._spec, self._cpu.memory.bytes_by_format, self._hybrid)
        caches = allocate_pool(
            self._spec, plan.num_pages, plan.page_tokens, torch.bfloat16, sequences=plan.state_slots, kv=self._kv
        )
        self._decisions.append(STEP_AHEAD)
        like = LikeGpu(overlap=True, chunk_rows=plan.max_batch_tokens, cells=plan.cells)
        executor = EagerExecutor(self.model, caches, plan.page_tokens, self._hybrid, like=like)
        tried = trial.result(executor, report)
        self._decisions = with_trial(self._decisions, tried, self._hybrid.choices)
        lender, rows = new_lender(plan, self._hybrid, caches)
        self._decisions += rows
        return Bound(executor, saver_of(plan, self._hybrid), lender)

    def _co_fetch(self, ram_bytes_per_s: float) -> CoFetch:
        if self._gpu.co_fetch_half:
            self._decisions.append(HALF_READ)
            return CoFetch(None)
        rates = InPlaceRates(self._gpu.pcie_bytes_per_s or ram_bytes_per_s, ram_bytes_per_s)
        rate = format_rate(rates.bus_bytes_per_s)
        why = f"simulated, at {rate}; the number of experts depends on the CPU's rate"
        self._decisions.append(Decision("co-fetch", "auto", "on", why))
        return CoFetch(rates)

    def _prompts(self, bytes_per_s: float) -> PromptParts:
        memory = first_shared(self._hybrid)
        rates = PrefillRates(bytes_per_s, try_cpu(memory, self.pool, top_k(self._spec)))
        self._decisions.append(rates_row(rates, memory))
        uploads = HostUploads(self._gpu.pcie_bytes_per_s)
        return PromptParts(uploads, self._gpu.ring_bytes, rates, pass_mode(self._plan))

    def _transport(self, layers: Sequence[Experts], size: JobSize) -> Transport:
        service = Service(
            spin_us=self._workers.spin_us, read_ahead=self._gpu.read_ahead, decode_tokens=decode_tokens(self._plan),
            deferred=self._gpu.deferred,
        )  # fmt: skip
        taken = take(self._gpu.doorbell, lambda way: HostTransport(self.pool, layers, size, service, way), PROBE_ROUNDS)
        self._round_trip_us = taken.round_trip_us
        self._decisions += taken.rows(read_ahead=self._gpu.read_ahead)
        return taken.transport

    def ready(self, load_seconds: float) -> Ready:
        ops = "torch, for a simulated GPU"
        return ready(self._plan, self._cpu, load_seconds, ops, self._round_trip_us, self._decisions)
