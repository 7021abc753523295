"""How fast is a prompt beside requests that decode, and how long are their gaps: in turns, beside them, and beside them
with some of the GPU's processors left to decode? One GPU; random weights; the engine runs in this process.

    python benchmarks/probes/beside_decode.py --format bf16 --prompt 16384
    python benchmarks/probes/beside_decode.py --format int4 --prompt 32768

Ways:
    turns       decode steps and layers of the prompt take turns
    beside      the prompt on a stream of lower priority than decode's, as in service
    equal       on a stream of the same priority
    co-fetch    as beside, but decode steps go on reading some experts in RAM over PCIe
    green N     on a stream of a green context that leaves N processors to decode (torch.cuda.green_contexts)
One JSON line a way: ms to the first token, tokens/s and their share of the speed alone; the undisturbed gap, the mean,
99th percentile and longest gap meanwhile, in ms and times the undisturbed one; prompts that went on in turns because
gaps exceeded --max-itl. `same` says whether all tokens are those of the first way; `reserved` is the most VRAM that
torch took, of what the plan allows. A way that the machine does not support says why.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from proa.bench.hybrid_shapes import MODEL_SHAPES
from proa.bench.prompts import random_prompts
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, ModelOptions, SchedulerOptions
from proa.engine.building.load import load_engine
from proa.engine.engine import Engine
from proa.engine.executors.device_queue import CudaQueue
from proa.engine.executors.queues import Queues
from proa.plan.prepare import prepare
from proa.types import EngineRequest, Sampling

UNDISTURBED = 40  # gaps
CONTEXT, ROOM = 128, 2048  # tokens of the decoding requests: of their prompts, and at most of their answers


def asks(name: str, tokens: list[int], count: int) -> EngineRequest:
    return EngineRequest(id=name, tokens=tokens, sampling=Sampling(max_tokens=count, temperature=0.0))


class Run:
    """One prompt beside decoding requests. gaps: seconds, before the prompt and meanwhile."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.tokens: dict[str, list[int]] = {}
        self.before, self.meanwhile = list[float](), list[float]()
        self.last_s = 0.0

    def step(self, gaps: list[float]) -> None:
        events = self.engine.step()
        now_s = time.perf_counter()
        for event in events:
            if event.error:
                raise SystemExit(event.error)
            self.tokens.setdefault(event.id, []).extend(event.tokens)
        if any(event.id.startswith("d") and event.tokens for event in events):
            if self.last_s:
                gaps.append(now_s - self.last_s)
            self.last_s = now_s

    def play(self, decoding: list[list[int]], prompt: list[int]) -> float:
        """Seconds to the prompt's first token."""
        for i, tokens in enumerate(decoding):
            self.engine.submit(asks(f"d{i}", tokens, ROOM))
        while len(self.tokens) < len(decoding):
            self.step([])
        self.step([])
        while len(self.before) < UNDISTURBED:
            self.step(self.before)
        self.engine.submit(asks("prompt", prompt, 1))
        began_s = time.perf_counter()
        while "prompt" not in self.tokens:
            self.step(self.meanwhile)
        took_s = time.perf_counter() - began_s
        for i in range(len(decoding)):
            self.engine.abort(f"d{i}")
        while self.engine.has_work:
            self.engine.step()
        return took_s


def alone_s(engine: Engine, prompt: list[int]) -> float:
    run = Run(engine)
    engine.submit(asks("prompt", prompt, 1))
    began_s = time.perf_counter()
    while "prompt" not in run.tokens:
        run.step([])
    took_s = time.perf_counter() - began_s
    while engine.has_work:
        engine.step()
    return took_s


def green_stream(left: int, device: torch.device) -> Any:
    """A stream that may use all processors but `left`."""
    from torch.cuda.green_contexts import GreenContext

    count = torch.cuda.get_device_properties(device).multi_processor_count
    context: Any = GreenContext.create(num_sms=count - left, device_id=device.index)
    if hasattr(context, "Stream"):
        return context, context.Stream()
    context.set_context()
    stream = torch.cuda.current_stream()
    context.pop_context()
    return context, stream


def set_way(engine: Engine, way: str, at_first: Queues) -> object:
    """Returns what must live as long as the way is used."""
    executor, runner = engine.runner.executor, engine.runner
    device, kept = executor._queues.steps.device, None  # type: ignore[attr-defined]
    vars(runner).pop("runs_beside", None)
    vars(runner).pop("launch_in_parts", None)
    prompts, hybrid = at_first.prompts, executor._session._session  # type: ignore[attr-defined]
    vars(hybrid).pop("_pause_co_fetch", None)
    if way == "turns":
        launch, hybrid._pause_co_fetch = type(runner).launch_in_parts, lambda: None
        runner.runs_beside = lambda flight: False  # type: ignore[method-assign]
        runner.launch_in_parts = lambda plan, share=0.0: launch(runner, plan)  # type: ignore[method-assign]
    elif way == "co-fetch":
        hybrid._pause_co_fetch = lambda: None
    elif way == "equal":
        prompts = CudaQueue(device, sleeps=True, first=True)
    elif way.startswith("green"):
        prompts = CudaQueue(device, sleeps=True)
        kept, prompts._stream = green_stream(int(way.split()[1]), device)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()  # activations are memory of one stream
    executor._queues = Queues(at_first.steps, prompts)  # type: ignore[attr-defined]
    return kept


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def measure(asked: argparse.Namespace, folder: str) -> None:
    shape = MODEL_SHAPES[asked.shape].cut(asked.layers)
    (Path(folder) / "config.json").write_text(json.dumps(shape.config()))
    options = EngineOptions(
        model=ModelOptions(dtype="bfloat16", load_format="dummy", dummy_format=asked.format),
        cache=CacheOptions(context=asked.prompt + ROOM + 64, prefix_cache=False),
        scheduler=SchedulerOptions(max_running=asked.requests + 1, max_batch_tokens=asked.batch),
        gpus=replace(GpuOptions(), gpu_experts=str(asked.resident)),
    )
    plan = prepare(folder, options).plan
    engine = load_engine(plan, lambda loading: None)[0]
    queues = engine.runner.executor._queues  # type: ignore[attr-defined]
    if not queues.separate:
        raise SystemExit("the plan has no ring: prompts do not run beside decode")
    prompt = random_prompts(shape.vocab, 1, asked.prompt, seed=1)[0]
    decoding = random_prompts(shape.vocab, asked.requests, CONTEXT, seed=2)
    alone = statistics.median([alone_s(engine, prompt) for _ in range(asked.runs + 2)][2:])
    print(json.dumps({"device": torch.cuda.get_device_name(), "torch": torch.__version__, "format": asked.format,
                      "prompt": asked.prompt, "alone_ms": round(1e3 * alone, 1)}), flush=True)  # fmt: skip
    first: dict[str, list[int]] | None = None
    for way in asked.way:
        given_up = engine.stats().gaps.given_up
        try:
            kept = set_way(engine, way, queues)
            Run(engine).play(decoding, prompt)  # kernels, graphs
            runs = [Run(engine) for _ in range(asked.runs)]
            took_s = statistics.median([run.play(decoding, prompt) for run in runs])
        except (RuntimeError, ImportError, AttributeError) as error:
            print(json.dumps({"way": way, "not supported": f"{type(error).__name__}: {error}"}), flush=True)
            continue
        before = [gap for run in runs for gap in run.before]
        gaps = [gap for run in runs for gap in run.meanwhile]
        usual, p99 = statistics.median(before), percentile(gaps, 0.99)
        first = first or runs[0].tokens
        same = all(
            tokens[:many] == first[name][:many]
            for run in runs for name, tokens in run.tokens.items()
            for many in [min(len(tokens), len(first[name]))]
        )  # fmt: skip
        print(json.dumps({
            "way": way, "first_token_ms": round(1e3 * took_s, 1), "tokens_per_s": round(asked.prompt / took_s),
            "of_alone": round(alone / took_s, 3), "gap_ms": round(1e3 * usual, 2),
            "mean_ms": round(1e3 * statistics.mean(gaps), 2), "mean_times": round(statistics.mean(gaps) / usual, 2),
            "p99_ms": round(1e3 * p99, 2), "p99_times": round(p99 / usual, 2),
            "longest_times": round(max(gaps) / usual, 2), "gaps": len(gaps),
            "given_up": engine.stats().gaps.given_up - given_up, "same": same,
            "reserved": torch.cuda.max_memory_reserved(),
            **({"series_ms": [[round(1e3 * gap, 1) for gap in run.meanwhile] for run in runs]} if asked.series else {}),
        }), flush=True)  # fmt: skip
        del kept
    used = 0 if plan.gpu is None else plan.gpu.vram.used_bytes - plan.gpu.vram.context_bytes
    print(json.dumps({"reserved": torch.cuda.max_memory_reserved(), "planned_beside_context": used}))
    engine.settle()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="qwen3-30b-a3b")
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--format", default="bf16")
    parser.add_argument("--resident", type=int, default=0, help="experts of each layer in VRAM")
    parser.add_argument("--requests", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=16384)
    parser.add_argument("--batch", type=int, help="as --max-batch-tokens of `proa serve`")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--series", action="store_true", help="print all gaps beside the prompt, by run")
    parser.add_argument(
        "--way", nargs="+", default=["turns", "beside", "co-fetch", "equal", "green 8", "green 16", "green 32"]
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as made:
        measure(parser.parse_args(), made)
