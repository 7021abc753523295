"""The size of what the prefix cache keeps in RAM and in files: runs of pages, and copies of recurrent states in parts
of that size (engine/scheduling/tiers.py). Pure. Never: how many are kept."""

from __future__ import annotations

from dataclasses import dataclass

from proa.cache.keys import run_pages
from proa.obs.units import format_bytes
from proa.plan.budget import Demand


@dataclass(frozen=True)
class Entries:
    """run_bytes: of any entry. run_tokens: whose KV that is. state_runs: entries that a copy of states takes at most,
    the pages behind the last whole run included; 0: the model has no recurrent states."""

    run_bytes: int
    run_tokens: int
    state_runs: int

    @property
    def state_bytes(self) -> int:
        return self.state_runs * self.run_bytes

    def words(self, runs: int) -> str:
        """Describe what so many runs and a copy of states hold."""
        return f"{runs * self.run_tokens} tokens" + (" and a copy of states" if self.state_runs else "")

    @property
    def note(self) -> str:
        """The size of a copy of states, for the start-up table; empty for a model without states."""
        if not self.state_runs:
            return ""
        tokens = self.state_runs * self.run_tokens
        return f"; a copy of states takes {format_bytes(self.state_bytes)}, as {tokens} tokens do"


def entries(need: Demand) -> Entries:
    """need: of a model with KV pages."""
    pages = run_pages(need.page_tokens)
    run_bytes = pages * need.page_bytes
    state_runs = 1 - (-need.copy_bytes // run_bytes) if need.copy_bytes else 0
    return Entries(run_bytes, pages * need.page_tokens, state_runs)
