"""The tensors behind KV pages and state slots: one allocation per layer and tensor. Never: which sequence holds a page
or slot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proa.models.spec import CacheSpec, Latent, Model, PagedKv, Recurrent
from proa.ops.caches import Caches, KvPages, LatentPages, LayerCache, RecurrentState


@dataclass(frozen=True)
class KvStorage:
    """Storage of K and V. scales: each layer's (K, V), exact in float32; empty: all 1 (see KvPages)."""

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
) -> Caches:
    """Allocate the caches of every layer: KV for num_pages x page_tokens tokens (Model.kv_bytes_per_token each), and
    state slots for `sequences`, running ones and copies (Model.state_bytes_per_sequence each). dtype: of states, and of
    KV if `kv` is None. Raises ValueError if `kv` asks for another dtype of latents.

    RAM is not initialised, so that it is only touched as the cache fills: no op reads a slot before it was written. GPU
    memory is zeroed, because kernels multiply masked rows by 0, and NaN would propagate.
    """
    new = torch.empty if device is None or device.type == "cpu" else torch.zeros

    stored = kv or KvStorage(dtype)
    scales = stored.scales or [(1.0, 1.0)] * len(model.blocks)

    def empty(*shape: int, of: torch.dtype = dtype) -> Tensor:
        return new(shape, dtype=of, device=device)

    def pages(c: PagedKv, scales: tuple[float, float]) -> KvPages:
        shape = num_pages, page_tokens, c.kv_heads, c.head_dim
        return KvPages(empty(*shape, of=stored.dtype), empty(*shape, of=stored.dtype), *scales)

    def latents(c: Latent, scales: tuple[float, float]) -> LatentPages:
        if stored.dtype != dtype:
            raise ValueError(f"latents must be stored in the dtype of activations, {dtype}, not in {stored.dtype}")
        return LatentPages(empty(num_pages, page_tokens, c.rank + c.key_dim), c.rank)

    def states(c: Recurrent, scales: tuple[float, float]) -> RecurrentState:
        rule = empty(sequences, c.heads, c.key_dim, c.value_dim, of=torch.float32)
        return RecurrentState(rule, empty(sequences, c.tail, c.channels))

    made: dict[type[CacheSpec], Callable[..., LayerCache]] = {PagedKv: pages, Latent: latents, Recurrent: states}
    return tuple(
        tuple(made[type(c)](c, of) for c in (block.mixer.caches if block.mixer else ()))
        for block, of in zip(model.blocks, scales, strict=True)
    )


def copy_states(caches: Caches, slots: Sequence[tuple[int, int]]) -> None:
    """Copy recurrent states of all layers from the first slot of each pair to the second, pair after pair; on a GPU, on
    the current stream."""
    if not slots:
        return
    for state in (state for layer in caches for cache in layer for state in cache.states):
        for source, target in slots:
            state[target].copy_(state[source])
