"""The least time of a prompt on a machine of measured rates: pure functions. Never: measuring."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proa.engine.stats import PrefillStats
from proa.machine.cost.prefill import CpuExpertCost
from proa.models.mixers import Attention, LatentAttention, Mixer
from proa.models.ranks import CPU
from proa.models.spec import Model
from proa.plan.plan import GpuPlan
from proa.weights.frequencies import frequencies

SUM_BYTES = 4  # of each value of the CPU's sums, float32


@dataclass(frozen=True)
class Shape:
    """Sizes that decide what a prompt reads and computes. layers: (experts, of these in RAM, bytes of one, top_k) of
    each MoE layer."""

    layers: tuple[tuple[int, int, int, int], ...]
    active_params: int  # parameters used per token, without embedding and head
    head_params: int
    attended: tuple[tuple[int, int | None], ...]  # of each mixer: heads * (key + value dimension), window
    hidden: int

    @classmethod
    def of(cls, spec: Model, gpu: GpuPlan) -> Shape:
        top_k = [ffn.top_k for ffn in spec.routed.values()]
        in_ram = [sum(owner == CPU for owner in owners) for owners in gpu.owners]
        layers = tuple(zip(gpu.experts, in_ram, gpu.expert_bytes, top_k, strict=True))
        head = spec.vocab * spec.hidden
        attended = tuple(map(_attended, spec.mixers))
        return cls(layers, spec.num_active_params - head, head, attended, spec.hidden)

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


@dataclass(frozen=True)
class Limits:
    """Rates of a run, which do not depend on how the experts are divided. own_s: the GPU's measured time per layer and
    launch before the experts, for which the CPU waits; 0: not counted. ram: bytes/s at which experts are read; flops:
    operations per second of the GPU; None: not counted. chunks: launches of each layer."""

    upload: float  # bytes/s over PCIe, each way
    cpu: CpuExpertCost
    ram: float | None = None
    flops: float | None = None
    own_s: float = 0.0
    chunks: int = 1


def bound_s(
    shape: Shape, tokens: int, cached: int, router: str, limits: Limits, *, in_turn: bool = True
) -> float | None:
    """Seconds that no division of the layers' experts can beat at these rates: per layer the least, over all divisions,
    of the longest of the copies, the CPU's part, the GPU's operations, and reading each chosen expert from RAM once.

    in_turn: the CPU's part begins after the GPU's own work and ends with the way back of its sums (for the first chunk;
    those of others overlap); else all of it overlaps. The copies may overlap everything. None if the CPU's or PCIe's
    rates are unknown.
    """
    if not limits.upload or not limits.cpu.seconds(1, 1):
        return None
    rows = -(-tokens // limits.chunks)
    around_s = limits.own_s + SUM_BYTES * rows * shape.hidden / limits.upload if in_turn else 0.0
    gpu_s = 0.0 if limits.flops is None else shape.flops(tokens, cached) / limits.flops / max(1, len(shape.layers))
    total_s = 0.0
    for experts, in_ram, nbytes, top_k in shape.layers:
        often = frequencies(router, experts, top_k)[experts - in_ram :]  # the hottest are in VRAM
        ram_s = 0.0 if not limits.ram else nbytes * sum(read_shares(often, tokens)) / limits.ram
        divided_s = least_division_s(often, nbytes, tokens, limits, around_s)
        total_s += max(gpu_s, ram_s, divided_s)
    return total_s


def read_shares(often: Sequence[float], tokens: int) -> list[float]:
    """The probability that any of `tokens` tokens chooses each expert."""
    return [1 - (1 - min(1.0, share)) ** tokens for share in often]


def least_division_s(often: Sequence[float], nbytes: int, tokens: int, limits: Limits, around_s: float) -> float:
    """The least, over all divisions of a layer's experts, of the longer of the copies and the CPU's part; one expert
    may be divided, so it is below every whole one. often: how often a token chooses each, the hottest first.

    An expert that no token chooses costs neither side anything. The hotter one is, the longer the CPU needs for it in
    times of its copy, so the hottest ones are copied.
    """
    shares = read_shares(often, tokens)
    copies_s, cpu_s = 0.0, around_s + limits.cpu.seconds(sum(shares), tokens * sum(often))
    all_copied_s = nbytes * sum(shares) / limits.upload
    for share, each in zip(shares, often, strict=True):
        copy_s, computed_s = share * nbytes / limits.upload, limits.cpu.seconds(share, tokens * each)
        if copies_s + copy_s >= cpu_s - computed_s:  # both sides end together within this expert
            return min(all_copied_s, copies_s + copy_s * (cpu_s - copies_s) / (copy_s + computed_s))
        copies_s, cpu_s = copies_s + copy_s, cpu_s - computed_s
    return all_copied_s


def prediction_error(before: PrefillStats, after: PrefillStats) -> float | None:
    """Measured over predicted time of passes, less 1; None if no pass was measured."""
    predicted_s = after.predicted_seconds - before.predicted_seconds
    took_s = after.took_seconds - before.took_seconds
    return took_s / predicted_s - 1 if predicted_s > 0 else None
