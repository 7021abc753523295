"""Tiny Qwen3-Next continues from copies of its states with the answers and logits of full prefill, on every engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.split_cases import logits_of
from engines import Loaded, RecordingRunner, finish_all, load_decoder, load_native, make_engine, request, tokens_of
from hybrid_engines import Split, load_split
from proa.engine.engine import Engine
from proa.native.pool import Pool
from teacher_forced import all_experts, prompts
from tiny import make_tiny

ENGINES = ["native", "sim", pytest.param("cuda", marks=pytest.mark.gpu)]
CHUNK = 16


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3-next", tmp_path_factory.mktemp("tiny"))


class Talk:
    """Greedy requests to an engine; records each one's prompt, answer and number of cached tokens."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.prompts: dict[str, list[int]] = {}
        self.answers: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}

    def ask(self, answer: int, **asked: list[int]) -> None:
        """Run these requests together to their ends."""
        self.prompts |= asked
        for name, tokens in asked.items():
            self.engine.submit(request(name, tokens, answer))
        for name, events in finish_all(self.engine).items():
            self.answers[name] = tokens_of(events)
            self.cached[name] = events[0].cached_tokens or 0

    @property
    def whole(self) -> dict[str, list[int]]:
        """The computed tokens of each request: prompt and answer, without the last token."""
        return {name: tokens + self.answers[name][:-1] for name, tokens in self.prompts.items()}


def turns(talk: Talk) -> None:
    """A conversation, its prompt again, and two requests that share a part of it and run together."""
    first, new, left, right = prompts([30, 9, 8, 7])
    talk.ask(11, first=first)
    talk.ask(11, again=first)
    talk.ask(5, next=first + talk.answers["first"] + new)
    talk.ask(5, left=first[:18] + left, right=first[:18] + right)
    talk.ask(5, third=first[:18] + new)


def cancelled(talk: Talk) -> None:
    """A request is aborted during prefill, then sent again."""
    (text,) = prompts([61])
    talk.engine.submit(request("gone", text, 5))
    for _ in range(2):
        talk.engine.step()
    talk.engine.abort("gone")
    talk.ask(5, back=text)


def crowded(talk: Talk) -> None:
    """More requests than there are pages for: some are preempted and continue."""
    texts = dict(zip("abcde", prompts([24, 25, 26, 27, 28]), strict=True))
    talk.ask(40, **texts)


SCENES = {
    "turns": (turns, {}, {"again": 28, "next": 40, "left": 16, "right": 16, "third": 16}),
    "cancelled": (cancelled, {}, {"back": 32}),
    "crowded": (crowded, {"num_pages": 56}, {}),
}


def play(scene: str, model: Loaded, **more: bool) -> tuple[Talk, RecordingRunner]:
    act, limits, _ = SCENES[scene]
    engine, runner = make_engine(model, max_batch_tokens=CHUNK, **limits, **more)
    talk = Talk(engine)
    act(talk)
    assert (engine.stats().scheduler.preemptions > 0) == (scene == "crowded")
    return talk, runner


@pytest.mark.parametrize("scene", SCENES)
def test_copies_change_no_answer(scene: str, folder: Path) -> None:
    model = load_decoder(folder)
    got, runner = play(scene, model)
    want, all_rows = play(scene, model, prefix_cache=False)
    assert got.answers == want.answers
    assert {name: got.cached[name] for name in SCENES[scene][2]} == SCENES[scene][2]
    assert runner.rows_computed < all_rows.rows_computed
    for name in got.prompts:
        rows = runner.logits[name]
        scale = torch.stack(list(all_rows.logits[name].values())).abs().max()
        assert max(rows) == len(got.whole[name]) - 1
        assert all(
            (row - all_rows.logits[name][position]).abs().max() <= 1e-4 * scale for position, row in rows.items()
        )


def model_of(engine: str, folder: Path, pool: Pool, override: dict[str, object]) -> Loaded:
    if engine == "native":
        return load_native(folder, pool, **override)
    return load_split(folder, pool, Split(0.5), engine, **override)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("scene", SCENES)
def test_no_further_from_float32_than_torch_in_bfloat16(scene: str, engine: str, folder: Path, pool: Pool) -> None:
    override = all_experts(folder)
    talk, runner = play(scene, model_of(engine, folder, pool, override))
    assert {name: talk.cached[name] for name in SCENES[scene][2]} == SCENES[scene][2]
    wanted = {name: sorted(runner.logits[name]) for name in talk.prompts}
    got = torch.stack([runner.logits[name][position] for name in talk.prompts for position in wanted[name]])
    exact, plain = (of(folder, dtype, talk, wanted) for dtype in (torch.float32, torch.bfloat16))
    scale = exact.abs().max()
    off_plain, off_got = ((rows - exact).pow(2).mean().sqrt() for rows in (plain, got))
    assert off_plain <= 0.05 * scale, "the bfloat16 reference itself is inaccurate"
    assert off_got <= 1.05 * off_plain + 1e-4 * scale


def of(folder: Path, dtype: torch.dtype, talk: Talk, wanted: dict[str, list[int]]) -> Tensor:
    """Logits of these positions, with all tokens computed as a prompt."""
    model = load_decoder(folder, dtype, **all_experts(folder))
    return torch.cat([logits_of(model, {name: tokens}, wanted) for name, tokens in talk.whole.items()])
