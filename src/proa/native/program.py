"""Recorded programs: a step's operations over fixed buffers, replayed in one call. Never: the buffers' meaning."""

from __future__ import annotations

import ctypes
import enum
import functools
from ctypes import POINTER, c_float, c_int, c_int32, c_int64, c_void_p

from proa.native.library import Signatures, finalizer, library
from proa.native.pool import Pool
from proa.native.weights import Experts, Matrix, Rows


class Regime(enum.IntEnum):
    """Choice of the kernels for a step's rows: PROA_REGIME_* in native.h."""

    BY_ROWS = 0
    DECODE = 1
    PROMPT = 2


class Cache(ctypes.Structure):
    """One layer's KV pages: keys, values: addresses of bfloat16 or e4m3 [pages, page_tokens, kv_heads, head_dim] each.
    e4m3: 1 or 0; K = stored value * key_scale, V likewise."""

    _fields_ = [
        ("keys", c_void_p), ("values", c_void_p), ("pages", c_int64), ("page_tokens", c_int64), ("kv_heads", c_int64),
        ("head_dim", c_int64), ("e4m3", c_int32), ("key_scale", c_float), ("value_scale", c_float),
    ]  # fmt: skip


class LatentCache(ctypes.Structure):
    """One layer's pages of latent attention: rows: address of bfloat16 [pages, page_tokens, latent + key]."""

    _fields_ = [
        ("rows", c_void_p), ("pages", c_int64), ("page_tokens", c_int64), ("latent", c_int64), ("key", c_int64),
    ]  # fmt: skip


class RouterRule(ctypes.Structure):
    """The rule that chooses experts: proa_router_rule in native.h, whose fields it has in their order."""

    _fields_ = [
        *((name, c_int32) for name in ("experts", "top_k", "score", "renormalise", "groups", "kept", "best_of")),
        *((name, c_float) for name in ("scale", "epsilon", "least")), ("correction", c_void_p),
    ]  # fmt: skip


class Delta(ctypes.Structure):
    """A gated delta rule: proa_gated_delta in native.h. Sizes, addresses; strides in elements."""

    _fields_ = [
        *((name, c_int64) for name in ("groups", "per_group", "key_dim", "value_dim", "taps")),
        *((name, c_void_p) for name in ("q", "k", "v", "z")), ("row_stride", c_int64), ("group_stride", c_int64),
        ("b", c_void_p), ("a", c_void_p), ("gates_row_stride", c_int64), ("gates_group_stride", c_int64),
        *((name, c_void_p) for name in ("conv", "a_log", "dt_bias", "norm")), ("eps", c_float),
        ("rule", c_void_p), ("tail", c_void_p), ("slots", c_int64), ("mixed", c_void_p), ("out", c_void_p),
        ("out_stride", c_int64),
    ]  # fmt: skip


_SIGNATURES: Signatures = {
    "proa_program_create": (c_void_p, c_int64, c_int64, c_int64, POINTER(c_void_p)),
    "proa_program_destroy": (c_void_p,),
    "proa_program_size": (c_void_p, POINTER(c_int64)),
    "proa_program_set_batch": (
        c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_int64,
    ),
    "proa_program_set_regime": (c_void_p, c_int32),
    "proa_program_run": (c_void_p, c_int64, c_int64, c_int64, c_int),
    "proa_program_add_embed": (c_void_p, c_void_p, c_void_p, c_int64, c_int64, c_void_p, c_int64),
    "proa_program_add_lookup": (c_void_p, c_void_p, c_void_p, c_void_p, c_int64),
    "proa_program_add_rms_norm": (
        c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_float, c_void_p, c_int64, c_float, c_int64,
    ),
    "proa_program_add_add": (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64),
    "proa_program_add_gated_add": (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_void_p, c_int64, c_int64),
    "proa_program_add_gate": (c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_int64),
    "proa_program_add_gated_delta": (c_void_p, POINTER(Delta)),
    "proa_program_add_rotary": (c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int),
    "proa_program_add_route": (
        c_void_p, c_void_p, c_int64, c_int, POINTER(RouterRule), c_void_p, c_void_p,
    ),
    "proa_program_add_best": (c_void_p, c_void_p, c_int64, c_int64, c_void_p),
    "proa_program_add_write_kv": (
        c_void_p, POINTER(Cache), c_void_p, c_int64, c_void_p, c_int64, c_void_p,
    ),
    "proa_program_add_attention": (
        c_void_p, POINTER(Cache), c_void_p, c_int64, c_void_p, c_int64, c_int64, c_int64, c_float, c_void_p,
    ),
    "proa_program_add_write_latent": (
        c_void_p, POINTER(LatentCache), c_void_p, c_int64, c_void_p, c_int64, c_void_p,
    ),
    "proa_program_add_latent_attention": (
        c_void_p, POINTER(LatentCache), c_void_p, c_int64, c_void_p, c_int64, c_int64, c_float,
    ),
    "proa_program_add_head_linear": (
        c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_int64, c_int64,
    ),
    "proa_program_add_linear": (
        c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int,
    ),
    "proa_program_add_moe": (
        c_void_p, c_void_p, c_int64, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64,
    ),
}  # fmt: skip


@functools.cache
def _native() -> ctypes.CDLL:
    return library().bind(_SIGNATURES)


class Program:
    """A list of operations on bfloat16 rows; each `add_` method appends one and raises ValueError if it is impossible.

    Buffers are passed as addresses: the caller keeps them, and the weights, alive as long as the program.
    """

    def __init__(self, pool: Pool, most_rows: int, most_sequences: int, most_pages: int) -> None:
        self._handle = c_void_p()
        _native().proa_program_create(pool.handle, most_rows, most_sequences, most_pages, ctypes.byref(self._handle))
        self._keep: list[object] = []
        finalizer(self, _native().proa_program_destroy, self._handle, pool)

    def __len__(self) -> int:
        size = c_int64()
        _native().proa_program_size(self._handle, ctypes.byref(size))
        return size.value

    def set_batch(
        self, sequences: int, q_lens: int, kv_lens: int, states: int, pages: int, stride: int, cache_pages: int,
        page_tokens: int,
    ) -> None:  # fmt: skip
        """Set the batch of later runs from int32 arrays at addresses: q_lens, kv_lens, states [sequences] (states: 0 as
        address: all use slot 0), and pages, one row per sequence, `stride` elements apart."""
        _native().proa_program_set_batch(
            self._handle, sequences, q_lens, kv_lens, states or None, pages, stride, cache_pages, page_tokens
        )

    def set_regime(self, regime: Regime) -> None:
        """Set the kernels of later runs; initially BY_ROWS."""
        _native().proa_program_set_regime(self._handle, regime)

    def run(self, first: int, end: int, rows: int, lane: int = 0) -> None:
        """Run operations [first, end) on `rows` rows. Raises ValueError for ids or slots out of range; NativeError."""
        _native().proa_program_run(self._handle, first, end, rows, lane)

    def add_embed(self, tokens: int, table: int, vocab: int, width: int, out: Rows) -> None:
        _native().proa_program_add_embed(self._handle, tokens, table, vocab, width, out.address, out.stride)

    def add_lookup(self, table: Matrix, tokens: int, out: Rows) -> None:
        self._keep.append(table)
        _native().proa_program_add_lookup(self._handle, table.handle, tokens, out.address, out.stride)

    def add_rms_norm(
        self, x: Rows, weight: int, groups: int, width: int, eps: float, out: Rows, offset: float = 0.0, apart: int = 0
    ) -> None:
        """apart: elements between the starts of consecutive groups of x; 0: the width."""
        _native().proa_program_add_rms_norm(
            self._handle, x.address, x.stride, weight, groups, width, eps, out.address, out.stride, offset, apart,
        )  # fmt: skip

    def add_add(self, x: Rows, y: Rows, width: int) -> None:
        _native().proa_program_add_add(self._handle, x.address, x.stride, y.address, y.stride, width)

    def add_gated_add(self, x: Rows, gate: Rows, y: Rows, width: int) -> None:
        _native().proa_program_add_gated_add(
            self._handle, x.address, x.stride, gate.address, gate.stride, y.address, y.stride, width
        )

    def add_gate(self, x: Rows, gate: Rows, heads: int, head_dim: int, apart: int) -> None:
        _native().proa_program_add_gate(
            self._handle, x.address, x.stride, gate.address, gate.stride, heads, head_dim, apart
        )

    def add_gated_delta(self, delta: Delta) -> None:
        """Append a gated delta rule. Raises ValueError unless 16 divides value_dim, and for more than 8 taps."""
        _native().proa_program_add_gated_delta(self._handle, delta)

    def add_rotary(self, x: Rows, cos: int, sin: int, heads: int, head_dim: int, half: int, interleaved: bool) -> None:
        _native().proa_program_add_rotary(
            self._handle, x.address, x.stride, cos, sin, heads, head_dim, half, interleaved
        )

    def add_route(self, logits: Rows, rule: RouterRule, ids: int, weights: int) -> None:
        """Append routing. Raises ValueError if groups do not divide the experts, or the kept groups hold fewer experts
        than top_k."""
        _native().proa_program_add_route(self._handle, logits.address, logits.stride, logits.wide, rule, ids, weights)

    def add_argmax(self, logits: Rows, width: int, ids: int) -> None:
        """Append an argmax over float32 rows of `width`; ids int32, -1 for a row with a non-finite value."""
        _native().proa_program_add_best(self._handle, logits.address, logits.stride, width, ids)

    def add_write_kv(self, cache: Cache, keys: Rows, values: Rows, slots: int) -> None:
        _native().proa_program_add_write_kv(
            self._handle, cache, keys.address, keys.stride, values.address, values.stride, slots
        )

    def add_attention(
        self, cache: Cache, q: Rows, out: Rows, heads: int, scale: float, window: int | None, sinks: int = 0
    ) -> None:
        """sinks: address of float32 [heads], or 0."""
        _native().proa_program_add_attention(
            self._handle, cache, q.address, q.stride, out.address, out.stride, heads, window or 0, scale,
            sinks or None,
        )  # fmt: skip

    def add_write_latent(self, cache: LatentCache, latents: Rows, keys: Rows, slots: int) -> None:
        """Append a write of latents. Raises ValueError unless 8 divides the sizes of latent and key."""
        _native().proa_program_add_write_latent(
            self._handle, cache, latents.address, latents.stride, keys.address, keys.stride, slots
        )

    def add_latent_attention(self, cache: LatentCache, q: Rows, out: Rows, heads: int, scale: float) -> None:
        """Append latent attention. Raises ValueError for cache rows of more than 576 elements."""
        _native().proa_program_add_latent_attention(
            self._handle, cache, q.address, q.stride, out.address, out.stride, heads, scale
        )

    def add_head_linear(self, weights: Matrix, x: Rows, x_apart: int, y: Rows, y_apart: int, carried: int = 0) -> None:
        """Append a product of each head with its own bfloat16 matrix of the stack. Heads start x_apart and y_apart
        elements apart in their rows; `carried` elements behind a head's inputs are copied behind its outputs."""
        self._keep.append(weights)
        _native().proa_program_add_head_linear(
            self._handle, weights.handle, carried, x.address, x.stride, x_apart, y.address, y.stride, y_apart
        )

    def add_linear(self, weights: Matrix, x: Rows, y: Rows, outputs: int, bias: int = 0) -> None:
        self._keep.append(weights)
        _native().proa_program_add_linear(
            self._handle, weights.handle, outputs, bias or None, x.address, x.stride, y.address, y.stride, y.wide
        )

    def add_moe(self, experts: Experts, x: Rows, y: Rows, ids: int = 0, weights: int = 0, top_k: int = 0) -> None:
        """Append routed experts; without ids all rows go to the only expert."""
        self._keep.append(experts)
        _native().proa_program_add_moe(
            self._handle, experts.handle, top_k, ids or None, weights or None, x.address, x.stride, y.address, y.stride
        )
