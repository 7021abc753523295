"""The tensors behind the pages: one allocation per layer and side. Never: which page is whose."""

from __future__ import annotations

import torch
from torch import Tensor

from proa.models.spec import Model, PagedKv
from proa.ops.table import KvPages


def allocate_pool(
    model: Model, num_pages: int, page_tokens: int, dtype: torch.dtype, device: torch.device | None = None
) -> tuple[KvPages, ...]:
    """KV storage for every block, num_pages x page_tokens tokens each; kv_bytes_per_token sums to its size.

    RAM is not initialised: it is touched only as the cache fills, and no op reads a slot before it was written. A GPU's
    kernels multiply what they mask with 0, so that `device` memory holds zeros.
    """
    new = torch.empty if device is None or device.type == "cpu" else torch.zeros

    def one(c: PagedKv) -> Tensor:
        return new(num_pages, page_tokens, c.kv_heads, c.head_dim, dtype=dtype, device=device)

    return tuple(KvPages(one(block.mixer.cache), one(block.mixer.cache)) for block in model.blocks)
