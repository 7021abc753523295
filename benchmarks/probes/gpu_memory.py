"""VRAM by part, planned and taken: which part of a plan is too small, or too large. Needs a GPU.

Loads an engine in this process as `proa serve` would, plays requests that need every graph, the longest step, prompts'
log-probabilities and sampling, and then says where VRAM is: what torch's allocator gave, by the line of Proa that asked
for it, and the rest, which is the driver's: the context, modules of kernels, graphs. With --prompts, prompts of these
lengths are played too, and the lines are those of the moment when most was in use.

Run: PYTHONPATH=src python benchmarks/probes/gpu_memory.py [MODEL] [--shape qwen3-30b-a3b --layers 8 --format bf16]
     [--experts all] [--context N] [--max-running N] [--prompts 2048,16384] [--json]
MODEL: a folder, alias or GGUF file; without it random weights of --shape. Exit code 1: more was taken than planned.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from proa.bench.hybrid_shapes import MODEL_SHAPES
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, ModelOptions, SchedulerOptions
from proa.engine.engine import Engine
from proa.engine.building.load import load_engine
from proa.ops.sizes import buckets
from proa.plan.plan import Plan, VramBudget
from proa.plan.prepare import prepare
from proa.types import EngineRequest, Sampling

MIB = 1 << 20
LINES = 25  # of Proa's code that asked for most
PARTS = {
    "hybrid/slots.py": "experts", "hybrid/moves.py": "experts", "hybrid/layer_memory.py": "dense",
    "cache/pool.py": "KV and states",
}  # fmt: skip
LIBRARIES = ("ops/cuda",)  # what stays of a product after loading is a library's workspace
CONTEXT_TOKENS = 40960  # of a shape, which has no longest context of its own

Segments = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Block:
    """Memory in use: the line that asked for it ("engine/executors/graphs.py:78"), bytes asked for, bytes taken."""

    line: str
    asked_bytes: int
    bytes: int
    in_graphs: bool  # in a pool of graphs


@dataclass
class Driver:
    """What is taken beside torch's allocator, since `free_bytes` were free."""

    free_bytes: int
    captures: int = 0
    captured_bytes: int = 0

    def bytes(self) -> int:
        torch.cuda.synchronize()
        return self.free_bytes - torch.cuda.mem_get_info()[0] - torch.cuda.memory_reserved()


@dataclass
class Found:
    """Bytes at the milestones: with a context alone, weights loaded, ready, all played."""

    total: int = 0
    driver: dict[str, int] = field(default_factory=dict)
    captures: int = 0
    captured: int = 0
    loaded: set[str] = field(default_factory=set)  # lines that had memory when weights were loaded
    blocks: list[Block] = field(default_factory=list)
    peak: list[Block] = field(default_factory=list)  # in use when most was
    retries: int = 0  # times that torch gave cached memory back to allocate more
    reserved: int = 0
    reserved_by_graphs: int = 0


def blocks_of(segments: Segments) -> list[Block]:
    """The blocks in torch's snapshot that are in use."""
    return [
        Block(line_of(block.get("frames", ())), block["requested_size"], block["size"], in_graphs(segment))
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    ]


def blocks_at_peak(trace: Sequence[Mapping[str, Any]]) -> list[Block]:
    """The blocks of a history that were in use when most bytes were: those that wait for another stream too."""
    total, most, at, sizes = 0, 0, 0, dict[int, int]()
    for i, event in enumerate(trace):
        if event["action"] == "alloc":
            sizes[event["addr"]] = event["size"]
            total += event["size"]
        elif event["action"] == "free_completed":
            total -= sizes.pop(event["addr"], 0)
        if total > most:
            most, at = total, i
    live = dict[int, Block]()
    for event in trace[: at + 1]:
        if event["action"] == "alloc":
            size = event["size"]
            live[event["addr"]] = Block(line_of(event.get("frames", ())), size, size, in_graphs=False)
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    return list(live.values())


def in_graphs(segment: Mapping[str, Any]) -> bool:
    return tuple(segment.get("segment_pool_id", (0, 0))) != (0, 0)


def line_of(frames: Iterable[Mapping[str, Any]]) -> str:
    """The innermost line of Proa, "" where there is none."""
    for frame in frames:
        _, found, path = str(frame["filename"]).rpartition("/proa/")
        if found:
            return f"{path}:{frame['line']}"
    return ""


def part_of(block: Block, loaded: set[str]) -> str:
    """loaded: lines that had memory when weights were loaded; what is theirs and no expert's is a dense weight."""
    path = block.line.rpartition(":")[0]
    if path in PARTS:
        return PARTS[path]
    if block.line in loaded:
        return "dense"
    return "CUDA" if not block.line or path.startswith(LIBRARIES) else "workspace"


def table(vram: VramBudget, found: Found) -> dict[str, tuple[int, int]]:
    """Part -> bytes planned and taken; `workspace` has all that torch reserved beside the other parts."""
    taken: Counter[str] = Counter()
    for block in found.blocks:
        taken[part_of(block, found.loaded)] += block.bytes
    workspace = found.reserved - sum(size for part, size in taken.items() if part != "workspace")
    driver = found.driver["played"] - found.captured
    return {
        "CUDA": (vram.context_bytes, driver + taken["CUDA"]),
        "graphs": (vram.graphs_bytes, found.captured),
        "dense": (vram.dense_bytes, taken["dense"]),
        "experts": (vram.experts_bytes + vram.spare_bytes, taken["experts"]),
        "KV and states": (vram.kv_bytes + vram.states_bytes, taken["KV and states"]),
        "workspace": (vram.workspace_bytes, workspace),
        "total": (vram.used_bytes, found.total),
    }


def details(found: Found) -> list[str]:
    """Explain where the parts' bytes come from."""
    used = sum(block.bytes for block in found.blocks)
    graphs_used = sum(block.bytes for block in found.blocks if block.in_graphs)
    rounded = used - sum(block.asked_bytes for block in found.blocks)
    at = found.driver
    lines = [
        f"driver: context {_mib(at['context'])}, more with weights loaded {_mib(at['loaded'] - at['context'])}, ready "
        f"{_mib(at['ready'] - at['loaded'])}, all played {_mib(at['played'] - at['ready'])}; of this "
        f"{found.captures} captured graphs {_mib(found.captured)}",
        f"torch: reserved {_mib(found.reserved)}, in use {_mib(used)} of which rounding {_mib(rounded)}; pools of "
        f"graphs reserved {_mib(found.reserved_by_graphs)}, in use {_mib(graphs_used)}",
    ]
    if found.peak:
        most = sum(block.bytes for block in found.peak)
        lines.append(f"at most in use {_mib(most)}; cached memory given back to allocate more: {found.retries} times")
    by_line: Counter[str] = Counter()
    for block in found.peak or found.blocks:
        by_line[f"{block.line or 'not Proa'} ({part_of(block, found.loaded)})"] += block.bytes
    return [*lines, *(f"  {_mib(size):>14}  {line}" for line, size in by_line.most_common(LINES))]


def _mib(nbytes: int) -> str:
    return f"{nbytes / MIB:.1f} MiB"


def planned(args: argparse.Namespace, folder: Path) -> Plan:
    """folder: for the config of a shape."""
    shape = MODEL_SHAPES[args.shape].cut(args.layers)
    (folder / "config.json").write_text(json.dumps(shape.config()))
    options = EngineOptions(
        model=ModelOptions() if args.model else
        ModelOptions(dtype="bfloat16", load_format="dummy", dummy_format=args.format),
        cache=CacheOptions(context=args.context or (None if args.model else CONTEXT_TOKENS)),
        scheduler=SchedulerOptions(max_running=args.max_running),
        gpus=GpuOptions(gpu="0", gpu_experts=args.experts),
    )  # fmt: skip
    return prepare(args.model or str(folder), options).plan


def play(engine: Engine, plan: Plan, prompts: Sequence[int]) -> None:
    """All graphs, the longest step, prompts' log-probabilities, sampling with log-probabilities, `prompts`."""
    vocab, context = engine.vocab, plan.context_tokens
    number = 0

    def ask(prompt_tokens: int, output_tokens: int, **asked: Any) -> None:
        nonlocal number
        number += 1
        sampling = Sampling(max_tokens=output_tokens, **{"temperature": 0.0, **asked})
        tokens = [(7 * number + 11 * i) % (vocab - 10) + 5 for i in range(prompt_tokens)]
        engine.submit(EngineRequest(id=f"r{number}", tokens=tokens, sampling=sampling))

    def until_done() -> None:
        while engine.has_work:
            engine.step()

    for count in buckets(plan.max_running):
        for _ in range(count):
            ask(3, 6)
        until_done()
    for tokens in sorted({2, 17, 100, 129, plan.max_batch_tokens, 2 * plan.max_batch_tokens}):
        if tokens + 8 < context:
            ask(tokens, 4)
            until_done()
    ask(min(200, context // 2), 4, prompt_logprobs=5)
    until_done()
    for i in range(plan.max_running):
        ask(5, 6, temperature=1.0, top_p=0.9, logprobs=5, repetition_penalty=1.1, seed=i)
    until_done()
    for tokens in prompts:
        ask(tokens, 4)
        until_done()


def measure(plan: Plan, prompts: Sequence[int]) -> Found:
    gpu = plan.gpu
    if gpu is None:
        raise SystemExit("The plan uses no GPU.")
    found, driver = Found(), Driver(gpu.vram.free_bytes)
    torch.empty(1, device="cuda")
    found.driver["context"] = driver.bytes()
    torch.cuda.memory._record_memory_history("all" if prompts else "state", stacks="python")
    _watch_captures(driver)
    _watch_loading(driver, found)
    engine, ready = load_engine(plan, lambda loading: None)
    found.driver["ready"] = driver.bytes()
    play(engine, plan, prompts)
    found.driver["played"] = driver.bytes()
    found.total = gpu.vram.free_bytes - torch.cuda.mem_get_info()[0]
    snapshot = torch.cuda.memory._snapshot()
    segments = snapshot["segments"]
    found.blocks, found.peak = blocks_of(segments), blocks_at_peak(snapshot["device_traces"][0]) if prompts else []
    found.retries = torch.cuda.memory_stats()["num_alloc_retries"]
    found.reserved = sum(segment["total_size"] for segment in segments)
    found.reserved_by_graphs = sum(segment["total_size"] for segment in segments if in_graphs(segment))
    found.captures, found.captured = driver.captures, driver.captured_bytes
    for row in ready.decisions:
        if row.name in ("GPU kernels", "co-fetch", "pinned RAM"):
            print(f"{row.name}: {row.got}; {row.why}", file=sys.stderr)
    return found


def _watch_captures(driver: Driver) -> None:
    captured = torch.cuda.graph

    class Watched(captured):  # type: ignore[misc, valid-type]
        """What the driver takes from the beginning of a capture until its graph can be launched."""

        def __enter__(self) -> None:
            self._before = driver.bytes()
            super().__enter__()

        def __exit__(self, *error: Any) -> None:
            super().__exit__(*error)
            driver.captures += 1
            driver.captured_bytes += max(0, driver.bytes() - self._before)

    torch.cuda.graph = Watched  # type: ignore[misc]


def _watch_loading(driver: Driver, found: Found) -> None:
    from proa.engine.building.gpu import GpuBuild  # needs a CUDA build of torch

    bind = GpuBuild.bind

    def watched(self: GpuBuild, report: Any) -> Any:
        found.driver["loaded"] = driver.bytes()
        found.loaded = {block.line for block in blocks_of(torch.cuda.memory._snapshot()["segments"])}
        return bind(self, report)

    GpuBuild.bind = watched  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--shape", default="qwen3-30b-a3b", choices=MODEL_SHAPES)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--format", default="bf16")
    parser.add_argument("--experts", default="all")
    parser.add_argument("--context", type=int)
    parser.add_argument("--max-running", type=int, default=4)
    parser.add_argument("--prompts", type=lambda text: [int(n) for n in text.split(",")], default=[])
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="proa-memory-") as folder:
        plan = planned(args, Path(folder))
        found = measure(plan, args.prompts)
    vram = plan.gpu.vram if plan.gpu is not None else None
    if vram is None:
        raise SystemExit("The plan uses no GPU.")
    parts = table(vram, found)
    if args.json:
        named = {name: {"planned_bytes": a, "taken_bytes": b} for name, (a, b) in parts.items()}
        print(json.dumps({"parts": named, "details": details(found), "context_tokens": plan.context_tokens}))
    else:
        print(f"{torch.cuda.get_device_name()}, context {plan.context_tokens}, {args.max_running} at once")
        print(f"{'part':<15}{'planned':>14}{'taken':>14}{'over':>14}")
        for name, (a, b) in parts.items():
            print(f"{name:<15}{_mib(a):>14}{_mib(b):>14}{_mib(b - a):>14}")
        print("\n".join(details(found)))
    sys.stdout.flush()
    raise SystemExit(1 if parts["total"][1] > parts["total"][0] else 0)


if __name__ == "__main__":
    main()
