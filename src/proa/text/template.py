"""Renders a checkpoint's chat template, in a sandbox, as transformers 5 does (utils/chat_template_utils.py).

transformers itself is not used because importing it takes a second, and its renderer needs only jinja2.
tests/unit/test_template.py compares the results.
"""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
import jinja2.ext
from jinja2.exceptions import SecurityError
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from proa.errors import RequestError, TokenizerError
from proa.types import Chat

_REASONING = ("reasoning_content", "thinking", "reasoning")
_PROBE = "proa-probe"
_ASKED = {"role": "user", "content": "Hello"}
_MARK = "CONTINUE_FINAL_MESSAGE_TAG "
# Errors of a template: raise_exception() in its own code, and Python's errors on messages of unexpected form.
_FAILURES = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
)


class ChatTemplate:
    """A compiled chat template: renders a Chat to prompt text.

    `templates`: Jinja source by name ("default", "tool_use", ...); a chat with tools uses "tool_use" if present.
    `special_tokens` (bos_token, eos_token, ...) become template variables. Raises TokenizerError if a template is not
    valid Jinja.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        self._source = dict(templates)
        self._special_tokens = dict(special_tokens)
        environment = _environment()
        try:
            self._compiled = {name: environment.from_string(text) for name, text in templates.items()}
        except jinja2.TemplateError as error:
            raise TokenizerError(
                f"The model's chat template is not valid Jinja: {error}.",
                "Give another template with --chat-template FILE.",
            ) from error

    def render(self, chat: Chat) -> str:
        """Render the prompt text, special tokens included. Raises RequestError if the template rejects the chat."""
        name = "tool_use" if chat.tools and "tool_use" in self._compiled else "default"
        if name not in self._compiled:
            raise RequestError(
                f"The model has no default chat template, only {', '.join(sorted(self._compiled))}.",
                "Give a template with --chat-template FILE, or use /v1/completions.",
            )
        messages = [_prepare(m, keep_parts=self._takes_parts) for m in chat.messages]
        if any("tool_calls" in message for message in messages):
            _convert_arguments(messages, to_text=self._takes_text_arguments)
            if self._takes_short_ids:
                _shorten_ids(messages)
        if not chat.continue_final_message:
            return self._run(name, messages, chat)
        if chat.add_generation_prompt:
            raise RequestError(
                "continue_final_message and add_generation_prompt exclude each other.",
                "Set add_generation_prompt to false.",
                param="continue_final_message",
            )
        final_text = _mark_end(messages)
        return _cut_at_mark(self._run(name, messages, chat), final_text)

    @property
    def source(self) -> str:
        """Source text of all templates."""
        return "\n".join(self._source.values())

    @cached_property
    def renders_tools(self) -> bool:
        """True if a request's tools are in the prompt; found by a trial render."""
        function = {"name": _PROBE, "description": "", "parameters": {"type": "object", "properties": {}}}
        return self._shows_probe([_ASKED], [{"type": "function", "function": function}])

    @cached_property
    def renders_calls(self) -> bool:
        """True if the calls of earlier answers are in the prompt; found by a trial render."""
        return self._shows_probe(_called({}), None)

    def _shows_probe(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> bool:
        try:
            return _PROBE in self.render(Chat(messages=messages, tools=tools))
        except RequestError:
            return False

    def _run(self, name: str, messages: list[dict[str, Any]], chat: Chat) -> str:
        # As in transformers: `documents` is always defined, and the request's variables override special tokens.
        variables = {**self._special_tokens, "documents": None, **chat.template_kwargs}
        try:
            return self._compiled[name].render(
                variables,
                messages=messages,
                tools=chat.tools or None,
                add_generation_prompt=chat.add_generation_prompt,
            )
        except SecurityError as error:  # for example a list that the template changes, as some of llama.cpp's do
            raise RequestError(
                f"The model's chat template needs what templates may not do: {str(error).rstrip('.')}.",
                "Give another template with --chat-template FILE.",
                param="messages",
            ) from error
        except _FAILURES as error:
            raise RequestError(
                f"The model's chat template rejects this conversation: {str(error).rstrip('.')}.",
                "Change the messages accordingly.",
                param="messages",
            ) from error

    @cached_property
    def _takes_parts(self) -> bool:
        """True if the template renders content of the form [{"type": "text", "text": ...}]; found by a trial render."""
        text = self._tried([{"role": "user", "content": [{"type": "text", "text": _PROBE}]}])
        return text is not None and _PROBE in text and "'text'" not in text and '"text"' not in text

    @cached_property
    def _takes_text_arguments(self) -> bool:
        """True if the arguments of calls must be JSON text, which the template joins to other text (DeepSeek-R1), not
        objects; found by trial renders."""
        return self._tried(_called({"key": 1})) is None and self._tried(_called('{"key": 1}')) is not None

    @cached_property
    def _takes_short_ids(self) -> bool:
        """True if ids of calls must be nine letters and digits (Mistral); found by trial renders."""
        return self._tried(_called({}, "call_proaprobe")) is None and self._tried(_called({})) is not None

    def _tried(self, messages: list[dict[str, Any]]) -> str | None:
        """Render messages as they are; None if the template refuses them."""
        source = self._compiled.get("default") or next(iter(self._compiled.values()))
        try:
            return source.render(self._special_tokens, messages=messages, tools=None, add_generation_prompt=False)
        except _FAILURES:
            return None


def _called(arguments: Any, call_id: str = "proaprobe") -> list[dict[str, Any]]:
    """Make a conversation with a call of a function named _PROBE."""
    call = {"id": call_id, "type": "function", "function": {"name": _PROBE, "arguments": arguments}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    result = {"role": "tool", "tool_call_id": call_id, "name": _PROBE, "content": "done"}
    return [_ASKED, answer, result]


def _prepare(original: Mapping[str, Any], *, keep_parts: bool) -> dict[str, Any]:
    """Copy a message into the form that templates expect: text parts joined unless `keep_parts`, reasoning under each
    of the names that templates use."""
    message = copy.deepcopy(dict(original))
    if not message.get("tool_calls"):
        message.pop("tool_calls", None)  # templates take an empty list, or null, for calls
    content = message.get("content")
    if isinstance(content, list) and not keep_parts:
        message["content"] = "\n".join(_part_text(part) for part in content)
    reasoning = next((message[key] for key in _REASONING if message.get(key) is not None), None)
    if reasoning is not None:
        message = {"thinking": reasoning, **message, "reasoning_content": reasoning}
    return message


def _convert_arguments(messages: Sequence[dict[str, Any]], *, to_text: bool) -> None:
    """Convert the arguments of all calls in place, to objects (OpenAI sends JSON text) or to JSON text."""
    for call in (call for message in messages for call in message.get("tool_calls", ())):
        function = call.get("function", call) if isinstance(call, dict) else {}
        arguments = function.get("arguments")
        if arguments is None or isinstance(arguments, str):
            text = (arguments or "").strip()
            function["arguments"] = (text or "{}") if to_text else _json_object_or_text(text)
        elif to_text:
            function["arguments"] = json.dumps(arguments, ensure_ascii=False)


def _shorten_ids(messages: Sequence[dict[str, Any]]) -> None:
    """Replace ids of calls that are not nine letters and digits, as of another model's calls, in place."""
    for message in messages:
        for holder, key in ((message, "tool_call_id"), *((call, "id") for call in message.get("tool_calls", ()))):
            if isinstance(holder, dict) and isinstance(call_id := holder.get(key), str):
                holder[key] = _short_id(call_id)


def _short_id(call_id: str) -> str:
    if len(call_id) == 9 and call_id.isascii() and call_id.isalnum():
        return call_id
    return hashlib.sha256(call_id.encode()).hexdigest()[:9]  # the same in each request, as cached prefixes need it


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str):
        return str(part["text"])
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    raise RequestError(
        f"A message has a content part of type {kind!r}, but the model reads text only.",
        'Send parts of the form {"type": "text", "text": ...}.',
        param="messages",
    )


def _json_object_or_text(text: str) -> Any:
    if not text:
        return {}  # agents send no text for a function without parameters; many templates iterate over its items
    try:
        value = json.loads(text)
    except ValueError:
        return text
    return value if isinstance(value, dict) else text


def _mark_end(messages: Sequence[dict[str, Any]]) -> str:
    """Append the marker to the final message's text in place; return the text without it."""
    content = messages[-1].get("content") if messages else None
    parts = [p for p in content if isinstance(p, dict) and "text" in p] if isinstance(content, list) else []
    if isinstance(content, str):
        messages[-1]["content"] = content + _MARK
        return content
    if parts:
        text = str(parts[-1]["text"])
        parts[-1]["text"] = text + _MARK
        return text
    raise RequestError(
        "continue_final_message is true, but the final message has no text to continue.",
        "Give the final message a text.",
        param="messages",
    )


def _cut_at_mark(rendered: str, final_text: str) -> str:
    """Cut the rendered prompt at the end of the final message. A template that strips messages also strips the marker's
    trailing space; then the final message is stripped too."""
    if final_text.strip() not in rendered or _MARK.strip() not in rendered:
        raise RequestError(
            "continue_final_message is true, but the chat template changes or drops the final message.",
            "Do not use continue_final_message with this model.",
            param="messages",
        )
    end = rendered.rindex(_MARK.strip())
    exact = rendered[end : end + len(_MARK)] == _MARK
    return rendered[:end] if exact else rendered[:end].rstrip()


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        namespace=_PlainNamespace,
    )
    return environment


class _GenerationTag(jinja2.ext.Extension):
    """Accepts {% generation %}...{% endgeneration %}, which marks text for training, and renders its body unchanged."""

    tags = {"generation"}  # noqa: RUF012 - jinja2's own declaration

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller: Macro) -> str:
        return caller()


class _PlainNamespace(Namespace):
    """Jinja's namespace, refusing names that begin with an underscore: templates are untrusted code."""

    def __init__(*args: Any, **kwargs: Any) -> None:  # as in jinja2, so that a namespace may have a name `self`
        attributes = dict(*args[1:], **kwargs)
        for name in attributes:
            _check_name(name)
        Namespace.__init__(args[0], attributes)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"namespace names must not begin with an underscore: {name!r}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replace Jinja's tojson filter, which escapes HTML and sorts keys: chat templates expect transformers' version."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> str:
    raise jinja2.TemplateError(message)
