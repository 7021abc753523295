"""All options of the engine and the server, each declared once. plan/resolve.py turns them into a Plan.

A field `max_running` is the flag `--max-running`, the YAML key `max_running` and a row in docs/options.md.
`None` means not given: the plan chooses a value and reports the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from proa.config.field import option

MODEL_HELP = "a Hugging Face folder, a GGUF file, a hub id, a name that `proa models` lists, demo or demo-dense"
DUMMY_FORMATS = ("bf16", "fp8", "int4", "nvfp4", "mxfp4")  # all but bf16: DUMMY in native/formats.py


@dataclass(frozen=True)
class ModelOptions:
    """Model and weights."""

    revision: str | None = option(None, help="branch, tag or commit of a hub repository", metavar="REV")
    tokenizer: str | None = option(None, help="folder of the tokenizer; default: the model's folder", metavar="PATH")
    chat_template: str | None = option(
        None, help="file with a Jinja chat template; default: the model's own template", metavar="PATH"
    )
    tool_call_parser: str = option(
        "auto",
        help="format of tool calls, by its name in vLLM or SGLang (hermes, qwen3_coder, glm45, kimi_k2...; docs/api.md "
        "lists them); auto: by the chat template; none: calls stay text",
        metavar="NAME",
    )
    reasoning_parser: str = option(
        "auto", help="format of reasoning (qwen3, deepseek_r1...; docs/api.md); auto, none: as above", metavar="NAME"
    )
    dtype: str = option(
        "auto",
        help="type of weights and activations; auto: the checkpoint's, bfloat16 for GGUF",
        choices=("auto", "bfloat16", "float16", "float32"),
        common=True,
    )
    load_format: str = option(
        "auto",
        help="weight files to read; auto: those found; dummy: random weights of the model's shapes, without files",
        choices=("auto", "safetensors", "bin", "gguf", "dummy"),
    )
    dummy_seed: int = option(0, help="seed of dummy weights", low=0)
    dummy_router: str = option(
        "uniform",
        help="routing with dummy weights: uniform; zipf: a few hot experts; drift: tokens of the vocabulary's upper "
        "half select other hot experts",
        choices=("uniform", "zipf", "drift"),
    )
    dummy_format: str = option(
        "bf16",
        help="dummy weights' format of experts and linear layers; fp8: blocks of 128 x 128, int4: groups of 32",
        choices=DUMMY_FORMATS,
    )
    ignore_config_key: tuple[str, ...] = option(
        (), help="ignore this key of config.json, which Proa does not support (repeatable)", metavar="KEY"
    )
    override_config: tuple[str, ...] = option(
        (), help="replace a value of config.json (repeatable)", metavar="KEY=JSON"
    )


@dataclass(frozen=True)
class CacheOptions:
    """Context and KV cache."""

    context: int | None = option(
        None,
        help="context length: most tokens of prompt plus answer, such as 32k (32768); default: the model's, if memory "
        "allows",
        metavar="TOKENS",
        kind="tokens",
        low=2,
        high=1 << 30,
        common=True,
    )
    kv_memory: int | None = option(
        None,
        help="memory for the KV cache; default: one full context, plus some for the other --max-running requests",
        metavar="SIZE",
        kind="size",
        low=1,
    )
    state_memory: int | None = option(
        None,
        help="memory for cached copies of recurrent states, with which prompts reuse a common prefix; default: 4 "
        "copies per request of --max-running, at most 1/8 of the memory that weights leave",
        metavar="SIZE",
        kind="size",
        low=1,
    )
    kv_dtype: str = option(
        "auto",
        help="type of the KV cache; auto: that of activations; fp8 (E4M3): half the memory of bf16, rounds K and V to "
        "four significant bits",
        choices=("auto", "bf16", "fp8"),
        common=True,
    )
    page_tokens: int = option(16, help="tokens per page of the KV cache", low=1, high=256)
    prefix_cache: bool = option(True, help="reuse the KV cache of prompts with a common prefix")
    prefix_cache_ram: int | None = option(
        None,
        help="RAM for KV pages and copies of recurrent states that VRAM has no room for, so that prompts whose prefix "
        "they hold are not computed again; 0: none; default: with a GPU, what is left of RAM, at most 8 times the KV "
        "cache in VRAM and a quarter of the free RAM",
        metavar="SIZE",
        kind="size",
        low=0,
    )
    prefix_cache_dir: str | None = option(
        None,
        help="folder to keep the KV cache of prompts and answers in, with copies of recurrent states, also after a "
        "restart; needs --prefix-cache-disk; "
        "its files contain what users wrote, and only their owner may read them; engines may share it",
        metavar="PATH",
    )
    prefix_cache_disk: int | None = option(
        None,
        help="most bytes of files in --prefix-cache-dir; the least recently used are deleted first",
        metavar="SIZE",
        kind="size",
        low=1,
    )


@dataclass(frozen=True)
class SchedulerOptions:
    """Scheduling of requests."""

    max_running: int = option(4, help="most requests that run at once", low=1, high=4096, common=True)
    max_batch_tokens: int | None = option(
        None,
        help="most tokens of one step, decode and prefill together; default: 512; up to 8192 on a GPU where prompts "
        "alternate with decode (--max-itl), as VRAM allows",
        metavar="TOKENS",
        kind="tokens",
        low=1,
        high=1 << 20,
    )
    max_itl: str = option(
        "auto",
        help="longest gap between two tokens of a request while prompts are computed, a few layers at a time between "
        "decode steps: a factor of the undisturbed gap (2.5x) or a time (80ms, 0.5s); none: ordinary chunked prefill, "
        "in the same steps as decode; auto: 2.5x, or none if a GPU computes all experts",
        metavar="GAP",
        kind="word",
    )
    deterministic: bool = option(
        False,
        help="bit-for-bit equal tokens and logprobs for equal requests, regardless of batching and caching, on the "
        "same machine with the same plan; somewhat slower (docs/reproducibility.md)",
        common=True,
    )
    max_queued: int = option(
        256, help="most waiting requests; further ones are refused with 429", low=0, high=1_000_000
    )
    max_queued_tokens: int = option(
        4_000_000,
        help="most prompt tokens of waiting requests; further requests are refused with 429",
        kind="tokens",
        low=0,
        high=1 << 40,
    )


@dataclass(frozen=True)
class MachineOptions:
    """RAM and CPUs."""

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
        None,
        help="CPU threads; default: one per usable core, of which decode uses as many as measure fastest; with a GPU "
        "one per usable CPU, less one for each memory node",
        low=1,
        high=4096,
    )
    cpu_binding: str = option(
        "core",
        help="CPU affinity of worker threads; core: one CPU each; node: all CPUs of its NUMA node; none: any CPU",
        choices=("core", "node", "none"),
    )
    numa_memory: str = option(
        "bind",
        help="placement of weights on several NUMA nodes; bind: each worker's slice on its own node; interleave: pages "
        "round-robin over all nodes",
        choices=("bind", "interleave"),
    )
    power_saving: bool = option(
        False, help="idle workers sleep sooner, and decode uses the fewest threads within 10 % of the fastest"
    )


@dataclass(frozen=True)
class GpuOptions:
    """GPU and placement of experts."""

    gpu: str = option(
        "auto",
        help="auto, none, a GPU's CUDA index, or a GPU simulated on the CPU: sim:SIZE or sim:SIZE,pcie=RATE, such as "
        "sim:512MiB,pcie=8GB/s",
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
        help="routed experts per layer that are resident in VRAM: auto (as many as fit), all, none or a number",
        metavar="N",
        kind="word",
    )
    gpu_resident_layers: str | None = option(
        None, help="layers whose experts are all resident in VRAM, such as 0-5,9", metavar="LAYERS", kind="word"
    )
    expert_placement: str = option(
        "auto",
        help="which experts are resident in VRAM; uniform: equally many per layer; front-loading: all of the first "
        "layers; frequency: the most used of all layers by --expert-counts; dynamic: uniform at start, then the most "
        "used are moved in; auto: dynamic if RAM keeps copies of the experts, else uniform",
        choices=("auto", "dynamic", "uniform", "front-loading", "frequency"),
    )
    vram_moves: str = option(
        "off",
        help="on: while sequences are short, idle pages of the KV cache hold additional experts; needs experts that "
        "move, and copies of all in RAM (docs/gpu.md)",
        choices=("off", "on"),
    )
    expert_counts: str | None = option(
        None, help="file written by --save-expert-counts: at start, each layer's most used experts are put into VRAM",
        metavar="FILE",
    )  # fmt: skip
    save_expert_counts: str | None = option(
        None, help="write how often each expert was selected to this file, every minute and at exit", metavar="FILE"
    )
    co_fetch: str = option(
        "auto",
        help="let the GPU read some experts with few tokens from RAM over PCIe while the CPU computes the others; "
        "auto: as many as finish at the same time, if the CPU leaves RAM bandwidth",
        choices=("auto", "off"),
    )
    prefill: str = option(
        "auto",
        help="what computes prompts with the experts in RAM; cpu: the CPU; stream: the GPU, to which they are "
        "copied; auto: both, divided so that they end at the same time, with --deterministic one of them, by length",
        choices=("auto", "cpu", "stream"),
    )
    read_ahead: str = option(
        "auto",
        help="let CPU workers that wait for the GPU prefetch the next layer's predicted experts into their caches, in "
        "steps of up to 4 tokens; auto: on with --doorbell kernel",
        choices=("auto", "off"),
    )
    fp8_activations: bool = option(
        False,
        help="lossy: on the GPU, round activations of experts with many tokens to FP8 (E4M3), to use its FP8 "
        "tensor cores with FP8 weights where that is faster; for checkpoints made for it, compute capability 8.9 "
        "or higher",
    )
    deferred_experts: int = option(
        0,
        help="lossy: in decode, of a token's N experts of least weight add those that the CPU computes one MoE layer "
        "later, so that it computes them while the GPU goes on (--kt-max-deferred-experts-per-token of KTransformers); "
        "proa check measures the loss",
        metavar="N",
        low=0,
        high=1024,
    )
    doorbell: str = option(
        "auto",
        help="how the GPU signals the CPU to compute experts; kernel: GPU kernels poll pinned memory; memops: copies "
        "and the driver's stream memory operations; callback: copies and host callbacks; auto: the first that works",
        choices=("auto", "kernel", "memops", "callback"),
    )
    plan_trial: str = option(
        "auto",
        help="compare co-fetch and read ahead, on and off, on the loaded model, for at most 10 s; auto: at the first "
        "start of a model on a machine, whose result later starts use; again: at this start too; off: never, both are "
        "on where possible",
        choices=("auto", "off", "again"),
    )


@dataclass(frozen=True)
class ServerOptions:
    """HTTP server."""

    host: str = option("127.0.0.1", help="address to listen on", metavar="ADDR", common=True)
    port: int = option(8000, help="port to listen on; 0: any free port", low=0, high=65535, common=True)
    api_key: tuple[str, ...] = option(
        (), help="require this API key as bearer token (repeatable: any of them)", metavar="KEY", secret=True
    )
    api_key_file: str | None = option(None, help="file of API keys, one per line; # begins a comment", metavar="FILE")
    requests_per_minute: int | None = option(
        None, help="most POST requests per minute and API key; default: no limit", low=1
    )
    ssl_certfile: str | None = option(None, help="serve HTTPS with this certificate (PEM)", metavar="FILE")
    ssl_keyfile: str | None = option(
        None, help="private key of --ssl-certfile, if it is in a separate file", metavar="FILE"
    )
    served_model_name: str | None = option(None, help="model name in the API; default: MODEL", metavar="NAME")
    accept_any_model: bool | None = option(
        None, help="answer requests for other model names too; default: on if --host is a loopback address"
    )
    strict: bool = option(False, help="refuse unknown request fields instead of listing them in a header")
    drain_seconds: float = option(
        30.0, help="on SIGTERM, seconds that running requests have to finish", low=0, high=86400
    )
    stored_responses: int = option(
        256, help="latest responses of /v1/responses kept in memory, for previous_response_id; 0: none", low=0
    )
    restart: bool = option(True, help="restart the engine if it dies, at most 3 times in 10 minutes")
    cors_origin: tuple[str, ...] = option((), help="origin allowed by CORS (repeatable)", metavar="URL")

    @property
    def scheme(self) -> str:
        return "http" if self.ssl_certfile is None else "https"

    @property
    def is_loopback(self) -> bool:
        return self.host in ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class EngineOptions:
    """All options of an engine; the keywords of `LLM(model, ...)`."""

    model: ModelOptions = field(default_factory=ModelOptions)
    cache: CacheOptions = field(default_factory=CacheOptions)
    scheduler: SchedulerOptions = field(default_factory=SchedulerOptions)
    machine: MachineOptions = field(default_factory=MachineOptions)
    gpus: GpuOptions = field(default_factory=GpuOptions)


@dataclass(frozen=True)
class ServeOptions:
    """All options of `proa serve`: the engine's and the server's."""

    engine: EngineOptions = field(default_factory=EngineOptions)
    server: ServerOptions = field(default_factory=ServerOptions)
