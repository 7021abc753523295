"""The split of a model over one GPU and RAM, or the refusal. Never: choosing the GPU, formulas (plan/vram.py), the
order of experts (plan/placement.py).

Dense weights first, then KV, then experts: docs/decisions/018-vram-plan.md.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from proa.config.options import GpuOptions
from proa.errors import ResourceError, UsageError
from proa.machine.machine import Gpu
from proa.obs.units import format_bytes
from proa.plan.budget import Demand
from proa.plan.expert_counts import Counts
from proa.plan.fit import (
    SHORTEST_CONTEXT_TOKENS,
    Case,
    Fitted,
    Short,
    free_ram,
    least_context_bytes,
    listed_parts,
    more_ram,
    reach,
    size_flag,
    too_large_flags,
)
from proa.plan.fp8_activations import with_fp8
from proa.plan.gpu_asked import asked_experts, asked_layers
from proa.plan.placement import MoeLayer, moe_layers, place, ram_bias_bytes, resident_bytes, spare_bytes, spare_slots
from proa.plan.plan import GpuPlan, MemoryBudget, Owners, VramBudget, held_by
from proa.plan.prefix_ram import copies_bytes
from proa.plan.ring import MOST_OF_EXPERTS, RingPlan, RingRoom, plan_ring, ring_row, wished_bytes
from proa.plan.state_copies import with_copies
from proa.plan.vram import (
    context_bytes,
    dense_read_bytes,
    graphs_bytes,
    host_workspace_bytes,
    linear_bytes,
    loading_bytes,
    process_bytes,
    prompt_graphs_bytes,
    vram_demand,
)
from proa.types import Decision

# VRAM reserved for other processes and for fragmentation; none on a simulated GPU.
LEAST_RESERVE_BYTES, RESERVE_SHARE = 256 << 20, 100

_RANK = 0  # one GPU is planned

# Share of the VRAM beside dense weights that context and KV leave to experts, unless --context asks for more.
EXPERTS_SHARE, MOVING_EXPERTS_SHARE = 1 / 2, 1 / 4  # where idle pages hold experts

STAYING = ("uniform", "front-loading", "frequency")  # static placements


@dataclass(frozen=True)
class Split:
    """The parts on the GPU and in RAM."""

    gpu: GpuPlan
    memory: MemoryBudget
    need: Demand  # on VRAM
    fitted: Fitted
    decisions: tuple[Decision, ...]
    pass_tokens: int = 0  # see Plan, as the next
    streamed_cell_tokens: int = 0


@dataclass(frozen=True)
class Wish:
    """Experts wanted in VRAM: a number per MoE layer, and all of the blocks in `whole`. must: fewer is an error."""

    asked: str
    wanted: tuple[int, ...]
    whole: frozenset[int]
    must: bool

    def counts(self, layers: tuple[MoeLayer, ...]) -> list[int]:
        return [x.experts if x.block in self.whole else n for x, n in zip(layers, self.wanted, strict=True)]

    def least(self, layers: tuple[MoeLayer, ...]) -> list[int]:
        """The numbers per layer below which the split is an error."""
        return self.counts(layers) if self.must else [x.experts if x.block in self.whole else 0 for x in layers]

    def is_met(self, layers: tuple[MoeLayer, ...], resident: Sequence[Sequence[int]]) -> bool:
        return all(len(ids) >= least for ids, least in zip(resident, self.least(layers), strict=True))


@dataclass(frozen=True)
class _Room:
    """RAM that experts may take, in bytes: if RAM holds all experts, and if it holds only those not in VRAM."""

    inclusive_bytes: int
    exclusive_bytes: int


@dataclass(frozen=True)
class _Placed:
    """Experts in VRAM and in RAM, and the spare slots for moves. inclusive: RAM holds all experts."""

    strategy: str
    owners: Owners
    inclusive: bool
    experts_bytes: int  # in VRAM
    in_ram_bytes: int
    spare: int = 0
    spare_bytes: int = 0
    decisions: tuple[Decision, ...] = ()

    @property
    def resident(self) -> tuple[tuple[int, ...], ...]:
        return held_by(self.owners, _RANK)

    def fits(self, room: _Room) -> bool:
        """True if RAM holds its experts."""
        return self.inclusive or self.in_ram_bytes <= room.exclusive_bytes


def asks_for_experts(asked: GpuOptions) -> bool:
    """True if options ask for experts in VRAM, which needs a GPU."""
    return asked_experts(asked.gpu_experts) not in ("auto", 0) or asked.gpu_resident_layers is not None


def saving_rows(asked: GpuOptions, saved: bool, why_not: str) -> tuple[Decision, ...]:
    """The row for --save-expert-counts, if it was given."""
    if asked.save_expert_counts is None:
        return ()
    got, why = (asked.save_expert_counts, "every minute and at the end") if saved else ("none", why_not)
    return (Decision("expert counts", asked.save_expert_counts, got, why),)


def _off_rows(asked: GpuOptions, plan: GpuPlan) -> tuple[Decision, ...]:
    """Rows for co-fetch, read ahead and doorbell that are off: as asked, or because the CPU computes no experts."""
    turned_off = {"co-fetch": asked.co_fetch, "read ahead": asked.read_ahead}
    rows = [Decision(name, "off", "off", "as asked") for name, word in turned_off.items() if word == "off"]
    if asked.doorbell != "auto" and plan.gpu_only:
        rows.append(Decision("doorbell", asked.doorbell, "none", "the CPU computes no experts"))
    return tuple(rows)


def split(case: Case, gpu: Gpu, batch_tokens: int) -> Split:
    """Split the model. case: machine and usable bytes of RAM; its demand is ignored.

    Raises UsageError for experts and contexts that the model does not have, ResourceError if they do not fit.
    """
    asked = case.options.gpus
    layers = moe_layers(case.spec, case.stored)
    wish = _wish(asked, layers, len(case.spec.blocks))
    budget_bytes, vram_row = _usable(asked, gpu)
    room = _room(case, layers, batch_tokens, gpu, budget_bytes)
    least_bytes = _least_bytes(layers, wish, room)
    vram = with_copies(_in_vram(case, gpu, batch_tokens, budget_bytes), least_bytes)
    need = vram.need
    spare = _spare_bytes(layers, wish, asked.expert_placement)
    fitted = _reach(vram, gpu, _share(vram, layers, wish, least_bytes, spare))
    left_bytes = budget_bytes - need.total_bytes(fitted.context_tokens, fitted.num_pages)
    ring_room = RingRoom(budget_bytes, left_bytes, least_bytes + spare, shared=not wish.must)
    ring = plan_ring(case, gpu, layers, ring_room, batch_tokens, fitted.context_tokens)
    placed, ring, ring_rows = _place_with_ring(case, layers, left_bytes, wish, room, ring)
    beside = 0 if placed.in_ram_bytes else left_bytes - placed.experts_bytes
    need, graphs = _with_prompt_graphs(case, gpu, need, batch_tokens, beside)
    if asked.vram_moves == "on":
        placed = _with_moves(case, placed)
    if not wish.is_met(layers, placed.resident):
        raise _experts_do_not_fit(gpu, _bytes_of(layers, wish.least(layers)), left_bytes)
    if not placed.fits(room):
        raise _ram_refusal(case, placed.in_ram_bytes, room.exclusive_bytes, placed.experts_bytes)
    plan = GpuPlan(
        index=gpu.index,
        name=gpu.name,
        uuid=gpu.uuid,
        capability=gpu.capability,
        numa_node=gpu.numa_node,
        pcie_bytes_per_s=gpu.pcie_bytes_per_s,
        vram=_vram_budget(case, gpu, budget_bytes, need, fitted, placed, ring),
        placement=placed.strategy,
        blocks=tuple(layer.block for layer in layers),
        expert_bytes=tuple(layer.expert_bytes for layer in layers),
        owners=placed.owners,
        spare=placed.spare,
        vram_moves=asked.vram_moves == "on",
        ring_bytes=ring.nbytes,
        prefill=asked.prefill,
        doorbell=asked.doorbell,
        fp8_activations=asked.fp8_activations,
        deferred=asked.deferred_experts,
        co_fetch=asked.co_fetch == "auto" and placed.in_ram_bytes > 0,
        read_ahead=asked.read_ahead == "auto" and placed.in_ram_bytes > 0,
        inclusive=placed.inclusive,
        prompt_graphs=graphs,
        block_graphs=ring.block_graphs,
        save_counts=asked.save_expert_counts if layers else None,
    )
    weights_bytes = placed.in_ram_bytes + ram_bias_bytes(layers, placed.resident, placed.inclusive)
    memory = _ram_budget(case, plan, weights_bytes, loading_bytes(layers, placed.inclusive), batch_tokens)
    rows = (*fitted.decisions, vram_row, _linear_row(case, gpu), _experts_row(wish, plan), *placed.decisions)
    rows += _off_rows(asked, plan)
    rows += saving_rows(asked, plan.save_counts is not None, "the model has no routed experts")
    streamed = 0 if ring.cells is None else ring.cells.streamed_from
    return Split(plan, memory, need, fitted, (*rows, *ring_rows), ring.pass_tokens, streamed)


def _with_moves(case: Case, placed: _Placed) -> _Placed:
    """The placement with a row for --vram-moves. Raises UsageError where experts cannot leave VRAM without a copy, or
    must stay where they are."""
    why = ""
    if case.options.scheduler.deterministic:
        why = "--deterministic computes each expert where it is at the start"
    elif not placed.spare:
        why = "; ".join(row.why for row in placed.decisions) or "the model has no routed experts"
    elif not placed.inclusive:
        why = "RAM has no room for a copy of every expert, so those in idle KV pages could not be given up at once"
    if why:
        remedy = "Leave --vram-moves out."
        raise UsageError(f"--vram-moves on needs experts that move: {why}.", remedy, param="vram_moves")
    row = Decision("VRAM moves", "on", "on", "idle pages of the KV cache hold experts, which RAM has too")
    return replace(placed, decisions=(*placed.decisions, row))


def _ram_budget(
    case: Case, plan: GpuPlan, weights_bytes: int, loading_bytes: int, batch_tokens: int
) -> MemoryBudget:  # fmt: skip
    return MemoryBudget(
        free_bytes=case.machine.available_bytes,
        reserve_bytes=case.machine.available_bytes - case.usable_bytes,
        weights_bytes=weights_bytes,
        kv_bytes=0,
        workspace_bytes=host_workspace_bytes(case.spec, case.options.scheduler.max_running, batch_tokens),
        loading_bytes=loading_bytes,
        process_bytes=process_bytes(plan.simulated),
        simulated_vram_bytes=plan.vram.used_bytes if plan.simulated else 0,
    )


def _with_prompt_graphs(
    case: Case, gpu: Gpu, need: Demand, batch_tokens: int, left_bytes: int
) -> tuple[Demand, bool]:  # fmt: skip
    """The demand with graphs of short prompts, if there are any. left_bytes: of VRAM beside all experts; 0 if some are
    in RAM, since prompts are then not computed whole. There are none with --deterministic: kernels depend on the rows
    that prompts are padded to."""
    nbytes = prompt_graphs_bytes(case.spec, batch_tokens)
    if gpu.simulated or case.options.scheduler.deterministic or not 0 < nbytes <= left_bytes:
        return need, False
    return replace(need, workspace_base_bytes=need.workspace_base_bytes + nbytes), True


def _in_vram(case: Case, gpu: Gpu, batch_tokens: int, budget_bytes: int) -> Case:
    """The case for VRAM: its demand, usable bytes and name."""
    page_tokens, running, kept = case.options.cache.page_tokens, case.options.scheduler.max_running, _kept(case, gpu)
    need = vram_demand(case.spec, page_tokens, running, batch_tokens, gpu.simulated, kept, case.kv_elem_bytes)
    if case.options.gpus.fp8_activations:
        need = with_fp8(need, case.spec, batch_tokens, running)
    if not gpu.simulated:
        copies = copies_bytes(case.options.cache, need)
        need = replace(need, workspace_base_bytes=need.workspace_base_bytes + copies)
    return replace(case, need=need, usable_bytes=budget_bytes, space="VRAM beside the experts' share")


def _place(
    asked: str, layers: tuple[MoeLayer, ...], left_bytes: int, wish: Wish, room: _Room, counts: Counts
) -> _Placed:
    """Choose the placement. Spare slots cost resident experts, but never ones that were asked for or that RAM cannot
    hold: then placement is static."""
    total_bytes = sum(layer.total_bytes for layer in layers)

    def among(budget_bytes: int, strategy: str) -> _Placed:
        owners = place(layers, [budget_bytes], strategy, wish.wanted, wish.whole, counts)
        experts_bytes = resident_bytes(layers, held_by(owners, _RANK))
        inclusive = experts_bytes < total_bytes <= room.inclusive_bytes
        return _Placed(strategy, owners, inclusive, experts_bytes, total_bytes - (0 if inclusive else experts_bytes))

    def with_row(of: _Placed, why: str) -> _Placed:
        return replace(of, decisions=(Decision("expert placement", asked, of.strategy, why),))

    if asked == "frequency" and layers and not counts:
        remedy = "Give a file that --save-expert-counts wrote: --expert-counts FILE."
        raise UsageError("--expert-placement frequency needs expert counts.", remedy, param="expert_counts")
    static = among(left_bytes, asked if asked in STAYING else "uniform")
    if not layers:
        return static
    if asked in STAYING:
        return with_row(static, "the placement is static, as asked")
    if not _can_move(layers, static.resident):
        return with_row(static, "no layer has experts both in VRAM and in RAM: none can swap")
    if asked == "auto" and not static.inclusive:
        why = "RAM keeps no copies, so a swap would copy two experts; --expert-placement dynamic allows that"
        return with_row(static, why)
    spare, needed_bytes = _spare(layers, sum(map(len, static.resident)))
    moving = replace(among(left_bytes - needed_bytes, "dynamic"), spare=spare, spare_bytes=needed_bytes)
    if not (moving.fits(room) and _can_move(layers, moving.resident) and wish.is_met(layers, moving.resident)):
        return with_row(static, f"no room for the {format_bytes(needed_bytes)} of VRAM that moving experts need")
    both = "" if moving.inclusive else ", and evicted ones are copied back to RAM"
    first = "at first the most used by --expert-counts, " if counts else ""
    why = f"{first}the same number in each layer; hot experts move in, at most {spare} at a time{both}"
    return with_row(moving, f"{why}; {format_bytes(needed_bytes)} of VRAM for spare slots")


def _place_with_ring(
    case: Case, layers: tuple[MoeLayer, ...], left_bytes: int, wish: Wish, room: _Room, ring: RingPlan
) -> tuple[_Placed, RingPlan, tuple[Decision, ...]]:
    """Place experts, with the ring for prompts unless all are in VRAM. The ring costs resident experts, but never ones
    that were asked for or that RAM cannot hold."""
    asked = case.options.gpus
    alone = _place(asked.expert_placement, layers, left_bytes, wish, room, case.counts)
    if not alone.in_ram_bytes:
        return alone, RingPlan(), ()
    if not ring.nbytes:
        return alone, ring, (ring_row(asked.prefill, ring),)
    beside = _place(asked.expert_placement, layers, left_bytes - ring.total_bytes, wish, room, case.counts)
    if ring.total_bytes <= left_bytes and beside.fits(room) and wish.is_met(layers, beside.resident):
        return beside, ring, (ring_row(asked.prefill, ring),)
    none = RingPlan(why=f"its ring of {format_bytes(ring.nbytes)} does not fit beside the resident experts")
    return alone, none, (ring_row(asked.prefill, none),)


def _can_move(layers: tuple[MoeLayer, ...], resident: Sequence[Sequence[int]]) -> bool:
    return any(0 < len(ids) < layer.experts for layer, ids in zip(layers, resident, strict=True))


def _wish(asked: GpuOptions, layers: tuple[MoeLayer, ...], num_blocks: int) -> Wish:
    count, whole = asked_experts(asked.gpu_experts), asked_layers(asked.gpu_resident_layers, num_blocks)
    if asks_for_experts(asked) and not layers:
        remedy = "Leave --gpu-experts and --gpu-resident-layers out."
        raise UsageError("The model has no routed experts to place.", remedy, param="gpu_experts")
    most = max((layer.experts for layer in layers), default=0)
    if isinstance(count, int) and count > most:
        raise UsageError(
            f"--gpu-experts {count} is more than the {most} experts of a layer.", "Use --gpu-experts all.",
            param="gpu_experts",
        )  # fmt: skip
    wanted = tuple(min(layer.experts, count) if isinstance(count, int) else layer.experts for layer in layers)
    text = asked.gpu_experts + (f", layers {asked.gpu_resident_layers} whole" if whole else "")
    return Wish(text, wanted, whole, must=count != "auto")


def _usable(asked: GpuOptions, gpu: Gpu) -> tuple[int, Decision]:
    reserve = _reserve(gpu)
    room = max(0, gpu.free_bytes - reserve)
    got = room if asked.vram is None else min(asked.vram, room)
    free = f"{format_bytes(gpu.free_bytes)} free of {format_bytes(gpu.total_bytes)}"
    why = f"{free}, {format_bytes(reserve)} reserved"
    return got, Decision("VRAM", "auto" if asked.vram is None else format_bytes(asked.vram), format_bytes(got), why)


def _reserve(gpu: Gpu) -> int:
    return 0 if gpu.simulated else max(LEAST_RESERVE_BYTES, gpu.total_bytes // RESERVE_SHARE)


def _room(case: Case, layers: tuple[MoeLayer, ...], batch_tokens: int, gpu: Gpu, budget_bytes: int) -> _Room:
    other = process_bytes(gpu.simulated) + (budget_bytes if gpu.simulated else 0)
    other += host_workspace_bytes(case.spec, case.options.scheduler.max_running, batch_tokens)
    biases = sum(layer.experts * layer.bias_bytes for layer in layers)
    inclusive = case.usable_bytes - other - loading_bytes(layers, True) - biases
    exclusive = case.usable_bytes - other - loading_bytes(layers, False) - 2 * biases  # biases: at most twice
    return _Room(inclusive, exclusive)


def _bytes_of(layers: tuple[MoeLayer, ...], counts: Sequence[int]) -> int:
    return sum(layer.expert_bytes * count for layer, count in zip(layers, counts, strict=True))


def _least_bytes(layers: tuple[MoeLayer, ...], wish: Wish, room: _Room) -> int:
    """Least bytes of experts in VRAM: those asked for, and those that RAM cannot hold."""
    total_bytes, wanted_bytes = sum(layer.total_bytes for layer in layers), _bytes_of(layers, wish.counts(layers))
    least_bytes = _bytes_of(layers, wish.least(layers))
    if total_bytes > room.inclusive_bytes:
        whole_expert = max((layer.expert_bytes for layer in layers), default=1) - 1
        least_bytes = max(least_bytes, min(wanted_bytes, total_bytes - room.exclusive_bytes + whole_expert))
    return least_bytes


def _spare(layers: tuple[MoeLayer, ...], experts: int) -> tuple[int, int]:
    """Number and bytes of the spare slots beside so many experts in VRAM."""
    slots = spare_slots(max(layer.expert_bytes for layer in layers), experts)
    return slots, spare_bytes(layers, slots)


def _spare_bytes(layers: tuple[MoeLayer, ...], wish: Wish, placement: str) -> int:
    """Bytes of spare slots for experts that were asked for, if these may move."""
    counts = wish.least(layers)
    if placement in STAYING or not any(0 < count < layer.experts for layer, count in zip(layers, counts, strict=True)):
        return 0
    return _spare(layers, sum(counts))[1]


def _share(case: Case, layers: tuple[MoeLayer, ...], wish: Wish, least_bytes: int, spare: int) -> int:
    """VRAM that context and KV leave to experts, unless --context asks for more: a share of what dense weights leave,
    less if all wanted experts need less, and at least `least_bytes`; if experts stay in RAM, also to the ring for
    prompts and `spare` bytes for moves, which have at most MOST_OF_EXPERTS of what `least_bytes` leave."""
    share = MOVING_EXPERTS_SHARE if case.options.gpus.vram_moves == "on" else EXPERTS_SHARE
    left_bytes = case.usable_bytes - case.need.total_bytes(0, 0)
    wanted_bytes = min(_bytes_of(layers, wish.counts(layers)), int(left_bytes * share))
    others = wished_bytes(case.options, layers, case.usable_bytes) + spare
    others = min(others, int(MOST_OF_EXPERTS * max(0, left_bytes - least_bytes)))
    return max(wanted_bytes, min(sum(layer.total_bytes for layer in layers), least_bytes + others))


def _reach(case: Case, gpu: Gpu, experts_bytes: int) -> Fitted:
    """Fit context and pages into the VRAM that experts leave, but at least the context asked for, or the least one."""
    left_bytes = max(least_context_bytes(case), case.usable_bytes - experts_bytes)
    got = reach(replace(case, usable_bytes=min(case.usable_bytes, left_bytes)))
    if isinstance(got, Short):
        listed = listed_parts(case, got, "dense weights", "CUDA")
        vram = case.options.gpus.vram
        by_flag = vram is not None and vram < got.total_bytes <= gpu.free_bytes - _reserve(gpu)
        helps = [f"--vram {size_flag(got.total_bytes)} or more"] if by_flag else []
        helps += [f"--context {got.fitting}"] if got.fitting >= SHORTEST_CONTEXT_TOKENS else []
        helps += [f"a smaller {flag}" for flag in too_large_flags(case, got.total_bytes)]
        raise ResourceError(
            f"{gpu.name} cannot hold {case.model} even without its routed experts: that takes "
            f"{format_bytes(got.total_bytes)} of VRAM ({listed}), and {format_bytes(case.usable_bytes)} may be used.",
            f"Use {', or '.join([*helps, '--gpu none'])}.",
        )
    return got


def _vram_budget(
    case: Case, gpu: Gpu, budget_bytes: int, need: Demand, fitted: Fitted, placed: _Placed, ring: RingPlan
) -> VramBudget:
    return VramBudget(
        total_bytes=gpu.total_bytes,
        free_bytes=gpu.free_bytes,
        reserve_bytes=gpu.free_bytes - budget_bytes,
        context_bytes=context_bytes(gpu.simulated),
        dense_bytes=need.weights_bytes,
        dense_read_bytes=dense_read_bytes(case.spec, _kept(case, gpu)),
        kv_bytes=fitted.num_pages * need.page_bytes,
        workspace_bytes=need.workspace_bytes(fitted.context_tokens),
        graphs_bytes=graphs_bytes(case.spec, case.options.scheduler.max_running, gpu.simulated),
        experts_bytes=placed.experts_bytes,
        spare_bytes=placed.spare_bytes,
        states_bytes=need.slots_bytes,
        ring_bytes=ring.total_bytes,
    )


def _kept(case: Case, gpu: Gpu) -> Mapping[str, str]:
    """Stored types of dense parameters; empty for a simulated GPU, which computes them in plain torch, unpacked."""
    return {} if gpu.simulated else case.stored


def _linear_row(case: Case, gpu: Gpu) -> Decision:
    formats = linear_bytes(case.spec, _kept(case, gpu))
    got = ", ".join(f"{form.name.lower()} {format_bytes(nbytes)}" for form, nbytes in sorted(formats.items()))
    why = "kept as stored if a packed format allows it, else bfloat16, as the embedding"
    if not case.stored:
        why = "the checkpoint has no quantised formats to keep"
    elif gpu.simulated:
        why = "a simulated GPU supports no other format"
    return Decision("linear layers", "as stored", got, why)


def _experts_row(wish: Wish, plan: GpuPlan) -> Decision:
    name, total = "experts in VRAM", sum(plan.experts)
    if not total:
        return Decision(name, wish.asked, "none", "the model has no routed experts: the GPU runs all of it")
    counts = [len(ids) for ids in plan.resident]
    got = f"{sum(counts)} of {total}: {format_bytes(plan.vram.experts_bytes)}"
    if plan.gpu_only:
        return Decision(name, wish.asked, got, "all fit: the GPU runs everything, and RAM keeps no copies")
    if not sum(counts):
        return Decision(name, wish.asked, "none", "as asked" if wish.must else "none fits beside dense weights and KV")
    copies = "RAM keeps a copy of each" if plan.inclusive else "RAM holds only the others"
    spread = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(counts[0])
    why = f"{plan.placement}: {spread} of each of {len(counts)} layers; {copies}; the CPU runs the others"
    return Decision(name, wish.asked, got, why)


def _experts_do_not_fit(gpu: Gpu, wanted_bytes: int, left_bytes: int) -> ResourceError:
    return ResourceError(
        f"The requested experts take {format_bytes(wanted_bytes)} of VRAM; beside dense weights and KV cache, "
        f"{gpu.name} has {format_bytes(max(0, left_bytes))} for them.",
        "Ask for fewer, or leave --gpu-experts and --gpu-resident-layers out: as many as fit are taken.",
        param="gpu_experts",
    )  # fmt: skip


def _ram_refusal(case: Case, needed_bytes: int, room_bytes: int, resident: int) -> ResourceError:
    asked, need, missing_bytes = case.options.cache, case.need, needed_bytes - room_bytes
    more, _ = more_ram(case, missing_bytes)
    lacks = f"RAM lacks {format_bytes(-room_bytes)} for the rest"
    has = f"RAM has {format_bytes(room_bytes)} for them" if room_bytes >= 0 else lacks
    shorter = "" if asked.context is None else "a shorter --context, "
    least_bytes = need.pages(asked.context or SHORTEST_CONTEXT_TOKENS) * need.page_bytes
    shorter += "a smaller --kv-memory, " if (asked.kv_memory or 0) - least_bytes >= missing_bytes else ""
    return ResourceError(
        f"{case.model} does not fit into VRAM and RAM together: of its routed experts {format_bytes(resident)} fit "
        f"into VRAM, {format_bytes(needed_bytes)} remain, and {has} "
        f"({free_ram(case.machine)}).",
        f"{more[0].upper()}{more[1:]}, {shorter}or a smaller model.",
    )
