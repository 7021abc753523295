"""Decides which passes of prompts begin divided by their routing, to find out whether that gains time. Never: dividing.

Finding out takes the first layers longer: with int4 experts and a router that likes all alike, 10 % of the time of 64
tokens, 5 % of 512 (H100). Whether it gains follows from the router and the number of tokens, which change slowly. The
first passes of a length do not try: they load kernels and capture graphs, and the GPU's times are not known before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

FIRST_SKIPPED = 2  # first passes of a length: one launches op by op, the next one captures graphs
MOST_SKIPPED = 31  # passes in a row that do not try


@dataclass
class Probes:
    """After n tries in a row without a gain, the next 2^(n + 1) - 1 passes of about as many tokens do not try, at most
    MOST_SKIPPED. Keys: number of bits of the number of tokens."""

    _failed: dict[int, int] = field(default_factory=dict)  # tries in a row
    _skip: dict[int, int] = field(default_factory=dict)  # passes from now on

    def due(self, tokens: int) -> bool:
        """Whether the pass that begins tries; call it once for each."""
        bits = tokens.bit_length()
        left = self._skip.get(bits, FIRST_SKIPPED)
        self._skip[bits] = max(0, left - 1)
        return not left

    def note(self, tokens: int, *, gained: bool) -> None:
        """Note what a pass found that tried."""
        bits = tokens.bit_length()
        failed = self._failed[bits] = 0 if gained else self._failed.get(bits, 0) + 1
        self._skip[bits] = min(MOST_SKIPPED, 2 ** (failed + 1) - 1) if failed else 0
