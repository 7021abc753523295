"""The tensors of caches, as ops read and write them: one class for each cache spec. Never: allocating them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True)
class KvPages:
    """One layer's KV cache. keys, values: [pages, page_tokens, kv_heads, D], in the activations' dtype or
    float8_e4m3fn.

    Scales apply to float8 only and are exact in float32. Stored is value * (1 / scale), computed in float32 and rounded
    to nearest; finite values saturate at +-448, non-finite ones become NaN.
    """

    keys: Tensor
    values: Tensor
    key_scale: float = 1.0
    value_scale: float = 1.0

    @property
    def num_pages(self) -> int:
        return len(self.keys)

    @property
    def page_tensors(self) -> tuple[Tensor, ...]:
        return self.keys, self.values

    @property
    def states(self) -> tuple[Tensor, ...]:
        return ()


@dataclass(frozen=True)
class LatentPages:
    """One layer's cache of latent attention. rows: [pages, page_tokens, rank + R]: per token the latent, then the
    rotary key that all heads share."""

    rows: Tensor
    rank: int

    @property
    def num_pages(self) -> int:
        return len(self.rows)

    @property
    def page_tensors(self) -> tuple[Tensor, ...]:
        return (self.rows,)

    @property
    def states(self) -> tuple[Tensor, ...]:
        return ()


@dataclass(frozen=True)
class RecurrentState:
    """One layer's recurrent states. The slot of a sequence without past tokens is uninitialised, and not read.

    rule: float32 [slots, value heads, key dim, value dim]: state of the delta rule. tail: [slots, taps - 1, channels]:
    last inputs of the causal convolution, oldest first.
    """

    rule: Tensor
    tail: Tensor

    @property
    def num_pages(self) -> None:
        return None

    @property
    def page_tensors(self) -> tuple[Tensor, ...]:
        return ()

    @property
    def states(self) -> tuple[Tensor, ...]:
        return self.rule, self.tail


class LayerCache(Protocol):
    """The tensors of one cache of one layer."""

    @property
    def num_pages(self) -> int | None:
        """Number of KV pages, the same in all caches that have pages; None: it has none."""

    @property
    def page_tensors(self) -> tuple[Tensor, ...]:
        """The tensors [pages, ...], contiguous, that hold the KV pages."""

    @property
    def states(self) -> tuple[Tensor, ...]:
        """The tensors [slots, ...] that hold a state for each sequence."""


# The caches of every block: those of its mixer, in the order of the spec's `caches`.
Caches = tuple[tuple[LayerCache, ...], ...]
