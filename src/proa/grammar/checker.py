"""Checks constraints before they reach the engine, in processes that may crash or hang (trial.py). Never: HTTP."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import OrderedDict
from contextlib import suppress

import msgspec

from proa.config.env import child_environ
from proa.errors import RequestError
from proa.grammar.verdict import Verdict
from proa.types import Constraint

MAX_PROCESSES = 4
TIMEOUT_S = 5.0
KEPT_BYTES = 16 << 20  # of the texts of constraints whose verdicts are kept


class GrammarChecker:
    """Compiles constraints in trial processes, which start on demand and are reused. Use it from one event loop."""

    def __init__(self) -> None:
        self._verdicts: OrderedDict[Constraint, asyncio.Task[Verdict]] = OrderedDict()  # least recently used first
        self._kept_bytes = 0
        self._trials = asyncio.Semaphore(MAX_PROCESSES)
        self._idle: list[Process] = []

    async def check(self, constraint: Constraint) -> None:
        """Raise RequestError if the constraint cannot be compiled within the limits; it names the construct."""
        task = self._verdicts.get(constraint)
        if task is None:
            task = self._verdicts[constraint] = asyncio.create_task(self._try(constraint))
            self._kept_bytes += len(constraint.text)
            self._forget_oldest()
        else:
            self._verdicts.move_to_end(constraint)
        found = await asyncio.shield(task)  # other requests may await the same task
        if found.message:
            raise RequestError(found.message, found.remedy, param=found.param)

    async def close(self) -> None:
        """End the processes. Idempotent."""
        tasks = list(self._verdicts.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        while self._idle:
            await _end(self._idle.pop(), kill=True)

    def _forget_oldest(self) -> None:
        while self._kept_bytes > KEPT_BYTES and len(self._verdicts) > 1:
            oldest, task = next(iter(self._verdicts.items()))
            if not task.done():
                return
            del self._verdicts[oldest]
            self._kept_bytes -= len(oldest.text)

    async def _try(self, constraint: Constraint) -> Verdict:
        async with self._trials:
            line: bytes | None = b""
            if self._idle:
                line = await self._answer(self._idle.pop(), constraint)
            if line == b"":  # also if the idle process had ended before
                line = await self._answer(await _start(), constraint)
        if line is None:
            return _refusal(constraint, f"it takes more than {TIMEOUT_S:g} s to compile")
        return msgspec.json.decode(line, type=Verdict) if line else _refusal(constraint, "compiling it failed")

    async def _answer(self, process: Process, constraint: Constraint) -> bytes | None:
        """Return the process's answer; b"" if it ended, None after the timeout. Keep a process that answered as idle,
        end any other."""
        line: bytes | None = None
        try:
            line = await asyncio.wait_for(_exchange(process, constraint), TIMEOUT_S)
        except TimeoutError:
            return None
        finally:
            if line:
                self._idle.append(process)
            else:
                await _end(process, kill=line is None)
        return line


async def _start() -> Process:
    """Start a process and wait until it is ready: its imports do not count as compiling."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "proa.grammar.trial"),
        stdin=PIPE, stdout=PIPE, stderr=DEVNULL, start_new_session=True, env=child_environ(),
    )  # fmt: skip
    assert process.stdout is not None
    try:
        await process.stdout.readline()
    except asyncio.CancelledError:
        await _end(process, kill=True)
        raise
    return process


async def _end(process: Process, *, kill: bool) -> None:
    if kill:
        with suppress(ProcessLookupError):
            process.kill()
    await process.wait()


async def _exchange(process: Process, constraint: Constraint) -> bytes:
    """Send a constraint and return the answer; b"" if the process ends."""
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(ConnectionError):  # it has crashed: readline returns nothing
        process.stdin.write(msgspec.json.encode(constraint) + b"\n")
        await process.stdin.drain()
    line = await process.stdout.readline()
    return line if line.endswith(b"\n") else b""


def _refusal(constraint: Constraint, why: str) -> Verdict:
    param = constraint.param
    return Verdict(f"{param} cannot be used: {why}.", "Make it smaller or less nested.", param)
