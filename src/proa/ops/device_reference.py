"""The specification of the GPU-only ops: plain torch on tensors in RAM. `experts` is missing: packed experts have their
reference in the native kernels, which compute on the same bytes. Never: speed, kernels.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from proa.native.doorbell import FORESEEN_ROWS
from proa.ops.added import Added
from proa.ops.bell_block import PENDING, STATE_WORDS, Bell, BellBlock, awaited, check_pull, check_push
from proa.ops.device_table import DeviceOps, NewExpertSpace, PackedExperts
from proa.ops.draws import BEST, CUT, TOO_MANY, WHOLE, DrawJobs, DrawSpace, Masks
from proa.ops.faults import CPU, IDS, INPUT, LAYER, OWN, SHARED, SOURCES, LayerFaults
from proa.ops.reference import rms_norm, route
from proa.ops.residency import IN_PLACE_PAIRS, Located, Residency
from proa.ops.table import NextRouter, Norm

BEST_WEIGHT = 2.0**40  # of the most likely token, when it is sampled


def locate(ids: Tensor, residency: Residency) -> Located:
    found, real = ids.clamp(min=0).long(), ids >= 0
    if residency.counts is not None:
        residency.counts.add_(torch.bincount(found[real], minlength=len(residency.counts)))
    up, down = (torch.where(real, of[found], 0) for of in (residency.up, residency.down))
    cpu = torch.where(real, residency.cpu[found], -1).to(torch.int32)
    if (here := residency.in_place) is not None and ids.numel() <= IN_PLACE_PAIRS:
        missing = (cpu >= 0) & (here.up[found] != 0)
        chosen = torch.bincount(found[missing], minlength=len(residency.up))
        alone = missing & (chosen[found] == 1)
        kept = int(alone.sum()) - int(here.share[int((chosen > 0).sum())])
        fetched = alone & (alone.flatten().cumsum(0).view(alone.shape) > kept)
        up, down = (torch.where(fetched, of[found], at) for of, at in ((here.up, up), (here.down, down)))
        cpu = torch.where(fetched, -1, cpu)
    return Located(ids, up, down, cpu)


@dataclass(frozen=True)
class ExpertSum:
    """Implements Unsummed. own: float32 [T, hidden]: the sum over the device's experts."""

    partial: Tensor
    weights: Tensor
    at: Located
    added: Added
    faults: LayerFaults
    x: Tensor
    factor: float = 1.0

    def scaled(self, factor: float) -> ExpertSum:
        return replace(self, factor=self.factor * factor)

    def total(self) -> Tensor:
        """The sum, float32 [T, hidden], times the factor. Records rows that are not finite."""
        mine = self.at.down != 0
        outputs = self.partial[: mine.numel()].view(*mine.shape, -1).where(mine[:, :, None], 0.0)
        total = (self.weights[:, :, None].where(mine[:, :, None], 0.0) * outputs).sum(1)
        cpu, shared, gate = self.added.cpu, self.added.shared, self.added.shared_gate
        if isinstance(cpu, Bell):
            bell, cpu = cpu, torch.empty(self.x.shape)
            pull(cpu, bell.block, bell.state)
        if cpu is not None:
            total = total + cpu
        if shared is not None:
            total = total + (shared.float() if gate is None else torch.sigmoid(gate.float()) * shared.float())
        parts = {CPU: cpu, SHARED: shared, INPUT: self.x} | {1 << k: outputs[:, k] for k in range(mine.shape[1])}
        record_faults(total, self.at, mine, self.faults, parts)
        return total * self.factor

    def add(self, x: Tensor) -> Tensor:
        return (x.float() + self.total()).to(x.dtype)

    def add_norm(self, x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
        x = self.add(x)
        return x, rms_norm(x, norm)


def add_experts(
    partial: Tensor, weights: Tensor, at: Located, total: Tensor | None, faults: LayerFaults, x: Tensor
) -> Tensor:
    return ExpertSum(partial, weights, at, Added(total), faults, x).total()


def record_faults(
    total: Tensor, at: Located, mine: Tensor, faults: LayerFaults, parts: Mapping[int, Tensor | None]
) -> None:
    """Record the rows of `total` [T, hidden] that are not finite, unless an earlier layer has, or the row is padding.
    mine: bool [T, k], pairs that this device computed; parts: the addends [T, hidden] by their bits in the record."""
    for row in (~total.isfinite().all(1)).nonzero().flatten().tolist():
        record = faults.notes.records[row]
        if record[LAYER] or at.ids[row, 0] < 0:
            continue
        record[LAYER] = faults.layer + 1
        record[SOURCES] = sum(bit for bit, part in parts.items() if part is not None and not part[row].isfinite().all())
        record[OWN] = sum(1 << k for k, here in enumerate(mine[row].tolist()) if here)
        record[IDS:] = at.ids[row]


def write_job(
    block: BellBlock, x: Tensor, ids: Tensor, weights: Tensor, on_cpu: Tensor, layer: int, number: int
) -> None:  # fmt: skip
    """Write a job into the doorbell's block. on_cpu: bool [T, k], the CPU's pairs; number: of the job, modulo 2^32."""
    tokens, rows = len(x), on_cpu.any(1)
    block.ids[:tokens] = ids.where(on_cpu, -1)
    block.weights[:tokens] = weights
    block.x[:tokens][rows] = x[rows]
    block.header.copy_(torch.tensor((layer, tokens, _signed(number))))


def _signed(number: int) -> int:
    return number - (number >> 31 << 32)


def push(
    x: Tensor, ids: Tensor, weights: Tensor, up_address: Tensor, layer: int, block: BellBlock, state: Tensor
) -> None:  # fmt: skip
    check_push(x, ids, weights, up_address, block)
    on_cpu, counts = awaited(ids, up_address, layer)
    state[STATE_WORDS : STATE_WORDS + len(x)] = counts
    state[PENDING] = counts.any().int()
    if bool(state[PENDING]):
        number = (int(state[0]) + 1) % (1 << 32)
        write_job(block, x, ids, weights, on_cpu, layer, number)
        state[0] = block.rung[0] = _signed(number)


def pull(out: Tensor, block: BellBlock, state: Tensor) -> None:
    """Does not wait: the answer must have arrived."""
    check_pull(out, block)
    pairs = state[STATE_WORDS : STATE_WORDS + len(out), None]
    out.copy_(torch.where(pairs > 0, block.y[: len(out)], 0.0))


def poll(word: Tensor, polls: int, found: Tensor) -> None:
    found.copy_(word)


def foresee(
    x: Tensor, slots: Tensor, following: NextRouter, cpu: Tensor, layer: int, block: BellBlock
) -> None:  # fmt: skip
    if not 0 < len(x) <= FORESEEN_ROWS:
        return
    normed = rms_norm(x, following.norm)
    ids, _ = route(following.router(normed), slots, following.rule)
    block.foreseen_ids[: len(x)] = torch.where(ids >= 0, cpu[ids.clamp(min=0).long()], -1)
    block.foreseen[1:] = torch.tensor((layer, len(x)))
    block.foreseen[0] += 1


def edit(logits: Tensor, edits: Tensor, saved: Tensor) -> None:
    inside = edits[:, 1] < logits.shape[1]
    rows, tokens = (edits[inside, i].long() for i in (0, 1))
    repetition, less, plus = edits[inside, 2:].view(torch.float32).unbind(1)
    score = logits[rows, tokens]
    saved[: len(edits)][inside] = score
    logits[rows, tokens] = torch.where(score > 0, score / repetition, score * repetition) - less + plus


def restore(logits: Tensor, edits: Tensor, saved: Tensor) -> None:
    inside = edits[:, 1] < logits.shape[1]
    logits[edits[inside, 0].long(), edits[inside, 1].long()] = saved[: len(edits)][inside]


def draw(logits: Tensor, jobs: DrawJobs, cuts: bool, space: DrawSpace, tokens: Tensor) -> None:
    for job, (row, kind) in enumerate(zip(jobs.rows.tolist(), jobs.kinds.tolist(), strict=True)):
        if tokens[row] < 0:
            continue
        scores = _allowed(logits[row], jobs.masks, job)
        log = (scores - scores.max()).double() * jobs.inverses[job]
        weights = (log.exp() * BEST_WEIGHT + 0.5).long()
        order = torch.arange(len(log)) if kind == WHOLE else torch.sort(scores, descending=True, stable=True).indices
        weights = weights[order]
        if kind == BEST:
            weights = weights[:1]
        elif kind == CUT:
            kept = _survivors(weights[: int(jobs.top_k[job])], float(jobs.top_p[job]), float(jobs.min_p[job]))
            weights = weights[:kept]
        if kind == CUT and len(weights) > space.most_kept:
            tokens[row] = TOO_MANY
            continue
        total = int(weights.sum())
        mark = min(int(float(jobs.uniforms[job]) * total), total - 1)
        tokens[row] = order[int((weights.cumsum(0) <= mark).sum())]


def _allowed(scores: Tensor, masks: Masks | None, job: int) -> Tensor:
    if masks is None or (row := int(masks.of[job])) < 0:
        return scores
    token = torch.arange(len(scores))
    return torch.where((masks.words[row][token // 32] >> (token % 32)) & 1 != 0, scores, -torch.inf)


def _survivors(weights: Tensor, top_p: float, min_p: float) -> int:
    """How many of the most likely tokens top_p and min_p keep, one at least. weights: int64, falling."""
    total = int(weights.sum())
    limit = math.ceil(top_p * total) if top_p < 1.0 else total + 1
    kept = (weights.cumsum(0) - weights < limit) & (weights >= int(min_p * BEST_WEIGHT))
    return max(1, int(kept.sum()))


def row_logprobs(
    logits: Tensor, rows: Tensor, tokens: Tensor, ones: tuple[Tensor, Tensor], space: DrawSpace, workspace: Tensor,
    ids: Tensor, logprobs: Tensor,
) -> None:  # fmt: skip
    for job, row in enumerate(rows.tolist()):
        if tokens[row] < 0:
            continue
        found = torch.log_softmax(logits[row].double(), 0)
        best = torch.sort(logits[row], descending=True, stable=True).indices[: ids.shape[1]]
        ids[job] = best
        logprobs[job] = torch.cat((found[tokens[row]][None], found[best]))


def device_reference(expert_space: NewExpertSpace, experts: PackedExperts) -> DeviceOps:
    """The reference as a table; the packed experts, which have none, are given."""
    return DeviceOps(
        locate=locate,
        expert_space=expert_space,
        experts=experts,
        sum_experts=ExpertSum,
        add_experts=add_experts,
        sums_beside_bell=lambda tokens, hidden: True,
        push=push,
        pull=pull,
        take=pull,
        poll=poll,
        foresee=foresee,
        edit=edit,
        restore=restore,
        draw=draw,
        row_logprobs=row_logprobs,
    )
