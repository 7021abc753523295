"""Options of `proa bench kernels`, and the plan of measurements that they give; all checks run before measuring."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from proa.bench.asked import parse_numbers
from proa.bench.kernel_cases import ALL, TOKENS, ExpertShape, WeightFormat, parse_formats, parse_shapes
from proa.bench.kernel_weights import expert_bytes
from proa.config.field import option
from proa.errors import ResourceError, UsageError
from proa.machine.machine import Machine
from proa.native.formats import BF16_FORM
from proa.native.pool import wished_isa
from proa.obs.units import format_bytes

LEAST_WEIGHTS_BYTES = 1_000_000_000  # of all layers of a cell; also at least _CACHES times the last-level caches
MOST_WEIGHTS_BYTES = 8 << 30  # default limit; --ram may raise it
MOST_LAYERS, MOST_TOKENS = 64, 1 << 16
_CACHES = 4
_WIDEST = WeightFormat("bf16", *BF16_FORM)


@dataclass(frozen=True)
class KernelOptions:
    """Options of `proa bench kernels`."""

    formats: str = option(ALL, help="weight formats, separated by commas", metavar="LIST", common=True)
    shapes: str = option(
        "qwen3-30b-a3b",
        help="expert shapes: qwen3-30b-a3b, qwen3-next, minimax-m2, deepseek-v3, all, or HIDDENxWIDTH/EXPERTS/TOP_K",
        metavar="LIST", common=True,
    )  # fmt: skip
    tokens: str = option(",".join(map(str, TOKENS)), help="numbers of tokens per call", metavar="LIST", common=True)
    threads: int | None = option(
        None, help="CPU threads; default: all cores this process may use", low=1, high=4096, common=True
    )
    isa: str | None = option(
        None, help="instruction set of the kernels; default: PROA_ISA, else the best of this CPU",
        metavar="NAME", common=True,
    )  # fmt: skip
    seconds: float = option(0.5, help="seconds of timed calls per cell", low=0.001, high=600, common=True)
    ram: int | None = option(
        None, help="RAM for weights; fewer experts and layers are used if they do not fit; default: a quarter of the "
        "free RAM, at most 8 GiB",
        kind="size", metavar="SIZE", low=1 << 20, high=1 << 50,
    )  # fmt: skip


@dataclass(frozen=True)
class PlannedShape:
    """A shape with as many experts as fit into memory, and notes on omitted experts."""

    shape: ExpertShape
    notes: tuple[str, ...]


@dataclass(frozen=True)
class KernelPlan:
    """The checked plan: all names are resolved, all shapes fit into memory."""

    formats: tuple[WeightFormat, ...]
    shapes: tuple[PlannedShape, ...]
    tokens: tuple[int, ...]
    seconds: float
    threads: int
    isa: str
    isa_reason: str
    weights_bytes: int  # most bytes of weights at a time
    machine: Machine

    def layers(self, of: WeightFormat, shape: ExpertShape) -> int:
        """Return the number of layers to allocate: enough that caches hold only a small part of the weights, and at
        least two if they fit, as calls alternate between layers."""
        layer_bytes = shape.experts * expert_bytes(of, shape)
        wanted = max(2, -(-self._uncached_bytes // layer_bytes))
        return max(1, min(wanted, self.weights_bytes // layer_bytes, MOST_LAYERS))

    def cache_notes(self, nbytes: int) -> tuple[str, ...]:
        """Return a note if weights of `nbytes` in total are so few that caches hold some of them."""
        if nbytes >= self._uncached_bytes:
            return ()
        wanted = format_bytes(self._uncached_bytes)
        return (f"all weights are {format_bytes(nbytes)}, less than {wanted}: caches hold some of them",)

    @property
    def _uncached_bytes(self) -> int:
        return max(LEAST_WEIGHTS_BYTES, _CACHES * (self.machine.l3_bytes or 0))


def plan_kernels(options: KernelOptions, machine: Machine) -> KernelPlan:
    """Make the plan. Raises UsageError for an unknown name, ResourceError for a shape that does not fit."""
    formats, shapes = parse_formats(options.formats), parse_shapes(options.shapes)
    weights_bytes = options.ram or min(MOST_WEIGHTS_BYTES, machine.available_bytes // 4)
    isa, reason = wished_isa(options.isa)
    return KernelPlan(
        formats=formats,
        shapes=tuple(_cut(shape, weights_bytes) for shape in shapes),
        tokens=parse_numbers(options.tokens, "tokens", 1, MOST_TOKENS),
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
            f"Use at most {cpus}, or extend the process's affinity or cpuset.",
        )
    return asked or machine.usable_cores


def _cut(shape: ExpertShape, weights_bytes: int) -> PlannedShape:
    """Halve the number of experts until a layer of the widest format fits, so that all formats have equally many."""
    each = expert_bytes(_WIDEST, shape)
    experts = shape.experts
    while experts * each > weights_bytes and experts // 2 >= shape.top_k:
        experts //= 2
    if experts * each > weights_bytes:
        raise ResourceError(
            f"{experts} experts of {shape.name} take {format_bytes(experts * each)}, but "
            f"only {format_bytes(weights_bytes)} may be used for weights.",
            "Free some memory, raise --ram, or measure a smaller shape.",
        )
    if experts == shape.experts:
        return PlannedShape(shape, ())
    note = (
        f"{shape.name} is measured with {experts} of its {shape.experts} experts, so that a layer of bf16 weights fits "
        f"into {format_bytes(weights_bytes)} (--ram)"
    )
    return PlannedShape(msgspec.structs.replace(shape, experts=experts), (note,))
