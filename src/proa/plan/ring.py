"""VRAM for streamed prefill: the ring that experts in RAM are copied to, and the rows of long prompts. Never: copies,
dividing experts (machine/cost/prefill.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proa.config.options import EngineOptions
from proa.machine.cost.turns import DECODING_TOKENS
from proa.models.spec import Model
from proa.obs.units import format_bytes
from proa.ops import sizes
from proa.ops.sizes import RING_BANKS
from proa.plan.cells import Cells
from proa.plan.deterministic import cells_beside_cpu
from proa.plan.placement import MoeLayer
from proa.types import Decision

LEAST_EXPERTS = 4  # in a bank, below which a ring is not worth its VRAM
MOST_SHARE = 0.1  # of the usable VRAM, for the ring; it would hold resident experts otherwise,
MOST_OF_EXPERTS = 0.25  # and of the VRAM that is left for experts
ROWS_SHARE = 0.02  # of the usable VRAM, for the rows of a long prompt
ROWS_SHARE_IN_GROUPS = 0.05  # where experts pass in groups: each pass copies all of them, and its rows wait for that
PASS_TOKENS = 1 << 16  # most tokens that pass through the layers together


@dataclass(frozen=True)
class RingPlan:
    """nbytes: of the ring; 0: prompts are not streamed. rows_bytes: for the rows of passes, beyond those of a step.
    cells: of prompts with --deterministic. block_graphs: see GpuPlan."""

    nbytes: int = 0
    pass_tokens: int = 0
    rows_bytes: int = 0
    why: str = ""
    cells: Cells | None = None
    block_graphs: bool = False

    @property
    def total_bytes(self) -> int:
        return self.nbytes + self.rows_bytes


def plan_ring(
    spec: Model, layers: Sequence[MoeLayer], options: EngineOptions, budget_bytes: int, left_bytes: int,
    batch_tokens: int, context_tokens: int,
) -> RingPlan:  # fmt: skip
    """Plan the ring of a model some of whose experts stay in RAM. budget_bytes: usable VRAM; left_bytes: of it, for
    experts and the ring; batch_tokens: rows that are computed at once."""
    mode = options.gpus.prefill
    if mode == "cpu":
        return RingPlan(why="as asked")
    if options.scheduler.max_itl == "none":
        return RingPlan(why="--max-itl none: prompts share steps with decode")
    largest, expert_bytes = max(of.total_bytes for of in layers), max(of.expert_bytes for of in layers)
    room_bytes = int(min(MOST_SHARE * budget_bytes, MOST_OF_EXPERTS * max(0, left_bytes)))
    nbytes = min(RING_BANKS * sizes.aligned(largest), room_bytes)
    if nbytes < RING_BANKS * LEAST_EXPERTS * expert_bytes:
        return RingPlan(why=f"a ring of {format_bytes(room_bytes)}, as VRAM allows, would hold too few experts")
    bank_bytes = sizes.bank_bytes(nbytes)
    groups = max(sizes.ring_groups(layer.experts, layer.expert_bytes, bank_bytes) for layer in layers)
    share = ROWS_SHARE if groups == 1 else ROWS_SHARE_IN_GROUPS
    cells = cells_beside_cpu(spec, layers, options, batch_tokens)
    least, grain = (batch_tokens, 1) if cells is None else (cells.tokens, cells.tokens)
    tokens = max(least, _whole(min(PASS_TOKENS, context_tokens), grain))
    while tokens > least and pass_bytes(spec, options, tokens, least, groups) > share * budget_bytes:
        tokens = max(least, _whole(tokens // 2, grain))
    why = "a layer's experts are copied to the GPU while it computes the layer before"
    if groups > 1:
        of = f"{groups} groups of up to {bank_bytes // expert_bytes}"
        why = f"a layer's experts are copied to the GPU in {of}, each while it computes the one before"
    rows_bytes = pass_bytes(spec, options, tokens, least, groups)
    return RingPlan(nbytes, tokens, rows_bytes + _tables_bytes(layers, groups), why, cells)


def ring_row(asked: str, got: RingPlan) -> Decision:
    """The row of the start-up table."""
    if not got.nbytes:
        return Decision("prefill", asked, "cpu", f"experts in RAM are computed by the CPU: {got.why}")
    size = f"{asked}, ring of {format_bytes(got.nbytes)}, up to {got.pass_tokens} tokens"
    why = f"{got.why}; the CPU computes some" if asked == "auto" else got.why
    if got.cells is not None and asked == "auto":
        why = f"{got.why}; --deterministic: by length, the CPU computes cells below {got.cells.streamed_from} tokens"
    return Decision("prefill", asked, size, why)


def _whole(tokens: int, grain: int) -> int:
    return -(-tokens // grain) * grain


def _tables_bytes(layers: Sequence[MoeLayer], groups: int) -> int:
    return groups * sizes.residency_bytes(len(layers), max(layer.experts for layer in layers))


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
