"""Divides the KV pool of a GPU into lots that may hold experts, if the plan lets VRAM move. Never: decisions, loans."""

from __future__ import annotations

from dataclasses import dataclass

from proa.cache.lots import Lots, lots_of, page_tensors
from proa.cache.pages import PageAllocator
from proa.cache.radix import PrefixCache
from proa.engine.building.gpu_plan import needed
from proa.engine.scheduling.lending import LentPages
from proa.engine.scheduling.scheduler import Scheduler
from proa.hybrid.model import HybridModel
from proa.ops.caches import Caches
from proa.plan.plan import Plan
from proa.types import Decision


@dataclass(frozen=True)
class Lender:
    """A pool's lots, and what holds experts in them."""

    lots: Lots
    owner: HybridModel

    def lend_to(
        self, scheduler: Scheduler, allocator: PageAllocator, cache: PrefixCache | None, *, tiers: bool
    ) -> None:
        """Have the scheduler lend idle pages. tiers: evicted prefixes are kept behind the prefix cache."""

        def stored() -> bool:
            return tiers and not scheduler.behind.busy

        tokens = scheduler.limits.page_tokens
        scheduler.room.lent = LentPages(self.lots, self.owner, allocator, cache, tokens, stored=stored)


def new_lender(plan: Plan, hybrid: HybridModel, caches: Caches) -> tuple[Lender | None, tuple[Decision, ...]]:
    """The planned lots of these caches, and their row of the start-up table; None if the plan has none, or if the pool
    is too small for one."""
    if not needed(plan)[0].vram_moves:
        return None, ()
    tensors = page_tensors(caches)
    lots = lots_of([tensor[0].nbytes for tensor in tensors], plan.num_pages, hybrid.room_bytes)
    pages, name = f"{lots.num_pages} pages", "lent KV pages"
    if not lots.count:
        why = f"{pages} would hold an expert, and the KV cache has {plan.num_pages}"
        return None, (Decision(name, "on", "none", why),)
    hybrid.may_lend([lots.rooms(lot, tensors) for lot in range(lots.count)])
    got = f"up to {lots.count} times {pages}"
    return Lender(lots, hybrid), (
        Decision(name, "on", got, f"each hold {lots.rooms_each} experts while they are idle"),
    )
