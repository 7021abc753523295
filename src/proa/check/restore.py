"""Has a prompt's pages stored in the tiers behind the prefix cache and restored from each: from RAM, and from files
alone, as after a restart. Never: which path has tiers, comparing.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import torch

from proa.check.drive import FROM_FILES, FROM_RAM, Texts, finish, finish_stores, run
from proa.engine.engine import Engine
from proa.engine.executors.page_tiers import PageTiers
from proa.errors import ProaError
from proa.ops.caches import Caches
from proa.plan.plan import Plan

NewTiers = Callable[[Plan], PageTiers | None]
NewEngine = Callable[[PageTiers | None], Engine]


def run_with_tiers(
    plan: Plan, texts: Texts, caches: Caches, new_tiers: NewTiers, new_engine: NewEngine
) -> dict[str, str]:  # fmt: skip
    """Compute the texts, then those of each planned tier, by an engine that begins with nothing but the tier. Returns
    the phases that were left out, and why. Raises ProaError if nothing was restored from a tier."""
    tiers = new_tiers(plan)
    engine = new_engine(tiers)
    run(engine, texts)
    if tiers is None:
        return {}
    finish_stores(engine)
    phases = [phase for phase, planned in ((FROM_RAM, plan.memory.prefix_cache_bytes), (FROM_FILES, plan.prefix_files))
              if planned]  # fmt: skip
    unwritten, cached = tiers.file_stats().failed_writes, engine.stats().scheduler.cached_prompt_tokens
    if cached and FROM_RAM in phases:
        _restore(FROM_RAM, texts, caches, tiers, new_engine)
    tiers.close()
    if not cached:
        return dict.fromkeys(phases, "no prompt reused a cached prefix")
    if FROM_FILES in phases and unwritten:
        return {FROM_FILES: "no files could be written to the folder of temporary files: see the log"}
    if FROM_FILES in phases:
        memory = msgspec.structs.replace(plan.memory, prefix_cache_bytes=0)
        files = new_tiers(msgspec.structs.replace(plan, memory=memory))
        assert files is not None
        _restore(FROM_FILES, texts, caches, files, new_engine)
        files.close()
    return {}


def _restore(phase: str, texts: Texts, caches: Caches, tiers: PageTiers, new_engine: NewEngine) -> None:
    _erase(caches)
    engine = new_engine(tiers)
    finish(engine, {phase: texts.of_tiers[phase]})
    finish_stores(engine)
    restored = tiers.ram_stats() if phase == FROM_RAM else tiers.file_stats()
    if not restored.restored_pages:
        raise ProaError(f"no page of a stored {phase} was restored")


def _erase(caches: Caches) -> None:
    """Zero all pages and recurrent states, so that what is not restored is not right by chance."""
    each = [cache for layer in caches for cache in layer]
    tensors = [tensor for cache in each for tensor in (*cache.page_tensors, *cache.states)]
    for tensor in tensors:
        tensor.view(torch.uint8).zero_()
    if tensors and tensors[0].is_cuda:
        torch.cuda.synchronize(tensors[0].device)  # restores copy on other streams
