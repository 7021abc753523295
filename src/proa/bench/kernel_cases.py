"""Weight formats and expert shapes of `proa bench kernels`, by name."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import TypeVar

import msgspec

from proa.config.suggest import did_you_mean
from proa.errors import UsageError
from proa.native.formats import Format, usual_forms

T = TypeVar("T")

ALL = "all"
TOKENS = (1, 2, 3, 4, 8, 16, 32, 64, 128, 1024, 4096)
_CUSTOM = re.compile(r"(\d{1,6})x(\d{1,6})/(\d{1,5})/(\d{1,3})")


class WeightFormat(msgspec.Struct, frozen=True):
    """A weight format: its user-facing name and its packed form. `group`: columns per scale; 0: one scale per row."""

    name: str
    form: Format
    group: int


class ExpertShape(msgspec.Struct, frozen=True):
    """The routed experts of one layer: gate and up are [width, hidden], down is [hidden, width]."""

    name: str
    hidden: int
    width: int
    experts: int
    top_k: int

    @property
    def expert_parameters(self) -> int:
        return 3 * self.hidden * self.width


@functools.cache
def weight_formats() -> dict[str, WeightFormat]:
    """Every format with a usual group, by name. Raises NativeError without a native library."""
    return {name: WeightFormat(name, *form) for name, form in usual_forms().items()}


SHAPES = {
    shape.name: shape
    for shape in (
        ExpertShape("qwen3-30b-a3b", 2048, 768, 128, 8),
        ExpertShape("qwen3-next", 2048, 512, 512, 10),
        ExpertShape("minimax-m2", 3072, 1536, 256, 8),
        ExpertShape("deepseek-v3", 7168, 2048, 256, 8),
        ExpertShape("tiny", 256, 96, 8, 2),
    )
}


def parse_formats(text: str) -> tuple[WeightFormat, ...]:
    """Parse names such as "bf16,int4-g32", or "all". Raises UsageError for an unknown name."""
    if text.strip() == ALL:
        return tuple(weight_formats().values())
    return _each(text, "--formats", _format)


def parse_shapes(text: str) -> tuple[ExpertShape, ...]:
    """Parse names of SHAPES or explicit shapes such as "2048x768/128/8"; "all": every name but `tiny`. Raises
    UsageError."""
    if text.strip() == ALL:
        return tuple(shape for name, shape in SHAPES.items() if name != "tiny")
    return _each(text, "--shapes", _shape)


def _each(text: str, flag: str, one: Callable[[str], T]) -> tuple[T, ...]:
    names = [name.strip().lower() for name in text.split(",")]
    if not all(names):
        raise UsageError(f"{flag} {text!r} has an empty entry.", "Separate names by single commas.")
    return tuple(one(name) for name in dict.fromkeys(names))


def _format(name: str) -> WeightFormat:
    formats = weight_formats()
    if name not in formats:
        known = f"Choose from {', '.join(formats)}, or all."
        raise UsageError(f"There is no weight format {name}.", f"{did_you_mean(name, formats)} {known}".strip())
    return formats[name]


def _shape(name: str) -> ExpertShape:
    if name in SHAPES:
        return SHAPES[name]
    custom = _CUSTOM.fullmatch(name)
    if custom is None:
        known = f"Choose from {', '.join(SHAPES)}, or give HIDDENxWIDTH/EXPERTS/TOP_K, as in 2048x768/128/8."
        raise UsageError(f"There is no shape {name}.", f"{did_you_mean(name, SHAPES)} {known}".strip())
    hidden, width, experts, top_k = map(int, custom.groups())
    if not (hidden and width and 1 <= top_k <= experts):
        raise UsageError(
            f"The shape {name} is invalid.",
            "Sizes must be at least 1, and TOP_K at most EXPERTS.",
        )
    return ExpertShape(name, hidden, width, experts, top_k)
