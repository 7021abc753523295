"""Parts of building that GpuBuild and SimBuild share. Never: Triton, CUDA."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from proa.engine.building.cpu_side import CpuSide
from proa.engine.count_saver import CountSaver
from proa.engine.ipc import Ready
from proa.errors import ResourceError
from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.model import HybridModel, Placement
from proa.machine.cost.prefill import PrefillRates
from proa.models.spec import Model
from proa.obs.units import format_rate
from proa.ops.sizes import LINEAR_ROWS
from proa.plan.plan import GpuPlan, Plan, Workers
from proa.types import Decision

STEP_AHEAD = Decision("step ahead", "auto", "on", "a step is launched before the last one's tokens are read")  # 026
HALF_READ = Decision("co-fetch", "auto", "half", "half of the missed experts, whatever the rates")


def top_k(spec: Model) -> int:
    """Largest top_k of any MoE layer; 1 without MoE layers."""
    return max((ffn.top_k for ffn in spec.routed.values()), default=1)


def decode_tokens(plan: Plan) -> int:
    """With --deterministic, the most tokens of a job for which the CPU's experts use decode kernels; else 0."""
    return plan.max_running if plan.deterministic else 0


def least_rows(plan: Plan) -> int:
    """Rows for which the GPU's kernels are chosen if a launch has fewer: with --deterministic those of a full decode
    step, unless its size is the only one (sizes.deterministic_buckets)."""
    return plan.max_running if plan.deterministic and plan.max_running <= LINEAR_ROWS else 1


def pass_mode(plan: Plan) -> str:
    """The --prefill mode of passes. With --deterministic they copy all experts in RAM: measured rates must not decide
    where an expert is computed."""
    return "stream" if plan.deterministic else needed(plan)[0].prefill


def needed(plan: Plan) -> tuple[GpuPlan, Workers]:
    """The plan's GPU and CPU workers. Raises ValueError if it has none."""
    if plan.gpu is None or plan.workers is None:
        raise ValueError("a plan with a GPU and CPU workers is required; this one lacks one of them")
    return plan.gpu, plan.workers


def cuda_index(gpu: GpuPlan, uuids: Sequence[str]) -> int:
    """CUDA's index of the planned GPU. uuids: those of CUDA's visible devices, in order. Raises ResourceError."""
    if gpu.index is None:
        raise ValueError("a simulated GPU has no CUDA index")
    wanted = gpu.uuid.removeprefix("GPU-")
    matching = [i for i, uuid in enumerate(uuids) if uuid.removeprefix("GPU-") == wanted]
    if len(matching) == 1:
        return matching[0]
    if len(uuids) == 1 and gpu.index == 0:  # a virtual GPU may have two UUIDs, but here is only one device
        return 0
    raise ResourceError(
        f"{gpu.name} ({gpu.uuid or 'without a UUID'}) is not among the {len(uuids)} GPUs that CUDA shows.",
        "Set CUDA_DEVICE_ORDER=PCI_BUS_ID, or show it alone with CUDA_VISIBLE_DEVICES.",
    )


def placement_of(gpu: GpuPlan) -> Placement:
    trace = None if gpu.trace is None else Path(gpu.trace)
    owners = dict(zip(gpu.blocks, gpu.owners, strict=True))
    counted = gpu.save_counts is not None
    return Placement(owners, gpu.inclusive, gpu.spare, counted, trace, gpu.rank, defers=gpu.deferred > 0)


def first_shared(hybrid: HybridModel) -> LayerMemory:
    """The first layer some of whose experts the CPU computes."""
    return next(layer.memory for layer in hybrid.layers if layer.memory.cpu_computes)


def rates_row(rates: PrefillRates, memory: LayerMemory) -> Decision:
    """The start-up row of the rates that divide prompts at first."""
    nbytes = memory.shape.up.matrix_bytes + memory.shape.down.matrix_bytes
    copy_us, cpu = 1e6 * nbytes / rates.copy_bytes_per_s, rates.cpu
    got = f"{format_rate(rates.copy_bytes_per_s)} to the GPU"
    on_cpu = f"{1e6 * cpu.expert_s:.0f} us on the CPU and {1e6 * cpu.pair_s:.1f} us for each token"
    why = f"an expert takes {copy_us:.0f} us to copy, or {on_cpu}; measured again in service"
    return Decision("prefill rates", "auto", got, why)


def saver_of(plan: Plan, hybrid: HybridModel) -> CountSaver | None:
    """The writer of expert counts, if the plan saves them. `hybrid` must be bound."""
    gpu, _ = needed(plan)
    if gpu.save_counts is None or hybrid.counting is None:
        return None
    return CountSaver(hybrid.counting, Path(gpu.save_counts), plan.model, gpu.blocks, gpu.experts)


def ready(
    plan: Plan, cpu: CpuSide, load_seconds: float, ops: str, round_trip_us: float | None, decisions: Sequence[Decision]
) -> Ready:
    """The Ready message of an engine with a planned GPU."""
    vram = needed(plan)[0].vram
    made = cpu.ready(load_seconds, ops, vram.dense_bytes + vram.experts_bytes, decisions)
    return msgspec.structs.replace(made, round_trip_us=round_trip_us)
