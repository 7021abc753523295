"""Translates a Constraint to llguidance's grammar format. Never: compiling, tokens' bytes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import msgspec
from llguidance import LLMatcher, regex_to_lark
from llguidance.gbnf_to_lark import gbnf_to_lark

from proa.grammar.json_schema import constraint_error, for_llguidance
from proa.types import Constraint, Tags

MOST_BYTES = 1 << 20
MOST_TAGS = 1024
# Only a Lark grammar has this; its rule may be inlined (?) or keep its tokens (!).
_LARK = re.compile(r"^\s*(%llguidance\b|[?!]*start\s*(\[.*\]\s*)?:(?!:=))", re.MULTILINE)


def to_grammar(constraint: Constraint, special: Mapping[str, int]) -> str:
    """Return the grammar. special: ids of special tokens by their texts, which tags may contain.

    Raises RequestError for a text that is too long or malformed; the compiler finds all other errors.
    """
    size = len(constraint.text.encode("utf-8", "surrogatepass"))
    if size > MOST_BYTES:
        raise constraint_error(constraint, f"it has {size} bytes", f"Send at most {MOST_BYTES}.")
    match constraint.kind:
        case "json":
            return msgspec.json.encode({"grammars": [{"json_schema": for_llguidance(constraint)}]}).decode()
        case "tags":
            return _of_tags(constraint, special)
    return str(LLMatcher.grammar_from_lark(_lark(constraint)))


def _lark(constraint: Constraint) -> str:
    match constraint.kind:
        case "regex":
            return f"start: {_regex(constraint.text)}"
        case "choice":
            options = json.loads(constraint.text)
            if not options or not all(isinstance(option, str) for option in options):
                raise constraint_error(
                    constraint, "it is not a list of one or more strings", "Send the texts to choose from."
                )
            return "start: " + " | ".join(map(_literal, options))
    if _LARK.search(constraint.text):
        return constraint.text
    try:
        return str(gbnf_to_lark(constraint.text))
    except (Exception, RecursionError) as error:  # the converter raises plain Exception
        raise constraint_error(constraint, f"the GBNF grammar is malformed: {error}", "Correct it.") from error


def _regex(pattern: str) -> str:
    """A Lark terminal that matches the pattern, in which \\d is an ASCII digit."""
    one_line = re.sub(r"\\?\n", lambda _: r"\n", pattern)
    return f"/{regex_to_lark(one_line, 'd')}/"


def _literal(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _of_tags(constraint: Constraint, special: Mapping[str, int]) -> str:
    tags = msgspec.json.decode(constraint.text, type=Tags)
    least, most = tags.at_least, tags.at_most
    if not tags.tags or len(tags.tags) > MOST_TAGS or any(tag.content.kind == "tags" for tag in tags.tags):
        raise constraint_error(
            constraint, f"it has {len(tags.tags)} tags", f"Send 1 to {MOST_TAGS}, none of them inside another."
        )
    if least < 0 or (most is not None and most < max(1, least)):
        raise constraint_error(constraint, f"at_least is {least} and at_most {most}", "Send 0 <= at_least <= at_most.")
    rules: list[str] = []
    inner: list[dict[str, Any]] = []
    leads = {trigger: f"lead_{i}" for i, trigger in enumerate(tags.triggers)}
    for i, tag in enumerate(tags.tags):
        lead, begin = "", tag.begin
        if leads:
            trigger = next((t for t in sorted(leads, key=len, reverse=True) if t and begin.startswith(t)), None)
            if trigger is None:
                raise constraint_error(
                    constraint, f"the tag {begin!r} begins with none of the triggers", "Add its trigger."
                )
            lead, begin = leads[trigger] + " ", begin[len(trigger) :]
        content = f"@content_{i}"
        inner.append({"name": content[1:], **_content(tag.content)})
        rules.append(f"tag_{i}: {lead}{_marked(begin, special)} {content} {_marked(tag.end, special)}")
    one = " | ".join(f"tag_{i}" for i in range(len(tags.tags)))
    rules += [_lead(rule, trigger, special) for trigger, rule in leads.items()]
    between = f"{_marked(tags.separator, special)} one" if tags.separator else "one"
    more = "" if most == 1 else f"({between}){{{max(least, 1) - 1},{'' if most is None else most - 1}}}"
    rules += [f"one: {one}", f"all: one {more}", f"start: {_around(least, most, free_text=bool(leads))}"]
    rules += [r"REST: /(.|\n)*/"] if leads else []
    lark = "\n".join(rules)
    return msgspec.json.encode({"grammars": [{"name": "tags", "lark_grammar": lark}, *inner]}).decode()


def _around(least: int, most: int | None, *, free_text: bool) -> str:
    """The rule for all tags and the free text after them."""
    if not free_text:
        return "all" if least else "all?"
    if most is None:
        return "all REST" if least else "all? REST"
    return "all" if least else "all | REST"


def _content(constraint: Constraint) -> dict[str, Any]:
    if constraint.kind == "json":
        return {"json_schema": for_llguidance(constraint)}
    return {"lark_grammar": _lark(constraint)}


def _lead(rule: str, trigger: str, special: Mapping[str, int]) -> str:
    """A rule for free text up to and including the trigger."""
    if trigger in special:
        return f"{rule}: REST {_marked(trigger, special)}"
    return f"{rule}[lazy]: /(.|\\n)*/ {_literal(trigger)}"


def _marked(text: str, special: Mapping[str, int]) -> str:
    """A literal in which the texts of special tokens stand for these tokens."""
    if not special:
        return _literal(text)
    pattern = "|".join(re.escape(name) for name in sorted(special, key=len, reverse=True))
    parts = re.split(f"({pattern})", text)
    return " ".join(f"<[{special[part]}]>" if part in special else _literal(part) for part in parts)
