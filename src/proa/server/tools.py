"""Validate tools and tool_choice, and constrain answers in which calls are forced or strict."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import msgspec

from proa.errors import RequestError
from proa.llm import AsyncLLM
from proa.parsers.forced import call_grammar
from proa.server.errors import ApiError
from proa.types import SamplingParams


@dataclass(frozen=True)
class Offer:
    """The tools that tool_choice allows, and the names of the functions of which one must be called."""

    tools: list[dict[str, Any]] | None
    forced: tuple[str, ...] = ()

    @property
    def has_strict(self) -> bool:
        """True if a function has `strict`: its arguments must then match its schema."""
        return any(tool["function"].get("strict") is True for tool in self.tools or [])


def offer_tools(tools: list[dict[str, Any]] | None, choice: Any) -> Offer:
    """Validate tools and tool_choice in OpenAI's form: "none", "auto", "required", a function's name, or a list of
    allowed tools. Raises ApiError 400."""
    for i, tool in enumerate(tools or []):
        if tool.get("type") != "function" or not isinstance(tool.get("function"), dict):
            message = 'A tool must have the form {"type": "function", "function": {...}}.'
            raise ApiError(400, "invalid_value", message, param=f"tools[{i}]")
    if choice == "none":
        return Offer(None)
    names = [str(tool["function"].get("name")) for tool in tools or []]
    wanted, mode = _wanted(choice, names)
    if unknown := [name for name in wanted if name not in names]:
        raise _wrong_choice(f"tool_choice names {unknown[0]!r}, which is not among the tools.")
    if mode not in ("auto", "required"):
        raise _wrong_choice(f"tool_choice is {mode!r}; use none, auto, required or a function's name.")
    left = [tool for tool, name in zip(tools or [], names, strict=True) if name in wanted] or None
    if mode == "required" and left is None:
        raise _wrong_choice("tool_choice forces a call, but there are no tools.")
    return Offer(left, tuple(wanted) if mode == "required" else ())


def _wanted(choice: Any, names: list[str]) -> tuple[Collection[str], str]:
    """Return (the functions that may be called, the mode)."""
    if not isinstance(choice, dict):
        return names, choice or "auto"
    allowed = choice.get("allowed_tools", choice if "mode" in choice else None)
    if isinstance(allowed, dict):
        listed = allowed.get("tools") or []
        if not isinstance(listed, list):
            raise _wrong_choice("tool_choice.allowed_tools.tools must be a list of functions.")
        return [_name_in(tool) for tool in listed], allowed.get("mode", "auto")
    return [_name_in(choice)], "required"


def _name_in(choice: Any) -> str:
    function = choice.get("function", choice) if isinstance(choice, dict) else {}
    return str(function.get("name") if isinstance(function, dict) else None)


def _wrong_choice(message: str) -> ApiError:
    return ApiError(400, "invalid_value", message, param="tool_choice")


def with_calls(llm: AsyncLLM, offer: Offer, params: SamplingParams, *, only_one: bool) -> SamplingParams:
    """Return the parameters with a grammar for forced or strict calls; unchanged if the offer has neither. Raises
    ApiError 400 if no grammar is known for this model's calls, RequestError if the request has another constraint."""
    has_other = params.constraint is not None
    if not offer.forced and (has_other or not offer.has_strict):
        return params
    if params.use_beam_search:
        name, remedy = "tools", "strict to false"
        if offer.forced:
            name, remedy = "tool_choice", 'tool_choice to "auto" or "none"'
        raise RequestError(
            f"{name} needs a grammar for calls, which beam search cannot follow.",
            f"Set {remedy}, or use_beam_search to false.",
            param=name,
        )
    if params.constraint is not None:
        raise RequestError(
            f"tool_choice forces a call, but {params.constraint.param} demands another form of answer.",
            "Send only one of them.",
            param="tool_choice",
        )
    constraint = call_grammar(llm.answers.format.calls, offer.tools or [], offer.forced, only_one=only_one)
    if constraint is None:
        if not offer.forced:
            return params
        message = 'This model has no known form of calls, so none can be forced. Use "auto" or "none".'
        raise ApiError(400, "unsupported_parameter", message, param="tool_choice")
    return msgspec.structs.replace(params, constraint=constraint)
