"""The interface to KV pages and copies of recurrent states outside the prefix tree (RAM, files), as the scheduler calls
it. Never: tensors, requests.

Everything is stored in entries of one size: a run of pages, or a part of the recurrent states in one slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Run:
    """A run of pages, or its beginning, with fewer pages, if a copy of states ends there. Restoring fills `pages` with
    those from `first` on."""

    key: bytes
    pages: Sequence[int]
    first: int = 0


@dataclass(frozen=True, slots=True)
class StatePart:
    """Part `number` of the recurrent states of all layers in `slot`, as long as a run."""

    key: bytes
    slot: int
    number: int


Entry = Run | StatePart


@dataclass(eq=False)
class Store:
    """Copies entries to the tiers. Their pages and states must not change until `done`, which another thread sets."""

    entries: Sequence[Entry]
    done: bool = False


@dataclass(eq=False)
class Restore:
    """Fills the pages and states of entries.

    num_restored: leading entries that were restored; final when `done`, which another thread sets last. Pages and
    states belong to it until then.
    """

    entries: Sequence[Entry]
    num_restored: int = 0
    done: bool = False


class Tiers(Protocol):
    """The tiers behind the prefix tree. No method blocks; other threads carry out `store` and `restore`, each in the
    order of its calls."""

    @property
    def root(self) -> bytes:
        """The hash that all keys are derived from: see cache/keys.py."""

    @property
    def run_pages(self) -> int:
        """Number of pages in a run."""

    @property
    def state_parts(self) -> int:
        """Number of parts of the recurrent states in a slot; 0: the model has none."""

    def has(self, key: bytes) -> bool:
        """Whether the entry is stored, as far as known. It may have vanished when it is restored."""

    def touch(self, key: bytes) -> None:
        """Note that an entry was used, if it is stored."""

    def lacks(self, key: bytes) -> bool:
        """Whether storing the entry is of use now: a tier does not have it, and its writing is not paused."""

    def worthwhile(self, keys: Sequence[bytes], num_tokens: int) -> bool:
        """Whether restoring these entries is predicted to be quicker than computing num_tokens tokens."""

    def keep_up(self) -> None:
        """Begin to find out, now and then, which entries other engines have stored. Called before each step, and
        regularly while no request runs."""

    def store(self, job: Store) -> None: ...

    def restore(self, job: Restore) -> None: ...
