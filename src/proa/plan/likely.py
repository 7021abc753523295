"""Predicts which choices (co-fetch and read ahead, on or off) are likely the fastest for a loaded model: a trial then
compares only these. Pure. Never: measuring, loading.

Decode of one request is predicted as in predict.py, from the plan's roof. Two choices whose predictions differ by less
than the error of a prediction cannot be told apart without a trial (docs/planning.md).
"""

from __future__ import annotations

from itertools import product

from proa.hybrid.choices import Choices
from proa.machine.cost.co_fetch import InPlaceRates
from proa.plan.attained import RAM_SHARE, VRAM_SHARE
from proa.plan.fixed_costs import CROSSING_S, GPU_LAYER_S, HOST_S
from proa.plan.plan import GpuPlan, Plan, step_seconds

ERROR = 0.25  # of predictions: most are within it, the exceptions are listed in docs/planning.md


def likely(plan: Plan, able: Choices, in_place: InPlaceRates | None) -> tuple[Choices, ...]:
    """The default, which is everything that the model is able to do; then the other choices that are predicted to take
    at most 1 + ERROR times as long as the fastest. in_place: as measured at start; None: unknown."""
    every = [
        Choices(*on) for on in product(*((True, False)[not is_able :] for is_able in (able.co_fetch, able.read_ahead)))
    ]
    seconds = {choices: decode_seconds(plan, choices, in_place) for choices in every}
    most_s = (1 + ERROR) * min(seconds.values())
    return every[0], *(choices for choices in every[1:] if seconds[choices] <= most_s)


def decode_seconds(plan: Plan, choices: Choices, in_place: InPlaceRates | None) -> float:
    """Predicted seconds of a decode step of one request. Raises ValueError for a plan without a GPU."""
    gpu, roof = plan.gpu, plan.roof
    if gpu is None:
        raise ValueError("only a plan with a GPU has these choices")
    ram = RAM_SHARE * roof.bandwidth_bytes_per_s
    vram, rate = roof.vram[0][0], VRAM_SHARE * roof.vram[0][0].bandwidth_bytes_per_s
    dense_s, resident_s = vram.dense_bytes_per_token / rate, vram.expert_bytes_per_token / rate
    beside = _beside(in_place, ram) if choices.co_fetch else 0.0
    ram_s = roof.bytes_per_token / (ram + beside)
    return _fixed_s(gpu) + step_seconds(dense_s, resident_s, ram_s, read_ahead=choices.read_ahead)


def _beside(in_place: InPlaceRates | None, ram: float) -> float:
    """Bytes/s of experts that the GPU reads in RAM beside the CPU, as in co_fetch_shares."""
    return 0.0 if in_place is None else max(0.0, min(in_place.bus_bytes_per_s, in_place.ram_bytes_per_s - ram))


def _fixed_s(gpu: GpuPlan) -> float:
    """Fixed costs of the MoE layers, which are nearly all layers of the models that are split."""
    return HOST_S if gpu.simulated else len(gpu.blocks) * (GPU_LAYER_S + CROSSING_S)
