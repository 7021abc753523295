"""A step's launches on a device, over fixed buffers: model, head, sampling. Never: graphs, streams, requests, so that
rehearsal.py can make the same launches without a GPU.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from proa.engine.executors.batch import Span, StepLimits
from proa.engine.executors.device_inputs import DeviceInputs
from proa.engine.executors.device_logprobs import DeviceLogprobs
from proa.engine.executors.device_sampler import DeviceSampler
from proa.layers.decoder import Decoder
from proa.layers.step import Step
from proa.models.spec import Rope
from proa.ops.caches import Caches
from proa.ops.device_table import DeviceOps
from proa.ops.table import AttentionBatch


class Angles(Protocol):
    def of(self, positions: Tensor) -> dict[Rope, tuple[Tensor, Tensor]]:
        """See AngleTables."""


class DeviceSteps:
    """inputs: those of steps launched op by op; chunk_inputs: those of the chunks of a step in parts, `inputs` first;
    over_inputs: those of a step in parts that overtakes another one.
    hidden bfloat16 [rows, hidden]: after the last block. logits float32 [head rows, vocab], best int32 [head rows]: of
    the rows scored last."""

    def __init__(
        self, model: Decoder, caches: Caches, limits: StepLimits, angles: Angles, device: torch.device,
        ops: DeviceOps, kept_blocks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._model, self._caches, self._angles, self._device = model, caches, angles, device
        # Rows of page tables are multiples of 16 bytes: kernels are compiled for aligned addresses.
        self._most_pages = -(-limits.context_tokens // limits.page_tokens // 4) * 4
        vocab = model.spec.vocab
        self.inputs = self._inputs_of(limits.rows, limits.sequences)
        others = (self._inputs_of(limits.chunk_rows, limits.sequences) for _ in range(1, limits.chunks))
        self.chunk_inputs = [self.inputs, *others]
        self.over_inputs = [self._inputs_of(rows, limits.sequences) for rows in (limits.over_rows,) if rows]
        hidden = partial(torch.zeros, dtype=torch.bfloat16, device=device)
        self.hidden = hidden(max(limits.rows, limits.head_rows), model.spec.hidden)
        self.kept = {block: hidden(limits.rows_in_parts, model.spec.hidden) for block in kept_blocks}
        self.scored = torch.zeros(limits.head_rows, dtype=torch.int64, device=device)
        self._first_rows = torch.arange(limits.head_rows, device=device)
        self.logits = torch.zeros(limits.head_rows, vocab, device=device)
        self.best = torch.zeros(limits.head_rows, dtype=torch.int32, device=device)
        self.logprobs = DeviceLogprobs(limits.head_rows, vocab, device, ops)
        self.sampler = DeviceSampler(min(limits.sequences, limits.rows), vocab, device, ops, self.logprobs)

    def decode_inputs(self, bucket: int, rows_each: int) -> DeviceInputs:
        """New inputs for steps of up to `bucket` sequences with `rows_each` rows each."""
        return self._inputs_of(bucket * rows_each, bucket, rows_each)

    def _inputs_of(self, rows: int, sequences: int, rows_each: int = 0) -> DeviceInputs:
        return DeviceInputs(rows, sequences, self._most_pages, rows_each=rows_each, device=self._device)

    def step(
        self, inputs: DeviceInputs, rows: int, spans: Sequence[Span] = (), *, beside_decode: bool = False
    ) -> tuple[Tensor, Step]:  # fmt: skip
        """The model's arguments for the first `rows` rows of the inputs. spans: those of the inputs, if the launches
        are for these alone; without them, launches serve any sequences. beside_decode: see AttentionBatch."""
        lens = tuple(len(s.tokens) for s in spans), tuple(s.start + len(s.tokens) for s in spans)
        batch = AttentionBatch(*lens, (), inputs.slots[:rows], inputs.batch, beside_decode=beside_decode)
        return inputs.tokens[:rows], Step(batch, self._angles.of(inputs.positions[:rows]), self._caches)

    def run(
        self, inputs: DeviceInputs, rows: int, spans: Sequence[Span] = (), *, beside_decode: bool = False
    ) -> None:  # fmt: skip
        """Compute hidden[:rows] from the first `rows` rows of the inputs. spans, beside_decode: see `step`."""
        tokens, step = self.step(inputs, rows, spans, beside_decode=beside_decode)
        self.hidden[:rows].copy_(self._model(tokens, step, self.kept))

    def bring(self, pieces: Sequence[Tensor], rows: Sequence[int], scored: int) -> None:
        """Copy rows of a step's hidden states, which lie in `pieces` one after the other, to the first rows of
        `self.hidden`, and score `scored` rows there, some of them padding. rows, rising: the first of `self.scored`."""
        begin = first = 0
        for piece in pieces:
            end = bisect_left(rows, first + len(piece))
            if begin < end:
                at = self.scored[begin:end] - first if first else self.scored[begin:end]
                self.hidden[begin:end].copy_(piece.index_select(0, at))
            begin, first = end, first + len(piece)
        self.scored[:scored].copy_(self._first_rows[:scored])

    def run_head(self, rows: int) -> None:
        """Compute logits[:rows] and their argmax best[:rows] for the rows scored[:rows] of `hidden`."""
        logits = self._model.logits(self.hidden.index_select(0, self.scored[:rows]))
        self.logits[:rows].copy_(logits)
        self.best[:rows].copy_(self._model.argmax(logits))
