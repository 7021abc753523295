"""The adjustments of adjust.py as a table of single logits, which a GPU kernel applies.

Each request's table is kept from step to step, so that a step processes only its new tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from proa.sampling.rows import Row

FIRST_ROOM = 64
# seen: the token is in the prompt or the answer; times: occurrences in the answer.
_COLUMNS = [("token", np.int32), ("seen", np.bool_), ("times", np.float32), ("bias", np.float32)]


class LogitEdits:
    """The logits that one request adjusts: for each token its occurrences and its bias."""

    def __init__(self, row: Row) -> None:
        s = row.sampling
        self._sampling = s
        self._places: dict[int, int] = {}
        self._table = np.zeros(FIRST_ROOM, _COLUMNS)
        self._penalised = s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
        self._repeated = s.repetition_penalty != 1.0
        if self._repeated:
            for token in set(row.tokens[: row.num_prompt]):
                place = self._place(token)  # before indexing: it may reallocate the table
                self._table["seen"][place] = True
        self._looked_at = row.num_prompt
        for token, bias in s.logit_bias.items():
            place = self._place(token)
            self._table["bias"][place] = bias
        ends = {*s.eos_token_ids, *s.stop_token_ids} if s.min_tokens else ()
        self._ends = np.array([self._place(token) for token in sorted(ends)], np.int64)

    def edits(self, row: Row) -> NDArray[np.int32]:
        """Build the table for the request's next token: int32 [N, 4], one row per token id.

        Columns: the id; then, as float32 bits, the repetition penalty (divides a positive logit, multiplies others),
        the value to subtract (presence and frequency penalty), the value to add (bias, or -inf under min_tokens).
        """
        if self._repeated or self._penalised:
            for token in row.tokens[self._looked_at :]:
                place = self._place(token)
                self._table["seen"][place] = True
                self._table["times"][place] += 1
            self._looked_at = len(row.tokens)
        count, s = len(self._places), self._sampling
        table = self._table[:count]
        times = table["times"]
        penalty, one = np.float32(s.repetition_penalty), np.float32(1)
        less = np.float32(s.presence_penalty) + np.float32(s.frequency_penalty) * times
        plus = table["bias"].copy()
        if row.delays_end:
            plus[self._ends] = -np.inf
        out = np.empty((count, 4), np.int32)
        out[:, 0] = table["token"]
        out[:, 1] = np.where(table["seen"] & self._repeated, penalty, one).view(np.int32)
        out[:, 2] = np.where(times > 0, less, np.float32(0)).view(np.int32)
        out[:, 3] = plus.view(np.int32)
        return out

    def _place(self, token: int) -> int:
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._table):
            self._table = np.concatenate([self._table, np.zeros_like(self._table)])
        self._table["token"][place] = token
        return place
