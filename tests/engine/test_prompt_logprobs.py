"""Log-probabilities of a prompt: complete, sent once and right, however often its request was preempted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines import finish_all, load_decoder, make_engine, request
from tiny import make_tiny


@pytest.mark.parametrize("chunk", [5, 256])
def test_complete_and_once_through_preemptions(tmp_path: Path, chunk: int) -> None:
    model = load_decoder(make_tiny("qwen3-moe", tmp_path / "tiny"))
    engine, runner = make_engine(model, num_pages=40, max_batch_tokens=chunk, prefix_cache=False)
    rng = torch.Generator().manual_seed(3)
    prompts = {f"r{i}": torch.randint(3, 250, (24 + i,), generator=rng).tolist() for i in range(5)}
    for name, tokens in prompts.items():
        engine.submit(request(name, tokens, 30, prompt_logprobs=2))
    events = finish_all(engine)
    assert engine.stats().scheduler.preemptions > 0
    for name, tokens in prompts.items():
        (scores,) = [e.prompt_logprobs for e in events[name] if e.prompt_logprobs is not None]
        assert scores[0] is None
        assert [s.token for s in scores[1:] if s] == tokens[1:]
        rows = torch.stack([runner.logits[name][p] for p in range(len(tokens) - 1)])
        want = torch.log_softmax(rows, -1)[range(len(rows)), tokens[1:]]
        assert [s.logprob for s in scores[1:] if s] == pytest.approx(want.tolist(), abs=1e-4)
