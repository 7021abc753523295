"""Keys of runs of pages outside the prefix tree (RAM, files). Never: tensors, files, requests.

A run is a fixed number of consecutive pages of one prefix. Its key is a hash chain: it depends on the root (model, KV
type, page size, version), the salt and all tokens from the first one to the run's end, as the run's KV does.
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


class RunKeys:
    """Makes keys for one root. Two roots have no key in common."""

    def __init__(self, root: bytes, run_tokens: int) -> None:
        self.root, self.run_tokens = root, run_tokens

    def extend(self, keys: list[bytes], tokens: Sequence[int], salt: str, num_runs: int) -> None:
        """Append the keys of the next runs of `tokens` until there are num_runs. Tokens are 0..2**32-1."""
        size = self.run_tokens
        before = keys[-1] if keys else _hashed(self.root, salt.encode())
        for run in range(len(keys), num_runs):
            before = _hashed(before, array("I", tokens[run * size : (run + 1) * size]).tobytes())
            keys.append(before)


def _hashed(before: bytes, data: bytes) -> bytes:
    return hashlib.blake2b(data, digest_size=KEY_BYTES, key=before[:64]).digest()
