"""How long does /health take while clients misbehave, and is anything lost? One row for each trial: p50, p99 and the
longest /health in ms; how requests ended; memory of server and engine, and requests still running afterwards.

python benchmarks/probes/stalls.py [--model demo] [--only NAME] [URL]

Without a URL, `proa serve MODEL` is started, and killed in the last trials: first its engine under 20 streams, then
the server itself. A process of its own asks /health every 20 ms, on a new connection every
other time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import multiprocessing
import os
import re
import signal
import socket
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from proa.cli.server_process import server_process

CHAT = "/v1/chat/completions"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
INTERVAL_S = 0.02


def body_of(tokens: int, **changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "Tell me a story about a boat. " * 20}], "max_tokens": tokens,
            "ignore_eos": True, "stream": True, **changes}  # fmt: skip


async def streams(url: str) -> None:
    """200 streams, of which 30 % are cancelled, twice."""
    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=None), timeout=300) as client:
        for _ in range(2):
            await _count(_stream(client, 32, cancel=i % 10 < 3) for i in range(200))


async def burst(url: str) -> None:
    """420 requests at once."""
    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=None), timeout=300) as client:
        await _count(_stream(client, 8) for _ in range(420))


async def engine_killed(url: str) -> None:
    """kill -9 of the engine under 20 streams: errors within 1 s, ready again within 5 s."""
    async with httpx.AsyncClient(base_url=url, limits=httpx.Limits(max_connections=None), timeout=300) as client:
        asked = [asyncio.create_task(_stream(client, 2000)) for _ in range(20)]
        await asyncio.sleep(5)
        began = time.monotonic()
        for pid in _children(_pid_of(url), "proa.engine.processes.worker"):
            os.kill(pid, signal.SIGKILL)
        ends = Counter(await asyncio.gather(*asked))
        ended_s, health = time.monotonic() - began, (await client.get("/health")).json()
        while (await client.get("/health")).status_code != 200:
            await asyncio.sleep(0.02)
        ready_s = time.monotonic() - began
        print(f"    {dict(ends)} within {ended_s:.2f} s, then {health.get('status')}; ready after {ready_s:.2f} s;"
              f" a new request: {await _stream(client, 4)}")  # fmt: skip


async def _count(streams: Iterable[Coroutine[Any, Any, str]]) -> None:
    print("   ", dict(Counter(await asyncio.gather(*streams))))


async def _stream(client: httpx.AsyncClient, tokens: int, *, cancel: bool = False) -> str:
    """How it ended: whole, cancelled, a status, an error in the stream, or lost without a word."""
    last, broken = "", False
    try:
        async with client.stream("POST", CHAT, json=body_of(tokens)) as answer:
            if answer.status_code != 200:
                return f"{answer.status_code}{' with Retry-After' if 'retry-after' in answer.headers else ''}"
            async for line in answer.aiter_lines():
                if cancel:
                    return "cancelled"
                broken, last = broken or '"error"' in line, line or last
    except httpx.HTTPError as error:
        return f"lost: {type(error).__name__}"
    return "error in the stream" if broken else "whole" if last == "data: [DONE]" else f"lost after {last[:80]}"


async def slow_readers(url: str) -> None:
    """20 readers of one byte a second, for 10 s."""

    async def read(reader: asyncio.StreamReader) -> None:
        for _ in range(10):
            await reader.read(1)
            await asyncio.sleep(1)

    content = json.dumps(body_of(500)).encode()
    request = HEAD + f"content-length: {len(content)}\r\n\r\n".encode() + content
    await _raw(url, 20, request, read)


async def half_open(url: str) -> None:
    """300 sockets that send nothing or half a head, for 10 s."""
    await asyncio.gather(_raw(url, 150, b"", _wait), _raw(url, 150, HEAD, _wait))


async def drips(url: str) -> None:
    """50 clients that send a byte of their body every 100 ms, for 10 s."""

    async def drip(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(100):
            writer.write(b" ")
            await asyncio.sleep(0.1)

    pairs = [await _connect(url) for _ in range(50)]
    for _, writer in pairs:
        writer.write(HEAD + b"content-length: 100000\r\n\r\n{")
    await asyncio.gather(*(drip(*pair) for pair in pairs))
    for _, writer in pairs:
        writer.close()


async def large_bodies(url: str) -> None:
    """10 bodies of 30 MiB at once: text, token ids, many messages."""
    text = json.dumps({"messages": [{"role": "user", "content": "word " * (6 << 20)}]}).encode()
    ids = b'{"prompt": [' + b"1," * (15 << 20) + b"1]}"
    many = json.dumps({"messages": [{"role": "user", "content": "Hi"}] * (30 * 2**20 // 35)}).encode()
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        headers = {"content-type": "application/json"}
        asked = [(CHAT, text), ("/v1/completions", ids), (CHAT, many)] * 3 + [(CHAT, text)]
        answers = await asyncio.gather(
            *(client.post(path, content=content, headers=headers) for path, content in asked)
        )
    print("   ", {answer.status_code for answer in answers}, answers[0].text[:100])


async def _wait(reader: asyncio.StreamReader) -> None:
    await asyncio.sleep(10)


async def _raw(url: str, count: int, request: bytes, use: Callable[[asyncio.StreamReader], Awaitable[None]]) -> None:
    pairs = [await _connect(url) for _ in range(count)]
    for _, writer in pairs:
        writer.write(request)
    await asyncio.gather(*(use(reader) for reader, _ in pairs))
    for _, writer in pairs:
        writer.close()


async def _connect(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    address = urlsplit(url)
    return await asyncio.open_connection(address.hostname, address.port)


TRIALS = (streams, burst, slow_readers, half_open, drips, large_bodies, streams)


def _pid_of(url: str) -> int:
    """The process that listens on the URL's port."""
    port = f"{urlsplit(url).port:04X}"
    lines = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (inode,) = [words[9] for words in lines if words[1].endswith(f":{port}") and words[3] == "0A"]
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            if os.readlink(fd) == f"socket:[{inode}]":
                return int(fd.parts[2])
    raise SystemExit(f"No process of this machine listens on {url}.")


def _children(pid: int, having: str = "") -> list[int]:
    """Processes below `pid`, at any depth, whose command line has a text."""
    found, parents = list[int](), {pid}
    stats = {int(p.parent.name): p.read_text() for p in Path("/proc").glob("[0-9]*/stat") if p.exists()}
    for _ in range(4):
        parents |= {child for child, text in stats.items() if int(text.rpartition(")")[2].split()[1]) in parents}
    for child in sorted(parents - {pid}):
        with contextlib.suppress(OSError):
            if having in Path(f"/proc/{child}/cmdline").read_text():
                found.append(child)
    return found


def state_of(url: str) -> str:
    """Memory of the server and of its processes, and what still runs."""
    server = _pid_of(url)
    sizes = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096 / 2**20 for pid in (server, *_children(server))]
    time.sleep(1.0)  # until cancellations have reached the engine
    metrics = httpx.get(f"{url}/metrics").text.splitlines()
    kept = [line for line in metrics if re.match(r"proa_(running|queued|waiting)_requests|proa_kv", line)]
    return f"MiB {' '.join(f'{size:.0f}' for size in sizes)}; {'; '.join(kept)}"


def kill_server(url: str) -> None:
    """kill -9 of the server: no process is left."""
    pid = _pid_of(url)
    below = _children(pid)
    os.kill(pid, signal.SIGKILL)
    began, left = time.monotonic(), below
    while left and time.monotonic() < began + 10:
        time.sleep(0.05)
        left = [p for p in left if Path(f"/proc/{p}").exists()]
    print(f"server killed: of {len(below)} processes below it {len(left)} are left after {time.monotonic() - began:.1f} s")


def poll(url: str, stop: Any, results: Any) -> None:
    """Ask /health until `stop` is set; send the times in ms."""
    times: list[float] = []
    kept, number = httpx.Client(), 0
    os.nice(-5) if os.geteuid() == 0 else None
    while not stop.is_set():
        number += 1
        began = time.perf_counter()
        if number % 2:
            kept.get(f"{url}/health", timeout=60)
        else:
            _ask_once(url)
        times.append(1000 * (time.perf_counter() - began))
        time.sleep(max(0.0, INTERVAL_S - (time.perf_counter() - began)))
    results.put(times)


def _ask_once(url: str) -> None:
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=60) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        while connection.recv(4096):
            pass


def measure(trial: Callable[[str], Awaitable[None]], url: str) -> None:
    context = multiprocessing.get_context("spawn")
    stop, results = context.Event(), context.Queue()
    poller = context.Process(target=poll, args=(url, stop, results))
    poller.start()
    time.sleep(2)
    began = time.monotonic()
    asyncio.run(trial(url))
    seconds = time.monotonic() - began
    stop.set()
    times = sorted(results.get())
    poller.join()
    p50, p99 = (times[int(len(times) * share)] for share in (0.5, 0.99))
    print(f"{trial.__name__:14} {seconds:6.1f} s  {len(times):5} asked  p50 {p50:6.1f}  p99 {p99:6.1f}  max "
          f"{times[-1]:6.1f} ms; {state_of(url)}", flush=True)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", nargs="?")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--only")
    asked = parser.parse_args()
    with contextlib.ExitStack() as stack:
        url = asked.url or stack.enter_context(server_process([asked.model, "--port=0"]))["url"]
        for trial in TRIALS if asked.url else (*TRIALS, engine_killed):
            if asked.only in (None, trial.__name__):
                measure(trial, url)
        if not asked.url and asked.only is None:
            kill_server(url)


if __name__ == "__main__":
    main()
