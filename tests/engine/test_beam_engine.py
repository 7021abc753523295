"""Beam search over an engine in this process: against transformers, and against all answers of a tiny vocabulary."""

from __future__ import annotations

import asyncio
import itertools
from collections import defaultdict
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from engines import load_decoder, make_engine
from proa.beam.driver import Found, beam_search
from proa.engine.engine import Engine
from proa.engine.processes.handle import EngineHandle
from proa.types import EngineRequest, Sampling, SamplingParams, TokenEvent
from tiny import make_tiny, tiny_reference

PROMPT = [17, 3, 250, 41, 9, 88, 120, 5, 61, 77]
TOLERANCE = 2e-4  # of a score: sums of float32 logprobs, computed in another order


class InProcess:
    """`generate` of an EngineHandle over an Engine, which runs a step whenever an event is waited for."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.requests: list[EngineRequest] = []
        self._events: dict[str, list[TokenEvent]] = defaultdict(list)

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        self.requests.append(request)
        self.engine.submit(request)
        while True:
            await asyncio.sleep(0)  # the other beams submit their requests
            if not self._events[request.id]:
                for event in self.engine.step():
                    self._events[event.id].append(event)
            while self._events[request.id]:
                event = self._events[request.id].pop(0)
                yield event
                if event.finish is not None:
                    return


def found_by(engine: InProcess, prompt: list[int], ends: tuple[int, ...], most: int, **params: Any) -> list[Found]:
    asked = SamplingParams(use_beam_search=True, **params)
    sampling = Sampling(max_tokens=most, eos_token_ids=ends, logprobs=params.get("logprobs"))
    request = EngineRequest(id="beams", tokens=prompt, sampling=sampling, group="beams")
    return asyncio.run(beam_search(cast(EngineHandle, engine), request, asked))


@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-next"])
@pytest.mark.parametrize(
    ("width", "penalty", "early"), [(1, 1.0, False), (3, 1.0, False), (4, 0.0, False), (5, 2.0, True), (4, -1.0, True)]
)
def test_beams_are_those_of_transformers(family: str, width: int, penalty: float, early: bool, tmp_path: Path) -> None:
    """transformers' early_stopping="never" is Proa's False. Several end tokens, so that some beams end early."""
    ends, most = tuple(range(2, 14)), 7
    reference = tiny_reference(family)
    settings: dict[str, Any] = {
        "num_beams": width, "num_return_sequences": width, "max_new_tokens": most, "length_penalty": penalty,
        "early_stopping": early or "never", "do_sample": False, "eos_token_id": list(ends), "pad_token_id": 0,
        "output_scores": True, "return_dict_in_generate": True,
    }  # fmt: skip
    with torch.inference_mode():
        theirs = reference.generate(torch.tensor([PROMPT]), attention_mask=torch.ones(1, len(PROMPT)), **settings)
    engine, _ = make_engine(load_decoder(make_tiny(family, tmp_path / "model")))
    wishes = {"n": width, "best_of": width, "length_penalty": penalty, "early_stopping": early}
    found = found_by(InProcess(engine), PROMPT, ends, most, **wishes)
    assert [answer.event.tokens for answer in found] == [
        list(itertools.takewhile(lambda t: t not in ends, row)) for row in theirs.sequences[:, len(PROMPT) :].tolist()
    ]
    if width > 1:
        assert [answer.score for answer in found] == pytest.approx(theirs.sequences_scores.tolist(), abs=TOLERANCE)
    assert not engine.has_work
    engine.scheduler.check()


def test_all_answers_of_a_tiny_vocabulary(tmp_path: Path) -> None:
    """With as many beams as sequences the search is exhaustive: all 5 ** 3 of them are scored by teacher forcing."""
    vocab, most, end = 5, 3, 2
    reference = tiny_reference("qwen3-moe", vocab_size=vocab)
    engine, _ = make_engine(load_decoder(make_tiny("qwen3-moe", tmp_path / "model", vocab_size=vocab)))
    prompt = [1, 4, 3, 0]
    handle = InProcess(engine)
    found = found_by(handle, prompt, (end,), most, n=20, best_of=125, length_penalty=0.7, logprobs=2)

    scores: dict[tuple[int, ...], float] = {}
    for answer in itertools.product(range(vocab), repeat=most):
        kept = (*itertools.takewhile(lambda t: t != end, answer), end)[:most]
        with torch.inference_mode():
            logprobs = reference(torch.tensor([[*prompt, *kept]])).logits[0].log_softmax(-1)
        total = sum(float(logprobs[len(prompt) - 1 + i, token]) for i, token in enumerate(kept))
        scores[kept] = total / len(kept) ** 0.7
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:20]
    assert [(*a.event.tokens, *([end] if a.event.finish == "stop" else [])) for a in found] == [
        list(b) and b for b in best
    ]
    assert [a.score for a in found] == pytest.approx([scores[b] for b in best], abs=TOLERANCE)
    for answer in found:
        assert [entry.token for entry in answer.event.logprobs or []] == answer.event.tokens
        assert all(len(entry.top) == 2 for entry in answer.event.logprobs or [])


def test_a_step_computes_at_most_a_page_per_beam(tmp_path: Path) -> None:
    engine, runner = make_engine(load_decoder(make_tiny("qwen3", tmp_path / "model")), page_tokens=4, num_pages=256)
    handle = InProcess(engine)
    found = found_by(handle, PROMPT * 3, (), 12, best_of=3)
    assert [len(answer.event.tokens) for answer in found] == [12]
    beams = len(handle.requests) - 1
    assert beams == 3 * 11
    assert runner.rows_computed <= len(PROMPT * 3) + 4 * beams
