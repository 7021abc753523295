"""What a loaded model can change between two steps without being loaded again. Never: which is faster (plan/likely.py,
engine/building/plan_trial.py), torch.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Choices:
    """co_fetch: in steps of few tokens the GPU reads some experts in RAM over PCIe. read_ahead: idle CPU workers
    prefetch the next layer's probable experts."""

    co_fetch: bool
    read_ahead: bool

    def within(self, able: Choices) -> Choices:
        """These, as far as they are possible."""
        return Choices(self.co_fetch and able.co_fetch, self.read_ahead and able.read_ahead)

    def __str__(self) -> str:
        on = {"co-fetch": self.co_fetch, "read ahead": self.read_ahead}
        return ", ".join(f"{name} {'on' if is_on else 'off'}" for name, is_on in on.items())


NONE = Choices(co_fetch=False, read_ahead=False)
