"""What do the server and constraints cost? Medians of pairs, measured in turns on one engine:

  streams    tokens/s of 64 streams of --tokens each over HTTP, against the engine's own (its events, without text) for
             requests with the same sampling that reach it at the times at which those over HTTP did
  first      milliseconds to the first token (max_tokens 1) over HTTP, against the engine's own
  masks      tokens/s of 16 streams with a JSON Schema, against 16 without
  compiling  milliseconds that a constraint adds to the first token: a schema seen before, and a new one of 50 KB

python benchmarks/probes/server_cost.py [--model demo] [--load-format auto] [--rounds 7] [PART ...]

HTTP clients are a process of their own that reads bytes and parses nothing: until the first data at once, then every
20 ms, so that it takes little time from the cores that it shares with the engine and the server.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import random
import socket
import statistics
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from multiprocessing.connection import Connection
from selectors import EVENT_READ, DefaultSelector
from typing import Any

from msgspec.structs import replace

from proa.config.options import EngineOptions, ServerOptions
from proa.config.parse import from_keywords
from proa.llm import AsyncLLM
from proa.server.listen import bind
from proa.server.run import Shutdown, serve_on
from proa.types import Constraint, EngineRequest, Sampling, SamplingParams, TokenEvent

STREAMS, CONSTRAINED, TOKENS = 64, 16, 64
SINGLE = 3  # pairs of single requests per round
READ_INTERVAL_S = 0.02
LAST_CHUNK = b"0\r\n\r\n"  # ends a streamed answer
WORDS = "river boat old stone light market window seven under garden letter north quiet copper rain field".split()
SCHEMA = {"type": "array", "minItems": 40, "items": {"type": "object", "required": ["name", "tags", "size"], "properties": {
    "name": {"type": "string", "minLength": 8, "maxLength": 30}, "size": {"type": "integer"},
    "tags": {"type": "array", "minItems": 3, "items": {"enum": ["red", "green", "blue"]}}}}}  # fmt: skip
NEW_SCHEMA_BYTES = 50_000


def prompt() -> str:
    """24 random words: no prefix of another prompt."""
    return " ".join(random.choices(WORDS, k=24))


def clients(port: int, orders: Connection) -> None:
    """Send each batch of HTTP requests at once; return the seconds to the first bytes with data and to the last. A
    connection whose answer is complete is kept for the next batch, as OpenAI's and Anthropic's clients do."""
    kept = list[socket.socket]()
    while (batch := orders.recv()) is not None:
        began, selector, first = time.perf_counter(), DefaultSelector(), 0.0
        for request in batch:
            connection = kept.pop() if kept else socket.create_connection(("127.0.0.1", port))
            connection.sendall(request)
            selector.register(connection, EVENT_READ)
        while selector.get_map():
            if first:
                time.sleep(READ_INTERVAL_S)
            for key, _ in selector.select():
                data = key.fileobj.recv(1 << 16)  # type: ignore[union-attr]
                if not first and b"data: " in data:
                    first = time.perf_counter() - began
                if not data:
                    raise ConnectionError("the server has closed a connection before its answer was complete")
                if data.endswith(LAST_CHUNK):
                    selector.unregister(key.fileobj)
                    kept.append(key.fileobj)  # type: ignore[arg-type]
        orders.send((first, time.perf_counter() - began))


@contextmanager
def client(port: int) -> Iterator[Connection]:
    """A process that runs `clients`; yields the connection that takes its batches and has its answers."""
    mine, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=clients, args=(port, theirs))
    process.start()
    try:
        yield mine
    finally:
        mine.send(None)
        process.join()


def http_request(tokens: int) -> bytes:
    body = {"model": "any", "prompt": prompt(), "max_tokens": tokens, "ignore_eos": True, "stream": True}
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(content)}\r\n"
    return head.encode() + b"content-type: application/json\r\n\r\n" + content


class Probe:
    def __init__(self, llm: AsyncLLM, orders: Connection, stream_tokens: int) -> None:
        self._llm, self._orders, self._count, self._stream_tokens = llm, orders, 0, stream_tokens
        self._generate = llm.engine.generate
        self._arrivals = list[float]()  # perf_counter of requests of the last batch over HTTP, at the engine's client
        self._sampling = Sampling(max_tokens=stream_tokens)  # theirs: the server adds the model's own settings

    def _arrived(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        self._arrivals.append(time.perf_counter())
        self._sampling = request.sampling
        return self._generate(request)

    async def over_http(self, requests: int, tokens: int) -> tuple[float, float]:
        """Seconds to the first data and to the end."""
        self._llm.engine.generate = self._arrived  # type: ignore[method-assign]
        self._arrivals = []
        self._orders.send([http_request(tokens) for _ in range(requests)])
        answer: tuple[float, float] = await asyncio.to_thread(self._orders.recv)
        return answer

    async def by_engine(self, requests: int, tokens: int) -> tuple[float, float]:
        """Seconds to the first token and to the end, of requests sent directly to the engine: no HTTP, no detokenizing.
        They are sampled like those over HTTP (the server adds what generation_config.json says, and top_p takes time),
        and begin at the intervals at which the last batch over HTTP reached the engine, so that as many share a step."""
        prompts = [self._llm.tokenize(prompt()) for _ in range(requests)]
        began, first = time.perf_counter(), list[float]()
        spread = self._arrivals if len(self._arrivals) == requests else [0.0] * requests
        delays = [at - min(spread) for at in sorted(spread)]

        async def one(ids: list[int], delay_s: float) -> None:
            await asyncio.sleep(began + delay_s - time.perf_counter())
            self._count += 1
            sampling = replace(self._sampling, max_tokens=tokens, seed=self._count)
            asked = EngineRequest(id=f"probe-{self._count}", tokens=ids, sampling=sampling)
            async with aclosing(self._generate(asked)) as events:
                async for _ in events:
                    if not first:
                        first.append(time.perf_counter() - began)

        await asyncio.gather(*map(one, prompts, delays))
        return first[0], time.perf_counter() - began

    async def answers(self, requests: int, tokens: int, constraint: Constraint | None) -> tuple[float, float]:
        """By AsyncLLM, with text: seconds to the first chunk, tokens per second."""
        params = SamplingParams(max_tokens=tokens, ignore_eos=constraint is None, constraint=constraint)
        began, first, count = time.perf_counter(), list[float](), 0

        async def one() -> None:
            nonlocal count
            async with aclosing(self._llm.stream(prompt(), params)) as chunks:
                async for chunk in chunks:
                    count += len(chunk.tokens)
                    if not first:
                        first.append(time.perf_counter() - began)

        await asyncio.gather(*(one() for _ in range(requests)))
        return first[0], count / (time.perf_counter() - began)

    async def streams(self, rounds: int) -> None:
        each = self._stream_tokens
        seconds = await in_turns(rounds, lambda: self.over_http(STREAMS, each), lambda: self.by_engine(STREAMS, each))
        http, engine = ([STREAMS * each / whole for _, whole in way] for way in seconds)
        report(f"streams of {each}", "tokens/s", engine, http)

    async def first(self, rounds: int) -> None:
        seconds = await in_turns(rounds * SINGLE, lambda: self.over_http(1, 1), lambda: self.by_engine(1, 1))
        http, engine = ([1000 * first for first, _ in each] for each in seconds)
        report("first", "ms", engine, http)

    async def masks(self, rounds: int) -> None:
        schema = Constraint.json(SCHEMA)
        await self.answers(1, 4, schema)
        both = await in_turns(
            rounds, lambda: self.answers(CONSTRAINED, TOKENS, None), lambda: self.answers(CONSTRAINED, TOKENS, schema)
        )
        free, bound = ([rate for _, rate in each] for each in both)
        report("masks", "tokens/s", free, bound)

    async def compiling(self, rounds: int) -> None:
        seen = Constraint.json(SCHEMA)
        await self.answers(1, 4, seen)
        for name, made in (("seen", lambda: seen), ("new", lambda: Constraint.json(new_schema()))):
            both = await in_turns(
                rounds, lambda: self.answers(1, 4, None), lambda made=made: self.answers(1, 4, made())
            )  # type: ignore[misc]
            free, bound = ([1000 * first for first, _ in each] for each in both)
            report(f"compiling, {name}", "ms", free, bound)


def new_schema() -> dict[str, Any]:
    """Make a random schema of NEW_SCHEMA_BYTES, which no cache has."""
    properties: dict[str, Any] = {}
    while len(json.dumps(properties)) < NEW_SCHEMA_BYTES:
        name = "_".join(random.choices(WORDS, k=3)) + str(random.randrange(10**6))
        kind = random.choice([{"type": "string", "maxLength": 20}, {"type": "integer"}, {"enum": random.sample(WORDS, 4)},
                              {"type": "array", "items": {"type": "number"}}, {"type": "object", "properties": {"a": {"type": "string"}}}])  # fmt: skip
        properties[name] = {"description": " ".join(random.choices(WORDS, k=12)), **kind}
    return {"type": "object", "properties": properties, "required": list(properties)[:10]}


Figures = tuple[float, float]


async def in_turns(
    rounds: int, one: Callable[[], Awaitable[Figures]], other: Callable[[], Awaitable[Figures]]
) -> tuple[list[Figures], list[Figures]]:
    """Both, `rounds` times, in alternating order; the first round is not counted."""
    found: tuple[list[Figures], list[Figures]] = [], []
    for number in range(rounds + 1):
        for which in (0, 1) if number % 2 else (1, 0):
            figures = await (one, other)[which]()
            if number:
                found[which].append(figures)
    return found


def report(name: str, unit: str, one: list[float], other: list[float]) -> None:
    ratios = sorted(b / a for a, b in zip(one, other, strict=True))
    differences = [b - a for a, b in zip(one, other, strict=True)]
    print(
        f"{name:16} {statistics.median(one):8.1f} {unit} -> {statistics.median(other):8.1f}: ratio "
        f"{statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f}), difference "
        f"{statistics.median(differences):.1f} {unit}",
        flush=True,
    )


async def measure(model: str, load_format: str, parts: list[str], rounds: int, stream_tokens: Sequence[int]) -> None:
    listener, made = bind("127.0.0.1", 0), list[AsyncLLM]()

    async def launch(progress: Callable[[str, int, int], None]) -> AsyncLLM:
        options = from_keywords(EngineOptions, max_running=STREAMS, load_format=load_format)
        made.append(await AsyncLLM.launch(model, options, own_thread=True))
        return made[0]

    shutdown = Shutdown()
    serving = asyncio.create_task(
        serve_on(listener, launch, model, ServerOptions(), lambda text: None, shutdown)  # port and model are given
    )
    try:
        with client(listener.getsockname()[1]) as orders:
            while not made and not serving.done():
                await asyncio.sleep(0.1)
            await made[0].engine.wait_ready()
            await asyncio.sleep(1.0)
            for part in parts:
                for each in stream_tokens if part == "streams" else stream_tokens[:1]:
                    await getattr(Probe(made[0], orders, each), part)(rounds)
    finally:
        shutdown.request()
        await serving


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", default=["streams", "first", "masks", "compiling"])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights for a config.json and tokenizer")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", nargs="+", type=int, default=[TOKENS], help="length of each stream")
    asked = parser.parse_args()
    asyncio.run(measure(asked.model, asked.load_format, asked.parts, asked.rounds, asked.tokens))


if __name__ == "__main__":
    main()
