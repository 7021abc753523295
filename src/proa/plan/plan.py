"""The frozen Plan: every decision, made once; JSON in and out, so that a bug report is a file. Never: logic."""

from __future__ import annotations

import msgspec

from proa.machine.topology import Team
from proa.types import Decision


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of RAM: what is free now, what is left alone, and what goes where.

    process + weights + loading + kv + workspace <= usable: the formulas stand in plan/budget.py.
    """

    free_bytes: int
    reserve_bytes: int
    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    loading_bytes: int  # transient: what the loader holds beside the weights
    process_bytes: int = 0  # the two processes themselves: Python, torch, tokenizer

    @property
    def usable_bytes(self) -> int:
        return self.free_bytes - self.reserve_bytes


class Roof(msgspec.Struct, frozen=True, kw_only=True):
    """The physical limit of decode for one request: bytes that must be read per token over RAM bandwidth."""

    bytes_per_token: int
    bandwidth_bytes_per_s: float

    @property
    def tokens_per_s(self) -> float:
        return self.bandwidth_bytes_per_s / self.bytes_per_token


class Workers(msgspec.Struct, frozen=True, kw_only=True):
    """The threads of the native kernels, and where they and their weights lie."""

    teams: tuple[Team, ...]  # the CPUs of each memory node's workers, the calling thread's first
    trials: tuple[tuple[int, ...], ...]  # CPUs of each team that work; those after the first are tried for decode
    binding: str  # core, node, none
    homes: tuple[tuple[int, ...], ...] = ()  # for "node": all usable CPUs of each team's node
    interleave: tuple[int, ...] = ()  # nodes that weights are dealt out over; else they lie on their team's
    spin_us: int  # how long an idle worker waits for work before it sleeps
    saving: bool = False  # fewer workers, if they lose little


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine executes. Paths are absolute; sizes are final."""

    model: str  # as asked
    path: str  # folder or GGUF file
    load_format: str  # safetensors, bin, gguf, dummy
    dtype: str  # bfloat16, float16, float32
    dummy_seed: int = 0
    dummy_router: str = "uniform"
    ignore_config_keys: tuple[str, ...] = ()
    override_config: dict[str, object] = {}
    context_tokens: int
    page_tokens: int
    num_pages: int
    prefix_cache: bool
    max_running: int
    max_batch_tokens: int
    max_queued: int
    max_queued_tokens: int
    threads: int
    isa: str = ""  # of the native kernels; empty: ops in plain torch
    workers: Workers | None = None  # of the native kernels
    memory: MemoryBudget
    roof: Roof
    decisions: tuple[Decision, ...] = ()
