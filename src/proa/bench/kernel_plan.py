"""Options of `proa bench kernels` -> what is measured, checked before anything is. Never: measuring, weights."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from proa.bench.kernel_cases import (
    ALL,
    FORMATS,
    TOKENS,
    Shape,
    WeightFormat,
    parse_formats,
    parse_shapes,
    parse_tokens,
)
from proa.bench.kernel_weights import expert_bytes
from proa.config.field import option
from proa.errors import ResourceError, UsageError
from proa.machine.machine import Machine
from proa.native.pool import wished_isa
from proa.obs.units import format_bytes

LEAST_WEIGHTS_BYTES = 1_000_000_000  # of all layers of a cell; and at least four times the caches
MOST_WEIGHTS_BYTES = 8 << 30  # unless asked for more
MOST_LAYERS = 64
_CACHES = 4
_WIDEST = FORMATS["bf16"]


@dataclass(frozen=True)
class KernelOptions:
    """What to measure."""

    formats: str = option(ALL, help="weight formats, separated by commas", metavar="LIST", common=True)
    shapes: str = option(
        "qwen3-30b-a3b",
        help="experts of qwen3-30b-a3b, qwen3-next, minimax-m2, deepseek-v3, of all, or HIDDENxWIDTH/EXPERTS/TOP_K",
        metavar="LIST", common=True,
    )  # fmt: skip
    tokens: str = option(",".join(map(str, TOKENS)), help="how many tokens a call has", metavar="LIST", common=True)
    threads: int | None = option(
        None, help="CPU threads; default: all cores this process may use", low=1, high=4096, common=True
    )
    isa: str | None = option(
        None, help="kernels of a lesser instruction set; default: PROA_ISA, else the best of this CPU",
        metavar="NAME", common=True,
    )  # fmt: skip
    seconds: float = option(0.5, help="seconds of timed calls for each cell", low=0.001, high=600, common=True)
    ram: int | None = option(
        None, help="for weights; experts and layers are cut to fit; default: a quarter of the free RAM, at most 8 GiB",
        kind="size", metavar="SIZE", low=1 << 20, high=1 << 50,
    )  # fmt: skip


@dataclass(frozen=True)
class PlannedShape:
    """A shape with as many experts as fit, and what was cut."""

    shape: Shape
    notes: tuple[str, ...]


@dataclass(frozen=True)
class KernelPlan:
    """Every name is known, every shape fits into the memory."""

    formats: tuple[WeightFormat, ...]
    shapes: tuple[PlannedShape, ...]
    tokens: tuple[int, ...]
    seconds: float
    threads: int
    isa: str
    isa_reason: str
    weights_bytes: int  # at most, at a time
    machine: Machine

    def layers(self, of: WeightFormat, shape: Shape) -> int:
        """As many that no cache holds much of them; two where they fit, for calls take them in turn."""
        layer_bytes = shape.experts * expert_bytes(of, shape)
        wanted = max(2, -(-self._uncached_bytes // layer_bytes))
        return max(1, min(wanted, self.weights_bytes // layer_bytes, MOST_LAYERS))

    def cache_notes(self, nbytes: int) -> tuple[str, ...]:
        """What to say of weights of `nbytes` in all."""
        if nbytes >= self._uncached_bytes:
            return ()
        wanted = format_bytes(self._uncached_bytes)
        return (f"all weights are {format_bytes(nbytes)}, less than {wanted}: caches hold some of them",)

    @property
    def _uncached_bytes(self) -> int:
        return max(LEAST_WEIGHTS_BYTES, _CACHES * (self.machine.l3_bytes or 0))


def plan_kernels(options: KernelOptions, machine: Machine) -> KernelPlan:
    """Raises UsageError for names that are not known, ResourceError for a shape that does not fit."""
    formats, shapes = parse_formats(options.formats), parse_shapes(options.shapes)
    weights_bytes = options.ram or min(MOST_WEIGHTS_BYTES, machine.available_bytes // 4)
    isa, reason = wished_isa(options.isa)
    return KernelPlan(
        formats=formats,
        shapes=tuple(_cut(shape, weights_bytes) for shape in shapes),
        tokens=parse_tokens(options.tokens),
        seconds=options.seconds,
        threads=_threads(options.threads, machine),
        isa=isa,
        isa_reason=reason,
        weights_bytes=weights_bytes,
        machine=machine,
    )


def _threads(asked: int | None, machine: Machine) -> int:
    cpus = len(machine.usable_cpus)
    if asked is not None and asked > cpus:
        raise UsageError(
            f"--threads {asked} is more than the {cpus} CPUs this process may use.",
            f"Use at most {cpus}, or widen its affinity or cpuset.",
        )
    return asked or machine.usable_cores


def _cut(shape: Shape, weights_bytes: int) -> PlannedShape:
    """Half the experts, again and again, until a layer of the widest format fits: alike for all formats."""
    each = expert_bytes(_WIDEST, shape)
    experts = shape.experts
    while experts * each > weights_bytes and experts // 2 >= shape.top_k:
        experts //= 2
    if experts * each > weights_bytes:
        raise ResourceError(
            f"{experts} experts of {shape.name} take {format_bytes(experts * each)}, but "
            f"{format_bytes(weights_bytes)} are there for weights.",
            "Free some memory, give more with --ram, or measure a smaller shape.",
        )
    if experts == shape.experts:
        return PlannedShape(shape, ())
    note = (
        f"{shape.name} is measured with {experts} of its {shape.experts} experts, for a layer of bf16 weights must fit "
        f"into {format_bytes(weights_bytes)} (--ram)"
    )
    return PlannedShape(msgspec.structs.replace(shape, experts=experts), (note,))
