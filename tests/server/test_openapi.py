"""/openapi.json describes every route, and every field with its fate."""

from __future__ import annotations

from typing import Any

from http_calls import run, send

from fakes import FakeEngine
from proa.server.fields import REFUSED
from proa.server.openapi import POSTED
from proa.text.tokenizer import Tokenizer
from served import make_service


def test_description(tokenizer: Tokenizer) -> None:
    document: dict[str, Any] = run(send(make_service(tokenizer, FakeEngine()), "GET", "/openapi.json")).json()
    assert document["openapi"] == "3.1.0"
    assert {"/health", "/v1/models/{name}", *POSTED} <= set(document["paths"])
    schemas = document["components"]["schemas"]
    for path, schema in POSTED.items():
        reference = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]["$ref"]
        assert reference.rsplit("/", 1)[1] == schema.__name__
        fields = schemas[schema.__name__]["properties"]
        assert set(schema.model_fields) <= set(fields)
        refused = {row.name for row in REFUSED if row.is_for(schema.endpoint)} - set(schema.model_fields)
        assert all(fields[name]["description"].startswith("Refused") for name in refused)
    assert references(document) <= set(schemas)


def references(value: Any) -> set[str]:
    if isinstance(value, dict):
        own = {value["$ref"].rsplit("/", 1)[1]} if isinstance(value.get("$ref"), str) else set()
        return own.union(*map(references, value.values()))
    return set().union(*map(references, value)) if isinstance(value, list) else set()
