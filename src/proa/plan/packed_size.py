"""The size of weights as the native kernels pack them: pure formulas over shapes and stored types. Never: reading
weights, options.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

from proa.models.spec import Model, Moe
from proa.native.formats import BF16_FORM, PANEL_ROWS, Form, kept_form, layout
from proa.weights.dummy_names import is_coded

BF16 = frozenset({"BF16"})
COLUMN_UNIT = 32  # bfloat16 columns are padded to a multiple of it

# A layer's gate and up matrices of all experts are one stack, its down matrices another.
_EXPERT = re.compile(r"(blocks\.\d+\.ffn\.experts)\.\d+\.(gate|up|down)\.weight")
_MLP_BIAS = re.compile(r"blocks\.\d+\.ffn\.(?:.*\.)?(?:gate|up|down)\.bias")
_MLP = re.compile(r"(blocks\.\d+\.ffn(?:\.shared)?)\.(gate|up)\.weight")


@dataclass(frozen=True)
class PackedSize:
    """Bytes of all weights, and of the weights that one decoded token reads; without padding if all are bfloat16, as
    the roof counts only what a token needs."""

    total_bytes: int
    active_bytes: int


def packed_size(spec: Model, stored: Mapping[str, str]) -> PackedSize:
    """Size of a model's packed weights. stored: the checkpoint's type of each parameter, by Proa's names; empty: all
    bfloat16."""
    if not stored:
        return PackedSize(_bf16_bytes(spec), 2 * spec.num_active_params)
    types = _types(stored)
    total = active = 0.0
    for name, shape in spec.params():
        nbytes = _packed_bytes(spec, name, shape, BF16 if of_heads(name) else frozenset(types[_stack(name)]))
        total += nbytes
        active += nbytes * _read_share(spec, name)
    return PackedSize(int(total), int(active))


def _bf16_bytes(spec: Model) -> int:
    """Bytes of all weights in bfloat16. A layer's experts are alike: one is counted, since there may be 100,000."""
    total = sum(_packed_bytes(spec, name, shape, BF16) for name, shape in spec.params(routed=False))
    for block, ffn in spec.routed.items():
        expert = ((f"blocks.{block}.ffn.experts.0.{name}", shape) for name, shape in ffn.expert.params())
        total += ffn.experts * sum(_packed_bytes(spec, name, shape, BF16) for name, shape in expert)
    return total


def _packed_bytes(spec: Model, name: str, shape: tuple[int, ...], stored: frozenset[str]) -> int:
    padded = (-(-shape[0] // PANEL_ROWS) * PANEL_ROWS,) if _MLP_BIAS.fullmatch(name) else shape
    return _bytes(stored, padded, table=name == "embed.weight" and not spec.tied)


def mixed_stacks(spec: Model, stored: Mapping[str, str]) -> dict[str, set[str]]:
    """Stacks that become bfloat16 only because their matrices differ in type; alone, some could be kept."""
    widths = {_stack(name): shape[-1] for name, shape in spec.params() if len(shape) > 1}
    found = {name: types for name, types in _types(stored).items() if len(types) > 1 and name in widths}
    alone = {name: any(kept_form({one}, widths[name]) != BF16_FORM for one in types) for name, types in found.items()}
    return {name: types for name, types in found.items() if alone[name]}


def _types(stored: Mapping[str, str]) -> dict[str, set[str]]:
    types: dict[str, set[str]] = {}
    for name, of in stored.items():
        types.setdefault(_stack(name), set()).add(of)
    return types


def dummy_types(spec: Model, form: str) -> dict[str, str]:
    """Types of random weights in --dummy-format `form`, by name; empty: all are bfloat16."""
    if form == "bf16":
        return {}
    return {name: f"dummy {form}" if is_coded(name) else "BF16" for name, _ in spec.params()}


def expert_forms(stored: Mapping[str, str], block: int, ffn: Moe) -> tuple[Form, Form]:
    """Forms of a block's experts: (gate and up, down). stored: see packed_size; empty: all is bfloat16."""
    if not stored:
        return BF16_FORM, BF16_FORM
    names = [f"blocks.{block}.ffn.experts.{e}" for e in range(ffn.experts)]
    up = {stored[f"{name}.{part}.weight"] for name in names for part in ("gate", "up")}
    return kept_form(up, ffn.hidden), kept_form({stored[f"{name}.down.weight"] for name in names}, ffn.width)


def of_heads(name: str) -> bool:
    """True for a parameter that is split into a matrix per head, some transposed: packed as bfloat16 in any case."""
    return name.endswith(".mixer.kv_b.weight")


def _stack(name: str) -> str:
    if found := _EXPERT.fullmatch(name):
        return f"{found[1]}.{'down' if found[2] == 'down' else 'up'}"
    if found := _MLP.fullmatch(name):
        return f"{found[1]}.up"
    return name


def packed_bytes(rows: int, columns: int, form: Form = BF16_FORM) -> int:
    """Bytes of a matrix in panels. In bfloat16 it may have any size: the layout's formula, without its limits."""
    if form != BF16_FORM:
        return layout(form.format, rows, columns, form.group).matrix_bytes
    return 2 * -(-rows // PANEL_ROWS) * PANEL_ROWS * -(-columns // COLUMN_UNIT) * COLUMN_UNIT


@functools.cache
def _bytes(stored: frozenset[str], shape: tuple[int, ...], table: bool) -> int:
    if len(shape) != 2 or 0 in shape:
        return prod(shape) * 4
    if table:
        return prod(shape) * 2
    return packed_bytes(*shape, kept_form(stored, shape[-1]))


def _read_share(spec: Model, name: str) -> float:
    if name == "embed.weight":
        return 1.0 if spec.tied else 0.0
    if ".ffn.experts." not in name:
        return 1.0
    ffn = spec.routed[int(name.split(".")[1])]
    return ffn.top_k / ffn.experts
