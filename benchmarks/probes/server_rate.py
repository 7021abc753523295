"""What does the server itself cost for each token, and how many tokens per second does its one thread pass on?

A scripted engine (scripted_engine.py) gives every stream a token per step. Slow steps show the CPU time of an idle
server for each token; steps without a pause show the highest rate.

    python benchmarks/probes/server_rate.py [--model demo] [--streams 64] [--tokens 128] [--rounds 5] [--steps 50 0]
        [--chat]

The client is a process of its own that reads bytes and parses nothing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from server_cost import client, prompt

from proa.config.options import EngineOptions, ServerOptions
from proa.config.parse import from_keywords
from proa.engine.processes.early import EarlyProcess
from proa.engine.processes.process import EngineProcess
from proa.llm import AsyncLLM
from proa.plan.prepare import prepare
from proa.server.listen import bind
from proa.server.run import Shutdown, serve_on
from proa.text.tokenizer import Tokenizer

SCRIPT = str(Path(__file__).with_name("scripted_engine.py"))
TEXT = "The river carried the old boat past seven quiet windows, and under the bridge the copper light was moving. "
SLOW_MS = 50.0


class ScriptedProcess(EarlyProcess):
    def __init__(self, step_ms: float, text: list[int]) -> None:
        super().__init__()
        self._command = (SCRIPT, str(step_ms), ",".join(map(str, text)))

    def take(self) -> EngineProcess:
        return EngineProcess(self._command)


def request(tokens: int, *, chat: bool) -> bytes:
    asked = {"messages": [{"role": "user", "content": prompt()}]} if chat else {"prompt": prompt()}
    content = json.dumps({"max_tokens": tokens, "ignore_eos": True, "stream": True, **asked}).encode()
    path = "chat/completions" if chat else "completions"
    head = f"POST /v1/{path} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
    return head.encode() + b"content-type: application/json\r\n\r\n" + content


@asynccontextmanager
async def serving(model: str, streams: int, step_ms: float) -> AsyncIterator[int]:
    """Serve `model` by a scripted engine; yields the port."""
    listener, ready = bind("127.0.0.1", 0), asyncio.Event()

    async def launch(progress: Callable[[str, int, int], None]) -> AsyncLLM:
        options = from_keywords(EngineOptions, max_running=streams, gpu="none")
        prepared = await asyncio.to_thread(prepare, model, options)
        text = Tokenizer.load(prepared.checkpoint.path, None).encode(TEXT, add_special_tokens=False)
        made = await AsyncLLM.launch_prepared(prepared, options, early=ScriptedProcess(step_ms, text))
        await made.engine.wait_ready()
        ready.set()
        return made

    shutdown = Shutdown()
    server = asyncio.create_task(serve_on(listener, launch, model, ServerOptions(), lambda text: None, shutdown))
    waiting = asyncio.create_task(ready.wait())
    await asyncio.wait((server, waiting), return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        waiting.cancel()
        await server  # raises why it has ended
        raise SystemExit("the server has ended")
    await asyncio.sleep(1.0)
    try:
        yield listener.getsockname()[1]
    finally:
        shutdown.request()
        await server


async def batch(orders: Connection, requests: list[bytes]) -> tuple[float, float]:
    """Seconds of CPU of this process, and until the last answer has ended, for requests sent at once."""
    before_s = time.process_time()
    orders.send(requests)
    _, seconds = await asyncio.to_thread(orders.recv)
    return time.process_time() - before_s, seconds


async def measure(asked: argparse.Namespace, step_ms: float) -> None:
    rates, cpu_us = list[float](), list[float]()
    async with serving(asked.model, asked.streams, step_ms) as port:
        with client(port) as orders:
            for number in range(asked.rounds + 1):
                requests = [request(asked.tokens, chat=asked.chat) for _ in range(asked.streams)]
                cpu_s, seconds = await batch(orders, requests)
                if number:
                    rates.append(asked.streams * asked.tokens / seconds)
                    cpu_us.append(1e6 * cpu_s / asked.streams / asked.tokens)
    print(
        f"steps of {step_ms:g} ms: {statistics.median(rates):7.0f} tokens/s ({min(rates):.0f} to {max(rates):.0f}), "
        f"server {statistics.median(cpu_us):6.1f} us of CPU per token ({min(cpu_us):.1f} to {max(cpu_us):.1f})",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=float, nargs="+", default=[SLOW_MS, 0.0], help="milliseconds of a step")
    parser.add_argument("--chat", action="store_true", help="by /v1/chat/completions")
    asked = parser.parse_args()
    for step_ms in asked.steps:
        asyncio.run(measure(asked, step_ms))


if __name__ == "__main__":
    sys.exit(main())
