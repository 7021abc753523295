"""Sizes the prefix cache in RAM, which holds pages that left VRAM (--prefix-cache-ram). Never: allocating it.

A size that was asked for is set aside before experts are placed; `auto` takes what the placement leaves.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from proa.config.options import CacheOptions
from proa.errors import UsageError
from proa.machine.machine import Gpu
from proa.obs.units import format_bytes
from proa.plan.budget import Demand
from proa.plan.entries import Entries, entries
from proa.plan.fit import Case, size_flag
from proa.plan.plan import MemoryBudget
from proa.plan.prefix_files import BUFFERS, NO_COPIES
from proa.types import Decision

LEAST_RUNS = 4  # with less room there is no tier; and a copy of states, if the model has them
MOST_OF_KV, SHARE_OF_FREE = 8, 4  # auto: at most so many times the KV cache in VRAM, and 1/4 of the free RAM

# torch takes memory from CUDA in segments: of 2 MiB for blocks up to 1 MiB, of 20 MiB for blocks up to 10 MiB.
SMALL_BYTES, SMALL_SEGMENT_BYTES, MEDIUM_BYTES, MEDIUM_SEGMENT_BYTES = 1 << 20, 2 << 20, 10 << 20, 20 << 20

_ROW = "prefix cache in RAM"


@dataclass(frozen=True)
class RamTier:
    """RAM with the tier counted, and its row of the start-up table."""

    memory: MemoryBudget
    row: Decision


def bytes_aside(case: Case) -> int:
    """RAM that an explicit --prefix-cache-ram takes of a GPU's plan; 0 for auto, and if no pages can be kept. Raises
    UsageError if it holds fewer than LEAST_RUNS runs and a copy of states."""
    asked = case.options.cache.prefix_cache_ram
    if not asked or _hindrance(case):
        return 0
    size = entries(case.need)
    if asked < (least := _least_bytes(size)):
        raise UsageError(
            f"--prefix-cache-ram {format_bytes(asked)} is too small: {size.words(LEAST_RUNS)} of {case.model}, "
            f"the least that is kept, take {format_bytes(least)}.",
            f"Use --prefix-cache-ram {size_flag(least)} or more, or 0 for none.",
            param="prefix_cache_ram",
        )
    return asked


def with_tier(case: Case, gpu: Gpu, memory: MemoryBudget, kv_bytes: int, copies: int) -> RamTier:
    """Add the tier to the RAM of a plan that was made with `bytes_aside` less. kv_bytes: the KV cache in VRAM. copies:
    of recurrent states, there."""
    aside = bytes_aside(case)
    memory = msgspec.structs.replace(memory, reserve_bytes=memory.reserve_bytes - aside)
    if case.options.cache.prefix_cache_ram == 0:
        return RamTier(memory, _none(case, "as asked"))
    if why := _hindrance(case) or (NO_COPIES if case.need.copy_bytes and not copies else ""):
        return RamTier(memory, _none(case, why))
    if aside:
        row = _row(case, aside, f"as asked, {_pinned(gpu)}")
        return RamTier(msgspec.structs.replace(memory, prefix_cache_bytes=aside), row)
    size = entries(case.need)
    if gpu.simulated:
        why = "a simulated GPU's KV cache is in RAM already; --prefix-cache-ram SIZE adds this tier all the same"
        return RamTier(memory, _none(case, why))
    limits = {
        "what is left of RAM": memory.usable_bytes - memory.used_bytes,
        f"{MOST_OF_KV} times the KV cache in VRAM": MOST_OF_KV * kv_bytes,
        "a quarter of the free RAM": memory.free_bytes // SHARE_OF_FREE,
    }
    limit = min(limits, key=lambda name: limits[name])
    got = limits[limit]
    if got < (least := _least_bytes(size)):
        why = f"no room: {limit} is {format_bytes(max(0, got))}, and {size.words(LEAST_RUNS)} take "
        return RamTier(memory, _none(case, f"{why}{format_bytes(least)}"))
    return RamTier(msgspec.structs.replace(memory, prefix_cache_bytes=got), _row(case, got, f"{limit}, {_pinned(gpu)}"))


def none_on_cpu(case: Case) -> Decision:
    """The row of a plan without a GPU."""
    why = "as asked" if case.options.cache.prefix_cache_ram == 0 else "the KV cache is in RAM already: see --kv-memory"
    return _none(case, why)


def too_large(case: Case, memory: MemoryBudget) -> UsageError:
    """The error for an explicit size without which the plan is possible. memory: of the plan without it."""
    asked, left = case.options.cache.prefix_cache_ram or 0, memory.usable_bytes - memory.used_bytes
    fits = left >= _least_bytes(entries(case.need))
    return UsageError(
        f"--prefix-cache-ram {format_bytes(asked)} does not fit: of {format_bytes(memory.usable_bytes)} usable RAM, "
        f"{case.model} leaves {format_bytes(max(0, left))}.",
        f"Use --prefix-cache-ram {left >> 20}M or less, or leave it out." if fits else "Use --prefix-cache-ram 0.",
        param="prefix_cache_ram",
    )


def copies_bytes(asked: CacheOptions, need: Demand) -> int:
    """VRAM that the threads which copy pages to RAM or files need, each on a stream of its own: a run, page
    numbers, and a table of the caches' tensors. Copies of states need none."""
    none = asked.prefix_cache_ram == 0 and asked.prefix_cache_dir is None
    if none or not asked.prefix_cache or not need.page_bytes:
        return 0
    run = entries(need).run_bytes
    if run <= SMALL_BYTES:
        return BUFFERS * SMALL_SEGMENT_BYTES
    medium = MEDIUM_SEGMENT_BYTES if run <= MEDIUM_BYTES else -(-run // SMALL_SEGMENT_BYTES) * SMALL_SEGMENT_BYTES
    return BUFFERS * (SMALL_SEGMENT_BYTES + medium)


def _least_bytes(size: Entries) -> int:
    return LEAST_RUNS * size.run_bytes + size.state_bytes


def _hindrance(case: Case) -> str:
    """The reason why no pages can be kept in RAM, whatever was asked for; empty if they can."""
    if not case.options.cache.prefix_cache:
        return "the prefix cache is off"
    return "" if case.need.page_bytes else "the model has no KV pages"


def _pinned(gpu: Gpu) -> str:
    how = "in the RAM of this simulated GPU's host" if gpu.simulated else "pinned as it fills"
    return f"{how}; pages are copied there behind the steps"


def _word(case: Case) -> str:
    asked = case.options.cache.prefix_cache_ram
    return "auto" if asked is None else format_bytes(asked)


def _row(case: Case, got: int, why: str) -> Decision:
    size = entries(case.need)
    tokens = got // size.run_bytes * size.run_tokens
    return Decision(_ROW, _word(case), f"{format_bytes(got)}: {tokens} tokens", f"{why}{size.note}")


def _none(case: Case, why: str) -> Decision:
    return Decision(_ROW, _word(case), "none", why)
