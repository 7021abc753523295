"""A prompt beside decode steps: GraphExecutor with two queues, and PrefillTurns with a simulated runner and clock."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engines import load_decoder
from on_host import HostMark, HostQueue, host_executor
from proa.cache.pool import allocate_pool
from proa.engine.executors.ahead import FIRST_UNITS
from proa.engine.executors.batch import Span, StepBatch, StepLimits
from proa.engine.executors.device_inputs import DeviceInputs
from proa.engine.executors.executor import Pace
from proa.engine.executors.graphs import GraphExecutor, GraphStep
from proa.engine.executors.queues import Queues
from proa.engine.executors.session import NoSession
from proa.engine.turns import MOST_OVER, STEPS, PrefillTurns
from proa.layers.decoder import Decoder
from proa.machine.cost.turns import BESIDE_SPEED, GapLimit, beside_pays
from proa.ops.sizes import FEW_ROWS
from tiny import make_tiny

PAGE_TOKENS, PAGES, RUNNING, ROWS = 16, 64, 4, 160
LIMITS = StepLimits(ROWS, RUNNING, 512, PAGE_TOKENS, 64, pass_rows=2 * ROWS, over_rows=32)


class LateQueue(HostQueue):
    """Computes at once, but its marks are passed only when `late` is reset."""

    late = False

    def mark(self, *, timed: bool = False) -> HostMark:
        mark = HostMark()
        mark.passed = not self.late
        self.marks.append(mark)
        return mark

    def __init__(self) -> None:
        self.marks = list[HostMark]()

    def catch_up(self) -> None:
        self.late = False
        for mark in self.marks:
            mark.passed = True


class Alone(NoSession):
    """A session whose passes need no CPU, unless they cannot run beside whole steps. calls: in their order."""

    has_experts = True

    def __init__(self) -> None:
        self.calls, self.beside = list[str](), None

    @property
    def pass_is_alone(self) -> bool:  # type: ignore[override]
        return self.beside is not None

    def begin(self) -> None:
        self.calls.append("begin")

    def end(self) -> None:
        self.calls.append("end")

    def begin_pass(self, tokens: int, chunks: int, beside: float | None = None) -> float:
        self.beside = beside
        self.calls.append("begin pass")
        return 1.0

    def end_pass(self) -> None:
        self.calls.append("end pass")


@pytest.fixture(scope="module", params=["qwen3-moe", "qwen3-next"])
def decoder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    made = load_decoder(make_tiny(request.param, tmp_path_factory.mktemp("tiny")), torch.bfloat16).decoder
    assert made is not None
    return made


class Case:
    def __init__(self, decoder: Decoder) -> None:
        self.session, self.prompts = Alone(), LateQueue()
        caches = allocate_pool(decoder.spec, PAGES, PAGE_TOKENS, torch.bfloat16, sequences=RUNNING)
        self.queues = Queues(HostQueue(), self.prompts)
        self.executor: GraphExecutor = host_executor(decoder, caches, LIMITS, session=self.session, queues=self.queues)
        self.position = 0

    def prompt(self, count: int, share: float = 0.6) -> GraphStep:
        return self.executor.launch_in_parts(StepBatch([span(count)]), share)

    def decode(self) -> None:
        """One step of another sequence."""
        pages = list(range(32, 64))
        step = self.executor.launch(StepBatch([Span([7], self.position, pages, 1, 1)]))
        self.position += 1
        self.executor.sample(step, (), ())
        assert self.executor.wait(step).faults == {}

    def logits(self, step: GraphStep) -> torch.Tensor:
        self.executor.sample(step, (), ())
        assert self.executor.wait(step).faults == {}
        rows = range(step.batch.num_tokens)
        return torch.cat([self.executor.logits_of(step, rows[i : i + 64]).clone() for i in range(0, len(rows), 64)])


def span(count: int) -> Span:
    first, state = (0, 0) if count > 20 else (24, 2)
    return Span([(5 + 7 * i) % 240 + 3 for i in range(count)], 0, list(range(first, first + 24)), count, state)


def test_a_prompt_beside_decode_has_its_logits(decoder: Decoder) -> None:
    """In two chunks, with decode steps between its units, and with some of it in turns."""
    found = []
    for way in ("turns", "beside", "both"):
        case = Case(decoder)
        step, done = case.prompt(300), False
        assert case.executor.runs_beside(step)
        assert case.queues.apart
        case.decode()
        for turn in range(1000):
            beside = way == "beside" or (way == "both" and turn % 2 > 0)
            done = case.executor.keep_ahead(step) if beside else case.executor.advance(step, 1)
            assert case.queues.apart == beside
            case.decode()
            if done:
                break
        assert done
        found.append(case.logits(step))
    assert torch.equal(found[1], found[0])
    assert torch.equal(found[2], found[0])


def test_a_pass_begins_before_its_inputs_are_written(decoder: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first copies then do not wait for the host."""
    case, write = Case(decoder), DeviceInputs.fill

    def fill(inputs: DeviceInputs, sequences: Sequence[Span], page_tokens: int) -> int:
        case.session.calls.append("fill")
        return write(inputs, sequences, page_tokens)

    monkeypatch.setattr(DeviceInputs, "fill", fill)
    case.prompt(300)
    assert case.session.calls == ["begin pass", "fill", "fill"]


def test_the_session_sees_only_the_end(decoder: Decoder) -> None:
    """Launches beside decode steps are not counted, as they end in no order with those of decode; one that is counted
    follows them all."""
    case = Case(decoder)
    step = case.prompt(300)
    while not case.executor.keep_ahead(step):
        pass
    assert case.session.calls == ["begin pass"]
    case.logits(step)
    assert case.session.calls[:4] == ["begin pass", "begin", "end pass", "end"]


def test_the_device_is_never_far_ahead(decoder: Decoder) -> None:
    """Until the device has passed the marks only a few units are launched, and the step is done when it has passed all.
    A cancelled step waits for no more than these."""
    case = Case(decoder)
    step = case.prompt(300)
    units = len(decoder.blocks) * 2
    case.prompts.late = True
    for _ in range(5):
        assert not case.executor.keep_ahead(step)
        case.decode()
    assert case.executor.done_share(step) * units == pytest.approx(FIRST_UNITS)
    case.prompts.catch_up()
    case.prompts.late = True
    while case.executor.done_share(step) < 1.0:
        assert not case.executor.keep_ahead(step)
        case.prompts.catch_up()
        case.prompts.late = True
    case.prompts.late = False
    assert case.executor.keep_ahead(step)
    case.executor.cancel(step)
    assert case.session.calls[-1] == "end pass"
    assert case.executor._session.num_in_flight == 0
    assert not case.queues.apart
    again = case.prompt(300)
    assert case.executor._ahead.room == FIRST_UNITS
    while not case.executor.keep_ahead(again):
        pass
    case.logits(again)


@pytest.mark.parametrize(("tokens", "over", "may"), [(FEW_ROWS, False, True), (FEW_ROWS - 1, False, False),
                                                     (20, True, False)])  # fmt: skip
def test_only_long_chunks_may_run_beside(tokens: int, over: bool, may: bool, decoder: Decoder) -> None:
    """Shorter ones share buffers with decode steps, and a step that overtakes needs the CPU."""
    case = Case(decoder)
    long = case.prompt(300) if over else None
    step = case.prompt(tokens)
    assert case.executor.runs_beside(step) == may
    if not may:
        with pytest.raises(ValueError, match="advance it between them"):
            case.executor.keep_ahead(step)
        while not case.executor.advance(step, 1):
            case.decode()
        case.logits(step)
    if long is not None:
        while not case.executor.keep_ahead(long):
            case.decode()
        case.logits(long)


def test_a_prompt_that_began_alone_goes_on_beside_decode(decoder: Decoder) -> None:
    case = Case(decoder)
    step = case.executor.launch_in_parts(StepBatch([span(300)]))
    case.executor.advance(step, 2)
    assert not case.queues.apart
    while not case.executor.keep_ahead(step):
        case.decode()
    beside = case.logits(step)
    whole = Case(decoder)
    step = whole.prompt(300)
    while not whole.executor.advance(step, 5):
        pass
    assert torch.equal(beside, whole.logits(step))


@pytest.mark.parametrize(("copied_s", "divided_s", "share", "pays"), [
    (1.0, 1.0, 0.6, True), (1.0, 0.9, 0.6, True), (1.0, 0.8, 0.6, False), (0.5, 0.4, BESIDE_SPEED, False),
    (0.4, 0.4, BESIDE_SPEED, True), (0.4, 0.4, 0.9, False),
])  # fmt: skip
def test_beside_or_in_turns(copied_s: float, divided_s: float, share: float, pays: bool) -> None:
    assert beside_pays(copied_s, divided_s, share) == pays


class Simulated:
    """A runner and its executor. Beside a prompt a decode step takes slow_s instead of step_s; each call of keep_ahead
    launches a unit. In turns a block takes block_s."""

    def __init__(self, step_s: float, slow_s: float, block_s: float, blocks: int) -> None:
        self.step_s, self.slow_s, self.block_s, self.blocks = step_s, slow_s, block_s, blocks
        self.now_s, self.calls, self.shares = 0.0, list[str](), list[float]()
        self.executor = SimpleNamespace(pace=lambda: Pace(step_s if self.now_s else 0.0, block_s))

    def launch_in_parts(self, plan: Any, share: float | None = None) -> Any:
        if share is None:
            return SimpleNamespace(plan=plan, left=2, over=True, age_s=lambda: 1.0)
        self.shares.append(share)
        return SimpleNamespace(plan=plan, left=self.blocks, age_s=lambda: 1.0)

    def runs_beside(self, flight: Any) -> bool:
        return not hasattr(flight, "over")

    def keep_ahead(self, flight: Any) -> bool:
        self.calls.append("beside")
        flight.left -= 1
        return bool(flight.left <= 0)

    def advance(self, flight: Any, blocks: int) -> bool:
        self.calls.append("over" if hasattr(flight, "over") else "turn")
        self.now_s += self.block_s * min(blocks, flight.left)
        flight.left -= blocks
        return bool(flight.left <= 0)

    def cancel(self, flight: Any) -> None:
        self.calls.append("cancel")

    def done_share(self, flight: Any) -> float:
        return 0.5

    def step(self, turns: PrefillTurns) -> None:
        """A decode step, as the engine computes it."""
        self.now_s += self.slow_s if turns.meanwhile is not None else self.step_s
        turns.prefill()
        if (meanwhile := turns.meanwhile) is not None:
            meanwhile()


def begun(runner: Simulated, factor: float = 2.5, tokens: int = 4096) -> PrefillTurns:
    """Turns with known decode steps and a prefill step that has begun."""
    turns = PrefillTurns(runner, GapLimit(factor=factor), fixed=True, over_tokens=1024, clock=lambda: runner.now_s)  # type: ignore[arg-type]
    for _ in range(STEPS):
        runner.step(turns)
    turns.launch(SimpleNamespace(num_tokens=tokens))  # type: ignore[arg-type]
    return turns


def test_prompts_run_beside_as_long_as_gaps_keep_to_the_limit() -> None:
    runner = Simulated(0.02, 0.045, 0.01, 40)
    turns = begun(runner)
    assert runner.shares == [pytest.approx(0.6)], "of the time, in turns"
    while turns.take() is None:
        runner.step(turns)
        assert turns.limit_s == pytest.approx(0.05), "steps beside a prompt do not count as undisturbed"
    assert set(runner.calls) == {"beside"}
    assert turns.given_up == 0
    assert turns.meanwhile is None


def test_too_long_gaps_end_it_for_this_prompt(caplog: pytest.LogCaptureFixture) -> None:
    """After MOST_OVER gaps beyond the limit the prompt goes on in turns. The next one is tried again; the log says it
    once."""
    runner = Simulated(0.02, 0.055, 0.01, 60)
    turns = begun(runner)
    with caplog.at_level(logging.WARNING):
        for given_up in (1, 2):
            while turns.take() is None:
                runner.step(turns)
            first = runner.calls.index("turn")
            assert set(runner.calls[first:]) == {"turn"}
            assert 0 < first <= 2 * (MOST_OVER + 1)
            assert turns.given_up == given_up
            runner.calls.clear()
            turns.launch(SimpleNamespace(num_tokens=4096))  # type: ignore[arg-type]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "A prompt computed beside decode steps made 3 gaps longer than --max-itl, 50.0 ms" in said


def test_a_short_prompt_overtakes_in_turns() -> None:
    runner = Simulated(0.02, 0.03, 0.01, 50)
    turns = begun(runner, tokens=16384)
    runner.step(turns)
    assert turns.short_tokens() > 0
    turns.launch(SimpleNamespace(num_tokens=100))  # type: ignore[arg-type]
    runner.calls.clear()
    assert turns.meanwhile is None
    runner.step(turns)
    assert set(runner.calls) == {"over"}
    assert turns.take() is not None
    runner.step(turns)
    assert runner.calls[-1] == "beside"
    assert turns.given_up == 0


def test_without_decode_it_is_not_beside() -> None:
    """Before a decode step, whose time is not known, and after the last one."""
    runner = Simulated(0.02, 0.03, 0.01, 50)
    turns = PrefillTurns(runner, GapLimit(factor=2.5), clock=lambda: runner.now_s)  # type: ignore[arg-type]
    turns.launch(SimpleNamespace(num_tokens=4096))  # type: ignore[arg-type]
    assert runner.shares == [0.0]
    turns.finish()
    assert runner.calls == ["turn"]
    for _ in range(2):
        runner.step(turns)
    assert runner.calls[-1] == "beside", "a prompt that began alone"
    turns.finish()
    assert runner.calls[-1] == "turn"
    assert turns.meanwhile is None
    runner.now_s += 100  # nothing decodes
    runner.step(turns)
    assert turns._beside._over == 0, "that was no gap"


def test_a_cancelled_prompt_is_forgotten() -> None:
    runner = Simulated(0.02, 0.055, 0.01, 60)
    turns = begun(runner)
    runner.step(turns)
    turns.cancel()
    assert runner.calls[-1] == "cancel"
    assert turns.meanwhile is None
    assert not turns.busy
    turns.launch(SimpleNamespace(num_tokens=4096))  # type: ignore[arg-type]
    runner.step(turns)
    assert runner.calls[-1] == "beside"
