"""HTTP client of an OpenAI-compatible server for benchmarks: token ids in, arrival times out."""

from __future__ import annotations

import ipaddress
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec

from proa.bench.timing import Timing
from proa.config.value import is_http_url
from proa.errors import ProaError, UsageError


class Endpoint:
    """A client of a server's /v1/completions and /tokenize; made by `open_endpoint`."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self.model = model

    async def tokenize(self, text: str) -> list[int]:
        """Tokenise `text` with the server's tokenizer. Raises ProaError."""
        answer = await _json(self._http, "POST", "/tokenize", {"model": self.model, "prompt": text})
        return list(answer["tokens"])

    async def logprobs(self, prompt: list[int], output_tokens: int) -> list[float]:
        """The log-probabilities of a greedy answer. Raises ProaError."""
        body = {"model": self.model, "prompt": prompt, "max_tokens": output_tokens, "temperature": 0.0, "logprobs": 1}
        answer = await _json(self._http, "POST", "/v1/completions", {**body, "ignore_eos": True})
        return list(answer["choices"][0]["logprobs"]["token_logprobs"])

    async def metrics(self) -> dict[str, float]:
        """The server's metrics without labels, by name. Raises ProaError."""
        try:
            text = (await self._http.get("/metrics")).text
        except httpx.HTTPError as error:
            raise _unreachable(self._http, error) from error
        lines = [line.split() for line in text.splitlines() if not line.startswith("#")]
        return {line[0]: float(line[1]) for line in lines if len(line) == 2 and "{" not in line[0]}

    async def complete(self, prompt: list[int], output_tokens: int, start_s: float | None = None) -> Timing:
        """Generate exactly `output_tokens` greedy tokens, streamed, and record arrival times. The request's start time
        is now, or `start_s` (of time.perf_counter).

        Raises ProaError if the server refuses the request, fails, or returns another number of tokens.
        """
        start_s = time.perf_counter() if start_s is None else start_s
        body = {
            "model": self.model,
            "prompt": prompt,
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        arrivals: list[float] = []
        usage: dict[str, Any] = {}
        async for event in _events(self._http, body):
            choices = event.get("choices") or []
            if any(c.get("text") or (c.get("finish_reason") and not arrivals) for c in choices):
                arrivals.append(time.perf_counter())
            usage = event.get("usage") or usage
        made = usage.get("completion_tokens")
        if made != output_tokens or not arrivals:
            raise ProaError(
                f"The server generated {made} tokens instead of {output_tokens}.",
                "Use a server that supports ignore_eos and stream_options.include_usage.",
            )
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        return Timing(start_s, tuple(arrivals), usage.get("prompt_tokens", len(prompt)), made, cached)


@asynccontextmanager
async def open_endpoint(
    url: str, model: str, *, api_key: str | None = None, timeout_s: float = 600.0, allow_remote: bool = False
) -> AsyncIterator[Endpoint]:
    """Connect, and choose the model: `model` if the server has it, else the server's only model.

    Raises UsageError for what is no URL, a remote one without `allow_remote`, or if the model is ambiguous; ProaError
    if the server does not answer.
    """
    if not is_http_url(url):
        raise UsageError(f"--url is {url!r}.", "Give a server's address, such as http://127.0.0.1:8000.", param="url")
    if not (is_loopback(url) or allow_remote):
        raise UsageError(
            f"{url} is not on this machine.", "Add --allow-remote if you are allowed to put load on that server."
        )
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)  # --concurrency is the limit
    base = url.rstrip("/").removesuffix("/v1")
    # No proxy for loopback addresses.
    async with httpx.AsyncClient(
        base_url=base, headers=headers, limits=limits, timeout=timeout_s, trust_env=not is_loopback(url)
    ) as http:
        served = [entry["id"] for entry in (await _json(http, "GET", "/v1/models"))["data"]]
        if model not in served and len(served) != 1:
            raise UsageError(
                f"{url} serves {', '.join(served) or 'no model'}, not {model}.", "Choose a served model with --model."
            )
        yield Endpoint(http, model if model in served else served[0])


def is_loopback(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def _events(http: httpx.AsyncClient, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
    """Yield the server-sent events of a completion, up to [DONE]. Raises ProaError."""
    try:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise _refused("/v1/completions", response.status_code, await response.aread())
            async for line in response.aiter_lines():
                data = line.removeprefix("data:").strip()
                if not line.startswith("data:") or data == "[DONE]":
                    continue
                event = msgspec.json.decode(data, type=dict[str, Any])
                if "error" in event:
                    raise _refused("/v1/completions", response.status_code, data.encode())
                yield event
    except httpx.HTTPError as error:
        raise _unreachable(http, error) from error


async def _json(http: httpx.AsyncClient, method: str, path: str, body: Any = None) -> dict[str, Any]:
    try:
        response = await http.request(method, path, json=body)
    except httpx.HTTPError as error:
        raise _unreachable(http, error) from error
    if response.status_code != 200:
        raise _refused(path, response.status_code, response.content)
    try:
        return msgspec.json.decode(response.content, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ProaError(
            f"{path} of {http.base_url} did not return JSON.", "Check that it is an OpenAI-compatible server."
        ) from error


def _refused(path: str, status: int, content: bytes) -> ProaError:
    """Build the error from an OpenAI error body's message, or from the first 200 bytes of another body."""
    try:
        message = str(msgspec.json.decode(content)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        message = content[:200].decode(errors="replace")
    return ProaError(f"{path} answered {status}: {message}", "Give the key with --api-key." if status == 401 else "")


def _unreachable(http: httpx.AsyncClient, error: httpx.HTTPError) -> ProaError:
    what = f"{type(error).__name__} {error}".strip()
    return ProaError(f"{http.base_url} does not answer ({what}).", "Start a server: `proa serve MODEL`.")
