"""Predicts a benchmark's figures from its plan and the rates measured beside it (plan/predict.py)."""

from __future__ import annotations

from dataclasses import dataclass

from proa.bench.gpu_rates import measure_gpu
from proa.config.options import EngineOptions
from proa.errors import NativeError, ResourceError
from proa.machine.probe import probe
from proa.machine.rates import GpuRate, RamRate, Rates
from proa.plan.plan import Plan
from proa.plan.predict import decode, prefill, speeds_of
from proa.plan.prepare import Prepared, cpu_flops
from proa.plan.speeds import Speed, Speeds
from proa.plan.work import Work, planned_work


def measured_rates(plan: Plan, asked: EngineOptions, ram: RamRate, gpus: tuple[GpuRate, ...] = ()) -> Rates | None:
    """`ram` and `gpus` with the CPU's products, measured now; None without native kernels, or if they cannot be
    measured."""
    try:
        flops = cpu_flops(asked.machine, probe(), plan.isa) if plan.isa else None
        return None if flops is None else Rates(ram=ram, cpu_flops_per_s=flops, gpus=gpus)
    except (NativeError, ResourceError):
        return None


def predicted_figures(
    plan: Plan, work: Work, rates: Rates, *, prompt_tokens: int, context_tokens: int
) -> dict[str, float | None]:
    """Tokens/s of one request: decode at a context, and its prompt; None if the GPU that computes it is unmeasured."""
    speeds = speeds_of(plan, rates)
    unknown = speeds.gpu is not None and speeds.gpu.per_s is None
    prompt = None if unknown else prefill(plan, work, speeds, prompt_tokens).tokens_per_s
    return {
        "predicted_decode_tokens_per_s": decode(plan, work, speeds, context_tokens).tokens_per_s,
        "predicted_prefill_tokens_per_s": prompt,
    }


def predicted_decode(
    plan: Plan, work: Work, requests: int, context_tokens: float, *, ram_bytes_per_s: float, vram_bytes_per_s: float
) -> float:
    """Tokens/s of `requests` decoding together on a GPU and the CPU, by the bandwidths measured beside them. Every
    expert counts as equally likely, and none moves."""
    speeds = Speeds(
        ram=Speed(per_s=ram_bytes_per_s, source="measured"),
        cpu=Speed(per_s=None, source="not needed"),
        vram=Speed(per_s=vram_bytes_per_s, source="measured"),
    )
    return decode(plan, work, speeds, round(context_tokens), requests).tokens_per_s


@dataclass(frozen=True)
class Planned:
    """The plan of an engine or server that a benchmark starts, and the rates of its GPU, which are measured before it
    starts. gpu: None if there is none, or it is simulated."""

    plan: Plan
    work: Work
    asked: EngineOptions
    gpu: GpuRate | None = None

    def speeds(self, ram: RamRate) -> Speeds | None:
        """`ram` with the other rates, the CPU's products measured now; None as by measured_rates."""
        rates = measured_rates(self.plan, self.asked, ram, () if self.gpu is None else (self.gpu,))
        return None if rates is None else speeds_of(self.plan, rates)


def planned(prepared: Prepared, asked: EngineOptions) -> Planned:
    """Measure the plan's GPU, whose memory should be free. Raises ResourceError if that fails, and what `planned_work`
    raises."""
    plan = prepared.plan
    index = None if plan.gpu is None else plan.gpu.index
    gpu = None if index is None else measure_gpu(index)
    return Planned(plan, planned_work(plan, asked.model, prepared.declared, prepared.checkpoint), asked, gpu)


def rates_used(speeds: Speeds) -> dict[str, float | None]:
    """The CPU's rates, which predictions depend on most, for results that have no other place for them."""
    return {"ram_bytes_per_s": speeds.ram.per_s, "cpu_flops_per_s": speeds.cpu.per_s}


def predicted_throughput(
    plan: Plan, work: Work, speeds: Speeds, *, requests: int, concurrency: int, input_tokens: int, output_tokens: int
) -> dict[str, float | None]:  # fmt: skip
    """Tokens/s of requests that are sent as others end: of decode alone at the mean context, of one prompt alone, and
    of both by turns. Each prompt's steps give the first token of its answer. The server's work is not counted."""
    together = min(concurrency, plan.max_running, requests)
    context = input_tokens + output_tokens // 2
    prompt = prefill(plan, work, speeds, input_tokens)
    rounds, left = divmod(requests, together)
    decoding = decode(plan, work, speeds, context, together)
    step_s = rounds * decoding.seconds + (decode(plan, work, speeds, context, left).seconds if left else 0.0)
    took_s = requests * prompt.seconds + (output_tokens - 1) * step_s
    return {
        "predicted_output_tokens_per_s": requests * output_tokens / took_s,
        "predicted_decode_tokens_per_s": decoding.tokens_per_s,
        "predicted_prefill_tokens_per_s": prompt.tokens_per_s,
    }


def predicted_restart(
    plan: Plan, work: Work, speeds: Speeds, *, prefix_tokens: int, suffix_tokens: int, restore_s: float
) -> dict[str, float | None]:  # fmt: skip
    """Milliseconds to the first token of a prompt: computed whole, with its prefix in memory, and with its prefix
    restored first."""
    computed_s = prefill(plan, work, speeds, prefix_tokens + suffix_tokens).seconds
    hit_s = prefill(plan, work, speeds, suffix_tokens, prefix_tokens).seconds
    return {
        "predicted_computed_ttft_ms": 1e3 * computed_s,
        "predicted_restored_ttft_ms": 1e3 * (restore_s + hit_s),
        "predicted_hit_ttft_ms": 1e3 * hit_s,
    }
