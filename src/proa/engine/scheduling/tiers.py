"""The interface to runs of pages outside the prefix tree (RAM, files), as the scheduler calls it. Never: tensors,
requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(eq=False)
class Store:
    """Copies a run of pages to the tiers. The pages must not change until `done`, which another thread sets."""

    key: bytes
    pages: Sequence[int]
    done: bool = False


@dataclass(eq=False)
class Restore:
    """Fills `pages` with the last pages of consecutive runs, those of `keys`.

    num_skipped: pages of the first run that are not wanted. num_pages: leading pages of `pages` that were filled; final
    when `done`, which another thread sets last. The pages belong to it until then.
    """

    keys: Sequence[bytes]
    pages: Sequence[int]
    num_skipped: int = 0
    num_pages: int = 0
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

    def has(self, key: bytes) -> bool:
        """Whether the run is stored, as far as known. It may have vanished when it is restored."""

    def touch(self, key: bytes) -> None:
        """Note that a run was used, if it is stored."""

    def lacks(self, key: bytes) -> bool:
        """Whether storing the run is of use now: a tier does not have it, and its writing is not paused."""

    def worthwhile(self, keys: Sequence[bytes], num_tokens: int) -> bool:
        """Whether restoring these runs is predicted to be quicker than computing num_tokens tokens."""

    def store(self, job: Store) -> None: ...

    def restore(self, job: Restore) -> None: ...
