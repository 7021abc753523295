"""Which routed experts live in VRAM: pure functions of sizes. Never: what else needs VRAM, options, decisions.

An expert in VRAM is a copy of its packed panels in RAM (csrc/src/layout.h), so it has their size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from proa.models.spec import Model, Moe
from proa.native.formats import BF16_FORM, PANEL_ROWS, Form, layout
from proa.plan.packed_size import expert_forms

COLUMN_UNIT, BF16_BYTES = 32, 2

# Of experts that change places in a step. At 55 GB/s, 80 MiB are 1.5 ms, less than a step that waits for the CPU.
SPARE_BYTES, MOST_SPARE = 80 << 20, 8
RESIDENT_PER_SPARE = 16  # spare slots are a small part of all


@dataclass(frozen=True)
class MoeLayer:
    """A block of the model that routes."""

    block: int
    experts: int
    top_k: int
    expert_bytes: int
    forms: tuple[Form, Form] = (BF16_FORM, BF16_FORM)  # of gate and up, of down
    bias_bytes: int = 0  # of an expert

    @property
    def total_bytes(self) -> int:
        return self.experts * self.expert_bytes


def moe_layers(spec: Model, stored: Mapping[str, str]) -> tuple[MoeLayer, ...]:
    """`stored`: the checkpoint's type of each parameter, by our names; empty: all are packed as bfloat16."""
    routed = [(i, block.ffn) for i, block in enumerate(spec.blocks) if isinstance(block.ffn, Moe)]
    forms = [expert_forms(stored, i, ffn) for i, ffn in routed]
    return tuple(
        MoeLayer(i, ffn.experts, ffn.top_k, expert_bytes(ffn, *of), of, bias_bytes(ffn))
        for (i, ffn), of in zip(routed, forms, strict=True)
    )


def expert_bytes(ffn: Moe, up: Form = BF16_FORM, down: Form = BF16_FORM) -> int:
    """Packed bytes of one expert: gate and up alternate panel by panel, down follows."""
    return 2 * packed_bytes(ffn.width, ffn.hidden, up) + packed_bytes(ffn.hidden, ffn.width, down)


def bias_bytes(ffn: Moe) -> int:
    """Of one expert, in float32 for whole panels. VRAM and RAM have those of all experts; they do not move."""
    rows = 2 * _padded(ffn.width, PANEL_ROWS) + _padded(ffn.hidden, PANEL_ROWS)
    return 4 * rows if ffn.bias else 0


def ram_bias_bytes(layers: Sequence[MoeLayer], resident: Sequence[Sequence[int]], inclusive: bool) -> int:
    """Where RAM has not all experts, the biases of those it has are there once more, by their numbers there."""
    again = [
        0 if inclusive or not ids else layer.experts - len(ids) for layer, ids in zip(layers, resident, strict=True)
    ]
    return sum(layer.bias_bytes * (layer.experts + more) for layer, more in zip(layers, again, strict=True))


def packed_bytes(rows: int, columns: int, form: Form = BF16_FORM) -> int:
    """Bytes of a matrix in panels. Of bfloat16: rows padded to 16, columns to 32."""
    if form != BF16_FORM:
        return layout(form.format, rows, columns, form.group).matrix_bytes
    return _padded(rows, PANEL_ROWS) * _padded(columns, COLUMN_UNIT) * BF16_BYTES


def place(
    layers: Sequence[MoeLayer], budget_bytes: int, strategy: str, wanted: Sequence[int], whole: frozenset[int]
) -> tuple[tuple[int, ...], ...]:
    """Ids of resident experts of each layer, within the budget: always the first of a layer.

    All experts of the blocks in `whole` come first. Then up to `wanted` of each layer: "uniform" takes one of every
    layer in turn, so that what does not divide goes to the first layers; "dynamic" begins so; "front-loading" fills
    layer after layer, the last one in part.
    """
    counts = [0] * len(layers)
    left_bytes = budget_bytes
    pinned = [layer.experts if layer.block in whole else 0 for layer in layers]
    for order in (_layer_by_layer(pinned), _ORDERS[strategy](wanted)):
        for i, nth in order:
            if nth == counts[i] and layers[i].expert_bytes <= left_bytes:
                counts[i] += 1
                left_bytes -= layers[i].expert_bytes
    return tuple(tuple(range(count)) for count in counts)


def spare_slots(expert_bytes: int, resident: int) -> int:
    """How many experts may change places at once, of `resident` in VRAM. In a step, so many are copied at most."""
    return max(1, min(MOST_SPARE, SPARE_BYTES // expert_bytes, resident // RESIDENT_PER_SPARE))


def spare_bytes(layers: Sequence[MoeLayer], spare: int) -> int:
    """Their slots: experts of another size or in other formats need others."""
    return spare * sum(nbytes for nbytes, _ in {(layer.expert_bytes, layer.forms) for layer in layers})


def resident_bytes(layers: Sequence[MoeLayer], resident: Sequence[Sequence[int]]) -> int:
    return sum(layer.expert_bytes * len(ids) for layer, ids in zip(layers, resident, strict=True))


def _layer_by_layer(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((i, nth) for i, count in enumerate(counts) for nth in range(count))


def _in_turn(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((i, nth) for nth in range(max(counts, default=0)) for i, count in enumerate(counts) if nth < count)


_ORDERS = {"uniform": _in_turn, "dynamic": _in_turn, "front-loading": _layer_by_layer}


def _padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
