"""Predicts whether restoring runs of pages is quicker than computing their tokens, by observed rates. Never: threads,
which runs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

LEAST_PREFILL_TOKENS = 64  # a step with fewer says little about the rate of prefill
NEWEST_SHARE = 0.3  # weight of the newest value in a running average
TRY_EVERY = 16  # every 16th refused restore is made after all: its rate may be that of a busy disk

Tier = Literal["ram", "files"]


class Rate:
    """A running average of a rate per second; None: not known yet."""

    def __init__(self) -> None:
        self.value: float | None = None

    def add(self, amount: float, seconds: float) -> None:
        rate = amount / max(seconds, 1e-9)
        self.value = rate if self.value is None else self.value + NEWEST_SHARE * (rate - self.value)


class RestoreRates:
    """The rates of prefill, in tokens/s, and of restoring from each tier, in bytes/s."""

    def __init__(self) -> None:
        self.restore: dict[Tier, Rate] = {"ram": Rate(), "files": Rate()}
        self.prefill = Rate()
        self.refused = 0

    def learn(self, num_tokens: int, seconds: float) -> None:
        """Record the duration of a step with this many tokens of prompts."""
        if num_tokens >= LEAST_PREFILL_TOKENS:
            self.prefill.add(num_tokens, seconds)

    def worthwhile(self, nbytes: Mapping[Tier, int], num_tokens: int) -> bool:
        """Whether to restore these bytes of each tier: if that is predicted to be quicker than computing the tokens, a
        rate is unknown, or it is the TRY_EVERY-th refusal."""
        tokens_per_s, restore_s = self.prefill.value, 0.0
        if tokens_per_s is None:
            return True
        for tier, count in nbytes.items():
            bytes_per_s = self.restore[tier].value
            if bytes_per_s is None and count:
                return True
            restore_s += count / bytes_per_s if bytes_per_s else 0.0
        if restore_s <= num_tokens / tokens_per_s:
            return True
        self.refused += 1
        return self.refused % TRY_EVERY == 0
