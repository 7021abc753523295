"""All options, each declared once. Belongs here: frozen groups of what the user asked. Never: devices,
model names, decisions, mutation (plan/resolve.py turns these into a Plan).

A field `max_running` is the flag `--max-running`, the YAML key `max_running` and a row in docs/options.md.
`None` means "not asked": the plan decides and says why.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from proa.config.field import option


@dataclass(frozen=True)
class ModelOptions:
    """What to load."""

    revision: str | None = option(None, help="branch, tag or commit of a hub repository", metavar="REV")
    tokenizer: str | None = option(None, help="folder with the tokenizer, if not the model's", metavar="PATH")
    chat_template: str | None = option(None, help="file with a Jinja chat template to use instead", metavar="PATH")
    dtype: str = option(
        "auto",
        help="type of weights and activations; auto = the checkpoint's, bfloat16 for GGUF",
        choices=("auto", "bfloat16", "float16", "float32"),
        common=True,
    )
    load_format: str = option(
        "auto",
        help="auto reads the files found; dummy makes random weights of the true shapes",
        choices=("auto", "safetensors", "bin", "gguf", "dummy"),
    )
    dummy_seed: int = option(0, help="seed of dummy weights", low=0)
    dummy_router: str = option(
        "uniform",
        help="routing of dummy weights: uniform, zipf (few hot experts), or drift (others after upper tokens)",
        choices=("uniform", "zipf", "drift"),
    )
    dummy_format: str = option(
        "bf16",
        help="format of experts and linear layers of dummy weights: fp8 in blocks of 128, int4 in groups of 32",
        choices=("bf16", "fp8", "int4", "nvfp4", "mxfp4"),
    )
    ignore_config_key: tuple[str, ...] = option(
        (), help="config key to accept although Proa does not know it (repeatable)", metavar="KEY"
    )
    override_config: tuple[str, ...] = option(
        (), help="config key to replace, as KEY=JSON (repeatable)", metavar="KEY=JSON"
    )


@dataclass(frozen=True)
class CacheOptions:
    """Context and KV cache."""

    context: int | None = option(
        None,
        help="longest prompt plus answer, such as 32k (32768); default: the model's, if memory allows",
        metavar="TOKENS",
        kind="tokens",
        low=1,
        high=1 << 30,
        common=True,
    )
    kv_memory: int | None = option(
        None,
        help="memory for the KV cache; default: what the context for one user and --max-running need",
        metavar="SIZE",
        kind="size",
        low=1,
    )
    state_memory: int | None = option(
        None,
        help="memory for copies of recurrent states, from which prompts that start alike go on; default: 4 for each of "
        "--max-running, at most 1/8 of what weights leave",
        metavar="SIZE",
        kind="size",
        low=1,
    )
    kv_dtype: str = option(
        "auto",
        help="type of the KV cache: auto = that of activations; fp8 (E4M3) takes half the memory of bf16, and rounds K "
        "and V to four significant bits",
        choices=("auto", "bf16", "fp8"),
        common=True,
    )
    page_tokens: int = option(16, help="tokens per KV page", low=1, high=256)
    prefix_cache: bool = option(True, help="reuse what was computed of prompts that start alike")


@dataclass(frozen=True)
class SchedulerOptions:
    """Who runs when."""

    max_running: int = option(4, help="requests decoded together", low=1, high=4096, common=True)
    max_batch_tokens: int | None = option(
        None,
        help="tokens of one step: decodes first, the rest is prefill; default: 512, or, where prompts take turns "
        "beside a GPU, up to 4096, as VRAM allows",
        metavar="TOKENS",
        kind="tokens",
        low=1,
        high=1 << 20,
    )
    prefill_share: float | None = option(
        None,
        help="share of the time that prompts get while others decode, where both take turns: prompts a few layers at a "
        "time; 0: they share steps; default: 0.5, or 0 where a GPU computes all experts",
        metavar="SHARE",
        low=0,
        high=0.95,
    )
    deterministic: bool = option(
        False,
        help="the same request gets the same tokens and log-probabilities, bit for bit, whatever else runs or is "
        "cached, on the same machine with the same plan; somewhat slower (docs/reproducibility.md)",
        common=True,
    )
    max_queued: int = option(256, help="requests that may wait; more are refused with 429", low=0, high=1_000_000)
    max_queued_tokens: int = option(
        4_000_000, help="prompt tokens that may wait; more are refused with 429", kind="tokens", low=0, high=1 << 40
    )


@dataclass(frozen=True)
class MachineOptions:
    """What Proa may use of this machine."""

    ram: int | None = option(
        None,
        help="most RAM to use; default: what is free now, minus the reserve",
        metavar="SIZE",
        kind="size",
        low=1,
        common=True,
    )
    ram_reserve: int | None = option(
        None,
        help="RAM to leave free; default: 1 GiB or 5 % of the total, whichever is less",
        metavar="SIZE",
        kind="size",
        low=0,
    )
    threads: int | None = option(
        None, help="CPU threads; default: the cores this process may use, for decode what is fastest", low=1, high=4096
    )
    cpu_binding: str = option(
        "core",
        help="where a worker thread may run: on a CPU of its own, on all CPUs of its memory node, or anywhere",
        choices=("core", "node", "none"),
    )
    numa_memory: str = option(
        "bind",
        help="weights on several memory nodes: each worker's own beside it, or pages dealt out over all nodes",
        choices=("bind", "interleave"),
    )
    power_saving: bool = option(False, help="workers sleep sooner when idle, and as few decode as lose a tenth at most")


@dataclass(frozen=True)
class GpuOptions:
    """What Proa may use of a GPU."""

    gpu: str = option(
        "auto",
        help="auto, none, a GPU's number, or one simulated in RAM: sim:SIZE or sim:SIZE,pcie=RATE (512MiB, 8GB/s)",
        metavar="GPU",
        kind="word",
        common=True,
    )
    vram: int | None = option(
        None,
        help="most VRAM to use; default: what is free now, minus 1 % of the total or 256 MiB, whichever is more",
        metavar="SIZE",
        kind="size",
        low=1,
        common=True,
    )
    gpu_experts: str = option(
        "auto",
        help="routed experts of each layer that live in VRAM: auto (as many as fit), all, none or a number",
        metavar="N",
        kind="word",
    )
    gpu_resident_layers: str | None = option(
        None, help="layers whose experts all live in VRAM, such as 0-5,9", metavar="LAYERS", kind="word"
    )
    expert_placement: str = option(
        "auto",
        help="which experts live in VRAM: as many of each layer (uniform), the first layers' (front-loading), the most "
        "used of all layers by --expert-counts (frequency), or uniform at first and then the most used (dynamic); "
        "auto = dynamic where RAM keeps copies, else uniform",
        choices=("auto", "dynamic", "uniform", "front-loading", "frequency"),
    )
    expert_counts: str | None = option(
        None, help="file that --save-expert-counts wrote: of each layer the most used experts live in VRAM, at first",
        metavar="FILE",
    )  # fmt: skip
    save_expert_counts: str | None = option(
        None, help="file to write how often each expert was chosen, every minute and at the end", metavar="FILE"
    )
    co_fetch: str = option(
        "auto",
        help="let the GPU read some experts of few tokens in RAM while the CPU computes the others: off, or auto (as "
        "many as end together, where the CPU leaves bandwidth)",
        choices=("auto", "off"),
    )
    read_ahead: str = option(
        "auto",
        help="let CPU workers that wait for the GPU read into their caches what the next layer will probably need, in "
        "steps of up to 4 tokens: off, or auto (where kernels ring the doorbell)",
        choices=("auto", "off"),
    )
    fp8_activations: bool = option(
        False,
        help="lossy: for experts of many tokens, where that is faster, round activations to FP8 (E4M3) on the GPU, so "
        "that its FP8 matrix unit multiplies them with FP8 weights; for checkpoints that were made for it, from "
        "compute capability 8.9 on",
    )
    doorbell: str = option(
        "auto",
        help="how the GPU hands experts to the CPU: by kernels that poll pinned memory, by copies and the driver's "
        "stream memory operations, or by copies and calls of the driver; auto = the first that works here",
        choices=("auto", "kernel", "memops", "callback"),
    )


@dataclass(frozen=True)
class ServerOptions:
    """HTTP."""

    host: str = option("127.0.0.1", help="address to listen on", metavar="ADDR", common=True)
    port: int = option(8000, help="port to listen on; 0 takes a free one", low=0, high=65535, common=True)
    api_key: str | None = option(None, help="demand this bearer token", metavar="KEY", secret=True)
    served_model_name: str | None = option(None, help="name in the API; default: MODEL", metavar="NAME")
    strict: bool = option(False, help="refuse unknown request fields instead of naming them in a header")
    drain_seconds: float = option(30.0, help="on SIGTERM, let running requests finish for this long", low=0, high=86400)
    cors_origin: tuple[str, ...] = option((), help="origin allowed to call from a browser (repeatable)", metavar="URL")


@dataclass(frozen=True)
class EngineOptions:
    """Everything an engine needs; what `LLM(model, ...)` takes as keywords."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    machine: MachineOptions = field(default_factory=MachineOptions)
    gpus: GpuOptions = field(default_factory=GpuOptions)


@dataclass(frozen=True)
class ServeOptions:
    """`proa serve`: an engine and a server."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
