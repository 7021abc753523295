"""Fault records: kernels note in which layer a row first became non-finite (NaN or Inf), and from which input. Never:
reading the records, changing values.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from proa.ops.sizes import FAULT_COLUMNS

# Columns of a record: layer number + 1 (0: no fault), bits of the non-finite inputs, bits of the choices computed on
# this device, then the chosen experts' ids.
LAYER, SOURCES, OWN, IDS = 0, 1, 2, FAULT_COLUMNS
# Bits of SOURCES besides bit i for the i-th chosen expert: the sum of the CPU's experts, the shared expert, the
# residual stream that the layer read.
CPU, SHARED, INPUT = 1 << 28, 1 << 29, 1 << 30


@dataclass
class Notes:
    """records: int32 [rows, IDS + k]: for each row of the running step, the first layer that found it non-finite."""

    records: Tensor


@dataclass(frozen=True)
class LayerFaults:
    """The fault records as seen by one layer; `layer` counts MoE layers only."""

    notes: Notes
    layer: int
