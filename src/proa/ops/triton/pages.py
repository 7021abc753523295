"""Copies a run of KV pages between the caches' tensors, where its pages are scattered, and one buffer: one launch for
all layers. Never: which pages, streams, the buffer's way to host memory.

A buffer holds, for each tensor, that tensor's part of all pages of the run, one after another. A program copies one
page of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from proa.ops.triton.variant import Variant

FIELDS = 3  # of a tensor in the table: its address, words in a page, the word of a buffer at which its part begins
_BLOCK, _WARPS = 2048, 4


@triton.jit(do_not_specialize=["first", "gathers"], do_not_specialize_on_alignment=["at"])  # vary by run
def _copy(table, run, at, first, gathers, BLOCK: tl.constexpr):
    tensor, page = tl.program_id(0), tl.program_id(1)
    entry = table + tensor * 3
    words = tl.load(entry + 1)
    source = tl.load(entry).to(tl.pointer_type(run.dtype.element_ty)) + tl.load(at + page) * words
    target = run + tl.load(entry + 2) + (first + page) * words
    if gathers == 0:
        source, target = target, source
    for start in range(0, words, BLOCK):
        word = start + tl.arange(0, BLOCK)
        inside = word < words
        tl.store(target + word, tl.load(source + word, inside), inside)


def page_table(rows: Sequence[Tensor], starts: Sequence[int]) -> Tensor:
    """int64 [tensors, FIELDS] where the rows are: [pages, words] each, contiguous, of one dtype. starts: the word of a
    buffer at which each one's part begins. Raises ValueError for other rows."""
    kinds = {(each.dtype, each.device) for each in rows}
    if len(kinds) != 1 or not all(each.dim() == 2 and each.is_contiguous() for each in rows):
        raise ValueError(f"tensors of pages must be [pages, words], contiguous, of one dtype, not of {kinds}")
    fields = [[each.data_ptr(), each.shape[1], start] for each, start in zip(rows, starts, strict=True)]
    return torch.tensor(fields, dtype=torch.int64, device=rows[0].device)


def copy_pages(table: Tensor, at: Tensor, run: Tensor, first: int, *, gathers: bool) -> None:
    """Copy pages between the tensors of a table and `run`, a buffer of their dtype: the pages `at`, int64 [n], to the
    buffer's first n places if it gathers, otherwise the buffer's places [first : first + n] to the pages `at`. The
    buffer may be host memory that the GPU can address. Raises ValueError for other tables and numbers."""
    if table.shape[1:] != (FIELDS,) or at.dtype != torch.int64 or not at.is_contiguous():
        raise ValueError(f"table {tuple(table.shape)} or page numbers {at.dtype} {at.stride()} do not fit")
    _copy[(len(table), len(at))](table, run, at, first, int(gathers), BLOCK=_BLOCK, num_warps=_WARPS)


def variants() -> Iterator[Variant]:
    types = {"table": "*i64", "run": "*i64", "at": "*i64", "first": "i32", "gathers": "i32"}
    yield Variant(_copy, types, {"BLOCK": _BLOCK}, warps=_WARPS, aligned=("table", "run"))
