"""The GPU's part of a layer where a CPU stands in for the GPU: native kernels over the slots. Never: arithmetic."""

from __future__ import annotations

import torch
from torch import Tensor

from proa.hybrid.layer_memory import LayerMemory
from proa.native.pool import Pool
from proa.native.weights import Activation, Experts, Matrix, Piece, Rows, moe
from proa.ops.faults import CPU, IDS, INPUT, LAYER, OWN, SHARED, SOURCES, LayerFaults
from proa.ops.residency import Located

LANE = 1  # of the pool: the doorbell's jobs have the other


class SimExperts:
    """Implements DeviceExperts. Slots are told apart by their addresses, as a GPU does."""

    def __init__(self, memory: LayerMemory, pool: Pool, faults: LayerFaults) -> None:
        self._pool, self._memory, self._faults = pool, memory, faults
        slots = memory.slots
        self._residency = slots.residency(memory.experts, memory.in_ram)
        self._experts = None
        if slots.resident:
            up, down = (
                Matrix(of, [Piece(0, part.data_ptr(), of.matrix_bytes, part.nbytes)], len(slots.resident))
                for of, part in ((memory.shape.up, slots.up), (memory.shape.down, slots.down))
            )
            self._experts = Experts(up, down, Activation.SILU)

    def locate(self, ids: Tensor) -> Located:
        found, real = ids.clamp(min=0).long(), ids >= 0
        table = self._residency
        return Located(
            ids,
            torch.where(real, table.up[found], 0),
            torch.where(real, table.down[found], 0),
            torch.where(real, table.cpu[found], -1).to(torch.int32),
        )

    def start(self, x: Tensor, at: Located) -> Tensor:
        """x itself: the sum needs weights, so it is made at the end."""
        return x

    def finish(
        self,
        started: Tensor,
        x: Tensor,
        at: Located,
        weights: Tensor,
        cpu: Tensor | None,
        shared: Tensor | None,
        gate: Tensor | None,
    ) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32) if cpu is None else cpu
        own = self._own(started, at, weights)
        if own is not None:
            total = total + own
        if shared is not None:
            total = total + (shared.float() if gate is None else torch.sigmoid(gate.float()) * shared.float())
        if not bool(total.isfinite().all()):
            self._note(total, {INPUT: x, CPU: cpu, SHARED: shared}, own, at)
        return total.to(x.dtype)

    def _own(self, x: Tensor, at: Located, weights: Tensor) -> Tensor | None:
        """The sum of the device's own experts, float32."""
        if self._experts is None or not bool((at.up != 0).any()):
            return None
        base, stride = self._memory.slots.up.data_ptr(), self._memory.shape.up.matrix_bytes
        slots = torch.where(at.up != 0, (at.up - base) // stride, -1).to(torch.int32).contiguous()
        weights = weights.float().contiguous()
        y = torch.empty(x.shape, dtype=torch.float32)
        rows = Rows(x.data_ptr(), x.stride(0)), Rows(y.data_ptr(), y.stride(0), wide=True)
        moe(
            self._pool, self._experts, *rows, len(x),
            ids=slots.data_ptr(), weights=weights.data_ptr(), top_k=slots.shape[1], lane=LANE,
        )  # fmt: skip
        return y

    def _note(self, total: Tensor, parts: dict[int, Tensor | None], own: Tensor | None, at: Located) -> None:
        """As the GPU does; but of its own experts only the sum is known, so all that the row chose are named."""
        for row in (~total.isfinite().all(1)).nonzero().flatten().tolist():
            record = self._faults.records[row]
            if record[LAYER] or at.ids[row, 0] < 0:
                continue
            mine = sum(1 << k for k, address in enumerate(at.up[row].tolist()) if address)
            sources = sum(bit for bit, part in parts.items() if part is not None and not part[row].isfinite().all())
            if own is not None and not own[row].isfinite().all():
                sources |= mine
            record[LAYER], record[SOURCES], record[OWN] = self._faults.layer + 1, sources, mine
            record[IDS:] = at.ids[row]
