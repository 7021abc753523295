"""Request fields that other servers support and Proa does not: one table.

Each field of a request is one of four kinds: implemented (in schema.py or anthropic_schema.py); refused, because it
would change the answer (neutral values are accepted); ignored, because it cannot change the answer; or unknown (it is
refused with --strict). A response header names the ignored and unknown ones.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from proa.server.errors import ApiError

Endpoint = Literal["chat", "completions", "messages", "responses", "ollama", "tokenize"]


@dataclass(frozen=True)
class Refused:
    """An unsupported field that would change the answer. null and `neutral` values are accepted. Empty `on`: all
    endpoints."""

    name: str
    neutral: tuple[Any, ...] = ()
    hint: str = ""
    on: tuple[Endpoint, ...] = ()

    def is_for(self, endpoint: Endpoint) -> bool:
        return not self.on or endpoint in self.on


@dataclass(frozen=True)
class Ignored:
    """A field that is accepted without effect; `why` is the reason given in the docs."""

    name: str
    why: str


_STRUCTURED = "Structured output is implemented on /v1/chat/completions."
_SAMPLER = "This sampler is not implemented."
_BEAMS = "Beam search is implemented on /v1/chat/completions and /v1/completions."
_NOT_CHAT: tuple[Endpoint, ...] = ("completions", "messages")
_NO_BEAMS: tuple[Endpoint, ...] = ("messages", "responses", "ollama", "tokenize")
# Fields of chat and completions, which /v1/messages and /v1/responses refuse unless null.
_OF_CHAT = (
    *("n", "best_of", "stop", "stop_token_ids", "ignore_eos", "min_tokens", "max_completion_tokens", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "logprobs", "top_logprobs"),
    *("prompt_logprobs", "return_token_ids", "skip_special_tokens", "include_stop_str_in_output"),
    *("chat_template_kwargs", "add_generation_prompt", "continue_final_message", "priority", "cache_salt"),
    *("response_format", "structured_outputs", "structural_tag", "regex", "ebnf", "grammar", "json_schema"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"),
)

REFUSED: tuple[Refused, ...] = (
    # OpenAI
    Refused("audio", hint="Answers are text."),
    Refused("modalities", (["text"],), "Answers are text."),
    Refused("moderation"),
    Refused("web_search_options", hint="Proa makes no network requests."),
    Refused("functions", ([],), "Use tools.", on=(*_NOT_CHAT, "responses")),
    Refused("function_call", ("none", "auto"), "Use tools and tool_choice.", on=(*_NOT_CHAT, "responses")),
    Refused("parallel_tool_calls", (True,), on=_NOT_CHAT),
    Refused("reasoning_effort", hint="Use /v1/chat/completions.", on=("completions", "messages", "responses")),
    Refused("verbosity", ("medium",), "Ask for it in the prompt."),
    Refused("suffix", ("",)),
    Refused("template", ("",), "Choose it when the server starts, with --chat-template.", on=("ollama",)),
    Refused("store", (False,), "/v1/responses stores answers.", on=("chat", "completions", "messages")),
    Refused("background", (False,), "Keep the connection open.", on=("responses",)),
    Refused("background_options", on=("responses",)),
    Refused("conversation", hint="Use previous_response_id.", on=("responses",)),
    Refused("prompt", hint="Send input.", on=("responses",)),
    Refused("max_tool_calls", hint="Proa runs no tools.", on=("responses",)),
    Refused("image", hint="Answers are text.", on=("responses",)),
    # vLLM and SGLang
    Refused("bad_words", ([],), "Use logit_bias."),
    Refused("allowed_token_ids", hint="Use logit_bias."),
    Refused("logits_processors", ([],)),
    Refused("custom_logit_processor"),
    Refused("use_beam_search", (False,), _BEAMS, on=_NO_BEAMS),
    Refused("length_penalty", (1.0,), _BEAMS, on=_NO_BEAMS),
    Refused("early_stopping", (False,), _BEAMS, on=_NO_BEAMS),
    Refused("truncate_prompt_tokens", hint="Shorten the prompt; Proa never cuts it silently."),
    Refused("documents", ([],), "Put them into the messages or into chat_template_kwargs."),
    Refused("chat_template", hint="Choose it when the server starts, with --chat-template."),
    Refused("mm_processor_kwargs", ({},)),
    Refused("lora_path"),
    Refused("thinking_token_budget", hint="Use /v1/chat/completions.", on=(*_NOT_CHAT, "responses", "ollama")),
    Refused("return_progress", (False,), "Use /v1/chat/completions.", on=(*_NOT_CHAT, "responses", "ollama")),
    Refused("return_hidden_states", (False,)),
    Refused("return_tokens_as_token_ids", (False,), "Use return_token_ids."),
    Refused("spaces_between_special_tokens", (True,)),
    Refused("echo", (False,), "Only /v1/completions supports echo.", on=("chat", "messages", "responses")),
    Refused("add_special_tokens", (False,), "The chat template adds them.", on=("chat", "messages", "responses")),
    # Anthropic
    Refused("output_format", hint=_STRUCTURED, on=("messages",)),
    Refused("mcp_servers", ([],), "Proa makes no network requests.", on=("messages",)),
    Refused("container", hint="Proa runs no code.", on=("messages",)),
    Refused("compaction", hint="Ask for a summary in the messages.", on=("messages",)),
    Refused("thread", hint="Proa stores no conversations; send all messages.", on=("messages",)),
    *(Refused(name, hint="Use /v1/chat/completions.", on=("messages", "responses")) for name in _OF_CHAT),
    Refused("stream_options", hint="Usage is always sent.", on=("messages",)),
    # llama.cpp
    Refused("n_predict", (-1,), "Use max_tokens."),
    Refused("repeat_penalty", (1.0,), "Use repetition_penalty."),
    Refused("typical_p", (1.0,), _SAMPLER),
    Refused("top_a", (0.0,), _SAMPLER),
    Refused("tfs", (1.0,), _SAMPLER),
    Refused("mirostat", (0,), _SAMPLER),
    Refused("mirostat_mode", (0,), _SAMPLER),
    Refused("dynatemp_range", (0.0,), _SAMPLER),
    Refused("dry_multiplier", (0.0,), _SAMPLER),
    Refused("xtc_probability", (0.0,), _SAMPLER),
)

IGNORED: tuple[Ignored, ...] = (
    Ignored("user", "the user's identity does not affect generation"),
    Ignored("safety_identifier", "the user's identity does not affect generation"),
    Ignored("metadata", "nothing is stored"),
    Ignored("service_tier", "there is only one service tier"),
    Ignored("prediction", "a hint for speed; the answer is the same without it"),
    Ignored("prompt_cache_key", "cached prefixes are matched by their tokens; cache_salt separates users"),
    Ignored("prompt_cache_retention", "prefixes stay cached until their pages are needed"),
    Ignored("prompt_cache_options", "prefixes stay cached until their pages are needed"),
    Ignored("cache_prompt", "prefixes are always cached"),
    Ignored("cache_control", "prefixes are always cached"),
    Ignored("context_management", "earlier messages are kept as they are"),
    Ignored("client_metadata", "nothing is stored"),
    Ignored("access_programs", "there is only one"),
    Ignored("betas", "beta features are not switched by name"),
    Ignored("inference_geo", "inference runs on this server"),
    Ignored("speed", "there is only one speed"),
    Ignored("diagnostics", "nothing is compared with earlier requests"),
    Ignored("stream_reasoning", "reasoning is streamed as it is generated"),
    Ignored("separate_reasoning", "reasoning is always separate from the content; --reasoning-parser none joins them"),
    Ignored("guided_decoding_backend", "there is one grammar library"),
    Ignored("request_id", "send the header x-request-id"),
    Ignored("rid", "send the header x-request-id"),
)

_REFUSED_BY_NAME = {row.name: row for row in REFUSED}
_IGNORED_NAMES = frozenset(row.name for row in IGNORED)


def implemented_fields(
    body: dict[str, Any], known: Collection[str], endpoint: Endpoint, *, strict: bool
) -> tuple[dict[str, Any], list[str], list[str]]:
    """Return (implemented fields, names of unknown fields, names of ignored fields); null counts as not given.

    Raises ApiError 400 for a refused field, and for an unknown one if `strict`.
    """
    kept: dict[str, Any] = {}
    unknown: list[str] = []
    ignored: list[str] = []
    for name, value in body.items():
        if name in known:
            if value is not None:
                kept[name] = value
        elif name in _REFUSED_BY_NAME and _REFUSED_BY_NAME[name].is_for(endpoint):
            _demand_neutral(_REFUSED_BY_NAME[name], value)
        elif name not in _IGNORED_NAMES:
            unknown.append(name)
        elif value is not None:
            ignored.append(name)
    if strict:
        refuse_unknown(unknown)
    return kept, unknown, ignored


def refuse_unknown(names: Collection[str]) -> None:
    """Raise ApiError 400 if `names` is not empty."""
    if names:
        listed = ", ".join(names)
        message = f"Unknown field(s): {listed}. The server runs with --strict, which refuses them; leave them out."
        raise ApiError(400, "unknown_parameter", message, param=next(iter(names)))


def _demand_neutral(row: Refused, value: Any) -> None:
    is_bool = isinstance(value, bool)  # True == 1 in Python, but not in JSON
    if value is None or any(value == n and isinstance(n, bool) == is_bool for n in row.neutral):
        return
    message = f"{row.name} is not supported, and ignoring it would change the answer. {row.hint}".rstrip()
    raise ApiError(400, "unsupported_parameter", message, param=row.name)
