"""The frozen Plan: every decision, made once; JSON in and out, so that a bug report is a file. Never: decisions."""

from __future__ import annotations

import msgspec

from proa.machine.cost.turns import GapLimit
from proa.machine.topology import Team
from proa.models.ranks import CPU, Mesh
from proa.plan.cells import Cells
from proa.types import Decision

# Per MoE layer, the owner of each expert: the number of a rank, which computes it on its GPU, or CPU.
Owners = tuple[tuple[int, ...], ...]


def held_by(owners: Owners, rank: int) -> tuple[tuple[int, ...], ...]:
    """Per MoE layer, the ascending ids of the experts that a rank owns."""
    return tuple(tuple(e for e, owner in enumerate(layer) if owner == rank) for layer in owners)


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of RAM: free now, reserved, and used by each part.

    process + weights + loading + kv + states + workspace + simulated VRAM + prefix cache <= usable: the formulas are in
    plan/budget.py, with a GPU in plan/vram.py. With a GPU, weights are routed experts, and KV and states are in VRAM.
    """

    free_bytes: int
    reserve_bytes: int
    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    loading_bytes: int  # transient: the loader's buffers
    process_bytes: int = 0  # both processes without weights: Python, torch, tokenizer
    states_bytes: int = 0  # recurrent states of all running requests, and copies
    simulated_vram_bytes: int = 0  # the VRAM of a simulated GPU
    prefix_cache_bytes: int = 0  # most bytes of KV pages in RAM, kept behind those in VRAM

    @property
    def usable_bytes(self) -> int:
        return self.free_bytes - self.reserve_bytes

    @property
    def used_bytes(self) -> int:
        parts = self.process_bytes + self.weights_bytes + self.loading_bytes + self.kv_bytes + self.states_bytes
        return parts + self.workspace_bytes + self.simulated_vram_bytes + self.prefix_cache_bytes


class VramBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of VRAM: free now, reserved, and used by each part.

    context + dense + kv + states + workspace + graphs + experts + spare + ring <= usable: the formulas are in
    plan/vram.py and plan/ring.py.
    """

    total_bytes: int
    free_bytes: int
    reserve_bytes: int
    context_bytes: int  # CUDA's context, libraries, modules of kernels
    dense_bytes: int  # attention, norms, routers, shared experts, dense FFNs, embedding, head
    dense_read_bytes: int  # the part of dense_bytes that one decoded token reads
    kv_bytes: int
    workspace_bytes: int
    graphs_bytes: int
    experts_bytes: int  # slots of resident experts, packed as in RAM
    spare_bytes: int = 0  # slots for moving experts
    states_bytes: int = 0  # recurrent states of all running requests, and copies
    ring_bytes: int = 0  # for experts that are copied in for a prompt, and for the rows of long prompts

    @property
    def usable_bytes(self) -> int:
        return self.free_bytes - self.reserve_bytes

    @property
    def used_bytes(self) -> int:
        parts = self.context_bytes + self.dense_bytes + self.kv_bytes + self.workspace_bytes + self.graphs_bytes
        return parts + self.experts_bytes + self.spare_bytes + self.states_bytes + self.ring_bytes


class GpuPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One rank's GPU, which computes everything but the routed experts of other ranks and of the CPU.

    `blocks`, `expert_bytes` and `owners` have one entry for each MoE layer, in the model's order.
    """

    rank: int = 0  # its place in the mesh

    index: int | None  # cuda:index; None: simulated
    name: str
    uuid: str = ""
    capability: tuple[int, int] = (0, 0)
    numa_node: int | None = None
    pcie_bytes_per_s: float | None = None  # simulated GPU: copies are throttled to this rate; None: they are not
    vram: VramBudget
    placement: str  # uniform, front-loading, frequency; dynamic: uniform at first
    blocks: tuple[int, ...] = ()  # block number of each MoE layer
    vram_moves: bool = False  # idle KV pages hold experts
    expert_bytes: tuple[int, ...] = ()  # packed bytes of one expert
    owners: Owners = ()  # of all experts, for each layer the same on every rank
    spare: int = 0  # spare slots for each size of experts: so many may move at once
    co_fetch: bool = False  # the GPU may read experts in RAM, beside the CPU
    co_fetch_half: bool = False  # (proa check) half of the missed experts, whatever the rates
    ring_bytes: int = 0  # VRAM that experts in RAM are copied to for prompts; 0: the CPU computes them
    prefill: str = "auto"  # --prefill, if there is a ring; "half" (proa check): half of the experts in RAM are copied
    doorbell: str = "auto"  # --doorbell as asked; the start takes a way that works
    read_ahead: bool = False  # idle workers prefetch the next layer's probable experts, if kernels ring
    fp8_activations: bool = False  # rows of experts of many tokens are rounded to E4M3, like weights; lossy
    deferred: int = 0  # of a decoded token's experts, the most that the CPU adds one MoE layer later; lossy
    inclusive: bool = False  # RAM keeps a copy of resident experts too; else it holds only the others
    prompt_graphs: bool = False  # short prompts are computed whole, by graphs
    block_graphs: bool = False  # or in parts, by graphs of each block
    save_counts: str | None = None  # file for expert counts; None: not asked for
    trace: str | None = None  # file for the counts of each look (hybrid/trace.py); for benchmarks

    @property
    def simulated(self) -> bool:
        return self.index is None

    @property
    def device(self) -> str:
        return "sim" if self.index is None else f"cuda:{self.index}"

    @property
    def experts(self) -> tuple[int, ...]:
        """Routed experts per layer."""
        return tuple(map(len, self.owners))

    @property
    def resident(self) -> tuple[tuple[int, ...], ...]:
        """Per layer, the ascending ids of experts in this GPU's VRAM."""
        return held_by(self.owners, self.rank)

    @property
    def gpu_only(self) -> bool:
        """True if GPUs hold all routed experts: the CPU computes none."""
        return not any(CPU in layer for layer in self.owners)


def step_seconds(dense_s: float, resident_s: float, ram_s: float, *, read_ahead: bool) -> float:
    """Lower bound of a decode step: the GPU reads dense weights, then resident experts while the CPU reads its own;
    with read ahead the CPU reads during the whole step."""
    return max(dense_s + resident_s, ram_s) if read_ahead else dense_s + max(resident_s, ram_s)


class VramRoof(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that decode of one request reads from one rank's VRAM per token, and the bandwidth."""

    dense_bytes_per_token: int  # dense weights and KV, read before the experts
    expert_bytes_per_token: int  # resident experts, for uniform routing, read while the CPU reads its own
    bandwidth_bytes_per_s: float
    source: str  # source of the bandwidth
    read_ahead: bool = False  # the CPU reads its experts also while dense weights are read, predicted or deferred ones


class Roof(msgspec.Struct, frozen=True, kw_only=True):
    """The physical limit of decode for one request: bandwidth over the bytes that a token must read.

    With a GPU: 1 / (dense / VRAM + max(resident experts / VRAM, the CPU's experts / RAM)). With read ahead RAM is read
    all the time: 1 / max((dense + resident experts) / VRAM, the CPU's experts / RAM). With several GPUs, those of a
    stage read at once, and the slowest counts; a token passes stage after stage.
    """

    bytes_per_token: int  # read from RAM
    bandwidth_bytes_per_s: float  # of RAM
    vram: tuple[tuple[VramRoof, ...], ...] = ()  # of each stage's ranks; empty: everything is read from RAM

    @property
    def tokens_per_s(self) -> float:
        if not self.vram:
            return self.bandwidth_bytes_per_s / self.bytes_per_token
        ram_s = self.bytes_per_token / self.bandwidth_bytes_per_s
        dense_s = sum(max(of.dense_bytes_per_token / of.bandwidth_bytes_per_s for of in s) for s in self.vram)
        experts_s = sum(max(of.expert_bytes_per_token / of.bandwidth_bytes_per_s for of in s) for s in self.vram)
        read_ahead = any(of.read_ahead for stage in self.vram for of in stage)
        return 1 / step_seconds(dense_s, experts_s, ram_s, read_ahead=read_ahead)

    @property
    def bound_by(self) -> str:
        """The memory that takes most of a token's time: "RAM" or "VRAM"."""
        ram_s = self.bytes_per_token / self.bandwidth_bytes_per_s
        return "RAM" if not self.vram or 2 * ram_s * self.tokens_per_s > 1 else "VRAM"


class Workers(msgspec.Struct, frozen=True, kw_only=True):
    """The threads of the native kernels, and the placement of threads and weights."""

    teams: tuple[Team, ...]  # the CPUs of each memory node's workers, the calling thread's first
    trials: tuple[tuple[int, ...], ...]  # workers per team; the first is used, the others are tried for decode
    binding: str  # core, node, none
    homes: tuple[tuple[int, ...], ...] = ()  # for "node": all usable CPUs of each team's node
    interleave: tuple[int, ...] = ()  # nodes that weights are interleaved over; else each team's are on its node
    spin_us: int  # how long an idle worker polls for work before it sleeps
    nice: int = 0  # added to the workers' nice value
    saving: bool = False  # --power-saving: fewer workers, if decode slows down little


class PrefixFiles(msgspec.Struct, frozen=True):
    """The folder of the prefix cache's files, absolute, and the most bytes of its files."""

    folder: str
    limit_bytes: int


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """All decisions that the engine executes. Paths are absolute; sizes are final."""

    model: str  # as asked
    path: str  # folder or GGUF file
    load_format: str  # safetensors, bin, gguf, dummy
    dtype: str  # bfloat16, float16, float32
    kv_dtype: str = "bfloat16"  # of the KV cache: one of these, or float8_e4m3fn
    dummy_seed: int = 0
    dummy_router: str = "uniform"
    dummy_format: str = "bf16"  # of routed experts and linear layers
    ignore_config_keys: tuple[str, ...] = ()
    override_config: dict[str, object] = {}
    context_tokens: int
    page_tokens: int
    num_pages: int
    prefix_cache: bool
    prefix_files: PrefixFiles | None = None  # where the prefix cache keeps pages beyond memory; None: nowhere
    state_copies: int = 0  # copies of recurrent states, from which prompts resume
    max_running: int
    max_batch_tokens: int
    shared_tokens: int = 0  # most tokens of a step in which prompts and decode are together; 0: max_batch_tokens
    deterministic: bool = False  # a token's bits do not depend on the schedule
    prompt_cell_tokens: int | None = None  # deterministic: prompts are computed in cells of this size; None: any size
    streamed_cell_tokens: int = 0  # least tokens of a cell whose experts in RAM are copied to the GPU; 0: no cell's are
    max_itl: GapLimit | None = None  # between decode steps while a prompt is computed; None: they share steps
    over_tokens: int = 0  # most tokens of a prefill step that overtakes another one; 0: none does
    pass_tokens: int = 0  # most prefill tokens that pass through the layers together; 0: as max_batch_tokens
    max_queued: int
    max_queued_tokens: int
    threads: int
    isa: str = ""  # of the native kernels; empty: ops in plain torch
    workers: Workers | None = None  # of the native kernels
    memory: MemoryBudget
    mesh: Mesh = Mesh()
    gpus: tuple[GpuPlan, ...] = ()  # of each rank of the mesh, in order; empty: everything runs on the CPU
    trial: str = "off"  # --plan-trial
    roof: Roof
    decisions: tuple[Decision, ...] = ()

    @property
    def gpu(self) -> GpuPlan | None:
        """The GPU of the only rank; None: everything runs on the CPU. Raises ValueError if there are several ranks."""
        if len(self.gpus) > 1:
            raise ValueError(f"the plan has {len(self.gpus)} ranks, and this code runs one")
        return self.gpus[0] if self.gpus else None

    @property
    def cells(self) -> Cells | None:
        """The cells of prompts; None: a row's bits do not depend on its step, or need not be the same."""
        if self.prompt_cell_tokens is None:
            return None
        return Cells(self.prompt_cell_tokens, self.streamed_cell_tokens)

    @property
    def prompts_may_run_beside(self) -> bool:
        """Whether prompts may be computed on a stream of their own while requests decode (docs/decisions/069). Not in
        cells: their bits must not depend on what else runs."""
        return self.gpu is not None and self.gpu.ring_bytes > 0 and self.cells is None

    @property
    def state_slots(self) -> int:
        """Number of state slots: of running requests, then of copies."""
        return self.max_running + self.state_copies
