"""Endpoints for supervisors: /health, /health/generate, /version, /metrics."""

from __future__ import annotations

import asyncio
import logging
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from proa.errors import ProaError
from proa.llm import AsyncLLM
from proa.obs.metrics import CONTENT_TYPE
from proa.server.errors import ApiError, json_response
from proa.server.replies import VERSION
from proa.server.service import Service
from proa.server.sse import unless_disconnected
from proa.types import SamplingParams

log = logging.getLogger(__name__)

GENERATE_TIMEOUT_S = 30.0
_PROBE = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
_PROBE_PRIORITY = -1_000_000  # ahead of all waiting requests


def root(service: Service) -> Response:
    """Answer 200, because some clients ask here whether there is a server."""
    return json_response({"name": "proa", "version": VERSION, "model": service.model_name})


def health(service: Service) -> Response:
    """Answer 200 when ready, else 503 with the reason; while loading, with phase, percent and ETA."""
    if service.is_draining:
        return _unhealthy("draining", reason="The server is shutting down.")
    if service.fatal_error is not None:
        return _unhealthy("failed", reason=str(service.fatal_error))
    llm = service.llm
    if llm is None or llm.engine.state == "loading":
        report = service.loading
        eta_s = None if report.eta_s is None else round(report.eta_s, 1)
        return _unhealthy("loading", phase=report.phase, percent=round(report.percent, 1), eta_s=eta_s)
    if llm.engine.state == "restarting":
        return _unhealthy("restarting", reason="The engine has died and is being restarted.")
    if llm.engine.state != "ready":
        return _unhealthy(llm.engine.state, reason="The engine is stopped.")
    return json_response({"status": "ready", "model": service.model_name})


async def health_generate(request: Request, service: Service) -> Response:
    """Answer 200 if a probe request gets a token, or, under load, if other requests make progress; else 503."""
    try:
        llm = service.ready()
        return await unless_disconnected(request.receive, _generate_one(llm))
    except (ApiError, ProaError) as error:
        return _unhealthy("failed", reason=str(error))


async def _generate_one(llm: AsyncLLM) -> Response:
    before = llm.engine.stats.scheduler
    try:
        async with asyncio.timeout(GENERATE_TIMEOUT_S):
            async with aclosing(llm.stream("Hello", _PROBE, priority=_PROBE_PRIORITY)) as chunks:
                finishes = [chunk.finish async for chunk in chunks]
    except TimeoutError:
        now = llm.engine.stats.scheduler
        if (now.generated_tokens, now.prompt_tokens) != (before.generated_tokens, before.prompt_tokens):
            return json_response({"status": "busy", "reason": "The probe is queued; other requests make progress."})
        return _unhealthy("failed", reason=f"The probe got no token within {GENERATE_TIMEOUT_S:.0f} s.")
    if finishes[-1:] != ["length"]:
        return _unhealthy("failed", reason=f"The probe ended with finish reason {finishes[-1:]}, not 'length'.")
    return json_response({"status": "ready"})


def version() -> Response:
    return json_response({"version": VERSION})


def metrics(service: Service) -> Response:
    return Response(service.metrics.render(), media_type=CONTENT_TYPE)


def _unhealthy(status: str, **details: Any) -> Response:
    return json_response({"status": status, **details}, 503, {"retry-after": "5"})
