"""Keys of entries outside the prefix tree (RAM, files): runs of pages, and copies of recurrent states. Never: tensors,
files, requests.

A run is a fixed number of consecutive pages of one prefix. Its key is a hash chain: it depends on the root (model, KV
type, page size, version), the salt and all tokens from the first one to the run's end, as the run's KV does. A copy of
states may end at any page's end. The keys of its parts depend on that of the prefix up to there.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

KEY_BYTES = 16
RUN_TOKENS = 256  # of a run, if a page is not longer: large enough for sequential I/O, small enough to lose little


def run_pages(page_tokens: int) -> int:
    """Number of pages in a run."""
    return max(1, RUN_TOKENS // page_tokens)


def state_key(end: bytes, part: int) -> bytes:
    """Key of a part of the states after a prefix with the key `end`."""
    return _hashed(end, b"state" + part.to_bytes(4, "little"))


class RunKeys:
    """Makes keys for one root. Two roots have no key in common."""

    def __init__(self, root: bytes, run_tokens: int, page_tokens: int, cell_tokens: int = 1) -> None:
        """cell_tokens: a run's KV depends on all tokens of the cells that it has a part of, so its key does."""
        self.root, self.run_tokens, self.page_tokens, self._cell_tokens = root, run_tokens, page_tokens, cell_tokens

    def extend(self, keys: list[bytes], tokens: Sequence[int], salt: str, num_runs: int) -> None:
        """Append the keys of the next runs of `tokens` until there are num_runs. Tokens are 0..2**32-1."""
        size = self.run_tokens
        before = keys[-1] if keys else self._start(salt)
        for run in range(len(keys), num_runs):
            end = -(-(run + 1) * size // self._cell_tokens) * self._cell_tokens
            before = _hashed(before, array("I", tokens[run * size : end]).tobytes())
            keys.append(before)

    def ends(self, keys: Sequence[bytes], tokens: Sequence[int], salt: str, run: int) -> list[bytes]:
        """Keys of the prefixes that end with each full page of a run; for the whole run that is the run's key,
        unless it ends within a cell. keys: those of the runs before it."""
        size, first = self.page_tokens, run * self.run_tokens
        data = array("I", tokens[first : first + self.run_tokens])
        hashed = _begun(keys[run - 1] if run else self._start(salt))
        ends = []
        for at in range(0, len(data) - size + 1, size):
            hashed.update(data[at : at + size].tobytes())
            ends.append(hashed.digest())
        return ends

    def _start(self, salt: str) -> bytes:
        return _hashed(self.root, salt.encode())


def _begun(before: bytes, data: bytes = b"") -> hashlib.blake2b:
    return hashlib.blake2b(data, digest_size=KEY_BYTES, key=before[:64])


def _hashed(before: bytes, data: bytes) -> bytes:
    return _begun(before, data).digest()
