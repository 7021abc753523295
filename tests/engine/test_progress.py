"""Progress of prompts that are computed in several steps."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.turn_cases import case_of
from engines import finish_all, load_decoder, request
from proa.types import Progress
from tiny import make_tiny


@pytest.mark.parametrize("turns", [False, True])
def test_progress_of_prefill_chunks(turns: bool, tmp_path: Path) -> None:
    """One event a chunk but the last, and with turns some within each; the last prompt begins with pages of the prefix
    cache."""
    engine = case_of(load_decoder(make_tiny("qwen3-moe", tmp_path)), turns=turns, rows=16).engine
    prompt = [i % 250 for i in range(50)]
    asked = {
        "quiet": ([*prompt, 1], False, []),
        "told": ([1, *prompt], True, [Progress(done, 0) for done in (16, 32, 48)]),
        "cached": ([1, *prompt, *prompt], True, [Progress(done, 48) for done in (64, 80, 96)]),
    }
    for name, (tokens, wish, expected) in asked.items():
        engine.submit(request(name, tokens, 4, return_progress=wish))
        events = finish_all(engine)[name]
        told = [event.progress for event in events if event.progress is not None]
        assert [one for one in told if not turns or one in expected] == expected
        assert told == sorted(told, key=lambda one: one.computed)
        assert sum(len(event.tokens) for event in events) == 4
        assert all(not event.tokens and event.finish is None for event in events if event.progress is not None)


def test_progress_of_a_prompt_beside_decode(tmp_path: Path) -> None:
    """Between decode steps a chunk of 32 tokens passes three blocks one by one."""
    case = case_of(load_decoder(make_tiny("qwen3-moe", tmp_path)), durations=(1.0, 1.0), rows=32)
    engine = case.engine
    engine.submit(request("decoding", [5, 6], 60))
    engine.step()
    engine.submit(request("told", [i % 250 for i in range(50)], 2, return_progress=True))
    events = finish_all(engine)
    told = [event.progress for event in events["told"] if event.progress is not None]
    assert case.blocks == 3
    assert told == [Progress(done, 0) for done in (10, 21, 32, 38, 44)]
    assert sum(len(event.tokens) for event in events["told"]) == 2
    assert all(event.progress is None for event in events["decoding"])


def test_without_a_gpu_no_prompt_is_divided(tmp_path: Path) -> None:
    engine = case_of(load_decoder(make_tiny("qwen3-moe", tmp_path)), turns=False).engine
    engine.submit(request("a", [5, 6], 2))
    assert all(event.prompt_experts is None for event in finish_all(engine)["a"])
