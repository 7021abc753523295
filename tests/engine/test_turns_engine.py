"""Prompts computed in turns with decode steps: every request's tokens, and the steps in which they come."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from engine.turn_cases import KINDS, PAGE_TOKENS, ROWS, RUNNING, Case, case_of, decode, planned, prompt
from engines import Loaded, finish_all, request, tokens_of
from hybrid_engines import Kept, Split, load_split
from proa.engine.executors.batch import Span, StepBatch
from proa.engine.turns import PrefillTurns
from proa.machine.cost.turns import GapLimit
from proa.native.pool import Pool
from proa.ops.caches import KvPages
from proa.types import EngineRequest, TokenEvent
from tiny import make_tiny

pytestmark = pytest.mark.one_table  # a test and a kind of executor
FAMILIES = ["qwen3-moe", "qwen3-next", "qwen2-moe", "deepseek-v3"]


def beside(case: Case, asked: EngineRequest, decoding: int = 3) -> dict[str, list[TokenEvent]]:
    """Submit `asked` beside decoding requests. Returns the events up to its first token."""
    events: dict[str, list[TokenEvent]] = {f"d{i}": [] for i in range(decoding)} | {asked.id: []}
    for event in decode(case, decoding, 120):
        events[event.id].append(event)
    case.engine.submit(asked)
    while not events[asked.id]:
        for event in case.engine.step():
            events[event.id].append(event)
        case.engine.scheduler.check()
    return events


@pytest.mark.parametrize("limit", [GapLimit(factor=1.0), GapLimit(factor=0.5), GapLimit(), GapLimit(seconds=-1.0)])
def test_a_limit_leaves_time_for_prompts(limit: GapLimit, load: Callable[[str, str], Loaded]) -> None:
    with pytest.raises(ValueError, match="leaves no time for prefill"):
        PrefillTurns(case_of(load("torch", "qwen3-moe")).engine.runner, limit)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("durations", [(1.0, 1.0), (1.0, 3.0), (2.0, 1.0)])
def test_turns_give_the_same_answers(
    kind: str, family: str, durations: tuple[float, float], load: Callable[[str, str], Loaded]
) -> None:
    """Prompts arrive while others decode, one after the other, in several chunks each and with common beginnings.
    On a GPU steps of other sizes round differently: the first token is the same, and no token is lost."""
    model, found = load(kind, family), []
    for turns in (False, True):
        case = case_of(model, turns=turns, durations=durations)
        events = beside(case, request("long", prompt(70), 9))
        case.engine.submit(request("alike", [*prompt(50), 9, 9], 7))
        case.engine.submit(request("short", [4], 5))
        for name, more in finish_all(case.engine).items():
            events.setdefault(name, []).extend(more)
        stats = case.engine.stats()
        assert stats.scheduler.pages_free + stats.scheduler.pages_cached == stats.scheduler.pages_total
        assert stats.scheduler.cached_prompt_tokens > 0 or model.spec.recurrent
        found.append({name: tokens_of(of) for name, of in events.items()})
    whole, got = found
    assert {name: len(tokens) for name, tokens in got.items()} == {name: len(t) for name, t in whole.items()}
    if kind == "torch":
        assert got == whole
    else:
        assert got["long"][0] == whole["long"][0]


def spans(lengths: list[int], start: int, first: int) -> list[Span]:
    """Sequences of these lengths from position `start` on, each with its own pages and state slot."""
    pages = -(-(start + max(lengths)) // PAGE_TOKENS)
    return [
        Span(prompt(n, i), start, list(range((first + i) * pages, (first + i + 1) * pages)), start + n, first + i)
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_in_parts_has_the_bits_of_a_whole_step(
    kind: str, family: str, load: Callable[[str, str], Loaded]
) -> None:
    """Decode steps of ever more rows run between the parts. Equal bits need the last sum of a block to be rounded alike
    in the fused norm and alone."""
    model, found = load(kind, family), []
    for turns in (False, True):
        executor = case_of(model).executor
        step = (executor.launch_in_parts if turns else executor.launch)(StepBatch(spans([11, 9], 0, 0)))
        if turns:
            done = False
            for others in range(1, RUNNING):
                done = executor.advance(step, 1)
                for position in range(2):
                    between = executor.launch(StepBatch(spans([1] * others, position, 2), range(others)))
                    executor.sample(between, (), ())
                    assert executor.wait(between).faults == {}
            done = done or executor.advance(step, 1000)
            assert done
        executor.sample(step, (), ())
        assert executor.wait(step).faults == {}
        found.append(executor.logits_of(step, range(20)).clone())
    torch.testing.assert_close(found[1], found[0], atol=0.05 if kind == "cuda" else 0.0, rtol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("durations", "turns_per_block"), [((1.0, 1.0), 1.0), ((1.0, 3.0), 3.0), ((2.0, 1.0), 0.5)])
def test_decode_does_not_wait_for_a_prompt(
    kind: str, durations: tuple[float, float], turns_per_block: float, load: Callable[[str, str], Loaded]
) -> None:
    """A prompt of three chunks: the other requests get a token in each step but those that end a chunk."""
    case = case_of(load(kind, "qwen3-moe"), durations=durations)
    events = beside(case, request("long", prompt(ROWS * 3), 5))
    steps = 3 * case.blocks * turns_per_block
    for name in ("d0", "d1", "d2"):
        assert len(tokens_of(events[name])) - 4 == pytest.approx(steps, abs=3)
    shared = case_of(load(kind, "qwen3-moe"), turns=False)
    events = beside(shared, request("long", prompt(ROWS * 3), 5))
    assert len(tokens_of(events["d0"])) - 4 <= 5, "without turns decode waits for the prompt"


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_turn_measures_one_block(kind: str, load: Callable[[str, str], Loaded]) -> None:
    case = case_of(load(kind, "qwen3-moe"))
    del case.executor.pace  # type: ignore[method-assign]
    beside(case, request("long", prompt(ROWS * 2), 5))
    step_s, block_s = case.executor.pace()
    assert 0 < step_s < 60
    assert 0 < block_s < 60


def test_steps_beside_grow_with_the_speed(load: Callable[[str, str], Loaded]) -> None:
    """At least 128 tokens, and as many as a block computes between two decode steps; 512 while nothing decodes."""
    case = case_of(load("torch", "qwen3-moe"), durations=(0.05, 0.02), pages=1500, rows=2048)
    decode(case, 1, 60)
    case.engine.submit(request("long", [token % 200 for token in range(4000)], 2))
    lengths = []
    while case.engine.has_work:
        case.engine.step()
        plan = case.engine.scheduler.beside
        if plan is not None and (not lengths or lengths[-1] is not plan):
            lengths.append(plan)
    assert [plan.num_tokens for plan in lengths] == [128, 256, 512, 1088, 2016]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("decoding", [0, 3])
def test_short_prompts_overtake_a_long_one(
    kind: str, family: str, decoding: int, load: Callable[[str, str], Loaded]
) -> None:
    """A step of short prompts is computed between two blocks of a longer one, with decode steps between its own blocks:
    the answers are those of requests alone, and so are log-probabilities of prompts."""
    model = load(kind, family)
    asked = [
        request("long", prompt(30), 6, prompt_logprobs=1), request("short", prompt(7, 3), 5, prompt_logprobs=1),
        request("late", prompt(4, 9), 5),
    ]  # fmt: skip
    case = case_of(model, durations=(1.0, 2.0), over_rows=8)
    decode(case, decoding, 60)
    case.engine.submit(asked[0])
    while not case.engine._turns.progress():
        case.engine.step()
    case.engine.submit(asked[1])
    case.engine.submit(asked[2])
    events = []
    while case.engine.has_work:
        events += case.engine.step()
        case.engine.scheduler.check()
    assert [name for name in dict.fromkeys(event.id for event in events) if name in ("long", "short")] == [
        "short", "long"
    ]  # fmt: skip
    for one in asked:
        plain = case_of(model, turns=False)
        plain.engine.submit(one)
        alone = finish_all(plain.engine)[one.id]
        got = [event for event in events if event.id == one.id]
        assert len(tokens_of(got)) == len(tokens_of(alone))
        assert tokens_of(got)[: None if kind == "torch" else 1] == tokens_of(alone)[: None if kind == "torch" else 1]
        if alone[0].prompt_logprobs:
            logprobs = [
                torch.tensor([p.logprob for p in of[0].prompt_logprobs or () if p is not None]) for of in (got, alone)
            ]
            torch.testing.assert_close(*logprobs, atol=1e-4 if kind == "torch" else 0.2, rtol=0)


def begin_both(case: Case) -> None:
    """Compute some blocks of a prompt "long", and then some of a prompt "short" that overtakes it."""
    case.engine.submit(request("long", prompt(30), 5))
    while not case.engine._turns.progress():
        case.engine.step()
    case.engine.submit(request("short", prompt(7, 3), 5))
    while case.engine.scheduler.over is None or len(case.engine._turns.progress()) < 2:
        case.engine.step()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cancelled", ["long", "short", "both"])
def test_a_cancelled_prompt_of_two_in_turns(kind: str, cancelled: str, load: Callable[[str, str], Loaded]) -> None:
    case = case_of(load(kind, "qwen3-next"), durations=(1.0, 2.0), over_rows=8)
    decode(case, 2, 60)
    begin_both(case)
    for name in ("long", "short") if cancelled == "both" else (cancelled,):
        case.engine.abort(name)
    events = finish_all(case.engine)
    left = {"long", "short"} - {cancelled} if cancelled != "both" else set()
    assert {name for name in events if not name.startswith("d")} == left
    for name, tokens in (("long", prompt(30)), ("short", prompt(7, 3))):
        if name in left:
            plain = case_of(load(kind, "qwen3-next"), turns=False)
            plain.engine.submit(request(name, tokens, 5))
            assert tokens_of(events[name])[0] == tokens_of(finish_all(plain.engine)[name])[0]
    stats = case.engine.stats()
    assert stats.scheduler.pages_free + stats.scheduler.pages_cached == stats.scheduler.pages_total


def test_nan_in_a_prompt_that_overtakes(load: Callable[[str, str], Loaded]) -> None:
    case = case_of(load("sim", "qwen3-moe"), durations=(1.0, 2.0), over_rows=8)
    decode(case, 1, 60)
    begin_both(case)
    poison(case, "short", 0)  # its first block is computed
    ends = {name: events[-1] for name, events in finish_all(case.engine).items()}
    assert {name: end.finish for name, end in ends.items()} == {"d0": "length", "long": "length", "short": "error"}
    assert "NaN or infinity in layer" in (ends["short"].error or "")


def test_steps_that_overtake_alternate_with_the_long_one(load: Callable[[str, str], Loaded]) -> None:
    """One may overtake if the held step still takes long, and after the last one the held step is computed for as
    long as that one took."""
    runner, now = case_of(load("torch", "qwen3-moe"), over_rows=8).engine.runner, 0.0
    turns = PrefillTurns(runner, GapLimit(factor=2.0), over_tokens=8, clock=lambda: now)
    long, short = (planned(name, count) for name, count in (("long", 30), ("short", 6)))
    assert turns.short_tokens() == 0, "no step is held"
    turns.launch(long, None)
    assert turns.short_tokens() == 0, "it may end soon: nothing of it is computed"
    turns.prefill()
    turns._held[0].began_s -= 10
    assert turns.short_tokens() == 8
    turns.launch(long, short)
    assert turns.short_tokens() == 0, "two steps are held"
    turns._held[1].began_s -= 4
    while turns._held[-1].plan is short and not turns._done:
        turns.prefill()
    flight = turns.take()
    assert flight is not None
    assert flight.plan is short
    assert turns.short_tokens() == 0
    now = 3.9
    assert turns.short_tokens() == 0
    now = 4.1
    assert 0 < turns.short_tokens() <= 8


@pytest.mark.parametrize("kind", KINDS)
def test_prefill_finishes_when_no_request_decodes(kind: str, load: Callable[[str, str], Loaded]) -> None:
    """The decoding requests end while a prompt is computed in turns: its remaining blocks follow at once, one at a time
    if they are slow, so that cancellations are seen in between."""
    case = case_of(load(kind, "qwen3-moe"), durations=(1.0, 100.0))
    decode(case, 1, 8)
    case.engine.submit(request("long", prompt(30), 5))
    steps = 8 + 2 * len(case.model.spec.blocks)
    names = [event.id for _ in range(steps) for event in case.engine.step()]
    count = names.count("d0")
    assert count >= 4
    assert names[: count + 2] == ["d0"] * count + ["long"] * 2
    finish_all(case.engine)


@pytest.mark.parametrize("kind", KINDS)
def test_prompt_logprobs_in_turns(kind: str, load: Callable[[str, str], Loaded]) -> None:
    """Log-probabilities of all prompt tokens are right, whatever decodes in between."""
    found = []
    for turns in (False, True):
        case = case_of(load(kind, "qwen3-moe"), turns=turns)
        events = beside(case, request("long", prompt(70), 1, prompt_logprobs=2))
        (event,) = events["long"]
        assert event.prompt_logprobs is not None
        found.append(torch.tensor([p.logprob for p in event.prompt_logprobs if p is not None]))
        finish_all(case.engine)
    assert len(found[0]) == 69
    torch.testing.assert_close(found[1], found[0], atol=1e-4 if kind == "torch" else 0.2, rtol=0)


def poison(case: Case, name: str, first_page: int) -> None:
    """Set the keys of a request's pages from one of them on to NaN."""
    pages = case.engine.scheduler._requests[name].pages[first_page:]
    for (cache,) in case.executor.caches:  # type: ignore[attr-defined]
        if isinstance(cache, KvPages):
            cache.keys[pages] = torch.nan
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("broken", ["long", "d1"])
def test_nan_ends_only_its_request(kind: str, broken: str, load: Callable[[str, str], Loaded]) -> None:
    """The prompt computed in turns, or a request that decodes meanwhile, whose rows have the same numbers."""
    case = case_of(load(kind, "qwen3-moe"))
    decode(case, 3, 40)
    case.engine.submit(request("long", prompt(ROWS + 20), 8))
    while True:
        case.engine.step()
        plan = case.engine.scheduler.beside
        if plan is not None and plan.items[0].start == ROWS:  # the second chunk, which reads the first one's keys
            break
    poison(case, broken, 0)
    ends = {name: events[-1] for name, events in finish_all(case.engine).items()}
    assert {name: end.finish for name, end in ends.items()} == {
        name: "error" if name == broken else "length" for name in ("d0", "d1", "d2", "long")
    }
    error = ends[broken].error
    assert error is not None
    assert ("NaN or infinity in layer" if kind in ("sim", "cuda") else "finite") in error
    stats = case.engine.stats()
    assert stats.scheduler.pages_free + stats.scheduler.pages_cached == stats.scheduler.pages_total


@pytest.mark.parametrize("kind", ["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("together", [True, False])
def test_faults_in_prefill_and_in_decode_are_told_apart(
    kind: str, together: bool, load: Callable[[str, str], Loaded]
) -> None:
    """NaN in the prompt and in a decoding request with the same row numbers: each error names where its own
    values did so first, though the other's fault was noted in between."""
    case = case_of(load(kind, "qwen3-moe"))
    decode(case, 3, 40)
    case.engine.submit(request("long", prompt(ROWS + 20), 8))
    while (plan := case.engine.scheduler.beside) is None or plan.items[0].start != ROWS:
        case.engine.step()
    poison(case, "long", 0)  # its first block is computed: NaN begins in the second one
    events = [] if together else case.engine.step()
    poison(case, "d0", 0)
    ends = {event.id: event for event in events} | {name: of[-1] for name, of in finish_all(case.engine).items()}
    assert {name: end.error for name, end in ends.items() if end.finish == "error"} == {
        "d0": "NaN or infinity in layer 0, from the input of its experts.",
        "long": "NaN or infinity in layer 1, from the input of its experts.",
    }


@pytest.mark.parametrize("kind", KINDS)
def test_faults_of_a_cancelled_step_are_discarded(kind: str, load: Callable[[str, str], Loaded]) -> None:
    """Faults noted for the prompt are not reported for requests with the same row numbers."""
    case = case_of(load(kind, "qwen3-moe"))
    decode(case, 3, 40)
    case.engine.submit(request("long", prompt(ROWS + 20), 8))
    while (plan := case.engine.scheduler.beside) is None or plan.items[0].start != ROWS:
        case.engine.step()
    poison(case, "long", 0)
    case.engine.step()
    case.engine.abort("long")
    ends = {name: events[-1].finish for name, events in finish_all(case.engine).items()}
    assert ends == {"d0": "length", "d1": "length", "d2": "length"}


@pytest.mark.parametrize("kind", KINDS)
def test_turns_with_few_pages(kind: str, load: Callable[[str, str], Loaded]) -> None:
    """A request is preempted, or waits for a page that the prefill step will release."""
    case = case_of(load(kind, "qwen3-next"), durations=(1.0, 3.0), pages=34)
    for i in range(4):
        case.engine.submit(request(f"d{i}", prompt(5, i), 40))
    for i in range(3):
        case.engine.submit(request(f"long{i}", prompt(60, i), 6))
    events = finish_all(case.engine)
    assert {name: len(tokens_of(of)) for name, of in events.items()} == {
        **{f"d{i}": 40 for i in range(4)}, **{f"long{i}": 6 for i in range(3)}
    }  # fmt: skip
    assert case.engine.stats().scheduler.preemptions > 0


@pytest.mark.gpu
def test_experts_move_between_parts(pool: Pool, tmp_path: Path) -> None:
    """Expert tables change between turns only: answers are those of engines whose experts do not move."""
    folder, found = make_tiny("qwen3-moe", tmp_path), []
    for spare in (0, 2):
        keep: list[Kept] = []
        model = load_split(folder, pool, Split(0.5, inclusive=True, spare=spare), "cuda", keep=keep)
        case = case_of(model)
        texts = {}
        for turn in range(4):
            events = beside(case, request(f"long {turn}", prompt(90, turn), 20))
            for name, more in finish_all(case.engine).items():
                events[name] += more
            texts |= {(turn, name): tokens_of(of) for name, of in events.items()}
        found.append(texts)
        moves = keep[0].hybrid.moves
        assert (moves is not None and moves.moved.experts > 0) == (spare > 0)
        keep[0].close()
    assert found[0].keys() == found[1].keys()
    assert {name: len(tokens) for name, tokens in found[0].items()} == {n: len(t) for n, t in found[1].items()}


def test_a_pool_of_states(load: Callable[[str, str], Loaded]) -> None:
    """A request computed in turns has a state slot of its own: all slots are taken."""
    model = load("torch", "qwen3-next")
    case, plain = case_of(model, durations=(1.0, 2.0)), case_of(model, turns=False)
    found = []
    for one in (case, plain):
        events = beside(one, request("long", prompt(70), 9), decoding=RUNNING - 1)
        for name, more in finish_all(one.engine).items():
            events[name] += more
        found.append({name: tokens_of(of) for name, of in events.items()})
    assert found[0] == found[1]


@pytest.mark.parametrize(("decoding", "lengths"), [(False, [180]), (True, [128, 52])])
def test_a_prompt_is_cut_only_beside_decode(
    decoding: bool, lengths: list[int], load: Callable[[str, str], Loaded]
) -> None:
    case, launched = case_of(load("torch", "qwen3-moe"), rows=200), list[int]()
    case.engine.submit(request("before", prompt(3), 4))
    finish_all(case.engine)
    if decoding:
        decode(case, 1, 100)
    launch = case.executor.launch_in_parts

    def noted(batch: StepBatch, share: float) -> object:
        launched.append(batch.num_tokens)
        return launch(batch, share)

    case.executor.launch_in_parts = noted  # type: ignore[method-assign]
    case.engine.submit(request("prompt", prompt(180), 2))
    finish_all(case.engine)
    assert launched == lengths
