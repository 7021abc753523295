"""The endpoints that generate text: read the request, run it, stream or return the response."""

from __future__ import annotations

import logging
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Send

from proa.errors import ProaError
from proa.llm import AsyncLLM
from proa.server import ollama
from proa.server.answer import Job, answer_objects
from proa.server.anthropic import messages_job
from proa.server.anthropic_schema import MessagesRequest
from proa.server.chat import chat_job
from proa.server.completions import completion_job
from proa.server.dialect import Dialect, dialect_of
from proa.server.direct import Endpoint
from proa.server.errors import from_proa, internal, json_response
from proa.server.intake import ignored_header, read_request
from proa.server.ollama_schema import OllamaChatRequest, OllamaGenerateRequest
from proa.server.responses import responses_job
from proa.server.responses_schema import ResponsesRequest
from proa.server.schema import ChatRequest, CompletionRequest, GeneratingRequest
from proa.server.service import RequestRecord, Service
from proa.server.sse import WhileConnected, send_events

log = logging.getLogger(__name__)

R = TypeVar("R", bound=GeneratingRequest)
MakeJob = Callable[[AsyncLLM, R, str, str], Coroutine[Any, Any, Job]]  # (llm, request, response id, model name)


def endpoints(service: Service) -> dict[str, Endpoint]:
    """Return the endpoints that generate text, by their paths."""
    return {
        "/v1/chat/completions": _endpoint(service, ChatRequest, chat_job),
        "/v1/completions": _endpoint(service, CompletionRequest, completion_job),
        "/v1/responses": _endpoint(service, ResponsesRequest, partial(responses_job, service.responses)),
        "/v1/messages": _endpoint(service, MessagesRequest, messages_job),
        "/api/chat": _endpoint(service, OllamaChatRequest, ollama.chat_job),
        "/api/generate": _endpoint(service, OllamaGenerateRequest, ollama.generate_job),
    }


def _endpoint(service: Service, schema: type[R], make_job: MakeJob[R]) -> Endpoint:
    async def endpoint(request: Request) -> Response:
        return await _generate(request, service, schema, make_job)

    return endpoint


async def _generate(request: Request, service: Service, schema: type[R], make_job: MakeJob[R]) -> Response:
    """Serve one request. All checks run before the first byte of the response, so that a refusal has its own status."""
    asked, ignored = await read_request(request, service, schema)
    if asked.is_empty:
        return ollama.loaded(service)
    llm = service.ready()
    record: RequestRecord = request.state.record  # of the middleware
    await service.turns.next()

    async def answer(send: Send) -> None:
        job = await make_job(llm, asked, record.request_id, service.model_name)
        headers = {**ignored_header([*ignored, *asked.without_effect(job.params)]), **job.headers}
        objects = answer_objects(llm, job, record, service.metrics)
        if asked.stream:
            dialect = dialect_of(request.scope["path"])
            await send_events(objects, dialect.frames, _explainer(record, dialect, job), headers, send)
        else:
            folded = job.writer.fold([item async for item in objects])
            await json_response(folded, headers=headers)(request.scope, request.receive, send)

    return WhileConnected(answer)


def _explainer(record: RequestRecord, dialect: Dialect, job: Job) -> Callable[[Exception], object]:
    """Return a function that handles an error in mid-stream: it records the error, logs a bug, and returns the content
    of the error event."""

    def explain(error: Exception) -> object:
        record.error = str(error) or type(error).__name__
        if isinstance(error, ProaError):
            shown = from_proa(error)
        else:
            log.error("Unexpected error in request %s", record.request_id, exc_info=error)
            shown = internal(record.request_id)
        return job.failure(shown) if job.failure is not None else dialect.error_body(shown, record.request_id)

    return explain
