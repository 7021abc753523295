"""Prompts whose experts are divided by their routing, and experts that they move from the ring to slots."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from hybrid.passes import CONTEXT, DEVICES, FAMILIES, FEW, PAGE_TOKENS, Load, passed, spans
from hybrid_engines import Kept, Split
from proa.engine.executors.batch import Span, StepBatch
from proa.engine.executors.executor import Executor
from proa.hybrid import promotions
from proa.hybrid.model import HybridModel
from proa.hybrid.moves import Moves
from proa.hybrid.slots import Slot
from proa.hybrid.streaming import Streaming
from proa.hybrid.uploads import Upload, Uploads
from proa.machine.cost.heat import Swap
from proa.machine.cost.prefill import CpuExpertCost, Division, PrefillRates
from proa.models.ranks import CPU
from proa.native.pool import Pool
from teacher_forced import prompts

WHOLE = 1 << 22  # bytes of a ring whose banks hold a layer's experts
EQUAL_SIDES = PrefillRates(1e9, CpuExpertCost(1e-5, 1e-7))
ALL_LAYERS = 1 << 10  # probed: a pass that may be divided by its routing is, to its end
PASSES = [("auto", 192, False), ("auto", 48, False), ("stream", 192, False), ("auto", 48, True)]
NO_COPIES = Division(0, 0.0, 1.0)
FAST_LINK, FAST_CPU = PrefillRates(1e12, CpuExpertCost(1.0, 1.0)), PrefillRates(1.0, CpuExpertCost(1e-9, 1e-9))


def streaming_of(keep: list[Kept]) -> Streaming:
    found = keep[0].hybrid.streaming
    assert found is not None
    return found


def decode(executor: Executor[Any], at: int, token: int | None = None) -> None:
    """Compute a decode step of another sequence, of this token, by default another one each time."""
    pages = CONTEXT // PAGE_TOKENS
    step = executor.launch(
        StepBatch([Span([7 + at if token is None else token], at, list(range(2 * pages, 3 * pages)), 1, 2)])
    )
    executor.sample(step, (), ())
    assert executor.wait(step).faults == {}


def divided_in_half(streaming: Streaming) -> int:
    """Copy half of each layer's experts in RAM, at any rates. Returns their number."""
    half = len(streaming._layers[0].in_ram) // 2
    division = Division(half, 1.0, 1.0)
    streaming._divided = lambda tokens, chunks, share: [division] * len(streaming._streamed)  # type: ignore[method-assign]
    return half


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("every", [True, False])
def test_logits_are_those_of_the_cpu(family: str, every: bool, device: str, load: Load) -> None:
    """At any rates: all of the tail copied, none, some; with experts that no token chooses."""
    batch = StepBatch(spans(prompts([70, 9, 50])))
    want = passed(load(family, Split(0.25), device, rows=192, every=every), batch)
    keep: list[Kept] = []
    split = Split(0.25, prefill="auto", ring_bytes=WHOLE)
    executor = load(family, split, device, rows=192, keep=keep, every=every)
    streaming_of(keep).probed_layers = ALL_LAYERS
    for rates in (FAST_LINK, FAST_CPU, EQUAL_SIDES):
        streaming_of(keep).rates = rates
        got = passed(executor, batch)
        if device == "sim":  # the same kernels compute the experts, wherever
            assert torch.equal(got, want)
        torch.testing.assert_close(got, want, atol=0.12, rtol=0.05)
        assert (got - want).abs().mean() < 0.01
    alone = device == "cuda"  # a pass whose experts are all copied: it may run beside decode steps, so is not routed
    assert streaming_of(keep).totals.routed == 3 - alone


@pytest.mark.parametrize("device", DEVICES)
def test_an_expert_that_no_token_chose_does_not_cross(device: str, load: Load) -> None:
    """One token of two experts in each layer, without a head: these are copied, or the CPU computes them."""
    keep: list[Kept] = []
    split = Split(0.0, prefill="auto", ring_bytes=WHOLE)
    executor = load("qwen3-moe", split, device, rows=192, keep=keep, every=False)
    streaming, hybrid = streaming_of(keep), keep[0].hybrid
    streaming.probed_layers, streaming.rates = ALL_LAYERS, FAST_LINK
    layers, shape = len(hybrid.layers), hybrid.layers[0].memory.shape
    top_k = streaming._asked.top_k
    jobs = executor.counters().jobs
    streaming._divided = lambda tokens, chunks, share: [NO_COPIES] * len(streaming._streamed)
    passed(executor, StepBatch(spans([[5]])))
    totals = streaming.totals
    assert totals.streamed == layers * top_k
    assert totals.streamed_bytes == totals.streamed * (shape.up.matrix_bytes + shape.down.matrix_bytes)
    assert totals.streamed + totals.left_to_cpu == layers * len(hybrid.layers[0].memory.in_ram)
    assert executor.counters().jobs == jobs, "the CPU has no pair"
    streaming.rates = FAST_CPU
    passed(executor, StepBatch(spans([[5]])))
    assert totals.streamed == layers * top_k
    assert executor.counters().jobs == jobs + layers


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "ring"), [(48, WHOLE), (192, FEW["qwen3-moe"])])
def test_passes_of_several_chunks_or_groups_are_divided_beforehand(
    rows: int, ring: int, device: str, load: Load
) -> None:
    keep: list[Kept] = []
    executor = load("qwen3-moe", Split(0.25, prefill="auto", ring_bytes=ring), device, rows=rows, keep=keep)
    streaming_of(keep).probed_layers = ALL_LAYERS
    passed(executor, StepBatch(spans(prompts([100]))))
    assert streaming_of(keep).totals.routed == 0
    assert streaming_of(keep).totals.passes == 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_pass_goes_on_so_only_where_that_gains(
    family: str, device: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer shows it: then the others are divided by their routing, or as before, with equal logits. Neither
    the first two passes of a length try, nor the three after one that tried in vain."""
    batch = StepBatch(spans(prompts([70, 9, 50])))
    want = passed(load(family, Split(0.25), device, rows=192), batch)
    keep: list[Kept] = []
    split = Split(0.25, prefill="auto", ring_bytes=WHOLE)
    executor = load(family, split, device, rows=192, keep=keep)
    streaming, in_ram = streaming_of(keep), sum(len(layer.memory.in_ram) for layer in keep[0].hybrid.layers)
    asked = list[int]()
    gained_s = 0.0

    def gain_s(tokens_of: Any, *_: object) -> float:
        asked.append(len(tokens_of))
        return gained_s

    monkeypatch.setattr("proa.hybrid.streaming.routing_gain_s", gain_s)
    layers = len(streaming._streamed)
    assert layers > 1
    passes = [(0, 1.0, 0), *2 * [(1, 1.0, 0)], (1, -1.0, 1), *3 * [(1, 1.0, 0)], (1, 1.0, layers)]
    for number, (probed, gained_s, routed) in enumerate(passes, 1):  # noqa: B007
        streaming.probed_layers, streaming.rates, asked[:] = probed, EQUAL_SIDES, []
        before = streaming.totals.routed
        got = passed(executor, batch)
        if device == "sim":
            assert torch.equal(got, want)
        torch.testing.assert_close(got, want, atol=0.12, rtol=0.05)
        assert (got - want).abs().mean() < 0.01
        assert len(asked) == routed
        assert streaming.totals.routed - before == (routed == layers)
        assert streaming.totals.streamed + streaming.totals.left_to_cpu == number * in_ram


@pytest.mark.parametrize("device", DEVICES)
def test_a_cancelled_pass_leaves_the_next_one_right(device: str, load: Load) -> None:
    keep: list[Kept] = []
    executor = load("qwen3-next", Split(0.25, prefill="auto", ring_bytes=WHOLE), device, rows=192, keep=keep)
    streaming_of(keep).probed_layers = ALL_LAYERS
    batch = StepBatch(spans(prompts([120])))
    want = passed(executor, batch)
    for units in (0, 1, 3):
        step = executor.launch_in_parts(StepBatch(spans(prompts([90]))))
        executor.advance(step, units)
        executor.cancel(step)
    again = passed(executor, batch)
    torch.testing.assert_close(again, want, atol=0.12, rtol=0.05)  # the rates change the division
    assert (again - want).abs().mean() < 0.01


@pytest.mark.parametrize("probed", [0, ALL_LAYERS])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("rows", "ring"), [(192, WHOLE), (48, WHOLE), (192, FEW["qwen3-moe"])])
def test_without_moving_experts_heat_is_what_passes_chose(
    rows: int, ring: int, device: str, probed: int, load: Load
) -> None:
    """No expert moves, so that nothing else counts choices: the next pass copies those that the last ones chose most.
    Passes of one chunk and of several, in one group a layer and in several."""
    keep: list[Kept] = []
    executor = load("qwen3-moe", Split(0.0, prefill="auto", ring_bytes=ring), device, rows=rows, keep=keep)
    streaming, batch, copied = streaming_of(keep), StepBatch(spans(prompts([100]))), dict[int, list[int]]()
    streaming.probed_layers = probed
    half = divided_in_half(streaming)
    chosen = streaming._asked.top_k * batch.num_tokens
    for number in range(3):
        streaming.rates = EQUAL_SIDES
        step = executor.launch_in_parts(batch)
        one = streaming._pass
        assert one is not None
        if number:
            for layer in streaming._streamed:
                copied[layer] = sorted(e for group in one.groups if group.layer == layer for e in group.experts)
        while not executor.advance(step, 1):
            pass
        executor.sample(step, (), ())
        assert executor.wait(step).faults == {}
        seen = streaming._seen
        assert seen is not None
        assert (seen.sum(1) == chosen).all(), "the same prompt each time"
        for layer, experts in copied.items():
            coldest = seen[layer, experts].min()
            left = [e for e in range(seen.shape[1]) if e not in experts]
            assert len(experts) <= half
            assert not experts or coldest >= seen[layer, left].max()


@pytest.mark.parametrize("device", DEVICES)
def test_the_prediction_is_that_of_the_division(device: str, load: Load) -> None:
    """Split, times and their prediction are metrics of routed passes too."""
    keep: list[Kept] = []
    executor = load("qwen3-moe", Split(0.25, prefill="auto", ring_bytes=WHOLE), device, rows=192, keep=keep)
    streaming, before = streaming_of(keep), executor.counters()
    streaming.probed_layers = ALL_LAYERS
    for _ in range(3):
        streaming.rates = EQUAL_SIDES  # at learned ones a pass may copy all experts, and is then not routed on a GPU
        passed(executor, StepBatch(spans(prompts([150]))))
    now = executor.counters()
    in_ram = sum(len(layer.memory.in_ram) for layer in keep[0].hybrid.layers)
    assert now.streamed + now.left_to_cpu == 3 * in_ram
    assert (now.passes, now.routed, now.pass_tokens) == (3, 3, 450)
    assert now.predicted_s > before.predicted_s == 0
    assert now.took_s >= now.own_s + now.decided_s > now.decided_s > 0
    rates = streaming.rates
    assert rates.gpu_s
    assert rates.decide_s != EQUAL_SIDES.decide_s
    assert (rates.copy_bytes_per_s, rates.cpu) != (EQUAL_SIDES.copy_bytes_per_s, EQUAL_SIDES.cpu)


def check_slots(hybrid: Any) -> None:
    """The experts that the tables map to the device lie there, byte for byte as in RAM."""
    for number, layer in enumerate(hybrid.layers):
        memory, where = layer.memory, hybrid.moves._where[number]
        up, cpu = (of.cpu() for of in (hybrid.tables.residency[number].up, hybrid.tables.residency[number].cpu))
        assert sorted(where.slot_of) == (up != 0).nonzero().flatten().tolist() == hybrid.moves.resident(number)
        assert ((up != 0) ^ (cpu >= 0)).all()
        for expert, slot in where.slot_of.items():
            assert up[expert] == slot.up.data_ptr()
            for to, packed in slot.parts(*memory.in_place(memory.number_of[expert])):
                assert torch.equal(to.cpu(), packed)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("mode", "rows", "few"), PASSES)
def test_experts_that_a_prompt_made_hot_take_slots(
    mode: str, rows: int, few: bool, family: str, device: str, load: Load
) -> None:
    """A prompt of one token, again and again: its experts get slots from the ring, without crossing PCIe for it, while
    decode steps run between the parts; all logits are those of the CPU."""
    batch, ring = StepBatch(spans([[9] * 120])), FEW.get(family, WHOLE) if few else WHOLE
    want = passed(load(family, Split(0.25), device, rows=rows, every=False), batch)
    keep: list[Kept] = []
    split = Split(0.25, inclusive=True, spare=1, prefill=mode, ring_bytes=ring)
    executor = load(family, split, device, rows=rows, keep=keep, every=False)
    hybrid, streaming = keep[0].hybrid, streaming_of(keep)
    streaming.probed_layers, streaming.rates = ALL_LAYERS, FAST_LINK  # all are streamed
    assert hybrid.moves is not None
    before, position = [hybrid.moves.resident(i) for i in range(len(hybrid.layers))], iter(range(100))
    got = passed(executor, batch, lambda: decode(executor, next(position)))
    assert streaming.totals.promoted > 0
    assert [hybrid.moves.resident(i) for i in range(len(hybrid.layers))] != before
    for _ in range(2):  # publish the tables; heat learns what the pass chose by the second look after it
        decode(executor, next(position))
        if device == "cuda":
            torch.cuda.synchronize()
        while not hybrid.counting._copy.done():  # a look while the counts are fetched learns nothing
            time.sleep(0.001)
    check_slots(hybrid)
    for layer in range(len(hybrid.layers)):
        heat, resident = hybrid.moves.heat.heat[layer], hybrid.moves.resident(layer)
        outside = [expert for expert in range(len(heat)) if expert not in resident]
        assert len(resident) == len(before[layer])
        assert heat[resident].min() > 0.8 * heat[outside].max(), "more experts than slots are equally hot"
    again = passed(executor, batch, lambda: decode(executor, next(position)))
    for logits in (got, again):
        torch.testing.assert_close(logits, want, atol=0.12, rtol=0.05)
        assert (logits - want).abs().mean() < 0.01


def poison_vacated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill vacated slots with NaN, so that a step that reads one before its expert has arrived has faults."""
    vacate = Moves.vacate

    def poisoned(moves: Moves, swap: Swap) -> Slot:
        slot = vacate(moves, swap)
        slot.up.fill_(0xFF)
        slot.down.fill_(0xFF)
        return slot

    monkeypatch.setattr(Moves, "vacate", poisoned)


@dataclass
class Late:
    """Uploads that do not begin before `allowed`."""

    uploads: Uploads[Any]
    allowed: bool = False

    def mark(self) -> Any:
        return self.uploads.mark()

    def start(self, *asked: Any) -> LateUpload:
        return LateUpload(self, partial(self.uploads.start, *asked))


@dataclass
class LateUpload:
    late: Late
    start: Callable[[], Upload]
    upload: Upload | None = None

    def done(self) -> bool:
        if self.upload is None and self.late.allowed:
            self.upload = self.start()
        return self.upload is not None and self.upload.done()


@pytest.mark.parametrize("cancelled", [False, True])
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rows", "nodes"), [(192, 1), (48, 1), (48, 2)])
def test_hot_experts_that_the_cpu_computed_are_fetched(
    rows: int, nodes: int, family: str, cancelled: bool, device: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The half of the experts that a prompt chooses least is copied, so that the CPU computes hot ones. They cross PCIe
    for their slots, also if the prompt is cancelled, while decode steps run; all logits are those of the CPU. Experts
    lie in one memory node, or in pieces in two."""
    with Pool([[0]] * nodes, pin=False) as teams:
        hybrid = check_fetched(rows, teams, family, cancelled, device, load, monkeypatch)
        assert all(layer.memory.in_pieces == (nodes > 1) for layer in hybrid.layers)


def check_fetched(
    rows: int, teams: Pool, family: str, cancelled: bool, device: str, load: Load, monkeypatch: pytest.MonkeyPatch
) -> HybridModel:
    monkeypatch.setattr(promotions, "COPIES_PER_FETCH", 1)
    batch, keep = StepBatch(spans([[9] * 120])), list[Kept]()
    split = Split(0.25, inclusive=True, spare=1, prefill="auto", ring_bytes=WHOLE)
    want = passed(load(family, replace(split, prefill="cpu"), device, rows=rows, keep=keep, every=False), batch)
    counting = keep.pop().hybrid.counting
    assert counting is not None
    counting.settle()
    chosen = counting.totals
    executor = load(family, split, device, rows=rows, keep=keep, teams=teams, every=False)
    hybrid, streaming, position = keep[0].hybrid, streaming_of(keep), iter(range(100))
    streaming.probed_layers, hottest = 0, streaming._hottest
    divided_in_half(streaming)

    def coldest_first(layer: int, heat: object) -> NDArray[np.int64]:
        own = hottest(layer, None)
        return own[chosen[layer, own].argsort()]

    monkeypatch.setattr(streaming, "_hottest", coldest_first)
    poison_vacated(monkeypatch)
    late = Late(streaming._uploads)
    monkeypatch.setattr(streaming.promotions, "_uploads", late)
    moves = hybrid.moves
    assert moves is not None
    results = list[torch.Tensor]()
    if cancelled:
        step = executor.launch_in_parts(batch)
        while not moves.moved.nbytes:
            assert not executor.advance(step, 1), "nothing was fetched"
            decode(executor, next(position), 9)
        executor.cancel(step)
    else:
        results.append(passed(executor, batch, lambda: decode(executor, next(position), 9)))
    fetched = [one.swap for one in moves._arriving]
    before = moves.moved.experts
    assert moves.moved.nbytes
    decode(executor, next(position), 9)
    assert [one.swap for one in moves._arriving] == fetched, "a step was computed before an expert had arrived"
    late.allowed = True
    while not all(one.copy.done() for one in moves._arriving):
        time.sleep(0.001)
    decode(executor, next(position), 9)
    assert moves._arriving == []
    assert moves.moved.experts >= before + len(fetched)
    for swap in fetched:
        assert swap.promote in moves.resident(swap.layer)
    check_slots(hybrid)
    assert [len(moves.resident(i)) for i in range(len(hybrid.layers))] == [
        len(layer.memory.slots.slot_of) for layer in hybrid.layers
    ]
    results.append(passed(executor, batch, lambda: decode(executor, next(position), 9)))
    for logits in results:
        torch.testing.assert_close(logits, want, atol=0.12, rtol=0.05)
        assert (logits - want).abs().mean() < 0.01
    return hybrid


def places(hybrid: Any) -> list[list[list[torch.Tensor]]]:
    """Bytes of each expert, where the tables map it: [layer][expert][part]."""
    found = []
    for number, layer in enumerate(hybrid.layers):
        where, owners = hybrid.moves._where[number], hybrid.tables.owners[number]
        found.append([
            [part.flatten().cpu().clone() for part in (where.slot_of[e].up, where.slot_of[e].down)] if owners[e] != CPU
            else [torch.cat([*spans]).clone() for spans in layer.memory.in_place(where.number_of[e])]
            for e in range(layer.memory.experts)
        ])  # fmt: skip
    return found


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [192, 48])
def test_without_copies_in_ram_a_promotion_is_a_move(rows: int, family: str, device: str, load: Load) -> None:
    """At most as many as there are spare slots in a pass, whose tables stay; later the evicted ones are copied to RAM,
    and each expert has its own bytes."""
    batch = StepBatch(spans([[9] * 120]))
    want = passed(load(family, Split(0.25), device, rows=rows, every=False), batch)
    keep: list[Kept] = []
    split = Split(0.25, spare=1, prefill="auto", ring_bytes=WHOLE)
    executor = load(family, split, device, rows=rows, keep=keep, every=False)
    hybrid, streaming = keep[0].hybrid, streaming_of(keep)
    streaming.probed_layers, streaming.rates = ALL_LAYERS, FAST_LINK
    before, owners = places(hybrid), hybrid.tables.owners.copy()
    got = passed(executor, batch)
    assert streaming.totals.promoted == 1
    assert device == "cuda" or (hybrid.tables.owners == owners).all()  # there its copies may be complete by now
    for at in range(40):
        decode(executor, at)
        time.sleep(0.001)  # gives copies time
    assert hybrid.moves.moved.experts >= 1
    assert (hybrid.tables.owners != owners).any()
    for layer, layer_before in zip(places(hybrid), before, strict=True):
        for now, then in zip(layer, layer_before, strict=True):
            assert all(torch.equal(a, b) for a, b in zip(now, then, strict=True))
    for logits in (got, passed(executor, batch)):
        torch.testing.assert_close(logits, want, atol=0.12, rtol=0.05)
        assert (logits - want).abs().mean() < 0.01
