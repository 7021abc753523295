"""The frozen Plan: every decision, made once; JSON in and out, so that a bug report is a file. Never: decisions."""

from __future__ import annotations

import msgspec

from proa.machine.topology import Team
from proa.types import Decision


class MemoryBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of RAM: what is free now, what is left alone, and what goes where.

    process + weights + loading + kv + states + workspace + simulated VRAM <= usable: the formulas stand in
    plan/budget.py, with a GPU in plan/vram.py. Then weights are routed experts, and KV and states are in VRAM.
    """

    free_bytes: int
    reserve_bytes: int
    weights_bytes: int
    kv_bytes: int
    workspace_bytes: int
    loading_bytes: int  # transient: what the loader holds beside the weights
    process_bytes: int = 0  # the two processes themselves: Python, torch, tokenizer
    states_bytes: int = 0  # recurrent states of all that run at once, and copies
    simulated_vram_bytes: int = 0  # what stands in for the memory of a simulated GPU

    @property
    def usable_bytes(self) -> int:
        return self.free_bytes - self.reserve_bytes


class VramBudget(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes of VRAM: what is free now, what is left alone, and what goes where.

    context + dense + kv + states + workspace + graphs + experts + spare <= usable: the formulas stand in plan/vram.py.
    """

    total_bytes: int
    free_bytes: int
    reserve_bytes: int
    context_bytes: int  # CUDA's own: context, libraries, modules of kernels
    dense_bytes: int  # attention, norms, routers, shared experts, dense FFNs, embedding, head
    dense_read_bytes: int  # of these, what one decoded token reads
    kv_bytes: int
    workspace_bytes: int
    graphs_bytes: int
    experts_bytes: int  # slots of resident experts, packed as in RAM
    spare_bytes: int = 0  # slots for experts that change places
    states_bytes: int = 0  # recurrent states of all that run at once, and copies

    @property
    def usable_bytes(self) -> int:
        return self.free_bytes - self.reserve_bytes

    @property
    def used_bytes(self) -> int:
        parts = self.context_bytes + self.dense_bytes + self.kv_bytes + self.workspace_bytes + self.graphs_bytes
        return parts + self.experts_bytes + self.spare_bytes + self.states_bytes


class GpuPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What runs on the GPU: everything but the routed experts that are not resident.

    `blocks`, `experts`, `expert_bytes` and `resident` have one entry for each MoE layer, in the model's order.
    """

    index: int | None  # cuda:index; None: simulated
    name: str
    uuid: str = ""
    capability: tuple[int, int] = (0, 0)
    numa_node: int | None = None
    pcie_bytes_per_s: float | None = None  # of a simulated GPU: copies are throttled to this; None: they are not
    vram: VramBudget
    placement: str  # uniform, front-loading, frequency; dynamic: uniform at first
    blocks: tuple[int, ...] = ()  # which block of the model each MoE layer is
    experts: tuple[int, ...] = ()  # how many routed experts it has
    expert_bytes: tuple[int, ...] = ()  # packed bytes of one of them
    resident: tuple[tuple[int, ...], ...] = ()  # ascending ids of those in VRAM
    spare: int = 0  # experts of each size that may change places at once, each with a slot beyond the residents'
    co_fetch: bool = False  # the GPU may read experts in RAM, beside the CPU
    doorbell: str = "auto"  # how the GPU hands experts to the CPU, as asked: the start takes what works
    read_ahead: bool = False  # idle workers read what the next layer will probably need, if kernels ring
    fp8_activations: bool = False  # rows of experts of many tokens are rounded to E4M3, as weights; lossy
    inclusive: bool = False  # RAM keeps a copy of resident experts too; else it holds only the others
    save_counts: str | None = None  # file for how often each expert was chosen; None: nobody asked
    trace: str | None = None  # file for what steps choose, look by look; for benchmarks

    @property
    def simulated(self) -> bool:
        return self.index is None

    @property
    def device(self) -> str:
        return "sim" if self.index is None else f"cuda:{self.index}"

    @property
    def gpu_only(self) -> bool:
        """No routed expert is left to the CPU."""
        return all(len(ids) == count for ids, count in zip(self.resident, self.experts, strict=True))


def step_seconds(dense_s: float, resident_s: float, ram_s: float, *, read_ahead: bool) -> float:
    """The least that a decode step can take: the GPU reads dense weights, then resident experts while the CPU reads its
    own; with read ahead the CPU does so all the time."""
    return max(dense_s + resident_s, ram_s) if read_ahead else dense_s + max(resident_s, ram_s)


class VramRoof(msgspec.Struct, frozen=True, kw_only=True):
    """What decode of one request reads from VRAM per token, and how fast that can be."""

    dense_bytes_per_token: int  # dense weights and KV: nothing runs beside these
    expert_bytes_per_token: int  # resident experts, if routing were even: the CPU runs its own meanwhile
    bandwidth_bytes_per_s: float
    source: str  # where the bandwidth is from
    read_ahead: bool = False  # the CPU reads its experts also while dense weights are read


class Roof(msgspec.Struct, frozen=True, kw_only=True):
    """The physical limit of decode for one request: bytes that must be read per token over bandwidth.

    With a GPU: 1 / (dense / VRAM + max(resident experts / VRAM, the CPU's experts / RAM)). With read ahead RAM need
    never wait: 1 / max((dense + resident experts) / VRAM, the CPU's experts / RAM).
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
        """What takes most of a token's time."""
        ram_s = self.bytes_per_token / self.bandwidth_bytes_per_s
        return "RAM" if self.vram is None or 2 * ram_s * self.tokens_per_s > 1 else "VRAM"


class Workers(msgspec.Struct, frozen=True, kw_only=True):
    """The threads of the native kernels, and where they and their weights lie."""

    teams: tuple[Team, ...]  # the CPUs of each memory node's workers, the calling thread's first
    trials: tuple[tuple[int, ...], ...]  # CPUs of each team that work; those after the first are tried for decode
    binding: str  # core, node, none
    homes: tuple[tuple[int, ...], ...] = ()  # for "node": all usable CPUs of each team's node
    interleave: tuple[int, ...] = ()  # nodes that weights are dealt out over; else they lie on their team's
    spin_us: int  # how long an idle worker waits for work before it sleeps
    saving: bool = False  # fewer workers, if they lose little


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine executes. Paths are absolute; sizes are final."""

    model: str  # as asked
    path: str  # folder or GGUF file
    load_format: str  # safetensors, bin, gguf, dummy
    dtype: str  # bfloat16, float16, float32
    kv_dtype: str = "bfloat16"  # of the KV cache: the same, or float8_e4m3fn
    dummy_seed: int = 0
    dummy_router: str = "uniform"
    dummy_format: str = "bf16"  # of routed experts and linear layers
    ignore_config_keys: tuple[str, ...] = ()
    override_config: dict[str, object] = {}
    context_tokens: int
    page_tokens: int
    num_pages: int
    prefix_cache: bool
    state_copies: int = 0  # of recurrent states, for prompts to go on from
    max_running: int
    max_batch_tokens: int
    deterministic: bool = False  # a token's bits do not depend on the schedule
    prompt_cell_tokens: int | None = None  # then: prompts are computed in steps of so many tokens; None: in any
    prefill_share: float = 0.0  # of the time, while others decode; 0: prompts share steps with these
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
        """Those of requests that run, then those of copies."""
        return self.max_running + self.state_copies
