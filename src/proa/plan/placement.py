"""Which routed experts live in VRAM: pure functions of sizes. Never: what else needs VRAM, options, decisions.

An expert in VRAM is a copy of its packed panels in RAM (csrc/src/layout.h), so it has their size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from proa.models.spec import Model, Moe
from proa.native.formats import BF16_FORM, PANEL_ROWS, Form, layout
from proa.plan.expert_counts import Counts
from proa.plan.packed_size import expert_forms

COLUMN_UNIT, BF16_BYTES = 32, 2

# Of experts that change places in a step. At 55 GB/s, 160 MiB are 3 ms, less than a step with much to move.
SPARE_BYTES, MOST_SPARE = 160 << 20, 16
RESIDENT_PER_SPARE = 64  # spare slots are a small part of all,
RESIDENT_PER_FEW, FEW_SPARE = 16, 8  # but there are some where residents are few


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
    layers: Sequence[MoeLayer], budget_bytes: int, strategy: str, wanted: Sequence[int], whole: frozenset[int],
    counts: Counts = (),
) -> tuple[tuple[int, ...], ...]:  # fmt: skip
    """Ids of resident experts of each layer, within the budget: always the first of a layer, or with `counts` the most
    used.

    All experts of the blocks in `whole` come first. Then up to `wanted` of each layer: "uniform" takes one of every
    layer in turn, so that what does not divide goes to the first layers; "dynamic" begins so; "front-loading" fills
    layer after layer, the last one in part; "frequency" takes the most used of all layers, a byte, and without counts
    raises ValueError.
    """
    used = counts or [[0] * layer.experts for layer in layers]
    ranked = [sorted(range(len(of)), key=lambda e: -of[e]) for of in used]  # of equals the first
    taken = [0] * len(layers)
    left_bytes = budget_bytes
    pinned = [layer.experts if layer.block in whole else 0 for layer in layers]
    order = list(_in_turn(wanted) if strategy != "front-loading" else _layer_by_layer(wanted))
    if strategy == "frequency":
        if layers and not counts:
            raise ValueError("nobody knows which experts are used most")
        order.sort(key=lambda at: -used[at[0]][ranked[at[0]][at[1]]] / layers[at[0]].expert_bytes)
    for i, nth in (*_layer_by_layer(pinned), *order):
        if nth == taken[i] and layers[i].expert_bytes <= left_bytes:
            taken[i] += 1
            left_bytes -= layers[i].expert_bytes
    return tuple(tuple(sorted(of[:count])) for of, count in zip(ranked, taken, strict=True))


def spare_slots(expert_bytes: int, resident: int) -> int:
    """How many experts may change places at once, of `resident` in VRAM. In a step, so many are copied at most."""
    share = max(resident // RESIDENT_PER_SPARE, min(FEW_SPARE, resident // RESIDENT_PER_FEW))
    return max(1, min(MOST_SPARE, SPARE_BYTES // expert_bytes, share))


def spare_bytes(layers: Sequence[MoeLayer], spare: int) -> int:
    """Their slots: experts of another size or in other formats need others."""
    return spare * sum(nbytes for nbytes, _ in {(layer.expert_bytes, layer.forms) for layer in layers})


def resident_bytes(layers: Sequence[MoeLayer], resident: Sequence[Sequence[int]]) -> int:
    return sum(layer.expert_bytes * len(ids) for layer, ids in zip(layers, resident, strict=True))


def _layer_by_layer(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((i, nth) for i, count in enumerate(counts) for nth in range(count))


def _in_turn(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((i, nth) for nth in range(max(counts, default=0)) for i, count in enumerate(counts) if nth < count)


def _padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
