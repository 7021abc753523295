"""What a step launches on a device, over buffers that stay: the model, its head, what is drawn. Belongs here: nothing
that a graph, a stream or a request adds, so that the same launches can be rehearsed without a GPU (rehearsal.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from proa.engine.executors.batch import StepLimits
from proa.engine.executors.device_inputs import DeviceInputs
from proa.engine.executors.device_logprobs import DeviceLogprobs
from proa.engine.executors.device_sampler import DeviceSampler
from proa.layers.decoder import Decoder
from proa.layers.step import Step
from proa.models.spec import Rope
from proa.ops.table import AttentionBatch, LayerCache


class Angles(Protocol):
    def of(self, positions: Tensor) -> dict[Rope, tuple[Tensor, Tensor]]:
        """See AngleTables."""


class DeviceSteps:
    """`inputs`: of steps that are no graphs. logits float32, best int32: of the rows that were scored last."""

    def __init__(
        self, model: Decoder, caches: tuple[LayerCache, ...], limits: StepLimits, angles: Angles, device: torch.device,
        kept_blocks: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._model, self._caches, self._angles, self._device = model, caches, angles, device
        self._most_pages = -(-limits.context_tokens // limits.page_tokens)
        vocab = model.spec.vocab
        self.inputs = DeviceInputs(limits.rows, limits.sequences, self._most_pages, rows_each=0, device=device)
        self.hidden = torch.zeros(limits.rows, model.spec.hidden, dtype=torch.bfloat16, device=device)
        self.kept = {block: torch.zeros_like(self.hidden) for block in kept_blocks}
        self.scored = torch.zeros(limits.head_rows, dtype=torch.int64, device=device)
        self.logits = torch.zeros(limits.head_rows, vocab, device=device)
        self.best = torch.zeros(limits.head_rows, dtype=torch.int32, device=device)
        self.logprobs = DeviceLogprobs(limits.head_rows, vocab, device)
        self.sampler = DeviceSampler(min(limits.sequences, limits.rows), vocab, device, self.logprobs)

    def decode_inputs(self, bucket: int, rows_each: int) -> DeviceInputs:
        """Inputs of steps of up to `bucket` sequences with `rows_each` rows each."""
        rows = bucket * rows_each
        return DeviceInputs(rows, bucket, self._most_pages, rows_each=rows_each, device=self._device)

    def step(self, inputs: DeviceInputs, rows: int) -> tuple[Tensor, Step]:
        """The tokens of the first rows, and what the model is called with beside them."""
        batch = AttentionBatch((), (), (), inputs.slots[:rows], inputs.batch)
        return inputs.tokens[:rows], Step(batch, self._angles.of(inputs.positions[:rows]), self._caches)

    def run(self, inputs: DeviceInputs, rows: int) -> None:
        """hidden[:rows] = what the model makes of the inputs' first rows."""
        tokens, step = self.step(inputs, rows)
        self.hidden[:rows].copy_(self._model(tokens, step, self.kept))

    def run_head(self, rows: int) -> None:
        """Of the first rows named in `scored`: logits, and the best token of each."""
        logits = self._model.logits(self.hidden.index_select(0, self.scored[:rows]))
        self.logits[:rows].copy_(logits)
        self.best[:rows].copy_(self._model.argmax(logits))
