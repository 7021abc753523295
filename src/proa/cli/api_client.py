"""A small HTTP client of OpenAI-compatible servers, for `proa chat`."""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from proa.errors import ProaError, RequestError

_LOOPBACK = ("127.0.0.1", "localhost", "::1")


@dataclass(frozen=True)
class Served:
    """One entry of /v1/models: the model's name in the API, the MODEL it was loaded from, and its context length, 0
    until that is known."""

    name: str
    source: str
    context_tokens: int = 0


@dataclass(frozen=True)
class Usage:
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class PromptProgress:
    """Tokens of a prompt that is being computed; `processed` includes the `cached` ones."""

    total: int
    cached: int
    processed: int


@dataclass(frozen=True)
class Piece:
    """One event of a streamed answer; `usage` and `finish` are set at most once per answer, near its end."""

    text: str = ""
    reasoning: str = ""
    finish: str | None = None
    usage: Usage | None = None
    progress: PromptProgress | None = None


class ApiClient:
    """A client of http://host:port; use as a context manager."""

    def __init__(self, host: str, port: int, api_key: str | None = None) -> None:
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        self._http = httpx.Client(
            base_url=self.url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(None, connect=5.0),  # prefill of a long prompt may take minutes
            trust_env=host not in _LOOPBACK,  # no proxy for loopback addresses
        )

    def __enter__(self) -> ApiClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def models(self) -> list[Served] | None:
        """Return the models that the server serves; None if there is no server. Raises ProaError if it refuses the
        request or is not OpenAI-compatible."""
        try:
            answer = self._http.get("/v1/models", timeout=5.0)
        except httpx.TransportError:
            return None
        if answer.status_code != 200:
            raise _refusal(answer, self.url)
        try:
            return [
                Served(str(entry["id"]), str(entry.get("root") or entry["id"]), int(entry.get("max_model_len") or 0))
                for entry in answer.json()["data"]
            ]
        except (ValueError, KeyError, TypeError) as e:
            raise ProaError(
                f"The server at {self.url} is not OpenAI-compatible.", "Choose another --host or --port."
            ) from e

    def health(self) -> dict[str, Any] | None:
        """Return None if the server is ready (or has no /health), its progress report while it loads. Raises ProaError
        if it is draining or has failed."""
        answer = self._get("/health")
        body = _json(answer)
        if answer.status_code != 503:
            return None
        if body.get("status") != "loading":
            reason = body.get("reason") or f"Its status is {body.get('status', 'unknown')}."
            raise ProaError(f"The server at {self.url} cannot answer: {reason}", "Restart it.")
        return body

    def roof_tokens_per_s(self) -> float | None:
        """Return the roof of decode from Proa's /metrics, in tokens/s; None if the server does not report one."""
        match = re.search(r"^proa_roof_tokens_per_second(?:\{.*\})? (\S+)$", self._get("/metrics").text, re.MULTILINE)
        return float(match[1]) if match else None

    def stream_chat(
        self, model: str, messages: list[dict[str, str]], settings: Mapping[str, Any], *, progress: bool = False
    ) -> Generator[Piece, None, None]:
        """Yield the pieces of an answer; progress: also those of a long prompt's progress. Closing the generator, or an
        exception, closes the connection, on which the server stops generating. Raises ProaError."""
        body = {
            "model": model, "messages": messages, "stream": True, "stream_options": {"include_usage": True},
            **({"return_progress": True} if progress else {}), **settings,
        }  # fmt: skip
        try:
            with self._http.stream("POST", "/v1/chat/completions", json=body) as answer:
                if answer.status_code != 200:
                    answer.read()
                    raise _refusal(answer, self.url)
                for line in _lines(answer):
                    if line == b"data: [DONE]":
                        return
                    if line.startswith(b"data:"):
                        yield _piece(json.loads(line[5:]))
        except UnicodeEncodeError as e:  # Python decodes such bytes of arguments and input to lone surrogates
            raise RequestError("The prompt, the system message or a setting is not UTF-8.", "Send UTF-8 text.") from e
        except (httpx.TransportError, ValueError) as e:  # the connection broke, perhaps inside an event
            raise _gone(self.url) from e
        raise _gone(self.url)

    def _get(self, path: str) -> httpx.Response:
        try:
            return self._http.get(path, timeout=30.0)
        except httpx.TransportError as e:
            raise _gone(self.url) from e


def _lines(answer: httpx.Response) -> Iterator[bytes]:
    """Yield a stream's lines. httpx's iter_lines also cuts them at U+0085 and U+2028, which JSON text may contain."""
    begun = b""
    for data in answer.iter_bytes():
        *lines, begun = (begun + data).split(b"\n")
        yield from (line.removesuffix(b"\r") for line in lines)


def _piece(event: dict[str, Any]) -> Piece:
    if "error" in event:
        raise ProaError(str(event["error"].get("message", event["error"])))
    choice: dict[str, Any] = next(iter(event.get("choices") or []), {})
    usage = event.get("usage")
    progress = event.get("prompt_progress")
    delta = choice.get("delta") or {}
    return Piece(
        text=delta.get("content") or "",
        reasoning=delta.get("reasoning_content") or delta.get("reasoning") or "",
        finish=choice.get("finish_reason"),
        usage=Usage(
            prompt_tokens=usage["prompt_tokens"],
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            completion_tokens=usage["completion_tokens"],
        )
        if usage
        else None,
        progress=PromptProgress(progress["total"], progress["cache"], progress["processed"]) if progress else None,
    )


def _refusal(answer: httpx.Response, url: str) -> ProaError:
    error = _json(answer).get("error")
    message = error.get("message") if isinstance(error, dict) else None
    message = str(message or f"{url} answered {answer.status_code} {answer.reason_phrase}.")
    if answer.status_code == 401:
        return RequestError(message, "Give the server's key with --api-key.")
    return RequestError(message) if answer.status_code < 500 else ProaError(message)


def _gone(url: str) -> ProaError:
    return ProaError(f"The server at {url} no longer answers.", "See its log, and restart it.")


def _json(answer: httpx.Response) -> dict[str, Any]:
    try:
        body = answer.json()
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
