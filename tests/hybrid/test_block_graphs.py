"""Short steps in parts whose blocks are graphs: padded to a size, launched op by op at its first use, then replayed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from engines import load_decoder
from hybrid.passes import CONTEXT, PAGE_TOKENS, Load, passed, spans
from hybrid_engines import Kept, Split
from on_host import HostQueue, host_executor
from proa.cache.pool import allocate_pool
from proa.engine.executors.batch import Span, StepBatch, StepLimits
from proa.engine.executors.executor import Executor
from proa.hybrid.streaming import Streaming
from proa.machine.cost.probes import FIRST_SKIPPED, MOST_SKIPPED, Probes
from proa.ops import sizes
from teacher_forced import prompts
from tiny import make_tiny

DEVICES = ["host", pytest.param("cuda", marks=pytest.mark.gpu)]
ROWS = 100
WHOLE = 1 << 22  # bytes of a ring that holds all experts of two layers
SPLITS = {
    "auto": Split(0.25, prefill="auto", ring_bytes=WHOLE),
    "half": Split(0.25, prefill="half", ring_bytes=WHOLE),
    "stream": Split(0.25, prefill="stream", ring_bytes=WHOLE),
    "moving": Split(0.5, prefill="half", ring_bytes=WHOLE, inclusive=True, spare=2),
}
# Lengths of the prompts of each step: sizes 32, 64 and none.
STEPS = ([20], [33], [9, 21], [50], [5, 3, 40], [90])


def other(position: int) -> Span:
    """A decode step's span, of a sequence with pages of its own."""
    pages = CONTEXT // PAGE_TOKENS
    return Span([7 + position], position, list(range(3 * pages, 4 * pages)), 1, 3)


def rounds_of(executor: Executor[Any], count: int, between: Callable[[], None] = lambda: None) -> list[list[Tensor]]:
    """Logits of all rows of each of STEPS, in each round."""
    texts = [prompts(lengths) for lengths in STEPS]
    return [[passed(executor, StepBatch(spans(text)), between) for text in texts] for _ in range(count)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", SPLITS)
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-next", "gpt-oss", "deepseek-v2"])
def test_graphs_compute_what_single_launches_do(family: str, case: str, device: str, load: Load) -> None:
    keep: list[Kept] = []
    executor = load(family, SPLITS[case], device, rows=ROWS, keep=keep)
    assert keep[0].hybrid.streaming is not None
    keep[0].hybrid.streaming.probed_layers = 0
    first, *others = rounds_of(executor, 3)
    totals = keep[0].hybrid.streaming.totals
    assert totals.passes == 3 * len(STEPS)
    jobs = executor.counters().jobs
    passed(executor, StepBatch(spans(prompts([20]))))
    if case != "auto":
        assert executor.counters().jobs - jobs == (0 if case == "stream" else len(keep[0].hybrid.layers))
    want = rounds_of(load(family, Split(0.25), device, rows=ROWS), 1)[0]
    for one, *again, exact in zip(first, *others, want, strict=True):
        for logits in again:  # experts that move, or another division, change the order of sums
            assert (logits - one).norm() <= (0.02 if case in ("auto", "moving") else 1e-3) * one.norm()
        assert (one - exact).norm() <= 0.03 * exact.norm()


@pytest.mark.parametrize("device", DEVICES)
def test_decode_steps_between_blocks(device: str, load: Load) -> None:
    """Their graphs use the same memory as those of blocks, and their own tables."""
    executor, at = load("qwen3-moe", SPLITS["half"], device, rows=ROWS), iter(range(CONTEXT))

    def decode() -> None:
        step = executor.launch(StepBatch([other(next(at))]))
        executor.sample(step, (), ())
        assert executor.wait(step).faults == {}

    alone, interrupted = rounds_of(executor, 2), rounds_of(executor, 1, decode)[0]
    for one, two in zip(alone[1], interrupted, strict=True):
        assert (one - two).norm() <= 1e-3 * one.norm()


@pytest.mark.parametrize("family", ["qwen3-moe", "llama-dynamic"])
def test_blocks_are_captured_when_a_size_comes_again(family: str, tmp_path: Path, monkeypatch: Any) -> None:
    decoder = load_decoder(make_tiny(family, tmp_path), torch.bfloat16).decoder
    assert decoder is not None
    caches = allocate_pool(decoder.spec, 200, PAGE_TOKENS, torch.bfloat16, sequences=4)
    limits = StepLimits(ROWS, 4, CONTEXT, PAGE_TOKENS, 64, block_rows=sizes.prompt_rows(ROWS))
    executor, captured = host_executor(decoder, caches, limits), list[object]()
    capture = HostQueue.capture_in_pieces
    monkeypatch.setattr(
        HostQueue, "capture_in_pieces", lambda queue, launch: captured.append(launch) or capture(queue, launch)
    )
    found: dict[int, list[Tensor]] = {}
    for rows, size in ((20, 0), (32, 32), (20, 0), (64, 0), (40, 64), (64, 0), (65, 0), (70, 0), (65, 0)):
        before = len(captured)
        found.setdefault(rows, []).append(passed(executor, StepBatch(spans(prompts([rows])))))
        assert len(captured) - before == (len(decoder.blocks) if size else 0), rows
    for one, two in pairwise(found[20] + found[20][:1]):
        assert torch.equal(one, two)
    assert torch.equal(*found[64])


def test_a_cancelled_step_leaves_nothing_to_the_next(load: Load) -> None:
    executor = load("qwen3-moe", SPLITS["half"], "host", rows=ROWS)
    batch = StepBatch(spans(prompts([30])))
    want = [passed(executor, batch) for _ in range(2)][1]
    step = executor.launch_in_parts(StepBatch(spans(prompts([25]))))
    executor.advance(step, 1)
    executor.cancel(step)
    assert torch.equal(passed(executor, batch), want)


@pytest.mark.parametrize("device", DEVICES)
def test_blocks_that_a_cancelled_step_did_not_launch_are_not_captured(device: str, load: Load) -> None:
    """Launching an op for the first time may load or compile its kernel, which a capture cannot do."""
    executor: Any = load("qwen3-moe", SPLITS["half"], device, rows=ROWS)
    batch = StepBatch(spans(prompts([30])))
    step = executor.launch_in_parts(batch)
    executor.advance(step, 1)
    executor.cancel(step)
    for captured in (False, True):
        passed(executor, batch)
        assert bool(executor._blocks._replays) == captured


def test_routed_passes_and_those_beside_decode_have_no_graphs(load: Load, monkeypatch: Any) -> None:
    """The host decides within a layer of the first, and launches of the second may run beside other graphs."""
    keep: list[Kept] = []
    executor = load("qwen3-moe", SPLITS["auto"], "host", rows=ROWS, keep=keep)
    streaming = keep[0].hybrid.streaming
    assert isinstance(streaming, Streaming)
    streaming.probed_layers = 1000
    for _ in range(3):
        passed(executor, StepBatch(spans(prompts([30]))))
    assert streaming.totals.routed == 3
    assert not executor._blocks._replays  # type: ignore[attr-defined]


def test_fewer_and_fewer_passes_try_what_gains_nothing() -> None:
    probes, tries = Probes(), list[int]()
    for number in range(300):
        if probes.due(500):
            tries.append(number)
            probes.note(500, gained=False)
    gaps = [b - a - 1 for a, b in pairwise(tries)]
    assert tries[0] == FIRST_SKIPPED
    assert gaps[:4] == [3, 7, 15, 31]
    assert set(gaps[4:]) == {MOST_SKIPPED}
    others = [probes.due(5000) for _ in range(FIRST_SKIPPED + 1)]
    assert others == [*FIRST_SKIPPED * [False], True], "other lengths are tried by themselves"
    while not probes.due(500):
        pass
    probes.note(500, gained=True)
    assert all(probes.due(500) for _ in range(100))


@pytest.mark.gpu
def test_garbage_is_collected_after_a_capture() -> None:
    """A graph among the garbage cannot be freed during it."""
    from proa.engine.executors.device_queue import CudaQueue

    queue, x = CudaQueue(torch.device("cuda:0")), torch.zeros(8, device="cuda")

    def launch(cut: Callable[[Callable[[], None]], None]) -> None:
        x.add_(1)
        cut(lambda: done.append(x.sum().item()))
        kept = [[i] for i in range(10 * gc.get_threshold()[0])]  # objects enough for a collection
        assert kept
        x.add_(2)

    done = list[float]()
    with queue.current():
        queue.finish_device()
        launch(lambda action: None)
        for _ in range(3):
            cycle: list[Any] = [queue.capture(lambda: x.add_(0))]
            cycle.append(cycle)
            del cycle
            replay = queue.capture_in_pieces(launch)
        x.zero_()
        replay()
        queue.finish()
    assert (done, x.sum().item()) == ([8.0], 24.0)
