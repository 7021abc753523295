"""The number of copies of recurrent states, from which prompts with a cached prefix resume: docs/decisions/032. Never:
when they are taken.
"""

from __future__ import annotations

from dataclasses import replace

from proa.errors import UsageError
from proa.obs.units import format_bytes
from proa.plan.budget import Demand
from proa.plan.fit import Case, least_context_bytes, size_flag
from proa.types import Decision

# A conversation uses two copies, one at its last prompt's end and one in its answer; as many again for branches and for
# paused conversations.
COPIES_PER_REQUEST = 4
# They take at most 1/8 of the memory that weights, running requests and the least context leave.
SHARE_OF_REST = 8


def with_copies(case: Case, kept_bytes: int = 0) -> Case:
    """Add copies to the case's demand. kept_bytes: memory for other uses that the demand does not include.

    Raises UsageError for --state-memory that holds no copy.
    """
    asked, need, each_bytes = case.options.cache.state_memory, case.need, case.need.copy_bytes
    if not each_bytes or not case.options.cache.prefix_cache:
        return case
    if asked is None:
        rest = case.usable_bytes - kept_bytes - least_context_bytes(case)
        wanted = COPIES_PER_REQUEST * case.options.scheduler.max_running
        return replace(case, need=replace(need, copies=min(wanted, max(0, rest) // SHARE_OF_REST // each_bytes)))
    if asked < each_bytes:
        raise UsageError(
            f"--state-memory {format_bytes(asked)} holds no copy of the recurrent states of {case.model}: one takes "
            f"{format_bytes(each_bytes)}.",
            f"Use --state-memory {size_flag(each_bytes)} or more, or --no-prefix-cache.",
            param="state_memory",
        )
    return replace(case, need=replace(need, copies=asked // each_bytes))


def has_prefix_cache(case: Case, need: Demand) -> bool:
    return case.options.cache.prefix_cache and (need.copies > 0 or not need.copy_bytes)


def prefix_rows(case: Case, need: Demand) -> tuple[Decision, ...]:
    """Rows for --prefix-cache and --state-memory."""
    return (_prefix_cache_row(case, need), *_copies_rows(case, need))


def _copies_rows(case: Case, need: Demand) -> tuple[Decision, ...]:
    asked, each_bytes = case.options.cache.state_memory, need.copy_bytes
    word = "auto" if asked is None else format_bytes(asked)
    if not each_bytes or not case.options.cache.prefix_cache:
        why = "the model has no recurrent states" if not each_bytes else "the prefix cache is off"
        return () if asked is None else (Decision("copies of states", word, "none", why),)
    if not need.copies:
        why = f"no room for one: it takes {format_bytes(each_bytes)}"
        return (Decision("copies of states", word, "none", why),)
    got = f"{format_bytes(need.copies * each_bytes)}: {need.copies} of {format_bytes(each_bytes)}"
    return (Decision("copies of states", word, got, "prompts with a cached prefix resume from them"),)


def _prefix_cache_row(case: Case, need: Demand) -> Decision:
    asked = case.options.cache.prefix_cache
    word = "on" if asked else "off"
    if not asked:
        return Decision("prefix cache", word, word, "as asked")
    if not need.copy_bytes:
        return Decision("prefix cache", word, word, "a prefix that prompts share is computed once")
    if not need.copies:
        return Decision("prefix cache", word, "off", "it needs copies of recurrent states, and there are none")
    return Decision("prefix cache", word, word, "a prompt resumes from the last copy of states in its cached prefix")
