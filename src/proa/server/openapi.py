"""The OpenAPI description: made from the request classes that validate requests, and from the tables of fields."""

from __future__ import annotations

import re
from typing import Any

from proa.server.anthropic_schema import CountTokensRequest, MessagesRequest
from proa.server.fields import IGNORED, REFUSED, Endpoint
from proa.server.ollama_schema import OllamaChatRequest, OllamaGenerateRequest, OllamaShowRequest
from proa.server.openapi_forms import refine
from proa.server.replies import VERSION
from proa.server.responses_schema import ResponsesRequest
from proa.server.schema import ApiRequest, ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeRequest

_SCHEMAS = "#/components/schemas/"
POSTED: dict[str, type[ApiRequest]] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountTokensRequest,
    "/api/chat": OllamaChatRequest,
    "/api/generate": OllamaGenerateRequest,
    "/api/show": OllamaShowRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def description(paths: dict[str, set[str]]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document. paths: {path of a route: its methods}."""
    components: dict[str, Any] = {}
    described: dict[str, Any] = {}
    for path, methods in paths.items():
        operations = described.setdefault(path, {})
        for method in sorted(methods):
            operations[method.lower()] = {"responses": {"default": {"description": "see docs/api.md"}}}
        if names := re.findall(r"{(\w+)[}:]", path):
            operations["parameters"] = [
                {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
            ]
        if path in POSTED:
            schema = POSTED[path]
            operations["post"]["description"] = schema.__doc__
            content = {"application/json": {"schema": {"$ref": _SCHEMAS + schema.__name__}}}
            operations["post"]["requestBody"] = {"required": True, "content": content}
    for schema in POSTED.values():
        whole = schema.model_json_schema(ref_template=_SCHEMAS + "{model}")
        components.update(whole.pop("$defs", {}))
        components[schema.__name__] = whole
        refine(schema, whole["properties"])
        whole["additionalProperties"] = True  # unknown fields are named in a header, or refused with --strict
        whole["properties"].update(_not_implemented(schema.endpoint, whole["properties"]))
    key = {"type": "http", "scheme": "bearer"}
    return {
        "openapi": "3.1.0",
        "info": {"title": "Proa", "version": VERSION, "description": "docs/api.md says what each field does."},
        "paths": described,
        "components": {"schemas": components, "securitySchemes": {"key": key}},
        "security": [{}, {"key": []}],
    }


def _not_implemented(endpoint: Endpoint, implemented: dict[str, Any]) -> dict[str, Any]:
    """Describe the refused and the ignored fields of an endpoint."""
    fields = {}
    for row in REFUSED:
        if row.is_for(endpoint) and row.name not in implemented:
            hint = f"Refused: not supported, and ignoring it would change the answer. {row.hint}".strip()
            fields[row.name] = {"description": hint, "enum": [None, *row.neutral]}
    for ignored in IGNORED:
        if ignored.name not in implemented:
            fields[ignored.name] = {"description": f"No effect: {ignored.why}."}
    return fields
