"""What a layer's division by its routing needs, but does not depend on the routing: prepared while the device computes.
Never: the division (machine/cost/prefill.py), the order of a pass (streaming.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from proa.hybrid.ring import Bank
from proa.hybrid.tables import Draft
from proa.machine.cost.prefill import Division
from proa.native.doorbell import Counters


@dataclass(frozen=True)
class RoutedLayer:
    """own: the CPU's experts, the most chosen first; numbers: of these in RAM; started: which of these are in the head,
    whose copies have started; draft: the layer's table, with the head in the bank."""

    own: NDArray[np.int64]
    numbers: NDArray[np.int32]
    started: NDArray[np.bool_]
    bank: Bank
    draft: Draft

    def send(self, more: Sequence[int]) -> list[int]:
        """Send the table with more of `own` in the bank, behind the head. Returns these experts in the order of their
        numbers in RAM, which is that of the bank."""
        at = np.array(more, np.int64)
        tail = self.own[at[self.numbers[at].argsort()]]
        place(self.draft, self.bank, tail, int(np.count_nonzero(self.started)))
        self.draft.send()
        found: list[int] = tail.tolist()
        return found


@dataclass(frozen=True)
class Divided:
    """A layer that was divided by its routing. tokens_of: of its experts in RAM, the hottest first; jobs: of the CPU
    until then."""

    of: Division
    tokens_of: NDArray[np.int64]
    jobs: Counters | None


def place(draft: Draft, bank: Bank, experts: NDArray[np.int64], first: int = 0) -> None:
    """Place the experts in the bank, at number `first` and the next ones."""
    at = np.arange(first, first + len(experts))
    draft.place(experts, bank.up + at * bank.up_bytes, bank.down + at * bank.down_bytes)


def tokens_of_each(chosen: NDArray[np.int32], experts: int) -> NDArray[np.int64]:
    """Tokens of each of a layer's experts. chosen: its choice, -1: none."""
    return np.bincount(chosen + 1, minlength=experts + 1)[1:]
