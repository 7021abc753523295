"""The rules of beam search, as a pure state machine: which beams go on, which are finished, when the search ends."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from proa.types import TokenLogprob

Candidates = Sequence[tuple[int, float]]  # (token, its natural logprob), most likely first


@dataclass(frozen=True, slots=True)
class Beam:
    """One hypothesis. tokens: generated ones. logprobs: one entry per token, empty unless requested. total: sum of the
    tokens' logprobs. end: the end token that finished it; it counts in `total` and `length`, and is not in `tokens`."""

    tokens: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    total: float = 0.0
    end: int | None = None

    @property
    def length(self) -> int:
        return len(self.tokens) + (self.end is not None)


@dataclass(frozen=True, kw_only=True)
class BeamRules:
    """The settings of one search. width: number of live beams, and of finished ones that are kept. ends: tokens that
    finish a beam, from `min_tokens` on. top: alternatives in each of Beam.logprobs; None: no logprobs."""

    width: int
    max_tokens: int
    ends: frozenset[int] = frozenset()
    min_tokens: int = 0
    length_penalty: float = 1.0
    early_stopping: bool = False
    top: int | None = None

    @property
    def candidates(self) -> int:
        """Number of candidates per beam with which the search is exact: even if all end tokens are among them, `width`
        others are left."""
        return self.width + len(self.ends)

    def score(self, beam: Beam) -> float:
        """Return total / length ** length_penalty."""
        return self._score(beam.total, beam.length)

    def bound(self, beam: Beam) -> float:
        """Return the highest score that a continuation of a live beam can have.

        Logprobs are at most 0, so no total is higher than the beam's. The best length is the greatest possible one for
        a positive penalty, which divides the negative total, and the smallest for a negative penalty.
        """
        length = self.max_tokens if self.length_penalty > 0 else beam.length + 1
        return self._score(beam.total, length)

    def _score(self, total: float, length: int) -> float:
        return float(total / length**self.length_penalty)


@dataclass(slots=True)
class BeamSearch:
    """The beams of one answer. live: all of the same length, highest total first; the search ends when there are none.
    finished: the `width` best ones, highest score first. Among equals the earlier candidate comes first."""

    rules: BeamRules
    live: list[Beam] = field(default_factory=lambda: [Beam()])
    finished: list[Beam] = field(default_factory=list)

    def advance(self, candidates: Sequence[Candidates]) -> None:
        """Extend each live beam by one token. candidates: per live beam the most likely `rules.candidates` tokens, or
        the whole vocabulary.

        All extensions are ranked together by total. An end token finishes its beam if it is among the first `width`;
        the first `width` others are the new live beams. Impossible tokens (logprob -inf) are left out.
        """
        width, ends = self.rules.width, self.rules.ends
        ranked = self._ranked(candidates)
        live: list[Beam] = []
        for rank, (beam, token, logprob, alternatives) in enumerate(ranked):
            if token in ends:
                if rank < width:
                    self.finished.append(Beam(beam.tokens, beam.logprobs, beam.total + logprob, token))
            elif len(live) < width:
                entry = self._entry(token, logprob, alternatives)
                live.append(Beam((*beam.tokens, token), beam.logprobs + entry, beam.total + logprob))
        self.live = live
        self._keep_best()
        if live and live[0].length == self.rules.max_tokens and not self._is_full_early:
            self.finished += live
            self._keep_best()
            self.live = []
        elif self._cannot_improve():
            self.live = []

    def _ranked(self, candidates: Sequence[Candidates]) -> list[tuple[Beam, int, float, Candidates]]:
        """Return all extensions, highest total first. An end token before min_tokens is no extension."""
        found = [
            (beam, token, logprob, options)
            for beam, options in zip(self.live, candidates, strict=True)
            for token, logprob in options
            if logprob > -math.inf and (beam.length >= self.rules.min_tokens or token not in self.rules.ends)
        ]
        found.sort(key=lambda item: item[0].total + item[2], reverse=True)  # stable
        return found

    def _entry(self, token: int, logprob: float, alternatives: Candidates) -> tuple[TokenLogprob, ...]:
        top = self.rules.top
        return () if top is None else (TokenLogprob(token, logprob, list(alternatives[:top])),)

    def _keep_best(self) -> None:
        self.finished.sort(key=self.rules.score, reverse=True)
        del self.finished[self.rules.width :]

    @property
    def _is_full_early(self) -> bool:
        return self.rules.early_stopping and len(self.finished) == self.rules.width

    def _cannot_improve(self) -> bool:
        """Return True if `width` beams are finished and, without early stopping, no live beam can beat the worst."""
        if len(self.finished) < self.rules.width or not self.live:
            return False
        return self.rules.early_stopping or self.rules.bound(self.live[0]) <= self.rules.score(self.finished[-1])
