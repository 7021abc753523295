"""The cells of prompts with --deterministic, and which of them are streamed: a rule of a prompt's length alone, so that
a token's bits depend on nothing else (docs/decisions/070). Never: requests, steps, measured rates.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Cells:
    """A prompt's tokens [i * tokens, (i + 1) * tokens), the last cell cut at the prompt's end. streamed_from: the
    experts in RAM are copied to the GPU for cells of at least so many tokens, and computed by the CPU for shorter ones;
    0: computed by the CPU for all cells."""

    tokens: int
    streamed_from: int = 0

    def size(self, start: int, num_prompt: int) -> int:
        """Number of tokens in the cell that begins at `start`."""
        return min(self.tokens, num_prompt - start)

    def streams(self, start: int, num_prompt: int) -> bool:
        """True if the cell that begins at `start` is streamed."""
        return 0 < self.streamed_from <= self.size(start, num_prompt)

    def streamed_tokens(self, start: int, num_prompt: int, most_cells: int, *, whole: bool) -> tuple[int, int]:
        """Tokens and number of the streamed cells from `start` on, at most `most_cells`. whole: without the last one if
        the prompt's end cuts it, unless it is the first."""
        end, count = start, 0
        while count < most_cells and end < num_prompt and self.streams(end, num_prompt):
            if whole and count and self.size(end, num_prompt) < self.tokens:
                break
            end, count = end + self.size(end, num_prompt), count + 1
        return end - start, count
