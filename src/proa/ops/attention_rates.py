"""Times a tile of attention over the longest segment by a library's kernel and by Proa's. Never: using the faster
one."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from proa.models.mixers import AttentionKernel
from proa.ops.caches import Caches, KvPages
from proa.ops.cuda_attention import Rectangle, by_head
from proa.ops.gpu_time import fastest_s
from proa.ops.gpu_traits import GpuTraits
from proa.ops.sizes import SEGMENT_TOKENS, segment_rows
from proa.ops.triton import attention
from proa.ops.triton.attention_segments import new_segment

RUNS = 3  # of each kernel; the fastest counts


def inputs_of(kernel: AttentionKernel, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q [1, heads, rows, D], keys and values [1, kv_heads, tokens, D] of a tile and a segment, all zero."""
    q = torch.zeros(segment_rows(kernel.heads), kernel.heads, kernel.head_dim, dtype=torch.bfloat16, device=device)
    keys, values = new_segment(tokens, kernel.kv_heads, kernel.head_dim, device)
    return by_head(q), by_head(keys.zero_()), by_head(values.zero_())


def rates(kernel: AttentionKernel, caches: Caches, rectangle: Rectangle, traits: GpuTraits) -> tuple[float, float]:
    """FLOP/s of the library's kernel and of Proa's. caches: of the model, which are read."""
    cache = _cache_of(kernel, caches)
    device, tokens = cache.keys.device, SEGMENT_TOKENS[0]
    q, keys, values = inputs_of(kernel, tokens, device)
    heads, rows, dim = q.shape[1:]
    flops = 4 * rows * tokens * heads * dim
    pages = torch.arange(tokens + rows, dtype=torch.int32, device=device) % cache.num_pages
    starts, lens = torch.zeros(2, dtype=torch.int32, device=device), pages[:1].clone()
    starts[1:].fill_(rows)
    lens.fill_(tokens + rows // 2)  # half of the rows' own keys are beyond the diagonal
    by_row = q[0].transpose(0, 1)
    own = partial(
        attention.prefill, by_row, cache, pages[None], starts, lens, attention.Softmax(1.0),
        torch.empty_like(by_row), torch.empty(rows, heads, device=device), native_codes=traits.converts_e4m3,
    )  # fmt: skip
    return flops / fastest_s(partial(rectangle, q, keys, values, 1.0), RUNS), flops / fastest_s(own, RUNS)


def _cache_of(kernel: AttentionKernel, caches: Caches) -> KvPages:
    """The first cache that such a kernel reads."""
    every = (cache for layer in caches for cache in layer if isinstance(cache, KvPages))
    return next(cache for cache in every if cache.keys.shape[2:] == (kernel.kv_heads, kernel.head_dim))
