"""Mixed traffic without leaks or failures: long, short and cancelled prompts, streamed ones on a GPU, with tiers behind
the prefix cache. Seconds on the CPU and a simulated GPU, minutes on a real one: SOAK_SECONDS.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import random
import time
from collections import Counter
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from gpu_llm import launched, make_model
from proa.engine.executors.page_tiers import READERS
from proa.engine.stats import SchedulerStats, Stats
from proa.errors import QueueFull
from proa.llm import AsyncLLM
from proa.types import SamplingParams

REAL_S = float(os.environ.get("SOAK_SECONDS", "300"))
LENGTHS = [
    pytest.param("none", 12.0, id="cpu"),
    pytest.param("sim:256MiB", 20.0, id="sim"),  # steps in turns have many shapes, and torch keeps memory for each
    pytest.param(  # alone: other tests would use the same VRAM
        "0", REAL_S, id="cuda", marks=[pytest.mark.gpu, pytest.mark.alone, pytest.mark.timeout(2 * REAL_S + 120)]
    ),
]
WINDOWS = 3  # of which one must not grow
WARM_UP = 0.5  # fraction of the time: caches fill, graphs are captured, every expert slot has been used
CONTEXT, VOCAB = 1024, 500
LONGEST = 900  # tokens of a prompt
SHARED = 5  # beginnings that prompts share: more than the KV cache holds, so tiers restore them
KV_BYTES, RAM_TIER_BYTES, DISK_TIER_BYTES = 2 << 20, 4 << 20, 8 << 20  # of 768 bytes a token; all are soon full
ON_GPU = {"prefix_cache_ram": RAM_TIER_BYTES, "prefill": "stream", "expert_placement": "dynamic"}
GIVEN_UP_S = 0.15  # at most, after a long prompt was sent: about what it takes on a simulated GPU
KINDS = ("short", "short", "long", "alike", "alike", "alike", "prompt", "cancelled", "given up")
# Python's own memory varies by some MiB, and the whole KV cache has 5 MiB; leaked pages and rows show in the counters.
RAM_SLACK_BYTES, VRAM_SLACK_BYTES = 12 << 20, 64 << 20


@dataclass(frozen=True)
class Held:
    """Resources of the engine process."""

    threads: int
    files: int
    rss_bytes: int
    vram_bytes: int

    @classmethod
    def by(cls, pid: int, gpu: str) -> Held:
        proc = Path(f"/proc/{pid}")
        pages = int((proc / "statm").read_text().split()[1])
        free, total = torch.cuda.mem_get_info() if gpu.isdigit() else (0, 0)
        tasks, files = (len(list((proc / name).iterdir())) for name in ("task", "fd"))
        return cls(tasks, files, pages * os.sysconf("SC_PAGE_SIZE"), total - free)


class Traffic:
    """Requests of mixed kinds, in bursts; sampled and greedy: short ones, long answers, prompts that share a beginning,
    long prompts, answers that are cancelled, and long prompts that are given up, most before their first token."""

    def __init__(self, llm: AsyncLLM, seed: int) -> None:
        self._llm, self._rng, self.ended = llm, random.Random(seed), Counter[str]()
        self._kinds = itertools.cycle(KINDS)
        self._shared = [self._tokens(LONGEST) for _ in range(SHARED)]

    async def run(self, until_s: float) -> None:
        while time.monotonic() < until_s:
            burst = 30 if self._rng.random() < 0.1 else self._rng.randrange(1, 5)
            await asyncio.gather(*(self._one() for _ in range(burst)))

    async def _one(self) -> None:
        rng = self._rng
        kind = next(self._kinds)
        lengths = {"short": (1, 12), "alike": (5, 6), "prompt": (500, LONGEST), "given up": (500, LONGEST)}
        prompt = self._tokens(rng.randrange(*lengths.get(kind, (300, 301))))
        if kind == "alike":
            prompt = rng.choice(self._shared)[: rng.randrange(1, LONGEST)] + prompt
        params = SamplingParams(
            max_tokens=rng.randrange(1, 9) if kind in ("short", "prompt") else rng.randrange(20, 60),
            temperature=rng.choice((0.0, 0.8)), ignore_eos=True, n=rng.choice((1, 1, 1, 2)),
        )  # fmt: skip
        patience = rng.randrange(0, 10) if kind == "cancelled" else 1 << 30
        tokens: list[int] = []
        try:
            async with (
                asyncio.timeout(rng.random() ** 2 * GIVEN_UP_S if kind == "given up" else None),
                aclosing(self._llm.stream(prompt, params)) as chunks,
            ):
                async for chunk in chunks:
                    tokens += chunk.tokens
                    if len(tokens) > patience:
                        break
            assert kind in ("cancelled", "given up") or len(tokens) == params.n * (params.max_tokens or 0)
            self.ended[kind] += 1
        except TimeoutError:
            self.ended["given up in its answer" if tokens else kind] += 1
        except QueueFull:
            self.ended["refused"] += 1

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(3, VOCAB) for _ in range(count)]


async def idle(llm: AsyncLLM) -> None:
    """Wait until the engine is idle: cancelled requests end only with the next step, copies of pages to files later."""
    end = time.monotonic() + 10
    while not is_idle(llm.engine.stats.scheduler):
        assert time.monotonic() < end, llm.engine.stats
        await asyncio.sleep(0.02)


def is_idle(stats: SchedulerStats) -> bool:
    return not (stats.running or stats.waiting) and stats.pages_free + stats.pages_cached == stats.pages_total


def check_tiers(stats: Stats, gpu: str) -> None:
    """Check that prompts were streamed and prefixes restored, and that the tiers are as large as they may be."""
    files, ram = stats.prefix_files, stats.prefix_ram
    assert (files.failed_writes, files.bad_files) == (0, 0)
    assert files.stored_bytes <= DISK_TIER_BYTES
    if gpu == "none":
        assert files.restored_pages > 0
    else:  # most come from RAM
        assert ram.restored_pages > 0
        assert ram.stored_bytes <= RAM_TIER_BYTES
        assert stats.prefill.streamed > 0


@pytest.mark.seldom
@pytest.mark.parametrize(("gpu", "seconds"), LENGTHS)
def test_nothing_leaks(
    gpu: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sampled: bool
) -> None:  # fmt: skip
    if sampled and gpu != "0":
        seconds /= 2
    # Plain torch on a CPU keeps a compiled kernel for each shape it meets, up to some tens of MiB: here none.
    monkeypatch.setenv("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "1")
    # Nor gaps in the heap: plain torch's tensors of every size leave them for minutes (heaptrack: nothing is kept).
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(64 << 10))
    folder = make_model(tmp_path / "tiny", max_position_embeddings=CONTEXT)
    options = {
        "context": CONTEXT, "max_running": 6, "max_batch_tokens": 256, "max_queued": 24, "kv_memory": KV_BYTES,
        "prefix_cache_dir": str(tmp_path / "cache"), "prefix_cache_disk": DISK_TIER_BYTES,
        **({} if gpu == "none" else ON_GPU),
    }  # fmt: skip

    async def go() -> None:
        async with launched(folder, gpu, **options) as llm:
            pid, traffic, begin = llm.engine._process.pid, Traffic(llm, 1), time.monotonic()  # type: ignore[attr-defined]
            await asyncio.gather(*(traffic.run(begin + WARM_UP * seconds) for _ in range(3)))
            await idle(llm)
            for _ in range(WINDOWS):  # on a busy machine the first one may be a part of the warm-up; a leak fills each
                before = Held.by(pid, gpu)
                end = time.monotonic() + (1 - WARM_UP) * seconds
                await asyncio.gather(*(traffic.run(end) for _ in range(3)))
                await idle(llm)
                after, stats = Held.by(pid, gpu), llm.engine.stats
                if after.rss_bytes - before.rss_bytes <= RAM_SLACK_BYTES:
                    break
            print(f"\n{dict(traffic.ended)}; {stats}\n{before}\n{after}")  # noqa: T201
            assert llm.engine.state == "ready"
            assert min(traffic.ended[kind] for kind in KINDS) > 0
            check_tiers(stats, gpu)
            assert stats.scheduler.pages_free + stats.scheduler.pages_cached == stats.scheduler.pages_total
            assert after.files == before.files
            assert after.threads <= before.threads + READERS, "readers of files begin when they are needed"
            assert after.rss_bytes - before.rss_bytes <= RAM_SLACK_BYTES
            assert after.vram_bytes - before.vram_bytes <= VRAM_SLACK_BYTES
            answer = await llm.generate([5, 6, 7], SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True))
            assert len(answer.choices[0].tokens) == 4

    asyncio.run(go())
