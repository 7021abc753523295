"""Compiles grammars and names what cannot be compiled. Never: processes, threads.

llguidance compiles most of a grammar when it is first needed. It counts its own work and gives up beyond these limits,
which bound a mask to tens of milliseconds; some constructs still overflow the stack or take minutes, so a grammar is
first tried in a process of its own (trial.py).
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from proa.errors import RequestError
from proa.grammar.json_schema import children, read_schema
from proa.grammar.translate import to_grammar
from proa.types import Constraint, Tags

LIMITS = LLParserLimits(verbose_errors=False)
SEARCH_S = 1.0  # longest search for the part of a schema that is at fault


def compiled(constraint: Constraint, tree: LLTokenizer, special: Mapping[str, int]) -> LLMatcher:
    """Compile a constraint. Raises RequestError, which names the construct that cannot be compiled and its path."""
    parser = LLMatcher(tree, to_grammar(constraint, special), log_level=0, limits=LIMITS)
    if not parser.is_error():
        return parser
    why, place = parser.get_error(), constraint.param
    if constraint.kind == "json":
        place = ".".join((place, *_place(read_schema(constraint), why)))
    elif constraint.kind == "tags":
        for tag in msgspec.json.decode(constraint.text, type=Tags).tags:
            compiled(tag.content, tree, special)  # raises if the fault is in this one
    raise RequestError(f"{place}: {_cause(why)}.", "Remove or change it.", param=place)


def follow(parser: LLMatcher, tree: LLTokenizer, num_tokens: int) -> None:
    """Compute the masks of a text of up to `num_tokens` allowed tokens, because most of a grammar is compiled then. The
    parser may be in error afterwards; else it has consumed the text."""
    mask = np.zeros(tree.vocab_size // 32 + 1, np.int32)
    for i in range(num_tokens):
        parser.unsafe_compute_mask_ptr(mask.ctypes.data, 4 * -(-tree.vocab_size // 32))
        allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
        allowed = allowed[allowed != tree.eos_token]
        if parser.is_error() or not len(allowed) or not parser.consume_token(int(allowed[7919 * i % len(allowed)])):
            return


def _cause(why: str) -> str:
    """llguidance's error as a phrase: of several lines, the one with the cause."""
    why = why.removesuffix("<non-verbose/>").strip()
    lines = [line.strip() for line in why.splitlines()]
    cause = next(
        (line.removeprefix("error: ") for line in lines if line.startswith("error: ")), lines[0] if lines else why
    )
    if keys := re.fullmatch(r"Unimplemented keys: (\[.*\])", cause):
        return f"{', '.join(json.loads(keys[1]))} is not supported"
    if cause.startswith("oneOf constraints"):  # goes on with an option of llguidance's, which requests cannot set
        return "oneOf needs a type, or a required property with const, that tells its schemas apart; anyOf does not"
    return cause.rstrip(".")


def _place(schema: Any, why: str) -> list[str]:
    """The path to the innermost schema that fails alone with the same error, and the keyword in it."""
    end, path, seen = time.monotonic() + SEARCH_S, list[str](), set[int]()
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema} if isinstance(schema, dict) else {}
    while isinstance(schema, dict) and id(schema) not in seen:
        seen.add(id(schema))
        inner = [([*path, *step], child) for step, child in children(schema)] + _target(schema, shared)
        for place, child in inner:
            if time.monotonic() < end and isinstance(child, dict) and _fails(child, shared, why):
                path, schema = place, child
                break
        else:
            return [*path, *_keyword(schema, why)]
    return path


def _target(schema: dict[str, Any], shared: dict[str, Any]) -> list[tuple[list[str], Any]]:
    """Path and value of the definition that a schema refers to, if it does."""
    names = str(schema.get("$ref", "")).removeprefix("#/").split("/")
    definitions = shared.get(names[0])
    if len(names) == 2 and isinstance(definitions, dict) and names[1] in definitions:
        return [(names, definitions[names[1]])]
    return []


def _fails(schema: dict[str, Any], shared: dict[str, Any], why: str) -> bool:
    alone = json.dumps({**shared, **schema})
    return bool(LLMatcher.validate_grammar(f'{{"grammars":[{{"json_schema":{alone}}}]}}', limits=LIMITS) == why)


def _keyword(schema: dict[str, Any], why: str) -> list[str]:
    if why.startswith("regex parse error") or "lookaround" in why:
        return ["pattern"] if "pattern" in schema else []
    named = [key for key in schema if re.search(rf"\b{re.escape(key)}\b", why)]
    named += [key for key in ("oneOf", "anyOf", "$ref", "type") if key in schema]
    return named[:1]
