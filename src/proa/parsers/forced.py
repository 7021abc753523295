"""Calls that a request demands: the text that an answer must then have, for a grammar."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from proa.parsers.formats import CallFormat
from proa.types import Constraint, Tag, Tags


def forced_call_grammar(
    calls: CallFormat | None, tools: Sequence[dict[str, Any]], names: Sequence[str], *, only_one: bool
) -> Constraint | None:
    """Demand one or more calls of the functions `names`, with arguments that their schemas accept; only_one: exactly
    one. None if the format's arguments are not JSON, so that no grammar of this form describes a call."""
    if calls is None or not calls.written:
        return None
    functions = {tool["function"].get("name"): tool["function"] for tool in tools}
    tags = []
    for name in names:
        begin, _, end = calls.written.replace("NAME", name).partition("ARGUMENTS")
        schema = functions[name].get("parameters") or {"type": "object"}
        tags.append(Tag(begin, Constraint.json(schema, param="tools"), end))
    return Constraint.tags(Tags(tags=tuple(tags), separator="\n", at_most=1 if only_one else None), param="tool_choice")
