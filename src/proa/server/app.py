"""The FastAPI application: routes, middleware and error handlers around one Service."""

from __future__ import annotations

from fastapi import FastAPI, Request
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from proa.errors import ProaError
from proa.server import generate, models, ollama, openapi, status
from proa.server.access import Access, checked_origins
from proa.server.dialect import error_response
from proa.server.direct import DirectEndpoints
from proa.server.errors import ApiError, json_response
from proa.server.intake import IGNORED_HEADER
from proa.server.middleware import REQUEST_ID_HEADER, RequestMiddleware
from proa.server.not_served import refusal_of
from proa.server.replies import VERSION
from proa.server.service import Service


def build_app(service: Service) -> FastAPI:
    """Build the HTTP application described in docs/api.md. server/body.py parses bodies instead of FastAPI, so that
    every error has its protocol's format; therefore server/openapi.py makes /openapi.json. Raises UsageError for
    origins and a file of keys that cannot be used: middleware itself is made by the first request."""
    app = FastAPI(title="Proa", version=VERSION, docs_url=None, redoc_url=None, openapi_url=None)
    generating = generate.endpoints(service)
    for path, endpoint in generating.items():
        app.post(path, response_model=None)(endpoint)
    _add_ollama_routes(app, service)
    _add_model_routes(app, service)
    _add_status_routes(app, service)
    app.add_exception_handler(ApiError, _answer_error)
    app.add_exception_handler(ProaError, _answer_error)
    app.add_exception_handler(HTTPException, _answer_http_exception)
    _add_description(app)
    paths = [route.path for route in app.routes if isinstance(route, APIRoute)]
    app.add_middleware(DirectEndpoints, endpoints=generating)
    app.add_middleware(RequestMiddleware, service=service, access=Access(service.options), paths=paths)
    if origins := checked_origins(service.options):
        app.add_middleware(  # outermost: CORS preflight requests carry no API key
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[REQUEST_ID_HEADER, IGNORED_HEADER],
        )
    return app


def _add_ollama_routes(app: FastAPI, service: Service) -> None:
    @app.get("/api/tags", response_model=None)
    @app.get("/api/ps", response_model=None)
    async def tags() -> Response:
        return ollama.tags(service)

    @app.post("/api/show", response_model=None)
    async def show(request: Request) -> Response:
        return await ollama.show(request, service)

    @app.api_route("/api/version", methods=["GET", "HEAD"], response_model=None)
    async def version() -> Response:
        return ollama.version()


def _add_model_routes(app: FastAPI, service: Service) -> None:
    @app.get("/v1/models", response_model=None)
    async def list_models(request: Request) -> Response:
        return models.model_list(request, service)

    @app.get("/v1/models/{name:path}", response_model=None)
    async def get_model(name: str, request: Request) -> Response:
        return models.model_card(name, request, service)

    @app.post("/v1/messages/count_tokens", response_model=None)
    async def count_tokens(request: Request) -> Response:
        return await models.count_tokens(request, service)

    @app.post("/tokenize", response_model=None)
    async def tokenize(request: Request) -> Response:
        return await models.tokenize_text(request, service)

    @app.post("/detokenize", response_model=None)
    async def detokenize(request: Request) -> Response:
        return await models.detokenize_tokens(request, service)


def _add_status_routes(app: FastAPI, service: Service) -> None:
    @app.api_route("/", methods=["GET", "HEAD"], response_model=None)
    async def root() -> Response:
        return status.root(service)

    @app.api_route("/health", methods=["GET", "HEAD"], response_model=None)
    async def health() -> Response:
        return status.health(service)

    @app.get("/health/generate", response_model=None)
    async def health_generate(request: Request) -> Response:
        return await status.health_generate(request, service)

    @app.get("/version", response_model=None)
    async def version() -> Response:
        return status.version()

    @app.get("/metrics", response_model=None)
    async def metrics() -> Response:
        return status.metrics(service)


def _add_description(app: FastAPI) -> None:
    methods: dict[str, set[str]] = {}
    for route in app.routes:
        if isinstance(route, APIRoute):
            methods.setdefault(route.path_format, set()).update(route.methods or ())

    @app.get("/openapi.json", response_model=None)
    async def described() -> Response:
        return json_response(openapi.description(methods))


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError | ProaError)
    return error_response(error, request.scope)


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    """Convert the router's 404 and 405 to the protocol's error format."""
    assert isinstance(error, HTTPException)
    return error_response(_from_router(error, f"{request.method} {request.url.path}"), request.scope)


def _from_router(error: HTTPException, asked: str) -> ApiError:
    if error.status_code == 404 and (refusal := refusal_of(asked.partition(" ")[2])) is not None:
        return refusal
    if error.status_code == 404:
        return ApiError(404, "unknown_url", f"Unknown request URL: {asked}. docs/api.md lists them.")
    if error.status_code == 405:
        return ApiError(405, "method_not_allowed", f"{asked} is not allowed.", headers=dict(error.headers or {}))
    return ApiError(error.status_code, "http_error", str(error.detail))
