"""The GPU's part of a layer on a simulated GPU: native kernels over packed experts, by address. Never: arithmetic,
deciding which experts."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from proa.hybrid.layer_memory import LayerMemory
from proa.native.formats import Layout
from proa.native.pool import Pool
from proa.native.weights import Experts, Matrix, Piece, Rows, moe
from proa.ops.added import Added
from proa.ops.bell_block import Bell
from proa.ops.device_reference import locate, record_faults
from proa.ops.faults import CPU, INPUT, SHARED, LayerFaults
from proa.ops.pieces import pieces_at
from proa.ops.residency import Located, Residency

LANE = 1  # of the pool; the doorbell's jobs use the other


class SimExperts:
    """Implements DeviceExperts. Weights are read by their addresses, as on a GPU."""

    def __init__(
        self, memory: LayerMemory, residency: Residency, pool: Pool, faults: LayerFaults,
        bus_bytes_per_s: float | None = None,
    ) -> None:  # fmt: skip
        """bus_bytes_per_s: reads in place are throttled to this rate; None: they are not."""
        self._bus_bytes_per_s = bus_bytes_per_s
        self._pool, self._shape, self.residency, self._faults = pool, memory.shape, residency, faults
        self._biases = memory.biases
        self._at: dict[tuple[int, int], tuple[int, Experts]] = {}

    def locate(self, ids: Tensor) -> Located:
        return locate(ids, self.residency)

    def start(self, x: Tensor, at: Located, weights: Tensor) -> Tensor | None:
        """The weighted sum of the device's experts, float32 [T, hidden]; None if it has no pair."""
        everywhere = zip(*(t.flatten().tolist() for t in (at.ids, at.up, at.down)), strict=True)
        mine = sorted({place for place in everywhere if place[1]})  # by expert id: the order is independent of location
        if not mine:
            return None
        begin, fetched = time.perf_counter(), 0
        total = torch.zeros(x.shape, dtype=torch.float32)
        for expert, up, down in mine:
            rows, choices = (at.up == up).nonzero(as_tuple=True)
            y = self._one(self._expert(up, down, expert), x[rows])
            total.index_add_(0, rows, weights[rows, choices, None].float() * y)
            fetched += self._in_place(up)
        if self._bus_bytes_per_s is not None and fetched:
            least_s = fetched * (self._shape.up.matrix_bytes + self._shape.down.matrix_bytes) / self._bus_bytes_per_s
            time.sleep(max(0.0, begin + least_s - time.perf_counter()))
        return total

    def waits(self, x: Tensor) -> Bell | None:
        return None

    def add(self, started: Tensor | None, x: Tensor, at: Located, weights: Tensor, total: Tensor | None) -> Tensor:
        total = torch.zeros(x.shape, dtype=torch.float32) if total is None else total
        if started is None:
            return total
        after = total + started
        if not bool(after.isfinite().all()):
            self._note(after, {INPUT: x}, started, at)
        return after

    def finish(self, started: Tensor | None, x: Tensor, at: Located, weights: Tensor, added: Added) -> Tensor:
        if isinstance(added.cpu, Bell):
            raise TypeError("a simulated GPU does not wait at a doorbell: pull the CPU's sum first")
        shared, gate = added.shared, added.shared_gate
        total = torch.zeros(x.shape, dtype=torch.float32) if added.cpu is None else added.cpu
        if started is not None:
            total = total + started
        if shared is not None:
            total = total + (shared.float() if gate is None else torch.sigmoid(gate.float()) * shared.float())
        if not bool(total.isfinite().all()):
            self._note(total, {INPUT: x, CPU: added.cpu, SHARED: shared}, started, at)
        return total.to(x.dtype)

    def _in_place(self, up: int) -> bool:
        here = self.residency.in_place
        return here is not None and bool((here.up == up).any())

    def _one(self, expert: Experts, x: Tensor) -> Tensor:
        y = torch.empty(x.shape, dtype=torch.float32)
        rows = Rows(x.data_ptr(), x.stride(0)), Rows(y.data_ptr(), y.stride(0), wide=True)
        moe(self._pool, expert, *rows, len(x), ids=0, weights=0, top_k=0, lane=LANE)
        return y

    def _expert(self, up: int, down: int, expert: int) -> Experts:
        """Return the expert at these addresses. An address may have held another expert, with other biases: the cache
        keeps the last one's."""
        number, made = self._at.get((up, down), (-1, None))
        if made is None or (number != expert and self._biases is not None):
            of = self._shape
            found = [(layout, pieces_at(address, layout)) for layout, address in ((of.up, up), (of.down, down))]
            most = max(len(pieces) for _, pieces in found)
            gate_up, low = (Matrix(layout, _filled(pieces, most, layout)) for layout, pieces in found)
            biases = {} if self._biases is None else {
                "gate_bias": self._biases.up[expert].data_ptr(), "down_bias": self._biases.down[expert].data_ptr()
            }  # fmt: skip
            made = Experts(gate_up, low, of.activation, limit=of.limit, **biases)
            self._at[up, down] = expert, made
        return made

    def _note(self, total: Tensor, parts: dict[int, Tensor | None], own: Tensor | None, at: Located) -> None:
        """Write fault records, as a GPU does. Only the sum of the device's experts is known here, so a record names all
        of them that the row chose."""
        mine = at.up != 0
        of_device = {1 << k: None if own is None else own.where(mine[:, k, None], 0.0) for k in range(mine.shape[1])}
        record_faults(total, at, mine, self._faults, parts | of_device)


def _filled(pieces: list[Piece], count: int, of: Layout) -> list[Piece]:
    """The pieces with empty ones behind them: kernels need as many of gate and up as of down, but a matrix with few
    panels lies on fewer memory nodes."""
    return pieces + [Piece(of.panels, 0, 0, 0)] * (count - len(pieces))
