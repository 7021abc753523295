"""Runs requests on a path's engine and collects what it noted, row by row. Never: building it, comparing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from proa.check.notes import END, FINAL, IDS, IN, MID, MIXED, NORM1, NORM2, NUMBERS, WEIGHTS, Notes, place
from proa.engine.engine import Engine
from proa.engine.executors.executor import Executor
from proa.engine.runner import Flight, Runner, StepOutput
from proa.errors import ProaError
from proa.models.spec import Model, Moe
from proa.plan.budget import SCORED_ROWS
from proa.types import EngineRequest, Sampling

LOGITS, STEP = "logits", "step"  # STEP: number of the step that computed the row
ANSWER_TOKENS = 5
PREFIX_TAIL_TOKENS = 9  # of the prompt that begins with another one
SCORED_BEFORE = 4  # positions of a prompt, before the first that is sampled, whose logits are compared
PROMPT, DECODE, CACHED = "prompt", "decode", "cached prefix"
FROM_RAM, FROM_FILES = "prefix from RAM", "prefix from files"  # also the ids of their requests
PHASES = (PROMPT, DECODE, CACHED, FROM_RAM, FROM_FILES)
_TIER_S = 0.001  # between two looks at pages that are copied


@dataclass(frozen=True)
class Texts:
    """Prompts. `again`, and that of each tier, begin with the first; the others are unrelated."""

    first: list[int]
    again: list[int]
    others: list[list[int]]
    of_tiers: dict[str, list[int]]  # by phase


def texts(vocab: int, longest: int, seed: int) -> Texts:
    """Random prompts of up to `longest` + PREFIX_TAIL_TOKENS tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count: int) -> list[int]:
        found: list[int] = torch.randint(vocab, (count,), generator=generator).tolist()
        return found

    first = draw(longest)
    others = [draw(max(2, longest // part - 1)) for part in (2, 3, 5)]
    again = first + draw(PREFIX_TAIL_TOKENS)
    return Texts(first, again, others, {tier: first + draw(PREFIX_TAIL_TOKENS) for tier in (FROM_RAM, FROM_FILES)})


@dataclass
class Noted:
    """One request. tokens: those that were computed. rows: by place, [len(tokens), ...]; of a reused prefix the rows of
    the request that computed it. cached: length of that prefix. sampled: by position, the token that was sampled
    there. scored: the positions whose rows of LOGITS are kept: sampled ones, and some before."""

    name: str
    tokens: list[int]
    num_prompt: int
    cached: int
    rows: dict[str, Tensor]
    sampled: dict[int, int]
    scored: list[int]

    def phases(self) -> list[str | None]:
        """For each row its phase; None: it was computed by another request."""
        if self.name in (FROM_RAM, FROM_FILES):
            return [None if p < self.cached else self.name for p in range(len(self.tokens))]
        prompt = CACHED if self.cached else PROMPT
        return [None if p < self.cached else prompt if p < self.num_prompt else DECODE for p in range(len(self.tokens))]


@dataclass
class _Rows:
    """A request's rows by position, as steps compute them."""

    request: Any
    rows: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    sampled: dict[int, int] = field(default_factory=dict)


class NotingRunner(Runner):
    """Reads the notes of every step before the next one is launched."""

    def __init__(self, executor: Executor[Any], notes: Notes, *, located: bool = False) -> None:
        """located: see notes.watch."""
        super().__init__(executor, overlap=False)
        self._notes, self._places = notes, places(executor.spec, located=located)
        self.requests: dict[str, _Rows] = {}
        self._steps = 0
        self.faults: dict[str, str] = {}

    def advance(self, flight: Flight, blocks: int) -> bool:
        with self._notes.in_parts(flight.step.parts, flight.plan.num_tokens):
            return super().advance(flight, blocks)

    def runs_beside(self, flight: Flight) -> bool:
        return False  # the notes of one step are read before another one is launched

    def wait(self, flight: Flight, meanwhile: Callable[[], None] | None = None) -> StepOutput:
        output = super().wait(flight, meanwhile)
        self.faults |= output.faults
        rows = self._read(flight)
        at = 0
        for item in flight.plan.items:
            of = self.requests.setdefault(item.request.id, _Rows(item.request))
            for position in range(item.start, item.start + item.num_tokens):
                of.rows[position] = {name: tensor[at] for name, tensor in rows.items()}
                at += 1
            if item.request.id in output.tokens:
                of.sampled[item.start + item.num_tokens - 1] = output.tokens[item.request.id][0]
        return output

    def _read(self, flight: Flight) -> dict[str, Tensor]:
        """All rows of the step, by place."""
        count, head = flight.plan.num_tokens, []
        self._steps += 1
        parts = None if flight.step_is_whole else flight.step.parts
        rows = {name: self._notes.read(name, count, parts) for name in self._places}
        if parts is not None:
            self._notes.forget(parts)
        rows[STEP] = torch.full((count,), self._steps)
        for first in range(0, count, SCORED_ROWS):
            scored = range(first, min(first + SCORED_ROWS, count))
            logits = self.executor.logits_of(flight.step, scored).to("cpu", copy=True)
            head.append([*(self._notes.read(name, len(scored)) for name in (END, FINAL)), logits])
        by_place = zip(*head, strict=True)
        return rows | {name: torch.cat(parts) for name, parts in zip((END, FINAL, LOGITS), by_place, strict=True)}


def places(spec: Model, *, located: bool = False) -> list[str]:
    """The places in a model's blocks that are noted. located: see notes.watch."""
    found = []
    for number, block in enumerate(spec.blocks):
        found += [place(what, number) for what in (IN, NORM1, MIXED) if block.mixer is not None]
        found += [place(what, number) for what in (MID, NORM2) if block.ffn is not None]
        of_experts = (IDS, WEIGHTS, NUMBERS) if located else (IDS, WEIGHTS)
        found += [place(what, number) for what in of_experts if isinstance(block.ffn, Moe)]
    return found


def run(engine: Engine, of: Texts) -> None:
    """Compute the first prompt alone, then an unrelated one, then the others together, and the one that begins with the
    first as soon as they decode; a few tokens are generated after each."""
    others = {f"other {i}": tokens for i, tokens in enumerate(of.others)}
    finish(engine, {"first": of.first})
    finish(engine, {"other 0": others.pop("other 0")})
    finish(engine, others, {"again": of.again})


def finish(engine: Engine, prompts: dict[str, list[int]], later: dict[str, list[int]] | None = None) -> None:
    """Compute prompts, and a few tokens after each. later: prompts that come when a token was generated."""
    _submit(engine, prompts)
    waiting = dict(later or {})
    while engine.has_work or waiting:
        began = any(event.tokens for event in engine.step()) or not engine.has_work
        if began and waiting:
            _submit(engine, waiting)
            waiting.clear()
        if engine.stalls:
            time.sleep(_TIER_S)


def _submit(engine: Engine, prompts: dict[str, list[int]]) -> None:
    sampling = Sampling(max_tokens=ANSWER_TOKENS, temperature=0.0)
    for name, tokens in prompts.items():
        engine.submit(EngineRequest(id=name, tokens=tokens, sampling=sampling))


def finish_stores(engine: Engine) -> None:
    """Wait until the pages of all prompts are stored in the tiers behind the prefix cache."""
    while engine.keep_up():
        time.sleep(_TIER_S)


def sequences(runner: NotingRunner) -> list[Noted]:
    """The sequences that gave rows. Raises ProaError if one reused a prefix that was not computed."""
    return [_sequence(runner.requests, name) for name in runner.requests]


def _sequence(requests: dict[str, _Rows], name: str) -> Noted:
    of = requests[name]
    computed = sorted(of.rows)
    tokens = list(of.request.tokens[: computed[-1] + 1])
    cached, found = computed[0], []
    for position in range(len(tokens)):
        row = of.rows.get(position) or _from_another(requests, name, tokens, position)
        if row is None:
            raise ProaError(f"the prefix cache gave a prompt {cached} tokens, but their pages are of another prompt")
        found.append(row)
    least = min(of.sampled, default=len(tokens)) - SCORED_BEFORE
    scored = [p for p in range(len(tokens)) if p in of.sampled or least <= p >= cached]
    rows = {key: torch.stack([row[key] for row in found]) for key in found[0] if key != LOGITS}
    rows[LOGITS] = torch.stack([found[position][LOGITS] for position in scored])
    return Noted(name, tokens, of.request.num_prompt, cached, rows, of.sampled, scored)


def _from_another(
    requests: dict[str, _Rows], name: str, tokens: Sequence[int], position: int
) -> dict[str, Tensor] | None:  # fmt: skip
    """The row at this position of another request that has the same tokens up to it."""
    for other, of in requests.items():
        same = of.request.tokens[: position + 1] == list(tokens[: position + 1])
        if other != name and same and position in of.rows:
            return of.rows[position]
    return None
