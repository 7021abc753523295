"""The context length and the number of KV pages that memory allows, or the refusal with its numbers. Never: other
decisions."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field

from proa.config.options import EngineOptions, MachineOptions
from proa.errors import ResourceError, UsageError
from proa.machine.machine import Machine
from proa.models.spec import Model, Rope
from proa.obs.units import format_bytes
from proa.plan.budget import Demand
from proa.plan.expert_counts import Counts
from proa.types import Decision

# If memory is short and --context is not given, a context below this is refused instead of granted.
LEAST_CONTEXT_TOKENS = 1024
SHORTEST_CONTEXT_TOKENS = 2  # one of a prompt, one of its answer
# The KV pool holds one full context, and this much for each further running request.
FURTHER_REQUEST_TOKENS = 8192


@dataclass(frozen=True)
class Case:
    """The inputs of the fit."""

    model: str  # as asked, for messages
    spec: Model
    options: EngineOptions
    dtype: str
    need: Demand
    machine: Machine
    usable_bytes: int
    space: str = "memory"  # the space that limits the context, for the start-up table
    kv_elem_bytes: int = 2
    stored: Mapping[str, str] = field(default_factory=dict)  # types of parameters that may be kept; see packed_size
    counts: Counts = ()  # how often each expert was chosen; empty: unknown


@dataclass(frozen=True)
class Fitted:
    """The context and pages that fit; context_tokens <= num_pages * page_tokens."""

    context_tokens: int
    num_pages: int
    decisions: tuple[Decision, ...]


@dataclass(frozen=True)
class Short:
    """A context of `context_tokens`, which needs `total_bytes`, does not fit; the longest that does is `fitting`."""

    context_tokens: int
    total_bytes: int
    fitting: int


def fit(case: Case) -> Fitted:
    """Fit a model in RAM, as `reach` does. Raises UsageError as it does, ResourceError if memory does not suffice."""
    got = reach(case)
    if isinstance(got, Short):
        raise _refusal(case, got)
    return got


def reach(case: Case) -> Fitted | Short:
    """Fit one context first, then pages for further requests, as far as memory reaches.

    Raises UsageError for a context that is longer than the model supports or than --kv-memory holds.
    """
    asked, need = case.options.cache.context, case.need
    full = supported_context(case.spec)
    given = _pages_asked(case)
    longest = full if given is None else min(full, given * need.page_tokens)

    def total_bytes(context: int) -> int:
        return need.total_bytes(context, need.pages(context) if given is None else given)

    fitting = bisect_right(range(1, longest + 1), case.usable_bytes, key=total_bytes)  # total_bytes is monotonic
    least = _least_context(case, given)
    if fitting < least:
        return Short(least, total_bytes(least), fitting)
    context = asked or fitting
    pages = _wanted_pages(case, context) if given is None else given
    return Fitted(context, pages, (_context_row(case, context, full), _pages_row(case, context, pages)))


def least_context_bytes(case: Case) -> int:
    """Bytes of the least context; if they do not fit, the model is refused. Raises UsageError as `reach` does."""
    given = _pages_asked(case)
    least = _least_context(case, given)
    return case.need.total_bytes(least, case.need.pages(least) if given is None else given)


def _least_context(case: Case, given: int | None) -> int:
    """Tokens of the shortest context that is granted. given: pages of --kv-memory."""
    least = min(supported_context(case.spec), LEAST_CONTEXT_TOKENS) if given is None else SHORTEST_CONTEXT_TOKENS
    return case.options.cache.context or least


def supported_context(spec: Model) -> int:
    """The longest context that the checkpoint supports: its positions, or more by its rope scaling."""

    def reach(rope: Rope) -> int:
        scaling = rope.scaling
        if scaling is None or scaling.kind == "llama3":  # llama3 configs state the stretched length themselves
            return spec.max_positions
        return max(spec.max_positions, int(scaling.original_positions * scaling.factor))

    return min(map(reach, spec.ropes), default=spec.max_positions)


def _pages_asked(case: Case) -> int | None:
    """Pages that --kv-memory holds; None if it was not given. Raises UsageError for a context that is longer than the
    model supports or than they hold."""
    asked, need = case.options.cache.kv_memory, case.need
    context = case.options.cache.context or SHORTEST_CONTEXT_TOKENS
    if context > (full := supported_context(case.spec)):
        raise _too_long(case.model, context, full)
    if asked is None:
        return None
    pages = asked // need.page_bytes
    if pages < need.pages(context):
        least = need.pages(context) * need.page_bytes
        raise UsageError(
            f"--kv-memory {format_bytes(asked)} holds {pages * need.page_tokens} tokens of {case.model}; "
            f"a context of {context} needs {format_bytes(least)}.",
            f"Use --kv-memory {size_flag(least)} or more"
            + (", or a shorter --context." if context > SHORTEST_CONTEXT_TOKENS else "."),
            param="kv_memory",
        )
    return pages


def _wanted_pages(case: Case, context: int) -> int:
    """Pages for one context and a share for each further request, limited by memory; at least one context. With
    --vram-moves the share is a whole context, since idle pages hold experts."""
    need, others = case.need, case.options.scheduler.max_running - 1
    least = need.pages(context)
    whole = case.options.gpus.vram_moves == "on"
    wanted = least + others * need.pages(context if whole else min(context, FURTHER_REQUEST_TOKENS))
    more = range(least + 1, wanted + 1)
    return least + bisect_right(more, case.usable_bytes, key=lambda pages: need.total_bytes(context, pages))


def _context_row(case: Case, context: int, full: int) -> Decision:
    asked = case.options.cache.context
    if asked is not None:
        return Decision("context", str(asked), str(context), f"as asked; the model supports {full}")
    if context == full:
        return Decision("context", "auto", str(context), "the longest that the model supports")
    limit = case.space if case.options.cache.kv_memory is None else "--kv-memory"
    return Decision("context", "auto", str(context), f"the longest that fits {limit}; the model supports {full}")


def _pages_row(case: Case, context: int, pages: int) -> Decision:
    asked, need, running = case.options.cache.kv_memory, case.need, case.options.scheduler.max_running
    got = f"{format_bytes(pages * need.page_bytes)}: {pages} pages of {need.page_tokens} tokens"
    why = f"{pages * need.page_tokens} tokens: one full context"
    if running > 1:
        why += f", {(pages - need.pages(context)) * need.page_tokens} tokens for {running - 1} more requests"
    return Decision("KV cache", "auto" if asked is None else format_bytes(asked), got, why)


def _too_long(model: str, asked: int, full: int) -> UsageError:
    example = '\'rope_scaling={"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": N}\''
    return UsageError(
        f"--context {asked} is longer than the {full} tokens that {model} supports.",
        f"Use --context {full} or less. If its authors document rope scaling: --override-config {example}.",
        param="context",
    )


def listed_parts(case: Case, short: Short, weights: str, fixed: str) -> str:
    """List the parts of the demand that does not fit, the largest first."""
    need, total_bytes = case.need, short.total_bytes
    workspace_bytes = need.workspace_bytes(short.context_tokens)
    kv = "KV cache" + (f" for a context of {short.context_tokens}" if case.options.cache.kv_memory is None else "")
    parts = {
        weights: need.weights_bytes,
        kv: total_bytes - need.weights_bytes - workspace_bytes - need.fixed_bytes - need.slots_bytes,
        "recurrent states": need.states_bytes,
        "copies of states": need.slots_bytes - need.states_bytes,
        "workspace": workspace_bytes,
        fixed: need.fixed_bytes,
    }
    return ", ".join(
        f"{name} {format_bytes(size)}" for name, size in sorted(parts.items(), key=lambda p: -p[1]) if size
    )


def _refusal(case: Case, short: Short) -> ResourceError:
    """The error with the demand and its parts, free memory, and flags that would help."""
    usable, total_bytes = max(0, case.usable_bytes), short.total_bytes  # below 0: buffers of files take more
    weights = "weights as stored" if case.stored else f"weights as {case.dtype}"
    listed = listed_parts(case, short, weights, "processes and loading")
    return ResourceError(
        f"{case.model} does not fit into memory: it needs {format_bytes(total_bytes)} ({listed}), but "
        f"{format_bytes(usable)} may be used ({free_ram(case.machine)}).",
        _remedies(case, total_bytes, short.fitting),
    )


def _remedies(case: Case, total_bytes: int, fitting: int) -> str:
    """List only remedies that help in this case."""
    missing = total_bytes - case.usable_bytes
    helps = []
    if fitting >= SHORTEST_CONTEXT_TOKENS:
        helps.append(f"use --context {fitting}")
    helps += [f"lower {flag}" for flag in too_large_flags(case, total_bytes)]
    if fewer := fewer_running(case, missing):
        helps.append(f"use --max-running {fewer}")
    if case.dtype == "float32" and case.need.weights_bytes // 2 >= missing:
        helps.append(f"use --dtype bfloat16, which saves {format_bytes(case.need.weights_bytes // 2)}")
    more, enough = more_ram(case, missing)
    helps.append(more if enough else f"{more}, or a smaller model")
    sentence = "; or ".join(helps)
    return f"{sentence[0].upper()}{sentence[1:]}."


def too_large_flags(case: Case, total_bytes: int) -> list[str]:
    """Flags of sizes with smaller values of which the model fits. total_bytes: that it needs with those given."""
    asked, need, flags = case.options.cache, case.need, []
    least = asked.context or SHORTEST_CONTEXT_TOKENS
    if asked.kv_memory is not None and need.total_bytes(least, need.pages(least)) <= case.usable_bytes:
        flags.append("--kv-memory")
    if asked.state_memory is not None and total_bytes - (need.copies - 1) * need.copy_bytes <= case.usable_bytes:
        flags.append("--state-memory")
    return flags


def free_ram(machine: Machine) -> str:
    """The machine's free RAM, and the limit that bounds it, if one does."""
    limit = f", bound by {machine.memory_limit}" if machine.memory_limit else ""
    return f"{format_bytes(machine.available_bytes)} free of {format_bytes(machine.total_bytes)}{limit}"


def ram_reserve(asked: MachineOptions, machine: Machine) -> int:
    """Bytes of free RAM that stay free."""
    return min(1 << 30, machine.total_bytes // 20) if asked.ram_reserve is None else asked.ram_reserve


def usable_ram(asked: MachineOptions, machine: Machine) -> int:
    """Bytes of RAM that may be used."""
    room = max(0, machine.available_bytes - ram_reserve(asked, machine))
    return room if asked.ram is None else min(asked.ram, room)


def more_ram(case: Case, missing_bytes: int) -> tuple[str, bool]:
    """What gives `missing_bytes` more RAM to the model, as a phrase; False if the machine's RAM is too small."""
    asked, machine = case.options.machine, case.machine
    wanted, reserve = usable_ram(asked, machine) + missing_bytes, ram_reserve(asked, machine)
    if wanted > machine.total_bytes:
        return f"use a machine with {format_bytes(wanted)} of free memory", False
    flags = [f"--ram {size_flag(wanted)}"] if asked.ram is not None and asked.ram < wanted else []
    if wanted > machine.available_bytes:
        lacking, limit = format_bytes(wanted + reserve - machine.available_bytes), machine.memory_limit
        freed = f"extend {limit} by {lacking}" if limit else f"free {lacking} of memory"
        return " and use ".join([freed, *flags]), True
    spare = machine.available_bytes - wanted
    flags += [f"--ram-reserve {spare >> 20}M"] if spare < reserve else []
    return f"use {' '.join(flags)}", True


def fewer_running(case: Case, missing_bytes: int) -> int:
    """The largest --max-running whose recurrent states take `missing_bytes` less; 0: none does."""
    running = case.options.scheduler.max_running
    each_bytes = case.need.states_bytes // running
    return max(0, running - -(-missing_bytes // each_bytes)) if each_bytes else 0


def size_flag(count: int) -> str:
    """Format bytes as the value of a flag, rounded up to MiB."""
    return f"{-(-count >> 20)}M"
