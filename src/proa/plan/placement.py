"""The choice of resident experts: pure functions of sizes and counts. Never: other demands on VRAM, options, decisions.

An expert in VRAM is packed as in RAM (csrc/src/layout.h), so it has the same size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from proa.models.ranks import CPU
from proa.models.spec import Model, Moe
from proa.native.formats import BF16_FORM, PANEL_ROWS, Form
from proa.plan.expert_counts import Counts
from proa.plan.packed_size import expert_forms, packed_bytes
from proa.plan.plan import Owners

BF16_BYTES = 2

# Bounds of the experts that move in a step. 160 MiB take 3 ms at 55 GB/s, less than a step with many moves.
SPARE_BYTES, MOST_SPARE = 160 << 20, 16
RESIDENT_PER_SPARE = 64  # one spare slot per so many resident experts,
RESIDENT_PER_FEW, FEW_SPARE = 16, 8  # or, with few resident experts, one per 16, up to 8


@dataclass(frozen=True)
class MoeLayer:
    """An MoE block of the model; sizes are of packed weights."""

    block: int
    experts: int
    top_k: int
    expert_bytes: int
    forms: tuple[Form, Form] = (BF16_FORM, BF16_FORM)  # (gate and up, down)
    bias_bytes: int = 0  # per expert

    @property
    def total_bytes(self) -> int:
        return self.experts * self.expert_bytes


def moe_layers(spec: Model, stored: Mapping[str, str]) -> tuple[MoeLayer, ...]:
    """The model's MoE blocks. stored: the checkpoint's type of each parameter, by Proa's names; empty: all bfloat16."""
    forms = [expert_forms(stored, i, ffn) for i, ffn in spec.routed.items()]
    return tuple(
        MoeLayer(i, ffn.experts, ffn.top_k, expert_bytes(ffn, *of), of, bias_bytes(ffn))
        for (i, ffn), of in zip(spec.routed.items(), forms, strict=True)
    )


def expert_bytes(ffn: Moe, up: Form = BF16_FORM, down: Form = BF16_FORM) -> int:
    """Packed bytes of one expert: gate and up alternate panel by panel, down follows."""
    return 2 * packed_bytes(ffn.width, ffn.hidden, up) + packed_bytes(ffn.hidden, ffn.width, down)


def bias_bytes(ffn: Moe) -> int:
    """Bytes of one expert's biases, float32, padded to panels. VRAM and RAM each hold all experts' biases."""
    rows = 2 * _padded(ffn.width, PANEL_ROWS) + _padded(ffn.hidden, PANEL_ROWS)
    return 4 * rows if ffn.bias else 0


def ram_bias_bytes(layers: Sequence[MoeLayer], resident: Sequence[Sequence[int]], inclusive: bool) -> int:
    """Bytes of biases in RAM. A layer whose experts are not all in RAM has a second copy of the biases of those that
    are, by their numbers in RAM."""
    again = [
        0 if inclusive or not ids else layer.experts - len(ids) for layer, ids in zip(layers, resident, strict=True)
    ]
    return sum(layer.bias_bytes * (layer.experts + more) for layer, more in zip(layers, again, strict=True))


def place(
    layers: Sequence[MoeLayer], budgets_bytes: Sequence[int], strategy: str, wanted: Sequence[int],
    whole: frozenset[int], counts: Counts = (),
) -> Owners:  # fmt: skip
    """Choose each expert's owner: a rank, within its budget, or the CPU. A layer's experts are taken by id, or with
    `counts` the most used first; each goes to the rank that has most room left.

    All experts of the blocks in `whole` come first. Then up to `wanted` of each layer: "uniform" takes one of every
    layer in turn, so the remainder goes to the first layers; "dynamic" starts like "uniform"; "front-loading" fills
    layer after layer, the last one in part; "frequency" takes the most choices per byte over all layers, and raises
    ValueError without counts.
    """
    used = counts or [[0] * layer.experts for layer in layers]
    ranked = [sorted(range(len(of)), key=lambda e: -of[e]) for of in used]  # stable: ties by id
    taken = [0] * len(layers)
    owners, left_bytes = [[CPU] * layer.experts for layer in layers], list(budgets_bytes)
    pinned = [layer.experts if layer.block in whole else 0 for layer in layers]
    order = list(_in_turn(wanted) if strategy != "front-loading" else _layer_by_layer(wanted))
    if strategy == "frequency":
        if layers and not counts:
            raise ValueError("placement by frequency needs expert counts")
        order.sort(key=lambda at: -used[at[0]][ranked[at[0]][at[1]]] / layers[at[0]].expert_bytes)
    for i, nth in (*_layer_by_layer(pinned), *order):
        rank = max(range(len(left_bytes)), key=left_bytes.__getitem__)  # among equals the first
        if nth == taken[i] and layers[i].expert_bytes <= left_bytes[rank]:
            owners[i][ranked[i][nth]] = rank
            taken[i] += 1
            left_bytes[rank] -= layers[i].expert_bytes
    return tuple(map(tuple, owners))


def spare_slots(expert_bytes: int, resident: int) -> int:
    """Number of spare slots for `resident` experts in VRAM. It bounds the experts that move at once."""
    share = max(resident // RESIDENT_PER_SPARE, min(FEW_SPARE, resident // RESIDENT_PER_FEW))
    return max(1, min(MOST_SPARE, SPARE_BYTES // expert_bytes, share))


def spare_bytes(layers: Sequence[MoeLayer], spare: int) -> int:
    """Bytes of spare slots, `spare` for each size and form of experts."""
    return spare * sum(nbytes for nbytes, _ in {(layer.expert_bytes, layer.forms) for layer in layers})


def resident_bytes(layers: Sequence[MoeLayer], resident: Sequence[Sequence[int]]) -> int:
    return sum(layer.expert_bytes * len(ids) for layer, ids in zip(layers, resident, strict=True))


def _layer_by_layer(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((i, nth) for i, count in enumerate(counts) for nth in range(count))


def _in_turn(counts: Sequence[int]) -> Iterator[tuple[int, int]]:
    return ((i, nth) for nth in range(max(counts, default=0)) for i, count in enumerate(counts) if nth < count)


def _padded(count: int, unit: int) -> int:
    return -(-count // unit) * unit
