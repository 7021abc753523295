"""HTTP calls of a service over a fake engine. Never: tests."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import httpx

from fakes import FakeEngine, Reply
from proa.server.app import build_app
from proa.server.service import Service
from proa.text.tokenizer import Tokenizer
from served import make_service

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


USER = [{"role": "user", "content": "Hi"}]


T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


async def send(service: Service, method: str, path: str, **request: Any) -> httpx.Response:
    transport = httpx.ASGITransport(build_app(service), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://proa") as client:
        return await client.request(method, path, **request)


def post(tokenizer: Tokenizer, path: str, engine: FakeEngine | None = None, **request: Any) -> httpx.Response:
    """Send one request to a new server; `options`: fields of ServerOptions."""
    options = request.pop("options", {})

    async def work() -> httpx.Response:
        service = make_service(tokenizer, engine or FakeEngine(Reply(tokenizer.encode("Hello"))), **options)
        return await send(service, "POST", path, **request)

    return run(work())


def check_shape(response: httpx.Response) -> dict[str, Any]:
    """Assert that the body has OpenAI's error format; return the error object."""
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    assert "Traceback" not in response.text
    assert response.headers["x-request-id"]
    error: dict[str, Any] = body["error"]
    return error
