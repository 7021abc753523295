"""The frozen Plan: every decision, made once; JSON in and out, so that a bug report is a file. Never: decisions."""

from __future__ import annotations

import msgspec

from proa.machine.topology import Team
from proa.types import Decision


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of RAM: free now, reserved, and used by each part.

    process + weights + loading + kv + states + workspace + simulated VRAM <= usable: the formulas are in
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

    @property
    def usable_bytes(self) -> int:
        return self.free_bytes - self.reserve_bytes


class VramBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of VRAM: free now, reserved, and used by each part.

    context + dense + kv + states + workspace + graphs + experts + spare <= usable: the formulas are in plan/vram.py.
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

    @property
    def usable_bytes(self) -> int:
        return self.free_bytes - self.reserve_bytes

    @property
    def used_bytes(self) -> int:
        parts = self.context_bytes + self.dense_bytes + self.kv_bytes + self.workspace_bytes + self.graphs_bytes
        return parts + self.experts_bytes + self.spare_bytes + self.states_bytes


class GpuPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The GPU's part: everything but the routed experts that are not resident.

    `blocks`, `experts`, `expert_bytes` and `resident` have one entry for each MoE layer, in the model's order.
    """

    index: int | None  # cuda:index; None: simulated
    name: str
    uuid: str = ""
    capability: tuple[int, int] = (0, 0)
    numa_node: int | None = None
    pcie_bytes_per_s: float | None = None  # simulated GPU: copies are throttled to this rate; None: they are not
    vram: VramBudget
    placement: str  # uniform, front-loading, frequency; dynamic: uniform at first
    blocks: tuple[int, ...] = ()  # block number of each MoE layer
    experts: tuple[int, ...] = ()  # routed experts per layer
    expert_bytes: tuple[int, ...] = ()  # packed bytes of one expert
    resident: tuple[tuple[int, ...], ...] = ()  # ascending ids of experts in VRAM
    spare: int = 0  # spare slots for each size of experts: so many may move at once
    co_fetch: bool = False  # the GPU may read experts in RAM, beside the CPU
    doorbell: str = "auto"  # --doorbell as asked; the start takes a way that works
    read_ahead: bool = False  # idle workers prefetch the next layer's probable experts, if kernels ring
    fp8_activations: bool = False  # rows of experts of many tokens are rounded to E4M3, like weights; lossy
    inclusive: bool = False  # RAM keeps a copy of resident experts too; else it holds only the others
    save_counts: str | None = None  # file for expert counts; None: not asked for
    trace: str | None = None  # file for the counts of each look (hybrid/trace.py); for benchmarks

    @property
    def simulated(self) -> bool:
        return self.index is None

    @property
    def device(self) -> str:
        return "sim" if self.index is None else f"cuda:{self.index}"

    @property
    def gpu_only(self) -> bool:
        """True if all routed experts are resident: the CPU computes none."""
        return all(len(ids) == count for ids, count in zip(self.resident, self.experts, strict=True))


def step_seconds(dense_s: float, resident_s: float, ram_s: float, *, read_ahead: bool) -> float:
    """Lower bound of a decode step: the GPU reads dense weights, then resident experts while the CPU reads its own;
    with read ahead the CPU reads during the whole step."""
    return max(dense_s + resident_s, ram_s) if read_ahead else dense_s + max(resident_s, ram_s)


class VramRoof(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes that decode of one request reads from VRAM per token, and the bandwidth."""

    dense_bytes_per_token: int  # dense weights and KV, read before the experts
    expert_bytes_per_token: int  # resident experts, for uniform routing, read while the CPU reads its own
    bandwidth_bytes_per_s: float
    source: str  # source of the bandwidth
    read_ahead: bool = False  # the CPU reads its experts also while dense weights are read


class Roof(msgspec.Struct, frozen=True, kw_only=True):
    """The physical limit of decode for one request: bandwidth over the bytes that a token must read.

    With a GPU: 1 / (dense / VRAM + max(resident experts / VRAM, the CPU's experts / RAM)). With read ahead RAM is read
    all the time: 1 / max((dense + resident experts) / VRAM, the CPU's experts / RAM).
    """

    bytes_per_token: int  # read from RAM
    bandwidth_bytes_per_s: float  # of RAM
    vram: VramRoof | None = None

    @property
    def tokens_per_s(self) -> float:
        if self.vram is None:
            return self.bandwidth_bytes_per_s / self.bytes_per_token
        ram_s = self.bytes_per_token / self.bandwidth_bytes_per_s
        rate = self.vram.bandwidth_bytes_per_s
        dense_s, experts_s = self.vram.dense_bytes_per_token / rate, self.vram.expert_bytes_per_token / rate
        return 1 / step_seconds(dense_s, experts_s, ram_s, read_ahead=self.vram.read_ahead)

    @property
    def bound_by(self) -> str:
        """The memory that takes most of a token's time: "RAM" or "VRAM"."""
        ram_s = self.bytes_per_token / self.bandwidth_bytes_per_s
        return "RAM" if self.vram is None or 2 * ram_s * self.tokens_per_s > 1 else "VRAM"


class Workers(msgspec.Struct, frozen=True, kw_only=True):
    """The threads of the native kernels, and the placement of threads and weights."""

    teams: tuple[Team, ...]  # the CPUs of each memory node's workers, the calling thread's first
    trials: tuple[tuple[int, ...], ...]  # workers per team; the first is used, the others are tried for decode
    binding: str  # core, node, none
    homes: tuple[tuple[int, ...], ...] = ()  # for "node": all usable CPUs of each team's node
    interleave: tuple[int, ...] = ()  # nodes that weights are interleaved over; else each team's are on its node
    spin_us: int  # how long an idle worker polls for work before it sleeps
    saving: bool = False  # --power-saving: fewer workers, if decode slows down little


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
    state_copies: int = 0  # copies of recurrent states, from which prompts resume
    max_running: int
    max_batch_tokens: int
    deterministic: bool = False  # a token's bits do not depend on the schedule
    prompt_cell_tokens: int | None = None  # deterministic: prompts are computed in cells of this size; None: any size
    prefill_share: float = 0.0  # fraction of time for prefill while requests decode; 0: they share steps
    max_queued: int
    max_queued_tokens: int
    threads: int
    isa: str = ""  # of the native kernels; empty: ops in plain torch
    workers: Workers | None = None  # of the native kernels
    memory: MemoryBudget
    gpu: GpuPlan | None = None  # None: everything runs on the CPU
    roof: Roof
    decisions: tuple[Decision, ...] = ()

    @property
    def state_slots(self) -> int:
        """Number of state slots: of running requests, then of copies."""
        return self.max_running + self.state_copies
