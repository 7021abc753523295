"""Which sequences of a step became infinite or no numbers, and where that began. Never: ending requests."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence

from proa.engine.session import Session
from proa.engine.spans import Span
from proa.errors import NumericsError
from proa.hybrid.faults import Fault
from proa.models.spec import Model, Moe
from proa.native.doorbell import Counters

_SOMEWHERE = "The hidden states were not finite."


class WatchedSession:
    """A session that goes on after a NumericsError: that is about some of the step's rows, and `broken` says which."""

    def __init__(self, session: Session, spec: Model) -> None:
        self._session = session
        self._blocks = [i for i, block in enumerate(spec.blocks) if isinstance(block.ffn, Moe)]
        self._said = ""
        self._notes: dict[int, str] = {}  # by rows, of a step that is computed in parts or of one between these

    def begin(self) -> None:
        self._session.begin()

    def launched(self) -> None:
        self._session.launched()

    def can_follow(self) -> bool:
        return self._session.can_follow()

    def follow(self) -> None:
        self._session.follow()

    def counters(self) -> Counters:
        return self._session.counters()

    def end(self) -> None:
        """Raises what else went wrong."""
        try:
            self._session.end()
        except NumericsError as error:
            self._said = error.message

    @property
    def complained(self) -> bool:
        """Whether `broken` has something to say, asked or not."""
        return self._said != ""

    def broken(self, sequences: Sequence[Span], *, look: bool) -> dict[int, str]:
        """Why sequences of the step that has ended are not finite, by their places; so have those of a step behind it.

        `look`: ask the device even if nobody has complained. If nobody knows which rows it was, it was all.
        """
        said, self._said = self._said, ""
        if not (said or look):
            return {}
        ends = list(itertools.accumulate(len(s.tokens) for s in sequences))
        found: dict[int, str] = {}
        for fault in self._session.faults(ends[-1]):
            place = next(i for i, end in enumerate(ends) if fault.row < end)
            found.setdefault(place, self._told(fault))
        return found if found or not said else dict.fromkeys(range(len(sequences)), said)

    def broken_rows(
        self, sequences: Sequence[Span], rows: Collection[int], *, between_parts: bool = False
    ) -> dict[int, str]:
        """The same where steps are computed between the parts of another one: notes and complaints are of either, so
        it is known already which rows are not finite. between_parts: of such a step; else of the one that ends them."""
        found: dict[int, str] = {}
        if rows or not between_parts:
            ends = list(itertools.accumulate(len(s.tokens) for s in sequences))
            for fault in self._session.faults(ends[-1]):
                self._notes.setdefault(fault.row, self._told(fault))
            for row in sorted(rows):
                place = next(i for i, end in enumerate(ends) if row < end)
                found.setdefault(place, self._notes.pop(row, self._said or _SOMEWHERE))
        if not between_parts:
            self._said, self._notes = "", {}
        return found

    def forget(self, sequences: Sequence[Span]) -> None:
        """Nobody will ask about these, whose step was computed in parts and is not to be ended."""
        self.broken_rows(sequences, ())

    def _told(self, fault: Fault) -> str:
        return f"NaN or infinity in layer {self._blocks[fault.layer]}, from {fault.source}."
