"""The endpoints that generate text, from body to answer. Never: what the fields mean, the shapes of answers."""

from __future__ import annotations

import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from proa.errors import ProaError
from proa.llm import AsyncLLM
from proa.server.answer import Job, Shape, answer_objects
from proa.server.anthropic import messages_job
from proa.server.anthropic_schema import MessagesRequest
from proa.server.chat import chat_job
from proa.server.completions import completion_job
from proa.server.dialect import Dialect, dialect_of
from proa.server.errors import from_proa, internal, json_response
from proa.server.fields import Endpoint
from proa.server.intake import read_request
from proa.server.schema import ChatRequest, CompletionRequest, GeneratingRequest
from proa.server.service import Service, Tally
from proa.server.sse import EventStream, Opened, unless_gone

log = logging.getLogger(__name__)

R = TypeVar("R", bound=GeneratingRequest)
MakeJob = Callable[
    [AsyncLLM, R, str, str], Coroutine[Any, Any, Job]
]  # (model, request, id of the answer, name of the model)


async def chat_completions(request: Request, service: Service) -> Response:
    return await _generate(request, service, "chat", ChatRequest, chat_job)


async def completions(request: Request, service: Service) -> Response:
    return await _generate(request, service, "completions", CompletionRequest, completion_job)


async def messages(request: Request, service: Service) -> Response:
    return await _generate(request, service, "messages", MessagesRequest, messages_job)


async def _generate(
    request: Request, service: Service, endpoint: Endpoint, schema: type[R], make_job: MakeJob[R]
) -> Response:
    """Everything that can be refused is refused before the status line of a stream goes out."""
    asked, headers = await read_request(request, service, endpoint, schema)
    llm, tally, receive = service.ready(), tally_of(request), request.receive
    job = await unless_gone(receive, make_job(llm, asked, tally.request_id, service.model_name))
    objects = answer_objects(llm, job, tally, service.metrics)
    if asked.stream:
        opened = await unless_gone(receive, Opened.start(objects))
        dialect = dialect_of(request.url.path)
        return EventStream(opened, dialect.frames, _explainer(tally, dialect), headers)
    answer = await unless_gone(receive, _folded(objects, job.shape))
    return json_response(answer, headers=headers)


def tally_of(request: Request) -> Tally:
    """The record that the middleware keeps of this request."""
    tally: Tally = request.state.tally
    return tally


async def _folded(objects: AsyncGenerator[Any, None], shape: Shape) -> Any:
    return shape.fold([item async for item in objects])


def _explainer(tally: Tally, dialect: Dialect) -> Callable[[Exception], object]:
    """For errors in the middle of a stream: note them, log bugs, return the event's content."""

    def explain(error: Exception) -> object:
        tally.trouble = str(error) or type(error).__name__
        if isinstance(error, ProaError):
            return dialect.error_body(from_proa(error), tally.request_id)
        log.error("A bug in request %s", tally.request_id, exc_info=error)
        return dialect.error_body(internal(tally.request_id), tally.request_id)

    return explain
