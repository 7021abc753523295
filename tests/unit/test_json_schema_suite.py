"""The JSON Schema Test Suite, draft 2020-12: for each of its schemas every answer is valid, or the schema is refused by
name. The suite is in jsonschema's sdist."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from fetched import unpacked
from grammars import matcher, random_answer, text_of
from proa.errors import RequestError
from proa.types import Constraint

jsonschema = pytest.importorskip("jsonschema")

SDIST = "jsonschema==4.26.0", "0c26707e2efad8aa1bfc5b7ce170f3fccc2e4918ff85989ba9ffa9facb2be326"
ANSWERS = 6  # random ones for each schema
LEAST_SCHEMAS, LEAST_ANSWERS = 130, 500


@pytest.fixture(scope="module")
def schemas() -> list[tuple[str, Any]]:
    folder = unpacked(*SDIST, source=True) / "jsonschema-4.26.0" / "json" / "tests" / "draft2020-12"
    files = sorted(Path(folder).glob("*.json"))
    return [(f"{file.stem}: {group['description']}", group["schema"]) for file in files for group in read(file)]


def read(file: Path) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))
    return groups


def refusal(constraint: Constraint) -> RequestError | None:
    try:
        matcher(constraint)
    except RequestError as error:
        return error
    return None


def test_answers_are_valid_or_the_schema_is_refused(schemas: list[tuple[str, Any]]) -> None:
    used, answers, invalid = 0, 0, list[str]()
    for name, schema in schemas:
        constraint = Constraint.json(schema)
        if refused := refusal(constraint):
            assert refused.param is not None
            assert refused.message.startswith(refused.param), name
            continue
        used += 1
        validator = jsonschema.Draft202012Validator(schema)
        for seed in range(ANSWERS):
            answer = random_answer(matcher(constraint), random.Random(seed))
            if answer is None:
                continue
            answers += 1
            if not validator.is_valid(json.loads(text_of(answer))):
                invalid.append(f"{name}: {text_of(answer)[:60]}")
    assert invalid == []
    assert used >= LEAST_SCHEMAS
    assert answers >= LEAST_ANSWERS
