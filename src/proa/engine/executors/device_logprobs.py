"""Log-probabilities of rows of logits on a GPU: buffers, launches, reading the results. Never: sampling, waiting."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from proa.ops.device_table import DeviceOps
from proa.ops.draws import WHOLE, DrawSpace
from proa.ops.sizes import MOST_LOGPROBS, logprobs_keys
from proa.types import TokenLogprob


class DeviceLogprobs:
    """Serves up to `rows` rows of `vocab` logits. Each launch must be read before the next one."""

    def __init__(self, rows: int, vocab: int, device: torch.device, ops: DeviceOps) -> None:
        pinned, most = device.type == "cuda", min(MOST_LOGPROBS, vocab)
        self._most, self._ops = most, ops
        self._space = DrawSpace(rows, vocab, 1, device)
        self._kinds = torch.full((rows,), WHOLE, dtype=torch.int32, device=device)
        self._inverses = torch.ones(rows, dtype=torch.float64, device=device)
        self._rows = torch.arange(rows, dtype=torch.int32).to(device)
        self._host_tokens = torch.zeros(rows, dtype=torch.int32, pin_memory=pinned)
        self._tokens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._workspace = torch.zeros(logprobs_keys(rows, vocab, most), dtype=torch.int64, device=device)
        self._ids, self._logprobs = _answers(rows, most, device, pinned=False)
        host = device if device.type == "meta" else torch.device("cpu")  # meta tensors cannot be copied to the CPU
        self._host_ids, self._host_logprobs = _answers(rows, most, host, pinned=pinned)
        self._number = self._count = 0

    def launch(self, logits: Tensor, rows: Tensor, tokens: Tensor, top: int) -> None:
        """Compute log-probabilities of tokens[row] and of the `top` most likely tokens for each row in `rows`. On the
        device: logits float32 [R, vocab], rows int32 [J], tokens int32 [R]."""
        self._number, self._count = len(rows), min(top, self._most)
        number, count = self._number, self._count
        num_ids, num_logprobs = number * count, number * (count + 1)
        self._ops.row_logprobs(
            logits, rows, tokens, (self._kinds[:number], self._inverses[:number]), self._space, self._workspace,
            self._ids[:num_ids].view(number, count), self._logprobs[:num_logprobs].view(number, count + 1),
        )  # fmt: skip
        self._host_ids[:num_ids].copy_(self._ids[:num_ids], non_blocking=True)
        self._host_logprobs[:num_logprobs].copy_(self._logprobs[:num_logprobs], non_blocking=True)

    def launch_given(self, logits: Tensor, tokens: Sequence[int], top: int) -> None:
        """Compute log-probabilities for the first len(tokens) rows of the logits, of tokens[i] in row i."""
        number = len(tokens)
        self._host_tokens[:number] = torch.tensor(tokens, dtype=torch.int32)
        self._tokens[:number].copy_(self._host_tokens[:number], non_blocking=True)
        self.launch(logits, self._rows[:number], self._tokens, top)

    def read(self, tokens: Sequence[int]) -> list[TokenLogprob]:
        """The results of the last launch, by row. tokens: the token of each row. Only after the device has finished."""
        number, count = self._number, self._count
        ids = self._host_ids[: number * count].view(number, count).tolist()
        scores = self._host_logprobs[: number * (count + 1)].view(number, count + 1).tolist()
        return [
            TokenLogprob(token, own[0], list(zip(best, own[1:], strict=True)))
            for token, best, own in zip(tokens, ids, scores, strict=True)
        ]


def _answers(rows: int, count: int, device: torch.device, *, pinned: bool) -> tuple[Tensor, Tensor]:
    """Flat buffers, row after row: int32 ids of the `count` most likely tokens; float32 log-probabilities of the given
    token and of these."""
    return (
        torch.zeros(rows * count, dtype=torch.int32, device=device, pin_memory=pinned),
        torch.zeros(rows * (count + 1), device=device, pin_memory=pinned),
    )
