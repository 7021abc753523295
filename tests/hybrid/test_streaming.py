"""Prompts whose experts are copied to the device while they pass through the layers: logits, order, sizes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid.passes import CONTEXT, DEVICES, FAMILIES, FEW, PAGE_TOKENS, Load, passed, spans
from hybrid_engines import Kept, Split
from proa.engine.executors.batch import PromptLogprobs, Span, StepBatch
from proa.hybrid.ring import groups_of
from proa.hybrid.streaming import Streaming
from proa.machine.cost.prefill import Division, divisions
from proa.native.pool import Pool
from teacher_forced import prompts


@pytest.mark.parametrize("device", [*DEVICES, "host"])
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_cpu(family: str, device: str, load: Load) -> None:
    """In one chunk and in several, with rings for all experts of a layer, for some and in divisions of any size."""
    texts = prompts([70, 9, 50])
    want = passed(load(family, Split(0.25), device, rows=192), StepBatch(spans(texts)))
    found = {}
    for rows in (192, 48):
        for mode, ring in (("stream", 1 << 22), ("stream", 1 << 17), ("auto", 1 << 22), ("auto", FEW[family])):
            split = Split(0.25, prefill=mode, ring_bytes=ring)
            found[rows, mode, ring] = passed(load(family, split, device, rows=rows), StepBatch(spans(texts)))
    for (rows, *case), logits in found.items():
        if device == "sim" and rows == 192 and case[1] == 1 << 22:  # the same kernels compute the experts, wherever
            assert torch.equal(logits, want), case
        # torch's products of fewer rows are rounded otherwise, as are those of a GPU's kernels
        torch.testing.assert_close(logits, want, atol=0.12, rtol=0.05)
        assert (logits - want).abs().mean() < 0.01, (rows, *case)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ring", [1 << 22, FEW["qwen3-moe"]])
def test_experts_in_two_memory_nodes(ring: int, device: str, load: Load) -> None:
    """Each expert lies in two pieces, of which the ring gets both."""
    keep: list[Kept] = []
    split, texts = Split(0.25, prefill="stream", ring_bytes=ring), prompts([70, 9, 50])
    with Pool([[0], [0]], pin=False) as teams:
        divided = load("qwen3-moe", split, device, rows=48, keep=keep, teams=teams)
        up, down = keep[0].hybrid.layers[0].memory.pieces()
        assert (len(up), len(down)) == (2, 2)
        got = passed(divided, StepBatch(spans(texts)))
        whole = load("qwen3-moe", split, device, rows=48)
    want = passed(whole, StepBatch(spans(texts)))
    torch.testing.assert_close(got, want, atol=0.12, rtol=0.05)
    assert (got - want).abs().mean() < 0.01


@pytest.mark.parametrize("device", DEVICES)
def test_decode_between_parts_uses_its_own_tables(device: str, load: Load) -> None:
    keep: list[Kept] = []
    executor = load("qwen3-moe", Split(0.25, prefill="stream", ring_bytes=1 << 22), device, rows=48, keep=keep)
    texts = prompts([100])
    alone = passed(executor, StepBatch(spans(texts)))
    position = iter(range(1000))

    def decode() -> None:
        at = next(position)
        pages = CONTEXT // PAGE_TOKENS
        other = Span([7 + at], at, list(range(2 * pages, 3 * pages)), 1, 2)
        jobs = executor.counters().jobs
        step = executor.launch(StepBatch([other]))
        executor.sample(step, (), ())
        assert executor.wait(step).faults == {}
        assert executor.counters().jobs > jobs, "decode's experts in RAM are the CPU's"

    again = passed(executor, StepBatch(spans(texts)), decode)
    assert torch.equal(alone, again)
    streaming = keep[0].hybrid.streaming
    assert streaming is not None
    assert not streaming.under_way


@pytest.mark.parametrize("device", DEVICES)
def test_each_expert_crosses_once(device: str, load: Load) -> None:
    """A pass in several chunks copies each expert in RAM once, and the CPU computes none."""
    keep: list[Kept] = []
    executor = load("qwen3-moe", Split(0.25, prefill="stream", ring_bytes=1 << 22), device, rows=32, keep=keep)
    before, hybrid = executor.counters().jobs, keep[0].hybrid
    assert hybrid.streaming is not None
    assert hybrid.transport is not None
    hybrid.transport.push = hybrid.transport.pull = None  # called by no layer
    passed(executor, StepBatch(spans(prompts([150]))))
    in_ram = sum(len(layer.memory.in_ram) for layer in hybrid.layers)
    assert hybrid.streaming.totals.streamed == in_ram
    each = hybrid.layers[0].memory.shape
    assert hybrid.streaming.totals.streamed_bytes == in_ram * (each.up.matrix_bytes + each.down.matrix_bytes)
    assert executor.counters().jobs == before


def halved(kept: Kept) -> tuple[Streaming, int]:
    """Let passes copy half of each layer's experts in RAM, whatever the rates, and leave the others to the CPU. Returns
    how many of a layer that is."""
    streaming, in_ram = kept.hybrid.streaming, [len(layer.memory.in_ram) for layer in kept.hybrid.layers]
    assert streaming is not None
    half = Division(sum(in_ram) // (2 * len(in_ram)), 1.0, 1.0)
    streaming._divided = lambda tokens, chunks, share: [half] * len(streaming._streamed)
    return streaming, half.streamed


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [192, 48, 10])
def test_groups_cross_once_while_the_cpu_computes(device: str, rows: int, load: Load) -> None:
    """A ring smaller than a layer's experts: each streamed expert crosses once, and each chunk is one job of the CPU's
    in each layer, however many groups and chunks there are."""
    keep: list[Kept] = []
    executor = load("qwen3-moe", Split(0.25, prefill="auto", ring_bytes=FEW["qwen3-moe"]), device, rows=rows, keep=keep)
    hybrid, tokens = keep[0].hybrid, 150
    streaming, half = halved(keep[0])
    in_ram = [len(layer.memory.in_ram) for layer in hybrid.layers]
    jobs = executor.counters().jobs
    passed(executor, StepBatch(spans(prompts([tokens]))))
    each = hybrid.layers[0].memory.shape
    bank = FEW["qwen3-moe"] // 2 // (each.up.matrix_bytes + each.down.matrix_bytes)
    assert -(-half // bank) > 1, "the test needs several groups"
    assert streaming.totals.streamed == half * len(in_ram)
    assert executor.counters().jobs - jobs == -(-tokens // rows) * len(in_ram)


@pytest.mark.parametrize("device", [*DEVICES, "host"])
@pytest.mark.parametrize("family", ["qwen3-moe", "deepseek-v3"])
def test_decode_between_groups(family: str, device: str, load: Load) -> None:
    """Decode steps use the CPU's block too: the sum of a chunk that was handed over is taken before them."""
    executor = load(family, Split(0.25, prefill="auto", ring_bytes=FEW[family]), device, rows=48)
    texts, position, pages = prompts([100]), iter(range(1000)), CONTEXT // PAGE_TOKENS
    alone = passed(executor, StepBatch(spans(texts)))

    def decode() -> None:
        at = next(position) % CONTEXT
        step = executor.launch(StepBatch([Span([7], at, list(range(2 * pages, 3 * pages)), 1, 2)]))
        executor.sample(step, (), ())
        assert executor.wait(step).faults == {}

    again = passed(executor, StepBatch(spans(texts)), decode)
    torch.testing.assert_close(again, alone, atol=0.12, rtol=0.05)  # the rates change the division
    assert (again - alone).abs().mean() < 0.01


def test_the_cpu_computes_while_all_groups_pass(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """While no other step interrupts a pass, the device waits for the CPU's sum of a chunk only behind the layer's last
    group: earlier, copies would stop once both banks of the ring are full."""
    keep, order = list[Kept](), list[str]()
    split = Split(0.25, prefill="auto", ring_bytes=FEW["qwen3-moe"])
    executor = load("qwen3-moe", split, "host", rows=192, keep=keep)
    (streaming, _), transport = halved(keep[0]), keep[0].hybrid.transport
    assert transport is not None
    for of, name in ((transport, "push"), (transport, "pull"), (streaming, "leave")):
        monkeypatch.setattr(of, name, partial(_noted, order, name, getattr(of, name)))
    passed(executor, StepBatch(spans(prompts([150]))))
    layers = len(streaming._streamed)
    groups = order.count("leave") // layers
    assert groups > 1
    assert order == ["push", *["leave"] * groups, "pull"] * layers


def _noted(order: list[str], name: str, call: Callable[..., Any], *args: Any) -> Any:
    order.append(name)
    return call(*args)


@pytest.mark.parametrize("device", ["host", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_pass_cancelled_while_the_cpu_computes(device: str, load: Load) -> None:
    """The sum that it had not taken is no later step's."""
    keep: list[Kept] = []
    executor = load("qwen3-moe", Split(0.25, prefill="auto", ring_bytes=FEW["qwen3-moe"]), device, rows=48, keep=keep)
    halved(keep[0])
    texts = prompts([120])
    want = passed(executor, StepBatch(spans(texts)))
    for units in range(1, 8):
        step = executor.launch_in_parts(StepBatch(spans(prompts([90]))))
        executor.advance(step, units)
        executor.cancel(step)
        assert torch.equal(passed(executor, StepBatch(spans(texts))), want), units


def test_layers_that_are_alike_are_divided_once(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies of a prompt begin only when all layers are divided."""
    keep, asked = list[Kept](), list[int]()

    def counted(experts: int, *others: Any) -> list[Division]:
        asked.append(experts)
        return divisions(experts, *others)

    monkeypatch.setattr("proa.hybrid.streaming.divisions", counted)
    executor = load("qwen3-moe", Split(0.25, prefill="auto", ring_bytes=1 << 22), "sim", rows=192, keep=keep)
    layers = [len(layer.memory.in_ram) for layer in keep[0].hybrid.layers]
    assert len(layers) > 1
    passed(executor, StepBatch(spans(prompts([50]))))
    assert asked == [layers[0]]


def test_copies_start_before_other_layers_are_planned(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link that waits for the host is idle."""
    keep, order = list[Kept](), list[str]()
    executor = load("qwen3-moe", Split(0.25, prefill="stream", ring_bytes=1 << 22), "sim", rows=192, keep=keep)
    streaming = keep[0].hybrid.streaming
    assert streaming is not None
    assert len(streaming._streamed) > 2
    for name in ("_hottest", "_copy", "_publish"):
        monkeypatch.setattr(streaming, name, partial(_noted, order, name, getattr(streaming, name)))
    passed(executor, StepBatch(spans(prompts([50]))))
    assert order[:4] == ["_hottest", "_copy"] * 2
    assert order.index("_publish") == len(streaming._streamed) + 2


@pytest.mark.parametrize("ring", [1 << 22, FEW["qwen3-moe"]])
def test_counts_are_not_read_between_the_layers_of_a_pass(ring: int, load: Load) -> None:
    """Each look reads those of all layers. The last ones miss none."""
    keep: list[Kept] = []
    split = Split(0.25, inclusive=True, spare=2, prefill="stream", ring_bytes=ring)
    executor = load("qwen3-moe", split, "sim", rows=192, keep=keep, every=False)
    hybrid = keep[0].hybrid
    counting, streaming = hybrid.counting, hybrid.streaming
    assert counting is not None
    assert streaming is not None
    looks, look = list[int](), counting.look

    def noted() -> Any:
        looks.append(len(one.groups) - one.at if (one := streaming._pass) else 0)
        return look()

    counting.look = noted  # type: ignore[method-assign]
    batch = StepBatch(spans(prompts([50])))
    for _ in range(3):
        passed(executor, batch)
    assert looks
    assert set(looks) <= {0, 1, 2}
    counting.settle()
    assert counting.totals.sum() == 3 * 50 * counting._top_k * len(streaming._streamed)


@given(experts=st.lists(st.integers(0, 500), unique=True, max_size=60), count=st.integers(1, 12))
def test_groups_are_a_division(experts: list[int], count: int) -> None:
    groups = groups_of(3, experts, count)
    assert [expert for group in groups for expert in group.experts] == experts
    assert [(group.layer, group.number, group.of) for group in groups] == [(3, i, count) for i in range(count)]
    sizes = [len(group.experts) for group in groups]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("ring", [1 << 22, FEW["qwen3-next"]])
def test_a_cancelled_pass_leaves_the_next_one_right(device: str, ring: int, load: Load) -> None:
    executor = load("qwen3-next", Split(0.25, prefill="stream", ring_bytes=ring), device, rows=48)
    texts = prompts([120])
    want = passed(executor, StepBatch(spans(texts)))
    for units in (0, 1, 5, 9):
        step = executor.launch_in_parts(StepBatch(spans(prompts([90]))))
        executor.advance(step, units)
        executor.cancel(step)
    assert torch.equal(passed(executor, StepBatch(spans(texts))), want)


@pytest.mark.parametrize("device", DEVICES)
def test_logprobs_of_a_prompt_longer_than_a_chunk(device: str, load: Load) -> None:
    texts, found = prompts([130, 20]), []
    for split, rows in ((Split(0.25), 192), (Split(0.25, prefill="stream", ring_bytes=1 << 22), 48)):
        executor = load("qwen3-moe", split, device, rows=rows)
        asked = [PromptLogprobs(0, 0, texts[0][1:], 2), PromptLogprobs(1, 130, texts[1][1:], 2)]
        step = executor.launch_in_parts(StepBatch(spans(texts), prompt_logprobs=asked))
        while not executor.advance(step, 3):
            pass
        executor.sample(step, (), ())
        found.append(executor.wait(step).prompt_logprobs)
    for span, text in enumerate(texts):
        assert [len(of[span]) for of in found] == [len(text) - 1] * 2
        for whole, streamed in zip(found[0][span], found[1][span], strict=True):
            assert streamed.logprob == pytest.approx(whole.logprob, abs=0.05)
            assert len(streamed.top) == 2


def test_rates_follow_what_is_measured(load: Load) -> None:
    """Wrong rates at first: the division moves towards the faster side."""
    keep: list[Kept] = []
    executor = load("qwen3-moe", Split(0.0, prefill="auto", ring_bytes=1 << 22), "sim", rows=192, keep=keep)
    streaming = keep[0].hybrid.streaming
    assert streaming is not None
    first = streaming.rates
    for _ in range(3):
        passed(executor, StepBatch(spans(prompts([150]))))
    assert streaming.rates.copy_bytes_per_s != first.copy_bytes_per_s
    assert streaming.totals.passes == 3
    assert streaming.totals.pass_tokens == 450
