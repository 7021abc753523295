"""The part of the ops table that only a GPU needs: signatures of the primitives by which a layer's experts are divided
between GPU and CPU inside a graph, and by which tokens are sampled on the device. Never: maths, kernels.

ops/device_reference.py is the specification; ops/cuda_device.py has the kernels. Both are chosen once, with `Ops`. All
of them launch on the current stream and never synchronise. Shapes: T rows of the step, k experts per row, E experts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from proa.ops.added import Added
from proa.ops.bell_block import BellBlock
from proa.ops.draws import DrawJobs, DrawSpace
from proa.ops.faults import LayerFaults
from proa.ops.residency import Biases, ExpertShape, Located, Residency
from proa.ops.table import NextRouter, Unsummed


class Locate(Protocol):
    def __call__(self, ids: Tensor, residency: Residency) -> Located:
        """Look up where each pair of ids int32 [T, k] is computed; -1 is no expert, and not counted in
        `residency.counts`. In a step of up to IN_PLACE_PAIRS pairs the GPU reads some of the CPU's experts in RAM: see
        InPlace. Raises ValueError for ids of another dtype."""


class ExpertSpace(Protocol):
    """Buffers of `experts`, for up to the number of tokens that they were made for. Calls that share them must be
    ordered on one stream."""

    @property
    def partial(self) -> Tensor:
        """float32 [pairs, hidden]: outputs of the pairs, not yet multiplied by their weights."""


class NewExpertSpace(Protocol):
    def __call__(
        self, tokens: int, top_k: int, experts: int, of: ExpertShape, device: torch.device, *, fp8: bool = False,
        least_rows: int = 1,
    ) -> ExpertSpace:  # fmt: skip
        """Allocate buffers for up to `tokens` rows. fp8: with many tokens, round activations to e4m3 if the experts are
        e4m3 and it is faster. least_rows: kernels are chosen as for at least so many rows."""


class PackedExperts(Protocol):
    def __call__(
        self, x: Tensor, at: Located, of: ExpertShape, space: ExpertSpace, biases: Biases | None = None, *,
        in_pieces: bool = False,
    ) -> None:  # fmt: skip
        """space.partial[t * k + j] = expert at.ids[t, j] applied to x[t], bfloat16 [T, hidden], for pairs whose address
        is not 0; packed weights are read at these addresses. in_pieces: some experts may lie in pieces (ops/pieces.py).
        Raises ValueError for shapes that do not fit."""


class SumExperts(Protocol):
    def __call__(
        self, partial: Tensor, weights: Tensor, at: Located, added: Added, faults: LayerFaults, x: Tensor
    ) -> Unsummed:
        """The sum over each row's pairs with an address of weights * partial, plus the terms in `added`; it waits for
        the doorbell's answer if that is one of them. The arguments must stay valid until the result is added.

        partial float32 [>= T * k, hidden], weights float32 [T, k]; x bfloat16 [T, hidden]: the experts' input. When it
        is added, rows that are not finite are recorded in `faults`."""


class AddExperts(Protocol):
    def __call__(
        self, partial: Tensor, weights: Tensor, at: Located, total: Tensor | None, faults: LayerFaults, x: Tensor
    ) -> Tensor:
        """Returns `total` (None: zeros) plus the sum over each row's pairs with an address of weights * partial,
        float32 [T, hidden]. May write to `total`; use only the return value. For the other arguments see SumExperts."""


class SumsBesideBell(Protocol):
    def __call__(self, tokens: int, hidden: int) -> bool:
        """True if `sum_experts` may wait at a doorbell for this many rows; if not, pull the CPU's sum first."""


class Push(Protocol):
    def __call__(
        self, x: Tensor, ids: Tensor, weights: Tensor, up_address: Tensor, layer: int, block: BellBlock, state: Tensor
    ) -> None:
        """Hand the pairs with id >= 0 and address 0, and the rows that have one, to the CPU, and ring; without such a
        pair only `state` is written.

        x bfloat16 [T, hidden], rows may be strided; ids int32 or int64, weights float32, up_address int64 [T, k].
        state int32 [STATE_WORDS + most tokens], initially zeros. Raises ValueError."""


class Pull(Protocol):
    def __call__(self, out: Tensor, block: BellBlock, state: Tensor) -> None:
        """Copy the CPU's sum of the last push to out float32 [T, hidden]; rows without a pair on the CPU become zeros.
        `pull` waits for the answer, if it rang; `take` requires that it has arrived. After a failure on the CPU, out is
        arbitrary. Raises ValueError."""


class Poll(Protocol):
    def __call__(self, word: Tensor, polls: int, found: Tensor) -> None:
        """Load `word`, int32 [1] in memory that the CPU writes, until it is not 0 or `polls` times; store the last
        value in found, int32 [1]."""


class Foresee(Protocol):
    def __call__(
        self, x: Tensor, slots: Tensor, following: NextRouter, cpu: Tensor, layer: int, block: BellBlock
    ) -> None:
        """Publish to the CPU which of its experts `following` chooses from x bfloat16 [T, hidden], each row's likeliest
        first. cpu int32 [E]: numbers of the experts in RAM, -1: none; layer: the doorbell's number of that layer; slots
        int64 [T], -1: padding row. Only a hint: it does nothing for steps and routers that it does not support."""


class Edit(Protocol):
    def __call__(self, logits: Tensor, edits: Tensor, saved: Tensor) -> None:
        """Edit single logits, and save their old values for `restore`, which undoes it.

        edits int32 [N, EDIT_WORDS]: row, token, then float32 repetition, less, plus; every (row, token) once. Positive
        logits are divided by `repetition`, others multiplied by it; then `less` is subtracted and `plus` added. Tokens
        beyond the vocabulary are skipped. logits float32 [R, vocab], saved float32 [N]."""


class Draw(Protocol):
    def __call__(self, logits: Tensor, jobs: DrawJobs, cuts: bool, space: DrawSpace, tokens: Tensor) -> None:
        """Sample each job's row: replace tokens[row] by the sampled token, or by TOO_MANY; negative tokens stay.

        logits float32 [R, vocab], rows may be strided; tokens int32 [R]; cuts: True if any job's kind is CUT. Weights
        are integers, 2**40 for the most likely token, and tokens are taken in the order of their ids, or, with a cut,
        of falling probability: the first token whose cumulative weight exceeds uniform * total is sampled."""


class RowLogprobs(Protocol):
    def __call__(
        self, logits: Tensor, rows: Tensor, tokens: Tensor, ones: tuple[Tensor, Tensor], space: DrawSpace,
        workspace: Tensor, ids: Tensor, logprobs: Tensor,
    ) -> None:  # fmt: skip
        """Natural logprobs of J rows: of tokens[row], then of the top `count` tokens, the lowest id first among equals.

        logits float32 [R, vocab], rows may be strided; rows int32 [J]; tokens int32 [R]: the results of a row with a
        negative token are arbitrary; ones: kinds, all WHOLE, int32 [J], and inverses, all 1, float64 [J]; workspace
        int64 [logprobs_keys(J, vocab, count)] or more; ids int32 [J, count] and logprobs float32 [J, count + 1]."""


@dataclass(frozen=True)
class DeviceOps:
    """For one doorbell, whose hints share buffers."""

    locate: Locate
    expert_space: NewExpertSpace
    experts: PackedExperts
    sum_experts: SumExperts
    add_experts: AddExperts
    sums_beside_bell: SumsBesideBell
    push: Push
    pull: Pull
    take: Pull
    poll: Poll
    foresee: Foresee
    edit: Edit
    restore: Edit
    draw: Draw
    row_logprobs: RowLogprobs
