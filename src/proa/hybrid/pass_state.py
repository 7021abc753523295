"""A pass of streamed prefill: what it was asked for, and how far it is. Values. Never: the order of a pass
(streaming.py)."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proa.hybrid.pass_totals import Times
from proa.hybrid.ring import Group
from proa.hybrid.routed_layer import Divided
from proa.hybrid.uploads import Fetched, Upload
from proa.machine.cost.prefill import Division
from proa.native.doorbell import Counters


@dataclass(frozen=True)
class Asked:
    """mode: what computes experts in RAM for prompts, a value of --prefill; or "half" (proa check): half of each
    layer's are streamed, whatever the rates. top_k: the largest of the model's layers."""

    mode: str
    top_k: int


@dataclass
class Pass:
    """A pass under way. left: chunks of the group under way that were not launched yet. marks: at the pass's begin;
    then with what the device did since the mark before; arriving: copies that were started. Of both, those that
    `add_up` has not counted yet. typical: later passes of as many tokens are launched like it, so that the GPU's times
    tell theirs: not the first ones, which load kernels and capture graphs, nor one that only begins divided by its
    routing.

    If it is routed: groups have the heads of layers whose routing is not known yet. chosen: tokens of each expert of
    the layer under way; tail: its experts to copy besides the head; divided: until the copies of these have started;
    gain_s: by which the pass is shorter, as far as it is known."""

    tokens: int
    chunks: int
    groups: list[Group]
    divisions: list[Division]
    before: Counters  # of the CPU's jobs when the pass began
    alone: bool = False  # the device computes all experts: the CPU gets no job
    heat: NDArray[np.float32] | None = None
    own_heat: bool = False  # heat is what passes chose
    routed: bool = False
    promotes: bool = False
    typical: bool = True
    at: int = 0  # the group under way
    left: int = 0
    uploads: dict[int, list[Upload]] = field(default_factory=dict)  # by group
    arriving: deque[Upload] = field(default_factory=deque)
    nbytes: int = 0
    streamed: int = 0  # experts, of the groups that are divided
    copied_s: float = 0.0  # on the host's clock, when all copies that were started are expected to have arrived
    chosen: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    tail: list[int] = field(default_factory=list)
    divided: Divided | None = None
    gain_s: float = 0.0
    decided: int = 0  # layers divided by their routing
    jobs: Counters | None = None  # the CPU's, when the layer before was divided
    counts: Fetched | None = None  # of the layer's choices, for promotions
    began_s: float = field(default_factory=time.perf_counter)
    marks: deque[tuple[int, Any]] = field(default_factory=deque)
    spent_s: list[float] = field(default_factory=lambda: [0.0] * len(Times._fields))
    copy_s: float = 0.0  # of copies that have arrived

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk, at most."""
        return -(-self.tokens // self.chunks)

    def add_up(self) -> None:
        """Count the marks that the device has passed, and the copies that have arrived. Called while the host has
        nothing else to do: the first token waits for what is left to count at the end."""
        while len(self.marks) > 1 and self.marks[1][1].passed:
            before, (what, mark) = self.marks.popleft()[1], self.marks[0]
            self.spent_s[what] += mark.seconds_since(before)
        while self.arriving and (took_s := self.arriving[0].seconds()) is not None:
            self.copy_s += took_s
            self.arriving.popleft()

    @property
    def times(self) -> Times:
        """The times between the marks that were counted."""
        return Times(*self.spent_s)
