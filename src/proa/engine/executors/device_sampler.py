"""Samples the next token of each row, with its log-probabilities, on a GPU; the kernels' inputs are copied there while
the model still computes. Belongs here: buffers, launches, reading the results. Never: the model, waiting.

It does all that sampling/ does but for two kinds of rows, which the CPU samples from their logits as without a GPU:
rows with more logit edits than there is room for, and rows in which more than MOST_KEPT candidates remain after top-k,
top-p and min-p (a nearly flat distribution), which only the device finds out.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proa.engine.executors.device_logprobs import DeviceLogprobs
from proa.ops.device_table import DeviceOps
from proa.ops.draws import BEST, CUT, NO_TOP_K, TOO_MANY, WHOLE, DrawJobs, DrawSpace, Masks, floor_of, inverse_of
from proa.ops.host_block import HostBlock
from proa.ops.sizes import EDIT_WORDS, MOST_EDITS, MOST_KEPT, mask_words
from proa.sampling.choose import SampledToken, choose
from proa.sampling.edits import LogitEdits
from proa.sampling.rows import Row
from proa.types import Sampling, TokenLogprob


class DeviceSampler:
    """Serves up to `rows` rows of `vocab` logits. A launch must be read before the next; all on the model's stream."""

    def __init__(
        self, rows: int, vocab: int, device: torch.device, ops: DeviceOps, logprobs: DeviceLogprobs,
        most_edits: int = MOST_EDITS,
    ) -> None:  # fmt: skip
        """logprobs: for at least `rows` rows; may be used elsewhere between steps."""
        self._logprobs, self._ops = logprobs, ops
        self._space = DrawSpace(rows, vocab, min(MOST_KEPT, vocab), device)
        self._inputs = _Inputs(rows, vocab, device)
        self._host_edits = HostBlock((most_edits, EDIT_WORDS), torch.int32, device)
        self._edits = torch.zeros(most_edits, EDIT_WORDS, dtype=torch.int32, device=device)
        self._saved = torch.zeros(most_edits, device=device)
        self._tallies: dict[str, LogitEdits] = {}
        self._num_edits = 0
        self._logprob_rows: list[int] = []  # rows of this step with log-probabilities
        self._left: set[int] = set()  # rows of this step whose edits do not fit: the CPU samples them

    def launch(self, logits: Tensor, tokens: Tensor, rows: Sequence[Row]) -> None:
        """Sample from logits float32 [R, vocab] into tokens int32 [R], which holds each row's argmax, -1 if non-finite.
        The last step must have been read."""
        self._fill_edits(rows)
        drawn = [i for i, row in enumerate(rows) if not row.takes_argmax and i not in self._left]
        self._logprob_rows = [i for i, row in enumerate(rows) if row.sampling.logprobs is not None]
        if not drawn and not self._logprob_rows:
            return
        jobs = self._inputs.fill([(i, rows[i]) for i in drawn], self._logprob_rows)
        if drawn:
            edits, saved = self._edits[: self._num_edits], self._saved
            if self._num_edits:
                self._host_edits.copy_to(self._edits, self._num_edits)
                self._ops.edit(logits, edits, saved)
            self._ops.draw(logits, jobs, any(_kind(rows[i]) == CUT for i in drawn), self._space, tokens)
            if self._num_edits:
                self._ops.restore(logits, edits, saved)
        if self._logprob_rows:
            top = max(rows[i].sampling.logprobs or 0 for i in self._logprob_rows)
            self._logprobs.launch(logits, self._inputs.logprob_rows[: len(self._logprob_rows)], tokens, top)

    def read(self, tokens: Sequence[int], rows: Sequence[Row], logits: Tensor) -> list[SampledToken]:
        """The step's results. tokens: as the device left them. logits: read only for rows that the CPU samples. Only
        after the device has finished."""
        choices = [SampledToken(token) for token in tokens]
        if self._logprob_rows:
            results = self._logprobs.read([tokens[i] for i in self._logprob_rows])
            for i, result in zip(self._logprob_rows, results, strict=True):
                if tokens[i] >= 0:
                    top = result.top[: rows[i].sampling.logprobs]
                    choices[i].logprob = TokenLogprob(result.token, result.logprob, top)
        left = [i for i, token in enumerate(tokens) if token == TOO_MANY or (i in self._left and token >= 0)]
        if left:
            again = choose([0] * len(left), [rows[i] for i in left], logits[left].cpu())
            for i, choice in zip(left, again, strict=True):
                choice.late = True
                choices[i] = choice
        return choices

    def warm_up(self, logits: Tensor, tokens: Tensor) -> None:
        """Launch every kernel once, so that it is compiled and loaded; the results are meaningless."""
        asked = Sampling(max_tokens=1, temperature=1.0, top_p=0.5, repetition_penalty=2.0, logprobs=1)
        self.launch(logits, tokens, [Row(asked, [0], 1)])

    def _fill_edits(self, rows: Sequence[Row]) -> None:
        """Write the rows' logit edits to the host buffer. Only tallies of this step's requests are kept; others are
        rebuilt when their requests return."""
        tallies: dict[str, LogitEdits] = {}
        self._num_edits = 0
        self._left = set()
        words = self._host_edits.host.numpy()
        for i, row in enumerate(rows):
            if not row.is_adjusted:
                continue
            tally = tallies[row.request] = self._tallies.get(row.request) or LogitEdits(row)
            edits = tally.edits(row)
            end = self._num_edits + len(edits)
            if end > len(words):
                self._left.add(i)
                continue
            words[self._num_edits : end, 0] = i
            words[self._num_edits : end, 1:] = edits
            self._num_edits = end
        self._tallies = tallies


class _Inputs:
    """Sampling parameters of the rows, as columns: one block, copied at once; and masks of the rows that have a
    constraint, in another."""

    def __init__(self, rows: int, vocab: int, device: torch.device) -> None:
        words = mask_words(vocab)
        self._host_words = HostBlock((rows, words), torch.int32, device)
        self._words = torch.zeros(rows, words, dtype=torch.int32, device=device)
        rows = -(-rows // 4) * 4  # columns begin at multiples of 16 bytes: Triton compiles other alignments separately
        nbytes = rows * (4 * 8 + 6 * 4)
        self._block = HostBlock((nbytes // 4,), torch.int32, device)
        self._device = torch.zeros(nbytes // 4, dtype=torch.int32, device=device)
        mine, self._theirs = (_columns(of, rows) for of in (self._block.host, self._device))
        self._floats, self._ints = (part.numpy() for part in mine)
        self.logprob_rows = self._theirs[1][4]

    def fill(self, drawn: Sequence[tuple[int, Row]], logprob_rows: Sequence[int]) -> DrawJobs:
        number, num_masks = len(drawn), 0
        words = self._host_words.host.numpy()
        for job, (i, row) in enumerate(drawn):
            s = row.sampling
            self._floats[:, job] = inverse_of(s.temperature), row.uniform(), s.top_p, s.min_p
            self._ints[:4, job] = i, _kind(row), min(s.top_k or NO_TOP_K, NO_TOP_K), floor_of(s.min_p)
            self._ints[5, job] = -1
            if (mask := row.mask()) is not None:
                words[num_masks], self._ints[5, job] = mask, num_masks
                num_masks += 1
        self._ints[4, : len(logprob_rows)] = logprob_rows
        if num_masks:
            self._host_words.copy_to(self._words, num_masks)
        self._block.copy_to(self._device)
        inverses, uniforms, top_p, min_p = self._theirs[0][:, :number]
        rows, kinds, top_k, floors = self._theirs[1][:4, :number]
        masks = Masks(self._theirs[1][5, :number], self._words)
        return DrawJobs(rows, kinds, top_k, floors, inverses, uniforms, top_p, min_p, masks)


def _columns(block: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Views of int32 [14 * rows]: float64 [4, rows], and int32 [6, rows]."""
    return block[: 8 * rows].view(torch.float64).view(4, rows), block[8 * rows :].view(6, rows)


def _kind(row: Row) -> int:
    if row.sampling.temperature == 0.0:
        return BEST
    return CUT if row.is_truncated else WHOLE
