"""The queues of an executor, and their order: one of decode steps and samples, one of prompts. Never: launches.

Both share buffers, so by default launches on one queue wait for all that was launched on the other before. While
`apart` is set they do not: prompts are computed at the same time as decode steps.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from proa.engine.executors.device_queue import Mark, Queue

STEPS, PROMPTS = range(2)


class Queues:
    """apart: launches on one queue do not wait for those on the other, except for those that were launched before
    `apart` was set. A launch after it is reset waits for all."""

    def __init__(self, steps: Queue, prompts: Queue | None = None) -> None:
        """prompts: None: there is one queue for both."""
        self._both = (steps, prompts or steps)
        self.apart = False
        self._unseen = [False, False]  # has launches that the other queue has not waited for
        self._owed: list[Mark | None] = [None, None]  # of the other queue: the next launch waits for it in any case

    @property
    def steps(self) -> Queue:
        return self._both[STEPS]

    @property
    def prompts(self) -> Queue:
        return self._both[PROMPTS]

    @property
    def separate(self) -> bool:
        return self.steps is not self.prompts

    @contextmanager
    def on_steps(self, *, ordered: bool = False) -> Iterator[None]:
        """Context in which launches go to the queue of decode steps. ordered: even while `apart` is set they wait for
        prompts launched before, and prompts launched later wait for them."""
        with self._on(STEPS, ordered=ordered or not self.apart):
            yield

    @contextmanager
    def on_prompts(self) -> Iterator[None]:
        """Context in which launches go to the queue of prompts."""
        with self._on(PROMPTS, ordered=not self.apart):
            yield

    @contextmanager
    def _on(self, side: int, *, ordered: bool) -> Iterator[None]:
        queue, other = self._both[side], 1 - side
        with queue.current():
            if self.separate:
                self._join(side, ordered=ordered)
            try:
                yield
            finally:
                if self.separate:
                    self._unseen[side] = True
                    if ordered:
                        self._owed[other] = queue.mark()

    def _join(self, side: int, *, ordered: bool) -> None:
        other = 1 - side
        if ordered and self._unseen[other]:
            self._both[side].after(self._both[other].mark())
            self._unseen[other] = False
        elif not ordered and (owed := self._owed[side]) is not None:
            self._both[side].after(owed)
        self._owed[side] = None

    def finish(self) -> None:
        """Wait until everything launched so far has ended."""
        self.steps.finish()
        if self.separate:
            self.prompts.finish()
            self._unseen, self._owed = [False, False], [None, None]
