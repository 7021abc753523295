"""Endpoints that describe the model or tokenise text: /v1/models, /tokenize, /detokenize, count_tokens."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from proa.errors import RequestError
from proa.llm import AsyncLLM
from proa.server.anthropic_prompt import as_chat
from proa.server.anthropic_schema import CountTokensRequest
from proa.server.errors import json_response
from proa.server.intake import ignored_header, read_request
from proa.server.prompts import encode_text, prompt_of, read_messages
from proa.server.schema import DetokenizeRequest, TokenizeRequest
from proa.server.service import Service
from proa.types import Chat

_ANTHROPIC_VERSION = "anthropic-version"


def model_list(request: Request, service: Service) -> Response:
    """List the served model, in Anthropic's form if the request has Anthropic's version header."""
    if _ANTHROPIC_VERSION in request.headers:
        name = service.model_name
        page = {"data": [_anthropic_card(service)], "has_more": False, "first_id": name, "last_id": name}
        return json_response(page)
    return json_response({"object": "list", "data": [_card(service)]})


def model_card(name: str, request: Request, service: Service) -> Response:
    """Return the served model's card; the list for /v1/models/ without a name. Raises ApiError 404 for a name that is
    not accepted."""
    if not name:
        return model_list(request, service)
    service.check_model(name)
    return json_response((_anthropic_card if _ANTHROPIC_VERSION in request.headers else _card)(service))


def _anthropic_card(service: Service) -> dict[str, Any]:
    created = datetime.fromtimestamp(service.created_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {"type": "model", "id": service.model_name, "display_name": service.model_name, "created_at": created}


def _card(service: Service) -> dict[str, Any]:
    """Build the model's card: OpenAI's fields, and vLLM's `root` and `max_model_len` (once known)."""
    card: dict[str, Any] = {
        "id": service.model_name,
        "object": "model",
        "created": service.created_s,
        "owned_by": "proa",
        "root": service.requested_model,
    }
    if service.llm is not None:
        card["max_model_len"] = service.llm.context_tokens
    return card


async def tokenize_text(request: Request, service: Service) -> Response:
    """Serve vLLM's /tokenize: {"prompt": text} or {"messages": [...]} -> count, max_model_len, tokens."""
    asked, ignored = await read_request(request, service, TokenizeRequest)
    llm = service.loaded()
    tokens = await _tokens_of(llm, asked)
    answer: dict[str, Any] = {"count": len(tokens), "max_model_len": llm.context_tokens, "tokens": tokens}
    if asked.return_token_strs:
        answer["token_strs"] = [llm.tokenizer.token_text(token) for token in tokens]
    return json_response(answer, headers=ignored_header(ignored))


async def _tokens_of(llm: AsyncLLM, asked: TokenizeRequest) -> list[int]:
    if asked.messages is None:
        text = asked.prompt or ""
        return await encode_text(llm, text, "prompt", add_special_tokens=asked.add_special_tokens)
    chat = Chat(
        messages=read_messages(asked.messages),
        tools=asked.tools,
        template_kwargs=asked.chat_template_kwargs,
        add_generation_prompt=asked.add_generation_prompt and not asked.continue_final_message,
        continue_final_message=asked.continue_final_message,
    )
    return (await prompt_of(llm, chat)).tokens


async def count_tokens(request: Request, service: Service) -> Response:
    """Serve Anthropic's /v1/messages/count_tokens: a conversation -> input_tokens."""
    asked, ignored = await read_request(request, service, CountTokensRequest)
    prompt = await prompt_of(service.loaded(), as_chat(asked))
    return json_response({"input_tokens": len(prompt.tokens)}, headers=ignored_header(ignored))


async def detokenize_tokens(request: Request, service: Service) -> Response:
    """Serve vLLM's /detokenize: {"tokens": [...]} -> {"prompt": text}, special tokens included."""
    asked, ignored = await read_request(request, service, DetokenizeRequest)
    tokenizer = service.loaded().tokenizer
    for i, token in enumerate(asked.tokens):
        if not 0 <= token < tokenizer.vocab_size:
            message = f"tokens[{i}] is {token}, which is not in the vocabulary."
            raise RequestError(message, f"Use ids from 0 to {tokenizer.vocab_size - 1}.", param=f"tokens[{i}]")
    text = tokenizer.decode(asked.tokens, skip_special_tokens=False)
    return json_response({"prompt": text}, headers=ignored_header(ignored))
