"""Finds the copies of recurrent states that the tiers have of a request's prefixes. Never: tensors, files, the prefix
tree."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from proa.cache.keys import RunKeys, state_key
from proa.engine.scheduling.request import Request
from proa.engine.scheduling.tiers import Tiers


@dataclass(frozen=True, slots=True)
class PrefixEnd:
    """The end of a page, after which states may have been copied. key: of all tokens up to there."""

    num_tokens: int
    key: bytes


class StoredStates:
    """Copies by position. Looking for one takes about 5 us for each page."""

    def __init__(self, tiers: Tiers, keys: RunKeys) -> None:
        self._tiers, self._keys = tiers, keys

    def ends(self, request: Request, low: int, high: int) -> Iterator[PrefixEnd]:
        """The ends of pages after more than `low` and at most `high` tokens, the last one first. 0 <= low, and the
        request has `high` tokens."""
        run_tokens, page_tokens = self._keys.run_tokens, self._keys.page_tokens
        for run in range((high - 1) // run_tokens, low // run_tokens - 1, -1):
            self._keys.extend(request.run_keys, request.tokens, request.salt, run)
            keys = self._keys.ends(request.run_keys, request.tokens, request.salt, run)
            for page in reversed(range(len(keys))):
                num_tokens = run * run_tokens + (page + 1) * page_tokens
                if low < num_tokens <= high:
                    yield PrefixEnd(num_tokens, keys[page])

    def at(self, request: Request, num_tokens: int) -> PrefixEnd:
        return next(self.ends(request, num_tokens - 1, num_tokens))

    def keys(self, end: PrefixEnd) -> list[bytes]:
        """Keys of the parts of the states at `end`."""
        return [state_key(end.key, part) for part in range(self._tiers.state_parts)]

    def has(self, end: PrefixEnd) -> bool:
        return all(self._tiers.has(state_key(end.key, part)) for part in range(self._tiers.state_parts))
