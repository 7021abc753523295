"""Large bodies are checked in a process of their own: same answers, same errors, and the server goes on meanwhile."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from http_calls import CHAT, COMPLETIONS, USER, run, send

from fakes import FakeEngine, Reply, make_plan, make_tokenizer
from proa.config.options import ServerOptions
from proa.llm import AsyncLLM, TextSource
from proa.server import precheck
from proa.server.precheck import Check, Precheck, Right
from proa.server.precheck_process import MAX_REDUCED_BYTES, checked
from proa.server.service import Service
from served import MODEL

PADDING = {"metadata": "x" * 2_000_000, "wibble": [1] * 100_000}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> TextSource:
    path = make_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return TextSource(
        plan=make_plan(),
        tokenizer_path=str(path),
        chat_template=None,
        tool_call_parser="auto",
        reasoning_parser="auto",
        vocab_size=512,
        config={},
        generation_config=None,
    )


def make_service(source: TextSource, **options: Any) -> Service:
    llm = AsyncLLM.without_engine(source)
    llm.engine = FakeEngine(Reply(llm.tokenizer.encode("Hello")))
    service = Service(ServerOptions(**options), MODEL, llm)
    service.precheck = Precheck(source)
    return service


def test_large_bodies_are_answered_and_refused_as_small_ones(source: TextSource) -> None:
    async def work() -> None:
        service = make_service(source)
        assert service.precheck is not None
        body: dict[str, Any] = {"messages": USER, **PADDING}
        answered = await send(service, "POST", CHAT, json=body)
        assert answered.status_code == 200, answered.text
        assert answered.json()["choices"][0]["message"]["content"] == "Hello"
        assert answered.headers["x-proa-ignored-fields"] == "wibble, metadata"
        wrong = {
            "messages": 'messages is missing', "invalid JSON": "not valid JSON", "too long": "maximum context length",
        }  # fmt: skip
        contents = [
            json.dumps(PADDING).encode(),
            b'{"x": "' + b"y" * 1_000_000,
            json.dumps({"prompt": "word " * 400_000}).encode(),
        ]
        for message, content, path in zip(wrong.values(), contents, (CHAT, CHAT, COMPLETIONS), strict=True):
            refused = await send(service, "POST", path, content=content, headers={"content-type": "application/json"})
            assert refused.status_code == 400
            assert message in refused.json()["error"]["message"]
        process = service.precheck._process
        assert process is not None
        process.kill()
        await process.wait()
        lost = await send(service, "POST", CHAT, json=body)
        assert lost.status_code == 500
        assert (await send(service, "POST", CHAT, json=body)).status_code == 200
        last = service.precheck._process
        service.precheck.close()
        assert last is not None
        await asyncio.wait_for(last.wait(), 10)

    run(work())


def test_small_bodies_stay_here(source: TextSource) -> None:
    async def work() -> None:
        service = make_service(source)
        assert service.precheck is not None
        assert (await send(service, "POST", CHAT, json={"messages": USER})).status_code == 200
        assert service.precheck._process is None

    run(work())


def test_a_process_that_parsed_a_very_large_body_is_not_kept(
    source: TextSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ten bodies of 30 MiB left it with 2.8 GB for good."""
    monkeypatch.setattr(precheck, "KEPT_BYTES", 3_000_000)

    async def work() -> None:
        service = make_service(source)
        assert service.precheck is not None
        small, large = ({"messages": USER, "metadata": "x" * count} for count in (2_000_000, 4_000_000))
        both = await asyncio.gather(*(send(service, "POST", CHAT, json=body) for body in (large, small)))
        assert [answer.status_code for answer in both] == [200, 200]
        assert service.precheck._process is None
        assert (await send(service, "POST", CHAT, json=small)).status_code == 200
        kept = service.precheck._process
        assert kept is not None
        service.precheck.close()
        await asyncio.wait_for(kept.wait(), 10)

    run(work())


@pytest.mark.parametrize(
    ("schema", "fields"),
    [
        ("ChatRequest", {"messages": USER, "max_tokens": 5}),
        ("CompletionRequest", {"prompt": "Hi"}),
        ("MessagesRequest", {"messages": USER, "max_tokens": 5}),
        ("CountTokensRequest", {"messages": USER}),
        ("ResponsesRequest", {"input": "Hi"}),
        ("ResponsesRequest", {"input": "Hi", "previous_response_id": "resp_1"}),
        ("TokenizeRequest", {"prompt": "Hi"}),
        ("DetokenizeRequest", {"tokens": [1]}),
    ],
)
def test_what_is_left_of_a_body(source: TextSource, schema: str, fields: dict[str, Any]) -> None:
    body = json.dumps({**fields, "wibble": "x" * 1000, "client_metadata": "y" * 1000}).encode()
    outcome = checked(AsyncLLM.without_engine(source), Check(schema, False, len(body)), body)
    assert isinstance(outcome, Right)
    left = json.loads(outcome.body)
    assert {name: left.pop(name) for name in ("wibble", "client_metadata")} == {"wibble": None, "client_metadata": True}
    assert {name: left[name] for name in fields if name != "input"} == {n: v for n, v in fields.items() if n != "input"}


def test_what_is_left_is_bounded(source: TextSource) -> None:
    body = json.dumps({"tokens": [1] * MAX_REDUCED_BYTES}).encode()
    outcome = checked(AsyncLLM.without_engine(source), Check("DetokenizeRequest", False, len(body)), body)
    assert not isinstance(outcome, Right)
    assert outcome.status == 413


def test_large_is_less_than_the_limit() -> None:
    from proa.server.body import MAX_BODY_BYTES

    assert precheck.LARGE_BYTES < MAX_REDUCED_BYTES < MAX_BODY_BYTES
