"""The least time of a prompt on a machine of measured rates: pure functions. Never: measuring."""

from __future__ import annotations

from dataclasses import dataclass

from proa.engine.stats import PrefillStats
from proa.machine.cost.prefill import CpuExpertCost, PrefillRates, divisions
from proa.models.mixers import Attention, LatentAttention, Mixer
from proa.models.ranks import CPU
from proa.models.spec import Model
from proa.plan.plan import GpuPlan


@dataclass(frozen=True)
class Shape:
    """What a prompt reads and computes. layers: (experts, of these in RAM, bytes of one, top_k) of each MoE layer."""

    layers: tuple[tuple[int, int, int, int], ...]
    active_params: int  # that a token multiplies with, without the embedding and the head
    head_params: int
    attended: tuple[tuple[int, int | None], ...]  # of each mixer: heads * (key + value dimension), window

    @classmethod
    def of(cls, spec: Model, gpu: GpuPlan) -> Shape:
        top_k = [ffn.top_k for ffn in spec.routed.values()]
        in_ram = [sum(owner == CPU for owner in owners) for owners in gpu.owners]
        layers = tuple(zip(gpu.experts, in_ram, gpu.expert_bytes, top_k, strict=True))
        head = spec.vocab * spec.hidden
        attended = tuple(map(_attended, spec.mixers))
        return cls(layers, spec.num_active_params - head, head, attended)

    @property
    def in_ram_bytes(self) -> int:
        """Bytes of the experts in RAM, each once."""
        return sum(in_ram * nbytes for _, in_ram, nbytes, _ in self.layers)

    def flops(self, tokens: int, cached: int) -> float:
        """Operations for `tokens` tokens behind `cached` ones: two per weight, and attention to all tokens before. The
        head computes one row."""
        all_pairs = tokens * cached + tokens * (tokens + 1) / 2
        attention = sum(width * min(all_pairs, tokens * (window or all_pairs)) for width, window in self.attended)
        return 2.0 * (self.active_params * tokens + self.head_params + attention)


def _attended(mixer: Mixer) -> tuple[int, int | None]:
    """The least multiplications per (query, key) pair of any method (Mixer.pair_flops counts those of the kernels), and
    the window."""
    match mixer:
        case Attention():
            return 2 * mixer.heads * mixer.head_dim, mixer.window
        case LatentAttention():
            return mixer.heads * (mixer.key_dim + mixer.rope.dim + mixer.value_dim), None
        case _:
            return 0, None


def bound_s(
    shape: Shape, tokens: int, upload: float, rates: PrefillStats, flops_per_s: float | None, cached: int
) -> float | None:
    """Seconds that no division of the layers' experts can beat: per layer the longer of copies and the CPU's jobs, at
    the best division by these rates, and of the GPU's operations. upload: bytes/s over PCIe. None if it is unknown how
    fast the CPU is."""
    if not upload or (not rates.cpu_expert_seconds and not rates.cpu_pair_seconds):
        return None
    cost = CpuExpertCost(rates.cpu_expert_seconds, rates.cpu_pair_seconds)
    computed_s = 0.0 if flops_per_s is None else shape.flops(tokens, cached) / flops_per_s / max(1, len(shape.layers))
    total_s = 0.0
    for experts, in_ram, nbytes, top_k in shape.layers:
        found = divisions(in_ram, nbytes, tokens, top_k * in_ram / experts, PrefillRates(upload, cost))
        total_s += max(computed_s, min(division.seconds for division in found))
    return total_s


def prediction_error(before: PrefillStats, after: PrefillStats) -> float | None:
    """Measured over predicted time of passes, less 1; None if no pass was measured."""
    predicted_s = after.predicted_seconds - before.predicted_seconds
    took_s = after.took_seconds - before.took_seconds
    return took_s / predicted_s - 1 if predicted_s > 0 else None
