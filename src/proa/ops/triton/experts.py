"""The routed experts that the GPU computes: choice of kernels, and the buffers between them. Never: their sum
(expert_sum.py)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from proa.native.formats import PANEL_ROWS
from proa.ops.residency import Biases, ExpertShape, Located, PairBias
from proa.ops.triton.expert_tiles import block_tokens, tile_of
from proa.ops.triton.experts_few import multiply_pairs
from proa.ops.triton.experts_fp8 import Fp8Space, fp8_block_tokens, fp8_space, multiply_fp8, pays
from proa.ops.triton.experts_grouped import Groups, group, groups, multiply_blocks
from proa.ops.triton.fp8_rows import round_rows

FEW_PAIRS = 64  # up to this many, hardly any two pairs share an expert


@dataclass(frozen=True)
class ExpertSpace:
    """Buffers of a call, for up to the number of tokens that they were made for."""

    h: Tensor  # bfloat16 [pairs, padded width]
    partial: Tensor  # float32 [pairs, hidden]: outputs of the pairs, not yet multiplied by their weights
    groups: Groups
    fp8: Fp8Space | None = None  # activations rounded to e4m3, for many tokens
    least_rows: int = 1  # see CudaOps
    capability: int = 0  # see expert_space


def expert_space(
    tokens: int, top_k: int, experts: int, of: ExpertShape, device: torch.device, *, fp8: bool = False,
    least_rows: int = 1, capability: int = 0,
) -> ExpertSpace:  # fmt: skip
    """Allocate buffers for batches of up to `tokens`. fp8: with many tokens, round activations to e4m3 if the experts
    are e4m3 and it is faster. least_rows: see CudaOps. capability: compute capability of the GPU (90: 9.0), for which
    tiles are chosen; 0: tiles for any GPU."""
    pairs = tokens * top_k
    return ExpertSpace(
        torch.empty(pairs, of.down.padded_columns, dtype=torch.bfloat16, device=device),
        torch.empty(pairs, of.hidden, dtype=torch.float32, device=device),
        groups(pairs, experts, device),
        fp8_space(tokens, top_k, of, device) if fp8 else None,
        least_rows,
        capability,
    )


def experts(
    x: Tensor, at: Located, of: ExpertShape, space: ExpertSpace, biases: Biases | None = None, *,
    in_pieces: bool = False,
) -> None:  # fmt: skip
    """space.partial[t * k + j] = expert at.ids[t, j] applied to x[t], for pairs whose address is not 0.

    x bfloat16 [T, hidden]. The kernels depend only on the number of pairs, or of those of space.least_rows if that is
    more, and of experts. Pairs of one expert must have one address. in_pieces: with up to FEW_PAIRS pairs, some experts
    may lie in pieces (ops/pieces.py).
    """
    pairs = at.ids.numel()
    kernel_pairs = max(pairs, space.least_rows * at.ids.shape[1])
    _check(x, at, of, space)
    up_bias, down_bias = (None, None) if biases is None else _of_pairs(biases, at.ids, of)
    if not pairs:
        return
    if kernel_pairs <= FEW_PAIRS:
        few = partial(multiply_pairs, in_pieces=in_pieces, kernel_pairs=kernel_pairs)
        few(x, at.up, of, space.h, up_bias, up=True)
        few(space.h, at.down, of, space.partial, down_bias, up=False)
        return
    by, total = space.groups, len(space.groups.counts)
    rounded = space.fp8 if space.fp8 is not None and pays(kernel_pairs, total) else Fp8Space(None, None)
    exact = rounded.x is None and rounded.h is None
    size = block_tokens(kernel_pairs, of, total, space.capability) if exact else fp8_block_tokens(kernel_pairs, total)
    up_tile, down_tile = (tile_of(packed, size, space.capability) for packed in (of.up, of.down))
    group(at.ids, total, size, by)
    if rounded.x is None:
        multiply_blocks(x, at.up, by, up_tile, of, space.h, up_bias, up=True)
    else:
        rows = rounded.x.first(len(x))
        round_rows(x, rows)
        multiply_fp8(rows, at.up, by, size, of, space.h, up_bias, up=True)
    if rounded.h is None:
        multiply_blocks(space.h, at.down, by, down_tile, of, space.partial, down_bias, up=False)
    else:
        rows = rounded.h.first(pairs)
        round_rows(space.h[:pairs, : of.width], rows)
        multiply_fp8(rows, at.down, by, size, of, space.partial, down_bias, up=False)


def _of_pairs(biases: Biases, ids: Tensor, of: ExpertShape) -> tuple[PairBias, PairBias]:
    for bias, packed in ((biases.up, of.up), (biases.down, of.down)):
        rows = packed.panels * PANEL_ROWS
        if bias.dtype != torch.float32 or bias.shape[1:] != (rows,) or not bias.is_contiguous():
            raise ValueError(f"biases must be float32 [experts, {rows}], not {bias.dtype} {tuple(bias.shape)}")
    return PairBias(ids, biases.up), PairBias(ids, biases.down)


def _check(x: Tensor, at: Located, of: ExpertShape, space: ExpertSpace) -> None:
    pairs, tokens = at.ids.numel(), len(at.ids)
    for tensor, dtype in ((at.ids, torch.int32), (at.up, torch.int64), (at.down, torch.int64)):
        if tensor.dtype != dtype or tensor.shape != at.ids.shape or not tensor.is_contiguous():
            wanted = f"{dtype} {tuple(at.ids.shape)}"
            raise ValueError(f"locations of pairs must be {wanted}, not {tensor.dtype} {tuple(tensor.shape)}")
    if x.shape != (tokens, of.hidden) or x.stride(1) != 1 or x.dtype != torch.bfloat16:
        raise ValueError(f"x must be bfloat16 [{tokens}, {of.hidden}], not {x.dtype} {tuple(x.shape)}")
    if pairs > len(space.h) or space.h.shape[1] < of.width or space.partial.shape[1:] != (of.hidden,):
        raise ValueError(f"the workspace has no room for {pairs} pairs of {of.width} and {of.hidden}")
