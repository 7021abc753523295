"""Options + model + machine -> the frozen Plan, each decision with its reason. Pure. Never: reading files, measuring.

In a Decision, `got` is what happens; if it differs from `asked`, `why` says what forced it. Options that cannot be met
raise UsageError (wrong in themselves) or ResourceError (wrong on this machine), before a byte is loaded.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from proa.config.options import EngineOptions, MachineOptions, ModelOptions, SchedulerOptions
from proa.errors import ResourceError, UsageError
from proa.machine.cost.turns import DECODING_TOKENS, SHARED_TOKENS, over_tokens
from proa.machine.machine import Gpu, Machine
from proa.machine.rates import RamRate
from proa.models.names import Declared
from proa.models.spec import Model
from proa.obs.units import format_bytes, format_rate
from proa.plan import deterministic
from proa.plan.budget import ELEM_BYTES, LOADING_BYTES, PROCESS_BYTES, Demand, demand
from proa.plan.deferral import deferral_rows
from proa.plan.deterministic import cell_tokens, fixed_options
from proa.plan.device import choose
from proa.plan.expert_counts import Counts
from proa.plan.fit import Case, Fitted, fit, ram_reserve, usable_ram
from proa.plan.fp8_activations import fp8_rows
from proa.plan.gpu_asked import asked_gpu, unused_rows
from proa.plan.kernels import beyond_cpu, beyond_gpu
from proa.plan.kv_type import kv_type
from proa.plan.overrides import config_overrides
from proa.plan.packed_size import PackedSize, packed_size
from proa.plan.plan import GpuPlan, MemoryBudget, Plan, Roof, Workers
from proa.plan.prefix_files import prefix_files, without_copies
from proa.plan.prefix_ram import bytes_aside, none_on_cpu, too_large, with_tier
from proa.plan.roof import cpu_roof, split_roof
from proa.plan.split import Split, asks_for_experts, saving_rows, split
from proa.plan.state_copies import has_prefix_cache, prefix_rows, with_copies
from proa.plan.stored import kept_types, weights_row
from proa.plan.turns import batch_row, gap_limit, turn_tokens
from proa.plan.workers import no_workers, plan_threads, plan_workers
from proa.types import Decision
from proa.weights.checkpoint import Checkpoint


@dataclass(frozen=True)
class Host:
    """The machine, and facts about it that are measured or tried."""

    machine: Machine
    ram: RamRate  # measured at this start
    isa: str  # the best instruction set of native kernels that its CPU runs
    isa_reason: str  # why not a better one


def resolve(
    options: EngineOptions, model: str, checkpoint: Checkpoint, declared: Declared, host: Host, counts: Counts = ()
) -> Plan:
    """Make the plan. counts: how often experts were chosen; empty: unknown. Raises UsageError, ResourceError."""
    options = fixed_options(options)
    spec, asked, machine = declared.spec, options.scheduler, host.machine
    dtype, dtype_row = _dtype(options.model.dtype, checkpoint)
    isa = host.isa if dtype == "bfloat16" else ""  # the native kernels compute in bfloat16 only
    batch_tokens = max(asked.max_batch_tokens or SHARED_TOKENS, asked.max_running)
    usable_bytes, ram_rows = _ram(options.machine, host)
    kv = kv_type(options.cache.kv_dtype, dtype, checkpoint, declared)
    _check_dummy(options.model, checkpoint, dtype)
    stored = kept_types(options.model, declared, checkpoint) if isa else {}
    packed = packed_size(spec, stored) if isa else None
    need, active_bytes = _need(options, spec, dtype, kv.elem_bytes, batch_tokens, packed)
    files = prefix_files(options, model, need)
    case = Case(model, spec, options, dtype, need, machine, usable_bytes - files.buffer_bytes,
                kv_elem_bytes=kv.elem_bytes, stored=stored, counts=counts)  # fmt: skip
    placed = _place(case, batch_tokens, active_bytes, host.ram.bytes_per_s)
    files = without_copies(files, placed.need.copies, need)
    limit, limit_row = gap_limit(asked, placed.gpu, placed.roof)
    launched = placed.gpu is not None
    threads, threads_row = plan_threads(options.machine.threads, machine, launched=launched)
    workers, worker_rows = _workers(options.machine, machine, threads, isa, launched=launched)
    weights = weights_row(options.model, checkpoint, spec, stored, placed.gpu)
    cell = cell_tokens(options, placed.batch_tokens, isa, placed.gpu)
    rows = (weights, dtype_row, _compute(dtype, host, placed.gpu), *placed.decisions, kv.row)
    rows += (*prefix_rows(case, placed.need), placed.tier_row, *files.decisions)
    steps = _step_rows(asked, placed.batch_tokens, batch_tokens if limit is None else None)
    rows += (*steps, limit_row, deterministic.row(asked.deterministic, cell, placed.streamed_cell_tokens))
    return Plan(
        model=model,
        path=str(checkpoint.path),
        load_format=checkpoint.load_format,
        dtype=dtype,
        kv_dtype=kv.dtype,
        **_as_given(options),
        context_tokens=placed.fitted.context_tokens,
        page_tokens=options.cache.page_tokens,
        num_pages=placed.fitted.num_pages,
        prefix_cache=has_prefix_cache(case, placed.need),
        prefix_files=files.files,
        state_copies=placed.need.copies,
        max_running=asked.max_running,
        max_batch_tokens=placed.batch_tokens,
        shared_tokens=min(placed.batch_tokens, batch_tokens),
        deterministic=asked.deterministic,
        prompt_cell_tokens=cell,
        streamed_cell_tokens=placed.streamed_cell_tokens,
        max_itl=limit,
        over_tokens=0 if limit is None else over_tokens(placed.batch_tokens),
        pass_tokens=placed.pass_tokens,
        threads=threads,
        isa=isa,
        workers=workers,
        memory=placed.memory,
        gpus=() if placed.gpu is None else (placed.gpu,),
        roof=placed.roof,
        decisions=(*rows, *ram_rows, threads_row, *worker_rows),
    )


def _as_given(options: EngineOptions) -> dict[str, Any]:
    """Fields of the Plan that are options as they were given."""
    asked = options.model
    return {
        "trial": options.gpus.plan_trial,
        "max_queued": options.scheduler.max_queued,
        "max_queued_tokens": options.scheduler.max_queued_tokens,
        "dummy_seed": asked.dummy_seed,
        "dummy_router": asked.dummy_router,
        "dummy_format": asked.dummy_format,
        "ignore_config_keys": asked.ignore_config_key,
        "override_config": config_overrides(asked.override_config),
    }


def _need(
    options: EngineOptions, spec: Model, dtype: str, kv_elem_bytes: int, batch_tokens: int, packed: PackedSize | None
) -> tuple[Demand, int]:
    """The demand on RAM, and the bytes of weights that one decoded token reads. packed: None without native kernels."""
    page_tokens, running = options.cache.page_tokens, options.scheduler.max_running
    need = demand(spec, ELEM_BYTES[dtype], page_tokens, running, batch_tokens, kv_elem_bytes)
    if packed is None:
        return need, spec.num_active_params * ELEM_BYTES[dtype]
    return replace(need, weights_bytes=packed.total_bytes), packed.active_bytes


def _step_rows(asked: SchedulerOptions, got: int, shared: int | None) -> tuple[Decision, Decision]:
    together = Decision("requests at once", str(asked.max_running), str(asked.max_running), "others queue")
    return together, batch_row(asked, got, shared)


@dataclass(frozen=True)
class _Placed:
    """Placement on GPU and RAM, with its roof."""

    gpu: GpuPlan | None
    batch_tokens: int
    memory: MemoryBudget
    need: Demand  # on the memory that holds KV and states
    fitted: Fitted
    roof: Roof
    decisions: tuple[Decision, ...]
    tier_row: Decision  # of the prefix cache in RAM
    pass_tokens: int = 0  # see Plan, as the next
    streamed_cell_tokens: int = 0


def _place(case: Case, batch_tokens: int, active_bytes: int, bandwidth: float) -> _Placed:
    """Place the model on a GPU if one is usable and the model fits, else on the CPU, with the reason. Raises
    UsageError, and ResourceError if it fits neither."""
    options = case.options.gpus
    asked = asked_gpu(options.gpu)
    moves = options.vram_moves == "on"
    certain = asked.explicit or asks_for_experts(options) or moves
    chosen = choose(asked, case.machine)
    why, refused = chosen.why, None
    if chosen.gpu is not None and (hindered := _hindrance(case, chosen.gpu)):
        if certain:
            raise UsageError(f"{case.model} cannot use a GPU: {hindered[0]}.", hindered[1], param="gpu")
        why = f"CPU only: {hindered[0]}"
    elif chosen.gpu is not None:
        try:
            return _with_gpu(case, chosen.gpu, chosen.why, batch_tokens, bandwidth)
        except ResourceError as error:
            if certain:
                raise
            why, refused = error.message.rstrip("."), error
    elif moves:
        raise UsageError(f"--vram-moves on needs a GPU, but none is used: {why}.", "Leave --vram-moves out, or see "
                         "`proa doctor`.", param="vram_moves")  # fmt: skip
    elif certain:
        raise UsageError(f"Experts in VRAM were requested, but no GPU is used: {why}.", "Leave --gpu-experts and "
                         "--gpu-resident-layers out, or see `proa doctor`.", param="gpu_experts")  # fmt: skip
    try:
        return _on_cpu(case, batch_tokens, why, active_bytes, bandwidth)
    except ResourceError as error:
        if refused is None:
            raise
        text = f"{error.message} It does not fit with the GPU either: {refused.message}"
        raise ResourceError(text, error.remedy) from refused


def _with_gpu(case: Case, gpu: Gpu, why: str, batch_tokens: int, bandwidth: float) -> _Placed:
    """batch_tokens: as asked, or the shortest steps."""
    got, batch_tokens = _split_beside_tier(case, gpu, batch_tokens)
    tier = with_tier(case, gpu, got.memory, got.gpu.vram.kv_bytes, got.need.copies)
    row = Decision("GPU", case.options.gpus.gpu, f"{got.gpu.device}: {gpu.name}", why)
    roof = split_roof(case.spec, got.gpu, gpu, bandwidth, case.kv_elem_bytes)
    rounded = fp8_rows(case.options.gpus.fp8_activations, case.model, got.gpu, case.spec, case.stored)
    deferred = deferral_rows(case.options.gpus.deferred_experts, case.model, got.gpu, case.spec)
    rows = (row, *got.decisions, *rounded, *deferred)
    return _Placed(
        got.gpu, batch_tokens, tier.memory, got.need, got.fitted, roof, rows, tier.row, got.pass_tokens,
        got.streamed_cell_tokens,
    )  # fmt: skip


def _split_beside_tier(case: Case, gpu: Gpu, batch_tokens: int) -> tuple[Split, int]:
    """Split without the RAM that --prefix-cache-ram asks for. Raises UsageError if only that keeps the model from
    fitting."""
    aside = bytes_aside(case)
    try:
        return _split(replace(case, usable_bytes=case.usable_bytes - aside), gpu, batch_tokens)
    except ResourceError:
        if not aside:
            raise
        with suppress(ResourceError):
            raise too_large(case, _split(case, gpu, batch_tokens)[0].memory) from None
        raise


def _split(case: Case, gpu: Gpu, batch_tokens: int) -> tuple[Split, int]:
    """Split with the longest steps that fit, if --max-batch-tokens is not given."""
    asked = case.options.scheduler
    longer = turn_tokens(case.spec, gpu, batch_tokens) if asked.max_batch_tokens is None else ()
    for tokens in longer:
        with suppress(ResourceError):  # the experts asked for leave no room for such long steps
            got = split(case, gpu, tokens)
            if tokens <= DECODING_TOKENS or (got.pass_tokens and not asked.deterministic):
                return got, tokens
    return split(case, gpu, batch_tokens), batch_tokens


def _on_cpu(case: Case, batch_tokens: int, why_no_gpu: str, active_bytes: int, bandwidth: float) -> _Placed:
    if case.dtype == "bfloat16" and (why := beyond_cpu(case.spec)):
        raise UsageError(
            f"The native kernels cannot compute {case.model}: {why}.", "Use --dtype float32: plain torch, slower."
        )
    deferral_rows(case.options.gpus.deferred_experts, case.model, None, case.spec, why_no_gpu)  # raises if asked for
    case = with_copies(case)
    fitted, need = fit(case), case.need
    memory = MemoryBudget(
        free_bytes=case.machine.available_bytes,
        reserve_bytes=case.machine.available_bytes - case.usable_bytes,
        weights_bytes=need.weights_bytes,
        kv_bytes=fitted.num_pages * need.page_bytes,
        workspace_bytes=need.workspace_bytes(fitted.context_tokens),
        loading_bytes=LOADING_BYTES,
        process_bytes=PROCESS_BYTES,
        states_bytes=need.slots_bytes,
    )
    roof = cpu_roof(case.spec, active_bytes, ELEM_BYTES[case.dtype], case.kv_elem_bytes, bandwidth)
    row = Decision("GPU", case.options.gpus.gpu, "none", why_no_gpu)
    uncounted = saving_rows(case.options.gpus, False, "choices are counted only with a GPU")
    unused = unused_rows(case.options.gpus)
    rows = (row, *unused, *fitted.decisions, *uncounted)
    return _Placed(None, batch_tokens, memory, need, fitted, roof, rows, none_on_cpu(case))


def _workers(
    asked: MachineOptions, machine: Machine, threads: int, isa: str, *, launched: bool
) -> tuple[Workers | None, tuple[Decision, ...]]:
    return plan_workers(asked, machine, threads, launched=launched) if isa else no_workers(asked)


def _hindrance(case: Case, gpu: Gpu) -> tuple[str, str] | None:
    """The reason why this GPU cannot run the model, and the remedy; None if it can."""
    if case.dtype != "bfloat16":
        return f"the GPU computes in bfloat16, not {case.dtype}", "Use --dtype bfloat16, or --gpu none."
    why = beyond_gpu(case.spec, gpu)
    return (why, "Use --gpu none.") if why else None


def _check_dummy(asked: ModelOptions, checkpoint: Checkpoint, dtype: str) -> None:
    form = asked.dummy_format
    if form != "bf16" and (checkpoint.load_format != "dummy" or dtype != "bfloat16"):
        what = f"weights are {checkpoint.load_format}" if checkpoint.load_format != "dummy" else f"the dtype is {dtype}"
        raise UsageError(
            f"--dummy-format {form} needs random weights and bfloat16 activations, but {what}.",
            "Leave --dummy-format out, or use --load-format dummy and --dtype bfloat16.",
            param="dummy_format",
        )  # fmt: skip


def _dtype(asked: str, checkpoint: Checkpoint) -> tuple[str, Decision]:
    stored = checkpoint.dtype
    if asked != "auto":
        narrower = ELEM_BYTES[stored] > ELEM_BYTES[asked]
        why = f"as asked; the checkpoint's {stored} is rounded once" if narrower else "as asked"
        return asked, Decision("dtype", asked, asked, why)
    if checkpoint.load_format == "gguf" or checkpoint.quantisation:
        return "bfloat16", Decision("dtype", asked, "bfloat16", "the type of activations; for weights see that row")
    return stored, Decision("dtype", asked, stored, "the checkpoint's own")


def _compute(dtype: str, host: Host, gpu: GpuPlan | None) -> Decision:
    if dtype != "bfloat16":
        return Decision(
            "computing", "auto", "plain torch", f"the native kernels compute in bfloat16, not {dtype}: slower"
        )
    if gpu is not None and gpu.gpu_only:
        return Decision("computing", "auto", gpu.device, "everything is in VRAM")
    got = f"native {host.isa}" if gpu is None else f"{gpu.device}, native {host.isa} for experts in RAM"
    return Decision("computing", "auto", got, host.isa_reason or "the best of this CPU")


def _ram(asked: MachineOptions, host: Host) -> tuple[int, tuple[Decision, Decision]]:
    """Usable bytes of RAM, and the rows for its size and its bandwidth."""
    machine = host.machine
    free, reserve, got = machine.available_bytes, ram_reserve(asked, machine), usable_ram(asked, machine)
    why = f"{format_bytes(free)} free of {format_bytes(machine.total_bytes)}, {format_bytes(reserve)} reserved"
    if machine.memory_limit:
        why += f"; bound by {machine.memory_limit}"
    size = Decision("RAM", "auto" if asked.ram is None else format_bytes(asked.ram), format_bytes(got), why)
    return got, (size, Decision("RAM speed", "auto", format_rate(host.ram.bytes_per_s), host.ram.source))
