"""How a device notes that a row's values are infinite or no numbers, where that begins. Never: reading the notes,
changing the values.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from proa.ops.sizes import FAULT_COLUMNS

# A record's columns: the layer's number + 1 (0: nothing noted), what is not finite, which choices are the device's own,
# then the chosen experts.
LAYER, SOURCES, OWN, IDS = 0, 1, 2, FAULT_COLUMNS
# Bits of SOURCES, beside one for each choice.
CPU, SHARED, INPUT = 1 << 28, 1 << 29, 1 << 30


@dataclass
class Notes:
    """records: int32 [rows, IDS + k], of each row of the step that is being computed the first layer that found it not
    finite."""

    records: Tensor


@dataclass(frozen=True)
class LayerFaults:
    """`layer` counts layers with experts."""

    notes: Notes
    layer: int
