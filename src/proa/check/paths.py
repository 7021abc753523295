"""Which paths a machine has for a model: pure. Never: building them.

A path is a way through the program that a served request can take: a device, an instruction set, a placement of experts
and a type of the KV cache. Each is described by the options that lead to it, so the engine's own plan and builders make
it.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

from proa.config.options import EngineOptions
from proa.models.spec import Model

LIMIT_S = 120  # of a check, from the opened model on, unless the user gives another one
ISAS = ("amx", "avx512-bf16", "avx512", "avx2", "scalar")  # the fastest first


class Streams(enum.Enum):
    """How prompts get the experts in RAM that are copied to the ring (docs/decisions/054)."""

    NOTHING = "nothing is copied"
    WHOLE = "those of a layer at once"
    GROUPS = "those of a layer in groups"


@dataclass(frozen=True)
class Path:
    """options: of the engine. isa: instruction set of the native kernels; "": the plan's. moving: experts must have
    moved between GPU and RAM before rows are compared. streams: what must be copied for prompts; halved: half of the
    experts in RAM, the CPU computes the others. in_place: in small steps the GPU must read half of the missed experts
    in RAM. tiers: prefixes are restored from RAM and files too."""

    name: str
    options: EngineOptions
    isa: str = ""
    moving: bool = False
    streams: Streams = Streams.NOTHING
    halved: bool = False
    in_place: bool = False
    tiers: bool = False


@dataclass(frozen=True)
class NoPath:
    """A path that cannot be checked, and why."""

    name: str
    why: str


@dataclass(frozen=True)
class Facts:
    """What decides on paths. isas: those that this CPU runs. gpu: name of the device that the plan chose ("" if none),
    no_gpu: why there is none. dtype: of activations."""

    isas: tuple[str, ...]
    gpu: str
    no_gpu: str
    dtype: str


def paths(asked: EngineOptions, spec: Model, facts: Facts) -> list[Path | NoPath]:
    """All paths, the most served ones first, since time may not suffice for all."""
    if facts.dtype != "bfloat16":
        why = f"they compute in bfloat16, not {facts.dtype}: use --dtype bfloat16"
        plain = Path(f"CPU, plain torch in {facts.dtype}", on_cpu(asked), tiers=True)
        others = [_with_kv(plain.name, kind, plain.options, spec) for kind in ("bf16", "fp8")]
        return [plain, *others, NoPath("CPU, native kernels", why), NoPath("GPU", why)]
    of_gpu = _on_gpu(asked, spec, facts)
    best = next(isa for isa in ISAS if isa in facts.isas)
    of_isas: list[Path | NoPath] = [
        Path(f"CPU, {isa}", on_cpu(asked), isa, tiers=isa == best) for isa in ISAS if isa in facts.isas
    ]
    of_kv = _with_kv(f"CPU, {best}", "fp8", on_cpu(asked), spec, best)
    lacking = [NoPath(f"CPU, {isa}", "this CPU lacks it") for isa in ISAS if isa not in facts.isas]
    return [*of_gpu[:1], *of_isas[:1], *of_gpu[1:], of_kv, *of_isas[1:], *lacking]


def on_cpu(asked: EngineOptions) -> EngineOptions:
    """The options with everything on the CPU, and no option of a GPU left."""
    return replace(asked, gpus=replace(type(asked.gpus)(), gpu="none"))


def _on_gpu(asked: EngineOptions, spec: Model, facts: Facts) -> list[Path | NoPath]:
    if not facts.gpu:
        return [NoPath("GPU", facts.no_gpu)]
    name = facts.gpu
    if not spec.routed:
        return [Path(name, asked, tiers=True), _with_kv(name, "fp8", asked, spec)]
    asked = replace(asked, gpus=replace(asked.gpus, plan_trial="off"))  # a path is what its name says
    alone = replace(asked, gpus=replace(asked.gpus, gpu_experts="all", gpu_resident_layers=None))
    half = str(max(1, min(moe.experts for moe in spec.routed.values()) // 2))
    divided = replace(asked.gpus, gpu_experts=half, gpu_resident_layers=None)
    static = replace(asked, gpus=replace(divided, expert_placement="uniform", co_fetch="off"))
    moving = replace(asked, gpus=replace(divided, expert_placement="dynamic", co_fetch="off"))
    none = replace(asked, gpus=replace(divided, gpu_experts="none", expert_placement="uniform", co_fetch="off"))
    in_place = replace(asked, gpus=replace(static.gpus, co_fetch="auto", prefill="cpu"))
    return [
        Path(f"{name}, experts in VRAM and RAM", static, tiers=True),
        *_streamed(name, static, none),
        Path(f"{name}, experts that move", moving, moving=True),
        Path(f"{name}, experts read over PCIe", in_place, in_place=True),
        Path(f"{name}, experts in VRAM", alone),
        Path(f"{name}, experts in RAM", none),
        _with_kv(f"{name}, experts in VRAM and RAM", "fp8", static, spec),
    ]


def _streamed(name: str, static: EngineOptions, none: EngineOptions) -> list[Path]:
    """Paths whose prompts pass through the layers one layer at a time, between decode steps."""

    def passing(options: EngineOptions, mode: str) -> EngineOptions:
        scheduler = replace(options.scheduler, max_itl="auto")
        return replace(options, scheduler=scheduler, gpus=replace(options.gpus, prefill=mode))

    split, whole = passing(static, "auto"), passing(static, "stream")
    in_groups = f"{name}, prompts streamed in groups and on CPU"
    return [
        Path(f"{name}, prompts streamed and on CPU", split, streams=Streams.WHOLE, halved=True),
        Path(in_groups, passing(none, "auto"), streams=Streams.GROUPS, halved=True),
        Path(f"{name}, prompts streamed", whole, streams=Streams.WHOLE),
    ]


def _with_kv(name: str, kind: str, options: EngineOptions, spec: Model, isa: str = "") -> Path | NoPath:
    """The path with another type of the KV cache. kind: bf16 or fp8, as --kv-dtype."""
    name = f"{name}, {kind.upper()} KV"
    kinds = [cache for cache in spec.caches if cache.elems_per_token]
    if not kinds:
        return NoPath(name, "the model keeps no keys and values")
    if not all(cache.has_kv_dtype for cache in kinds):
        return NoPath(name, "its cache is kept in the type of activations")
    return Path(name, replace(options, cache=replace(options.cache, kv_dtype=kind)), isa, tiers=True)
