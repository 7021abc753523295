"""VRAM for streamed prefill: the ring that experts in RAM are copied to, and the rows of long prompts. Never: copies,
dividing experts (machine/cost/prefill.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proa.config.options import EngineOptions
from proa.machine.cost.turns import DECODING_TOKENS
from proa.machine.machine import Gpu
from proa.models.spec import Model
from proa.obs.units import format_bytes
from proa.ops import sizes
from proa.ops.sizes import RING_BANKS
from proa.plan.cells import Cells
from proa.plan.deterministic import cells_beside_cpu
from proa.plan.fit import Case
from proa.plan.placement import MoeLayer
from proa.plan.vram import beside_bytes, block_graphs_bytes
from proa.types import Decision

LEAST_EXPERTS = 4  # in a bank, below which a ring is not worth its VRAM
MOST_SHARE = 0.1  # of the usable VRAM, for the ring; it would hold resident experts otherwise,
MOST_OF_EXPERTS = 0.25  # and of the VRAM that is left for experts
ROWS_SHARE = 0.02  # of the usable VRAM, for the rows of a long prompt
ROWS_SHARE_IN_GROUPS = 0.05  # where experts pass in groups: each pass copies all of them, and its rows wait for that
GRAPHS_SHARE = 1 / 32  # of the VRAM for experts, at most, for graphs of short prompts
PASS_TOKENS = 1 << 16  # most tokens that pass through the layers together


@dataclass(frozen=True)
class RingPlan:
    """nbytes: of the ring; 0: prompts are not streamed. rows_bytes: for the rows of passes, beyond those of a step, and
    for what computes them beside decode steps and by graphs. cells: of prompts with --deterministic. block_graphs: see
    GpuPlan."""

    nbytes: int = 0
    pass_tokens: int = 0
    rows_bytes: int = 0
    why: str = ""
    cells: Cells | None = None
    block_graphs: bool = False

    @property
    def total_bytes(self) -> int:
        return self.nbytes + self.rows_bytes


@dataclass(frozen=True)
class RingRoom:
    """VRAM for the ring. budget_bytes: all usable VRAM; left_bytes: of it, for experts and the ring; claimed_bytes: of
    these, for experts that were asked for or that RAM cannot hold, with their spare slots. shared: more experts are
    wanted in VRAM, so that the ring is worth only a part."""

    budget_bytes: int
    left_bytes: int
    claimed_bytes: int
    shared: bool

    @property
    def most_bytes(self) -> int:
        """Most bytes of the ring and of the rows of passes, together."""
        return max(0, self.left_bytes - self.claimed_bytes)

    @property
    def most_ring_bytes(self) -> int:
        share = MOST_SHARE * self.budget_bytes
        return int(min(share, MOST_OF_EXPERTS * max(0, self.left_bytes)) if self.shared else share)


def wished_bytes(options: EngineOptions, layers: Sequence[MoeLayer], budget_bytes: int) -> int:
    """VRAM of a ring and of the rows of prompts where both have all the room they want; 0: prompts are not streamed."""
    if not layers or _why_not(options):
        return 0
    whole_bytes, most_bytes = _whole_ring_bytes(layers), int(MOST_SHARE * budget_bytes)
    share = ROWS_SHARE if whole_bytes <= most_bytes else ROWS_SHARE_IN_GROUPS
    return min(whole_bytes, most_bytes) + int(share * budget_bytes)


def plan_ring(
    case: Case, gpu: Gpu, layers: Sequence[MoeLayer], room: RingRoom, batch_tokens: int, context_tokens: int
) -> RingPlan:
    """Plan the ring of a model some of whose experts stay in RAM. batch_tokens: rows that are computed at once."""
    spec, options = case.spec, case.options
    if not layers:
        return RingPlan()
    if why_not := _why_not(options):
        return RingPlan(why=why_not)
    cells = cells_beside_cpu(spec, layers, options, batch_tokens)
    alone = gpu.simulated or cells is not None  # see Plan.prompts_may_run_beside
    beside = 0 if alone else beside_bytes(spec, case.stored, batch_tokens)
    graphs = 0 if alone else block_graphs_bytes(spec, batch_tokens)
    rows = _Rows(spec, options, layers, *((batch_tokens, 1) if cells is None else (cells.tokens, cells.tokens)))
    most_tokens, free_bytes = rows.whole(min(PASS_TOKENS, context_tokens)), room.most_bytes - beside
    room_bytes = min(room.most_ring_bytes, free_bytes - rows.first_bytes(most_tokens, free_bytes, room.budget_bytes))
    nbytes, expert_bytes = min(_whole_ring_bytes(layers), room_bytes), max(of.expert_bytes for of in layers)
    if nbytes < RING_BANKS * LEAST_EXPERTS * expert_bytes:
        size = format_bytes(max(0, room_bytes))
        return RingPlan(why=f"a ring of {size}, as VRAM allows, would hold too few experts")
    bank_bytes = sizes.bank_bytes(nbytes)
    groups = max(sizes.ring_groups(layer.experts, layer.expert_bytes, bank_bytes) for layer in layers)
    share = ROWS_SHARE if groups == 1 else ROWS_SHARE_IN_GROUPS
    tokens = rows.most_tokens(most_tokens, groups, min(share * room.budget_bytes, free_bytes - nbytes))
    rows_bytes = rows.nbytes(tokens, groups) + beside
    most_graphs = min(GRAPHS_SHARE * room.left_bytes, room.most_bytes - nbytes - rows_bytes)
    by_graphs = 0 < graphs <= most_graphs
    why = _streams_why(groups, bank_bytes // expert_bytes)
    return RingPlan(nbytes, tokens, rows_bytes + by_graphs * graphs, why, cells, by_graphs)


@dataclass(frozen=True)
class _Rows:
    """VRAM for the rows of passes. least_tokens: of a pass; grain_tokens: every longer one has a multiple of them."""

    spec: Model
    options: EngineOptions
    layers: Sequence[MoeLayer]
    least_tokens: int
    grain_tokens: int

    def whole(self, tokens: int) -> int:
        """The shortest pass that has room for so many tokens."""
        return max(self.least_tokens, -(-tokens // self.grain_tokens) * self.grain_tokens)

    def nbytes(self, tokens: int, groups: int) -> int:
        """groups: of a layer's experts."""
        tables = groups * sizes.residency_bytes(len(self.layers), max(layer.experts for layer in self.layers))
        return pass_bytes(self.spec, self.options, tokens, self.least_tokens, groups) + tables

    def first_bytes(self, most_tokens: int, free_bytes: int, budget_bytes: int) -> int:
        """Bytes that rows have before the ring: a small ring costs little speed, but each pass copies all experts. So
        rows come first in half of what is free."""
        groups = -(-max(of.experts for of in self.layers) // LEAST_EXPERTS)
        first = min(self.nbytes(most_tokens, groups), free_bytes // 2, int(ROWS_SHARE_IN_GROUPS * budget_bytes))
        return max(first, self.nbytes(self.least_tokens, groups))

    def most_tokens(self, wanted_tokens: int, groups: int, most_bytes: float) -> int:
        """Tokens of the longest pass in `most_bytes`: so many, or half of that, and so on."""
        tokens = wanted_tokens
        while tokens > self.least_tokens and self.nbytes(tokens, groups) > most_bytes:
            tokens = self.whole(tokens // 2)
        return tokens


def _streams_why(groups: int, experts: int) -> str:
    """How a layer's experts pass through the ring. experts: that a bank holds."""
    if groups == 1:
        return "a layer's experts are copied to the GPU while it computes the layer before"
    of = f"{groups} groups of up to {experts}"
    return f"a layer's experts are copied to the GPU in {of}, each while it computes the one before"


def _why_not(options: EngineOptions) -> str:
    """Why options leave prompts to the CPU; empty: they do not."""
    if options.gpus.prefill == "cpu":
        return "as asked"
    if options.scheduler.max_itl == "none":
        return "--max-itl none: prompts share steps with decode"
    return ""


def _whole_ring_bytes(layers: Sequence[MoeLayer]) -> int:
    """Bytes of a ring each of whose banks holds all experts of a layer."""
    return RING_BANKS * sizes.aligned(max(of.total_bytes for of in layers))


def ring_row(asked: str, got: RingPlan) -> Decision:
    """The row of the start-up table."""
    if not got.nbytes:
        return Decision("prefill", asked, "cpu", f"experts in RAM are computed by the CPU: {got.why}")
    size = f"{asked}, ring of {format_bytes(got.nbytes)}, up to {got.pass_tokens} tokens"
    why = f"{got.why}; the CPU computes some" if asked == "auto" else got.why
    if got.cells is not None and asked == "auto":
        why = f"{got.why}; --deterministic: by length, the CPU computes cells below {got.cells.streamed_from} tokens"
    return Decision("prefill", asked, size, why)


def pass_bytes(spec: Model, options: EngineOptions, tokens: int, batch_tokens: int, groups: int) -> int:
    """Bytes of a pass beyond those of a step: hidden states, angles, inputs of its chunks, and fault records. With
    several groups, each chunk also keeps what the block was given and the mixer's output, the experts' input, their sum
    in float32, the choice and where it was located."""
    chunk_tokens = min(batch_tokens, DECODING_TOKENS)
    chunks = -(-tokens // chunk_tokens)
    angles = sum(sizes.angle_bytes(tokens, rope.dim) for rope in spec.ropes)
    pages = -(-(options.cache.context or spec.max_positions) // options.cache.page_tokens)
    inputs = (chunks - 1) * sizes.input_bytes(batch_tokens, options.scheduler.max_running, pages)
    top_k = max((ffn.top_k for ffn in spec.routed.values()), default=0)
    faults = (tokens - batch_tokens) * (sizes.FAULT_COLUMNS + top_k) * 4
    rows = 2 * spec.hidden if groups == 1 else (3 * 2 + 4) * spec.hidden + 32 * top_k
    return tokens * rows + angles + inputs + faults
