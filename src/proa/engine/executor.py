"""What runs a step's rows through a model. Belongs here: what all executors promise, and what they share. Never:
requests, how tokens are drawn."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from proa.engine.clock import StepClock
from proa.engine.spans import Span
from proa.models.spec import Model
from proa.native.doorbell import Counters
from proa.sampling.choose import SampledToken, choose
from proa.sampling.logprobs import token_logprobs
from proa.sampling.rows import Row
from proa.types import TokenLogprob

# Steps up to this many tokens are bound by reading weights, longer ones by arithmetic: each has its thread count.
FEW_TOKENS = 8


class Executor(Protocol):
    """`clock` is told when inputs are ready and when the model is done."""

    spec: Model
    clock: StepClock

    def forward(self, sequences: Sequence[Span], scored: Sequence[int] = ()) -> None:
        """Compute all rows of a step; write their K and V. `scored`: the rows that score or sample will name first, if
        they are known: they may be scored along."""

    def copy_states(self, slots: Sequence[tuple[int, int]]) -> None:
        """Behind what was computed and before what will be: of all recurrent layers, the first slot of each pair to the
        second, one pair after the other."""

    def score(self, rows: Sequence[int]) -> list[int]:
        """The best next token after each of these rows of the last step; -1 where logits are not finite."""

    def sample(self, rows: Sequence[int], asked: Sequence[Row]) -> None:
        """Choose the next token after each of these rows of the last step, as each is asked for."""

    def choices(self) -> list[SampledToken]:
        """What `sample` chose."""

    def explain(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        """Log-probabilities of a token after each of these rows of the last step, and of the `top` best ones there."""

    def broken(self) -> dict[int, str]:
        """Sequences of the last step, by their places, that are known not to be finite, and why. Called once a step,
        after what is sampled from it was scored."""

    @property
    def logits(self) -> Tensor:
        """Of the rows scored last, float32 [R, vocab], valid until the next call."""

    def counters(self) -> Counters:
        """What the CPU did for a GPU so far."""


class Follower(Executor, Protocol):
    """Computes steps one after the other without waiting for what the last one's tokens are.

    forward, sample, then any number of times: follow (the step after that one), choices and broken (of the one before),
    sample (of the one that followed); choices at last.
    """

    def can_follow(self) -> bool:
        """Whether `follow` is possible now, the last step having been sampled."""

    def follow(self, sequences: Sequence[Span]) -> None:
        """Compute one more token of each sequence of the last step that `sample` was asked for, in that order: the one
        that is being chosen, which they do not name."""


class InParts(Executor, Protocol):
    """Computes one step in parts, and whole steps between these: begin; advance and any number of steps, until it is
    done; end."""

    def begin(self, sequences: Sequence[Span]) -> None:
        """Such a step. Nothing of it is computed yet."""

    def advance(self, blocks: int) -> bool:
        """Compute so many more blocks of it, or what is left; whether that was all."""

    def end(self) -> None:
        """From now on it is the last step, which `score`, `sample` and `broken` are about."""

    def drop(self) -> None:
        """Nobody wants what is left of it."""

    def turns_s(self) -> tuple[float, float]:
        """Seconds of the last step that was computed between parts, and of a block of the last part; 0: none yet."""


class ChoosesOnTheCpu(ABC):
    """What executors have in common whose logits are in RAM when `score` returns."""

    def __init__(self) -> None:
        self._choices: list[SampledToken] = []

    @abstractmethod
    def score(self, rows: Sequence[int]) -> list[int]: ...

    @property
    @abstractmethod
    def logits(self) -> Tensor: ...

    def sample(self, rows: Sequence[int], asked: Sequence[Row]) -> None:
        self._choices = choose(self.score(rows), asked, self.logits)

    def choices(self) -> list[SampledToken]:
        return self._choices

    def explain(self, rows: Sequence[int], tokens: Sequence[int], top: int) -> list[TokenLogprob]:
        self.score(rows)
        return token_logprobs(self.logits, tokens, top)
