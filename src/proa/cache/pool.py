"""The tensors behind pages and state slots: one allocation per layer and side. Never: which page or slot is whose."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proa.models.spec import CacheSpec, Latent, Model, PagedKv
from proa.ops.table import KvPages, LatentPages, LayerCache, RecurrentState


@dataclass(frozen=True)
class KvStorage:
    """What K and V are stored as. scales: of each block's keys and values, exact in float32; empty: 1 (see KvPages)."""

    dtype: torch.dtype
    scales: Sequence[tuple[float, float]] = ()


def allocate_pool(
    model: Model,
    num_pages: int,
    page_tokens: int,
    dtype: torch.dtype,
    device: torch.device | None = None,
    *,
    sequences: int,
    kv: KvStorage | None = None,
) -> tuple[LayerCache, ...]:
    """Storage for every block: num_pages x page_tokens tokens of KV, to whose size kv_bytes_per_token sums, and state
    slots of `sequences`, those that run at once and copies, to each of whose size state_bytes_per_sequence sums. dtype:
    of states, and of KV where `kv` says nothing.

    RAM is not initialised: it is touched only as the cache fills, and no op reads a slot before it was written. A GPU's
    kernels multiply what they mask with 0, so that `device` memory holds zeros.
    """
    new = torch.empty if device is None or device.type == "cpu" else torch.zeros

    stored = kv or KvStorage(dtype)
    scales = stored.scales or [(1.0, 1.0)] * len(model.blocks)

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return new(shape, dtype=of, device=device)

    def one(c: CacheSpec, scales: tuple[float, float]) -> LayerCache:
        if isinstance(c, PagedKv):
            shape = num_pages, page_tokens, c.kv_heads, c.head_dim
            return KvPages(empty(*shape, of=stored.dtype), empty(*shape, of=stored.dtype), *scales)
        if isinstance(c, Latent):
            if stored.dtype != dtype:
                raise ValueError(f"latents are stored as activations are, not in {stored.dtype}")
            return LatentPages(empty(num_pages, page_tokens, c.rank + c.key_dim), c.rank)
        rule = empty(sequences, c.heads, c.key_dim, c.value_dim, of=torch.float32)
        return RecurrentState(rule, empty(sequences, c.tail, c.channels))

    return tuple(one(block.mixer.cache, of) for block, of in zip(model.blocks, scales, strict=True))


def copy_states(caches: Sequence[LayerCache], slots: Sequence[tuple[int, int]]) -> None:
    """Of all recurrent layers the first slot of each pair to the second, one pair after the other. On a GPU: on the
    current stream."""
    for cache in caches:
        if isinstance(cache, RecurrentState):
            for source, target in slots:
                cache.rule[target].copy_(cache.rule[source])
                cache.tail[target].copy_(cache.tail[source])
