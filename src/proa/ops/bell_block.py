"""The block of memory that a GPU and the CPU's doorbell both address, as tensors. Never: who writes what when."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from proa.native.doorbell import FORESEEN_ROWS, BlockLayout, JobSize, block_layout


@dataclass(frozen=True)
class Block:
    """Views of the memory that both sides address: pinned host memory, which is not a device's."""

    rung: Tensor  # int32 [1]
    answer: Tensor  # int64 [1]: answered in the low half, dead in the high one
    header: Tensor  # int32 [3]: layer, tokens, number
    ids: Tensor  # int32 [most tokens, k]
    weights: Tensor  # float32 [most tokens, k]
    x: Tensor  # bfloat16 [most tokens, hidden]
    y: Tensor  # float32 [most tokens, hidden]
    foreseen: Tensor  # int32 [3]: number, layer, rows
    foreseen_ids: Tensor  # int32 [FORESEEN_ROWS, k]


def views(memory: Tensor, layout: BlockLayout, size: JobSize) -> Block:
    """The parts of a block in uint8 `memory`."""
    tokens, top_k, hidden = size.most_tokens, size.top_k, size.hidden

    def part(at: int, dtype: torch.dtype, *shape: int) -> Tensor:
        values = torch.Size(shape).numel()
        return memory[at : at + values * dtype.itemsize].view(dtype).view(shape)

    return Block(
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
    """Of a layer, for kernels that ring and wait as a part of what they do. state int32: what ops/triton/bell.py keeps
    on the device; layer: the CPU's number of it."""

    block: Block
    state: Tensor
    layer: int


@dataclass(frozen=True)
class Copied:
    """A job of so many tokens that is copied to the CPU, in a block for more; see csrc/include/proa/native.h."""

    block: Block  # its parts
    job: Tensor  # uint8: what goes to the CPU


def copied(memory: Tensor, size: JobSize, tokens: int) -> Copied:
    """In uint8 `memory`, which has room for a block of `size`."""
    mine = replace(size, most_tokens=tokens)
    layout = block_layout(mine)
    end = layout.x + tokens * size.hidden * torch.bfloat16.itemsize
    layout.y = block_layout(size).y
    return Copied(views(memory, layout, mine), memory[layout.header : end])


def check_push(x: Tensor, ids: Tensor, weights: Tensor, up_address: Tensor, block: Block) -> None:
    """Raises ValueError for what `push` cannot take."""
    most, top_k = block.ids.shape
    hidden = block.x.shape[1]
    if x.dtype != torch.bfloat16 or x.dim() != 2 or not 1 <= len(x) <= most or x.shape[1] != hidden or x.stride(1) != 1:
        raise ValueError(f"x is bfloat16 [T, {hidden}] of 1 to {most} rows, not {x.dtype} {tuple(x.shape)}")
    dtypes = {"ids": (torch.int32, torch.int64), "weights": (torch.float32,), "up_address": (torch.int64,)}
    for (name, possible), of in zip(dtypes.items(), (ids, weights, up_address), strict=True):
        if of.dtype not in possible or tuple(of.shape) != (len(x), top_k) or not of.is_contiguous():
            wanted = f"{possible[0]} [{len(x)}, {top_k}] without gaps"
            raise ValueError(f"{name} is {wanted}, not {of.dtype} {tuple(of.shape)}")


def check_pull(out: Tensor, block: Block) -> None:
    """Raises ValueError for what `pull` cannot take."""
    most, hidden = block.y.shape
    fits = out.dim() == 2 and 1 <= len(out) <= most and out.shape[1] == hidden and out.stride(1) == 1
    if out.dtype != torch.float32 or not fits:
        raise ValueError(f"out is float32 [T, {hidden}] of 1 to {most} rows, not {out.dtype} {tuple(out.shape)}")
