"""GraphExecutor without a GPU: the steps that it launches, their inputs, sampled tokens and faults."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engines import COPIES, RULES, finish_all, load_decoder, load_native, prefixes, request, tokens_of
from on_host import HostQueue, host_executor
from proa.cache.pages import PageAllocator
from proa.cache.pool import allocate_pool
from proa.engine.engine import Engine
from proa.engine.executors.batch import PromptLogprobs, Span, StepBatch, StepLimits
from proa.engine.executors.eager import EagerExecutor
from proa.engine.executors.executor import Executor, Pace
from proa.engine.executors.graphs import GraphExecutor
from proa.engine.executors.parts import non_finite_rows
from proa.engine.runner import Runner
from proa.engine.scheduling.policy import Limits
from proa.engine.scheduling.scheduler import Scheduler
from proa.engine.turns import PrefillTurns
from proa.layers.decoder import Decoder
from proa.machine.cost.turns import GapLimit
from proa.native.pool import Pool
from proa.ops.caches import KvPages
from proa.sampling.rows import Row
from proa.types import EngineRequest, Sampling, TokenEvent
from tiny import make_tiny

PAGES, PAGE_TOKENS, RUNNING, ROWS = 120, 4, 5, 32
LIMITS = StepLimits(ROWS, RUNNING, PAGES * PAGE_TOKENS, PAGE_TOKENS, 64)
GREEDY = Sampling(max_tokens=1, temperature=0.0)
# Logits in bfloat16 have ties, between which penalties and cuts choose in another order on a device.
DRAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0, "seed": 3},
    {"logprobs": 0},
    {"temperature": 1.0, "logprobs": 0},
]


@pytest.fixture(scope="module", params=["qwen3-moe", "qwen3-next"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    made = load_decoder(make_tiny(request.param, tmp_path_factory.mktemp("tiny")), torch.bfloat16).decoder
    assert made is not None
    return made


@pytest.fixture(scope="module")
def attention(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    made = load_decoder(make_tiny("qwen3-moe", tmp_path_factory.mktemp("tiny")), torch.bfloat16).decoder
    assert made is not None
    return made


def executor_of(decoder: Decoder, kind: str, kept_blocks: Sequence[int] = ()) -> Executor[Any]:
    caches = allocate_pool(decoder.spec, PAGES, PAGE_TOKENS, torch.bfloat16, sequences=RUNNING + COPIES)
    if kind == "eager":
        return EagerExecutor(decoder, caches, PAGE_TOKENS, kept_blocks=kept_blocks)
    return host_executor(decoder, caches, LIMITS, kept_blocks=kept_blocks)


class Case:
    def __init__(self, decoder: Decoder, kind: str = "graphs", *, overlap: bool = True, turns: bool = False) -> None:
        self.executor = executor_of(decoder, kind)
        limits = Limits(PAGES * PAGE_TOKENS, PAGE_TOKENS, RUNNING, ROWS, 1000, 1_000_000)
        allocator = PageAllocator(PAGES)
        scheduler = Scheduler(limits, allocator, prefixes(decoder.spec, limits, allocator), RULES, turns=turns)
        runner = Runner(self.executor, overlap=overlap)
        self.engine = Engine(
            runner, scheduler, decoder.spec.vocab, turns=PrefillTurns(runner, GapLimit(factor=2.0)) if turns else None
        )
        self.followed: list[int] = []  # of each step launched ahead, its sequences
        launch = self.executor.launch

        def noted(batch: StepBatch, after: Any = None) -> Any:
            if after is not None:
                self.followed.append(len(batch.spans))
            return launch(batch, after)

        self.executor.launch = noted  # type: ignore[method-assign]
        if turns:
            self.executor.pace = lambda: Pace(1.0, 1.0)  # type: ignore[method-assign]

    def answers(self, asked: list[EngineRequest]) -> dict[str, Any]:
        for one in asked:
            self.engine.submit(one)
        found = {name: outcome(events) for name, events in finish_all(self.engine).items()}
        stats = self.engine.stats()
        assert stats.scheduler.pages_free + stats.scheduler.pages_cached == stats.scheduler.pages_total
        return found


def outcome(events: list[TokenEvent]) -> tuple[Any, ...]:
    scores = [s for event in events for s in event.logprobs or []]
    told = [(s.token, pytest.approx(s.logprob, abs=1e-3), [t for t, _ in s.top]) for s in scores]
    return tokens_of(events), events[-1].finish, told


def requests(seed: int, vocab: int, count: int = 6) -> list[EngineRequest]:
    rng = Random(seed)
    return [
        request(
            f"r{i}", [rng.randrange(vocab) for _ in range(rng.randrange(1, 30))], rng.randrange(2, 14),
            **rng.choice(DRAWS), eos_token_ids=tuple(range(0, vocab, 11)) if i % 2 else (),
            prompt_logprobs=rng.choice((None, 1)),
        )
        for i in range(count)
    ]  # fmt: skip


class OpsSeen(TorchDispatchMode):
    """The ops of torch that are launched meanwhile: names and dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.ops = set[tuple[str, ...]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.add((str(func), *(str(of.dtype) for of in args if isinstance(of, torch.Tensor))))
        return func(*args, **(kwargs or {}))


def test_warm_ups_launch_the_ops_around_the_model(attention: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU loads the kernel of an op at its first use, which took 17 to 45 ms for each in a first request."""
    monkeypatch.setattr(HostQueue, "capture", lambda queue, launch: lambda: None)  # what graphs hold is launched before
    executor = executor_of(attention, "graphs")
    assert isinstance(executor, GraphExecutor)
    with OpsSeen() as warm:
        for task in executor.warm_ups(compiled=True):
            task()
    first = executor.launch(StepBatch([Span((5,), 0, (0,), 0)]))
    executor.sample(first, [0], [Row(GREEDY, [5], 1)])
    with torch.inference_mode(), OpsSeen() as used:
        second = executor.launch(StepBatch([Span((0,), 1, (0,), 0)]), first)
        assert non_finite_rows((executor._on.hidden[:1],), 1) == []
    executor.sample(second, [0], [Row(GREEDY, [5], 1)])
    assert ("aten.clamp_.default", "torch.int64") in used.ops
    assert used.ops <= warm.ops


@pytest.mark.one_table
@pytest.mark.parametrize("seed", range(2))
def test_answers_are_those_of_an_eager_executor(seed: int, decoder: Decoder) -> None:
    """Without overlap both compute the same steps; sampling is the device's, interpreted. Twice: with prefix hits."""
    graphs, eager = Case(decoder, overlap=False), Case(decoder, "eager")
    asked = requests(seed, decoder.spec.vocab)
    for _ in range(2):
        assert graphs.answers(asked) == eager.answers(asked)
    assert graphs.followed == []


@pytest.mark.one_table
def test_overlap_changes_no_answer(decoder: Decoder) -> None:
    """All decode together and one ends before the others: the rows after it move up, in the same graph."""
    asked = [request(f"r{i}", [5 + i, 9, 7], count, **DRAWS[i]) for i, count in enumerate((12, 8, 12, 12))]
    ahead, waits = Case(decoder), Case(decoder, overlap=False)
    assert ahead.answers(asked) == waits.answers(asked)
    assert ahead.followed == [4] * 7 + [3] * 3


@pytest.mark.one_table
def test_stops_aborts_and_arrivals_leave_nothing(decoder: Decoder) -> None:
    """Stops, aborts and arrivals at any time: no page or slot stays allocated."""
    case, rng = Case(decoder), Random(1)
    sent = requests(5, decoder.spec.vocab, 16)
    for step in range(400):
        if step % 3 == 0 and sent:
            case.engine.submit(msgspec.structs.replace(sent.pop(), id=f"s{step}"))
        if rng.random() < 0.05:
            case.engine.abort(f"s{3 * rng.randrange(16)}")
        if not case.engine.has_work and not sent:
            break
        assert all(event.finish != "error" for event in case.engine.step())
        case.engine.scheduler.check()
    assert not case.engine.has_work
    assert len(case.followed) > 10
    stats = case.engine.stats()
    assert stats.scheduler.pages_free + stats.scheduler.pages_cached == stats.scheduler.pages_total


def test_a_sequence_with_nan_ends_alone(attention: Decoder) -> None:
    """Another step in flight computes the sequence again."""
    whole = {}
    for poisoned in (False, True):
        case = Case(attention)
        for i in range(4):
            case.engine.submit(request(f"r{i}", [5 + i, 9, 7], 12))
        found: dict[str, list[TokenEvent]] = {f"r{i}": [] for i in range(4)}
        for step in range(100):
            if step == 4 and poisoned:
                poison(case, "r2")
            for event in case.engine.step():
                found[event.id].append(event)
        ends = {name: events[-1].finish for name, events in found.items()}
        assert ends == {name: "error" if poisoned and name == "r2" else "length" for name in found}
        whole[poisoned] = {name: tokens_of(events) for name, events in found.items() if name != "r2"}
    assert whole[True] == whole[False]


def poison(case: Case, name: str) -> None:
    assert isinstance(case.executor, GraphExecutor)
    for (cache,) in case.executor.caches:
        if isinstance(cache, KvPages):
            cache.keys[case.engine.scheduler._requests[name].pages] = torch.nan


@pytest.mark.one_table
def test_prompts_in_turns(decoder: Decoder) -> None:
    """A long prompt between decode steps: every request's first token is that of an engine without turns."""
    found = []
    for turns in (False, True):
        case = Case(decoder, turns=turns)
        for i in range(2):
            case.engine.submit(request(f"d{i}", [5 + i, 9], 40))
        events = [event for _ in range(12) for event in case.engine.step()]
        case.engine.submit(request("long", [(7 * i) % 200 for i in range(70)], 4, prompt_logprobs=0))
        more = finish_all(case.engine)
        assert len(more["long"][0].prompt_logprobs or ()) == 70
        found.append([tokens_of([e for e in events if e.id == "d0"])[0], tokens_of(more["long"])[0]])
    assert found[0] == found[1]


@pytest.mark.one_table
def test_cancel_leaves_nothing_in_flight(decoder: Decoder) -> None:
    case = Case(decoder)
    case.engine.submit(request("r", [5, 6], 30))
    for _ in range(4):
        case.engine.step()
    assert case.followed
    assert isinstance(case.executor, GraphExecutor)
    assert case.executor._session.num_in_flight == 1
    case.engine.settle()
    assert case.executor._session.num_in_flight == 0


@pytest.mark.parametrize("kind", ["eager", "graphs"])
@pytest.mark.parametrize("wrong_from", [0, 1, 2])
def test_drafts_are_accepted_up_to_the_first_wrong_one(kind: str, wrong_from: int, attention: Decoder) -> None:
    """Two drafts per sequence: a graph of three rows each. The tokens are those of decode without drafts."""
    executor = executor_of(attention, kind)
    texts = [[5, 6, 7], [11, 3, 8]]
    pages = [list(range(10)), list(range(10, 20))]

    def run(spans: list[Span], rows: list[Row]) -> dict[int, list[int]]:
        step = executor.launch(StepBatch(spans, range(len(spans))))
        executor.sample(step, range(len(spans)), rows)
        return executor.wait(step).tokens

    def rows_of(texts: list[list[int]]) -> list[Row]:
        return [Row(GREEDY, text, 3) for text in texts]

    answers: list[list[int]] = [[], []]
    first = run([Span(text, 0, pages[i], 3, i) for i, text in enumerate(texts)], rows_of(texts))
    for i in range(2):
        answers[i] += first[i]
    for _ in range(3):
        spans = [Span([answers[i][-1]], 2 + len(answers[i]), pages[i], 3, i) for i in range(2)]
        for i, tokens in run(spans, rows_of([texts[i] + answers[i] for i in range(2)])).items():
            answers[i] += tokens
    drafts = [[(t + (n >= wrong_from)) % attention.spec.vocab for n, t in enumerate(answers[i][1:3])] for i in range(2)]
    spans = [Span([answers[i][0], *drafts[i]], 3, pages[i], 3, i, num_drafts=2) for i in range(2)]
    rows = rows_of([texts[i] + answers[i][:1] + drafts[i][:n] for i in range(2) for n in range(3)])
    got = run(spans, rows)
    assert got == {i: answers[i][1 : 2 + wrong_from] for i in range(2)}


def test_a_batch_can_be_serialised() -> None:
    """A batch is equal after msgpack, as it would be sent to other ranks."""
    batch = StepBatch([Span([1, 2], 3, [7, 8], 5, 2)], [0], [(1, 2)], [(2, 3)], [PromptLogprobs(0, 0, [2], 1)])
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(batch), type=StepBatch) == batch


@pytest.mark.parametrize("kind", ["eager", "graphs", "native"])
@pytest.mark.parametrize("in_parts", [False, True])
def test_outputs_of_named_blocks_are_kept(kind: str, in_parts: bool, tmp_path: Path) -> None:
    """Kept outputs are those of the blocks: the head gives the step's logits from the last block's."""
    folder = make_tiny("qwen3-moe", tmp_path)
    spans = [Span([5, 6, 7], 0, [0, 1], 3, 0), Span([9, 10], 0, [2, 3], 2, 1)]
    with Pool([[0]], pin=False) as pool:
        loaded = load_native(folder, pool) if kind == "native" else load_decoder(folder, torch.bfloat16)
        last = len(loaded.spec.blocks) - 1
        if kind == "native":
            executor: Executor[Any] = loaded.make(LIMITS, PAGES, kept_blocks=(0, last))
        else:
            assert loaded.decoder is not None
            executor = executor_of(loaded.decoder, kind, kept_blocks=(0, last))
        step = (executor.launch_in_parts if in_parts else executor.launch)(StepBatch(spans, [0, 1]))
        while in_parts and not executor.advance(step, 1):
            pass
        executor.sample(step, [], [])
        executor.wait(step)
        kept = {block: hidden.clone() for block, hidden in executor.kept(step).items()}
        logits = executor.logits_of(step, range(5)).clone()
        assert {block: tuple(hidden.shape) for block, hidden in kept.items()} == dict.fromkeys(
            (0, last), (5, loaded.spec.hidden)
        )
        assert not torch.equal(kept[0], kept[last])
        reference = load_decoder(folder, torch.bfloat16).decoder
        assert reference is not None
        torch.testing.assert_close(logits, reference.logits(kept[last].bfloat16()), atol=0.02, rtol=0.02)
