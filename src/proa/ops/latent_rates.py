"""Times latent attention of a part of a prompt with expanded keys and values and without. Never: using the fastest
way."""

from __future__ import annotations

from functools import partial

import torch

from proa.models.mixers import LatentKernel
from proa.ops.caches import Caches, LatentPages
from proa.ops.cuda_latent import CudaLatentAttention, CudaLatentMaps
from proa.ops.expanded_latents import ExpandedAttention
from proa.ops.gpu_time import fastest_s
from proa.ops.gpu_traits import GpuTraits
from proa.ops.table import AttentionBatch, DeviceBatch

RUNS = 3  # the fastest counts


def seconds(
    kernel: LatentKernel, caches: Caches, way: ExpandedAttention | None, traits: GpuTraits, rows: int, past: int
) -> float:  # fmt: skip
    """Seconds of a layer for `rows` rows after `past` positions, with W_k and W_v. way: None: over latents. caches: of
    the model, which are read."""
    cache = next(cache for layer in caches for cache in layer if isinstance(cache, LatentPages))
    device, (num_pages, page_tokens, _) = cache.rows.device, cache.rows.shape
    q = torch.zeros(
        rows, kernel.heads, kernel.key_dim + kernel.rotary_dim, dtype=torch.bfloat16, device=device
    )  # fmt: skip
    pages = torch.arange(-(-(past + rows) // page_tokens), dtype=torch.int32, device=device) % num_pages
    starts, lens = torch.tensor([0, rows], dtype=torch.int32), torch.tensor([past + rows], dtype=torch.int32)
    none = torch.empty(0, dtype=torch.int32, device=device)
    at = DeviceBatch(0, starts.to(device), lens.to(device), pages[None], none)
    batch = AttentionBatch((rows,), (past + rows,), (), none, at)
    attention = CudaLatentAttention(traits)
    if way is not None:
        attention.bind(way)
    maps = CudaLatentMaps(kernel.heads, kernel.key_dim, kernel.value_dim, kernel.rank, device, attention)
    maps.weight.zero_()
    return fastest_s(partial(maps.attend, q, cache, batch, 1.0), RUNS)
