"""The log line of each request."""

from __future__ import annotations

import logging

import pytest

from fakes import FakeEngine, Reply
from proa.text.tokenizer import Tokenizer
from proa.types import PromptExperts
from served import make_service
from server.http_calls import COMPLETIONS, run, send


@pytest.mark.parametrize("prompts", [1, 2])
@pytest.mark.parametrize("experts", [None, PromptExperts(3, 1), PromptExperts(0, 4)])
def test_the_line_says_how_the_prompt_was_computed(
    tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture, experts: PromptExperts | None, prompts: int
) -> None:
    engine = FakeEngine(Reply([7, 8, 9], cached_tokens=2, prompt_experts=experts))
    text = "a b c d e f"

    async def work() -> None:
        body = {"prompt": [text] * prompts, "max_tokens": 3, "n": 2}
        assert (await send(make_service(tokenizer, engine), "POST", COMPLETIONS, json=body)).status_code == 200

    with caplog.at_level(logging.INFO, "proa.server.middleware"):
        run(work())
    (line,) = [record.getMessage() for record in caplog.records if record.name == "proa.server.middleware"]
    count = prompts * len(tokenizer.encode(text))
    more = ""
    if experts is not None:
        more = f", {prompts * experts.streamed} streamed, {prompts * experts.cpu} by the CPU"
    assert f", {count} prompt tokens ({2 * prompts} cached{more}), first token after" in line
