"""Writes expert counts (how often each was selected) every minute and at the end. Never: the file format, counting."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path

from proa.hybrid.counting import Counting
from proa.plan.expert_counts import write_counts

SAVE_EVERY_S = 60.0

log = logging.getLogger(__name__)


class CountSaver:
    """experts: number of experts of each layer. If the file cannot be written, that is logged once and serving goes
    on."""

    def __init__(
        self, counting: Counting, file: Path, model: str, blocks: Sequence[int], experts: Sequence[int]
    ) -> None:
        self._counting, self._file, self._model = counting, file, model
        self._blocks, self._experts = blocks, experts
        self._saved_s = time.monotonic()
        self._failed = False

    def between_steps(self) -> None:
        if time.monotonic() - self._saved_s >= SAVE_EVERY_S:
            self._write()

    def end(self) -> None:
        """Write the final counts. Only when no step is in flight and none will follow."""
        self._counting.settle()
        self._write()

    def _write(self) -> None:
        rows = [row[:count] for row, count in zip(self._counting.totals.tolist(), self._experts, strict=True)]
        try:
            write_counts(self._file, self._model, self._blocks, rows)
        except OSError as error:
            if not self._failed:
                log.error(
                    "Expert counts cannot be written to %s: %s. Proa tries again every minute.",
                    self._file, error.strerror,
                )  # fmt: skip
            self._failed = True
        self._saved_s = time.monotonic()
