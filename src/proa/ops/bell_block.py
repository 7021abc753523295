"""The doorbell's block of memory, which GPU and CPU both address, as tensors. Never: the order of reads and writes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from proa.native.doorbell import DECODE_JOB, FORESEEN_ROWS, BlockLayout, JobSize, block_layout

# Words of `state`, int32 in the GPU's memory: number of the last job; 1 if this layer has a pending job; programs that
# have arrived and the rows they counted. Then, for each row of the step, the number of its pairs that go to the CPU; in
# a DECODE_JOB at least 1.
JOB_NUMBER, PENDING, ARRIVED, STATE_WORDS = 0, 1, 2, 4


@dataclass(frozen=True)
class BellBlock:
    """Views of the doorbell's block, in pinned host memory."""

    rung: Tensor  # int32 [1]
    answer: Tensor  # int64 [1]: answered in the low half, dead in the high one
    header: Tensor  # int32 [3]: layer, tokens, number
    ids: Tensor  # int32 [most tokens, k]
    weights: Tensor  # float32 [most tokens, k]
    x: Tensor  # bfloat16 [most tokens, hidden]
    y: Tensor  # float32 [most tokens, hidden]
    foreseen: Tensor  # int32 [3]: number, layer, rows
    foreseen_ids: Tensor  # int32 [FORESEEN_ROWS, k]


def views(memory: Tensor, layout: BlockLayout, size: JobSize) -> BellBlock:
    """Views of a block's parts in uint8 `memory`."""
    tokens, top_k, hidden = size.most_tokens, size.top_k, size.hidden

    def part(at: int, dtype: torch.dtype, *shape: int) -> Tensor:
        values = torch.Size(shape).numel()
        return memory[at : at + values * dtype.itemsize].view(dtype).view(shape)

    return BellBlock(
        rung=part(layout.rung, torch.int32, 1),
        answer=part(layout.answered, torch.int64, 1),
        header=part(layout.header, torch.int32, 3),
        ids=part(layout.ids, torch.int32, tokens, top_k),
        weights=part(layout.weights, torch.float32, tokens, top_k),
        x=part(layout.x, torch.bfloat16, tokens, hidden),
        y=part(layout.y, torch.float32, tokens, hidden),
        foreseen=part(layout.foreseen, torch.int32, 3),
        foreseen_ids=part(layout.foreseen_ids, torch.int32, FORESEEN_ROWS, top_k),
    )


@dataclass(frozen=True)
class Bell:
    """One layer's doorbell, for kernels that ring or wait besides their main work. state: int32
    [STATE_WORDS + most tokens] on the device; layer: its number in the doorbell."""

    block: BellBlock
    state: Tensor
    layer: int


@dataclass(frozen=True)
class Copied:
    """A job with a fixed number of tokens that is copied to the CPU as one range of bytes; see
    csrc/include/proa/native.h."""

    block: BellBlock  # views of the job's parts
    job: Tensor  # uint8: the bytes to copy


def copied(memory: Tensor, size: JobSize, tokens: int) -> Copied:
    """Lay out a job of `tokens` tokens in uint8 `memory`, which has room for a block of `size`."""
    mine = replace(size, most_tokens=tokens)
    layout = block_layout(mine)
    end = layout.x + tokens * size.hidden * torch.bfloat16.itemsize
    layout.y = block_layout(size).y
    return Copied(views(memory, layout, mine), memory[layout.header : end])


def awaited(ids: Tensor, up_address: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    """The CPU's pairs, bool [T, k], and how many each row waits for, [T]. In a DECODE_JOB every row with experts waits
    for one at least: what the layer before deferred comes with this layer's answer."""
    on_cpu = (ids >= 0) & (up_address == 0)
    counts = on_cpu.sum(1)
    if layer >= DECODE_JOB:
        counts = counts.maximum(((ids >= 0) | (up_address != 0)).any(1).long())
    return on_cpu, counts


def check_push(x: Tensor, ids: Tensor, weights: Tensor, up_address: Tensor, block: BellBlock) -> None:
    """Raise ValueError for arguments that `push` does not support."""
    most, top_k = block.ids.shape
    hidden = block.x.shape[1]
    if x.dtype != torch.bfloat16 or x.dim() != 2 or not 1 <= len(x) <= most or x.shape[1] != hidden or x.stride(1) != 1:
        raise ValueError(f"x must be bfloat16 [T, {hidden}] with 1 to {most} rows, not {x.dtype} {tuple(x.shape)}")
    dtypes = {"ids": (torch.int32, torch.int64), "weights": (torch.float32,), "up_address": (torch.int64,)}
    for (name, possible), of in zip(dtypes.items(), (ids, weights, up_address), strict=True):
        if of.dtype not in possible or tuple(of.shape) != (len(x), top_k) or not of.is_contiguous():
            wanted = f"contiguous {possible[0]} [{len(x)}, {top_k}]"
            raise ValueError(f"{name} must be {wanted}, not {of.dtype} {tuple(of.shape)}")


def check_pull(out: Tensor, block: BellBlock) -> None:
    """Raise ValueError for an output that `pull` does not support."""
    most, hidden = block.y.shape
    fits = out.dim() == 2 and 1 <= len(out) <= most and out.shape[1] == hidden and out.stride(1) == 1
    if out.dtype != torch.float32 or not fits:
        raise ValueError(f"out must be float32 [T, {hidden}] with 1 to {most} rows, not {out.dtype} {tuple(out.shape)}")
