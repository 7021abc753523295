"""Which sequences of a step became infinite or no numbers, and where that began. Never: ending requests."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager

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

    def begin(self) -> None:
        self._session.begin()

    def launched(self) -> None:
        self._session.launched()

    def in_parts(self) -> AbstractContextManager[None]:
        return self._session.in_parts()

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

    def broken_between(self, sequences: Sequence[Span], rows: Collection[int]) -> dict[int, str]:
        """The same of a step between the parts of another one. Complaints are of either, so these rows of it are known
        not to be finite."""
        if not rows:
            return {}
        ends = list(itertools.accumulate(len(s.tokens) for s in sequences))
        told = {fault.row: self._told(fault) for fault in self._session.faults(ends[-1])}
        found: dict[int, str] = {}
        for row in sorted(rows, key=lambda row: (row not in told, row)):
            place = next(i for i, end in enumerate(ends) if row < end)
            found.setdefault(place, told.get(row, _SOMEWHERE))
        return found

    def broken_parts(self, sequences: Sequence[Span], rows: Collection[int]) -> dict[int, str]:
        """The same of the step in parts, all of which have ended."""
        self._said = ""
        with self._session.in_parts():
            return self.broken_between(sequences, rows)

    def forget_parts(self, sequences: Sequence[Span]) -> None:
        """Nobody will ask about these, whose step is not to be ended."""
        self.broken_parts(sequences, range(sum(len(s.tokens) for s in sequences)))

    def _told(self, fault: Fault) -> str:
        return f"NaN or infinity in layer {self._blocks[fault.layer]}, from {fault.source}."
