"""POST /v1/chat/completions: build the generation job, write OpenAI's chat objects."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from functools import partial

from msgspec import UNSET

from proa.errors import RequestError
from proa.llm import AsyncLLM
from proa.parsers.events import Event, Parsed, Reasoning, Text, ToolArguments, ToolCall
from proa.server.answer import Job, usage_field
from proa.server.logprobs import chat_logprobs, prompt_logprobs
from proa.server.prompts import fitted, prompt_of, read_messages, refuse_too_many, with_reasoning
from proa.server.replies import (
    FINGERPRINT,
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatLogprobs,
    Delta,
    Function,
    FunctionDelta,
    Message,
    PromptProgress,
    ToolCallDelta,
    Usage,
)
from proa.server.replies import ToolCall as WrittenCall
from proa.server.schema import ChatRequest
from proa.server.tools import Offer, offer_tools, with_calls
from proa.text.tokenizer import Tokenizer
from proa.types import Chat, Chunk, SamplingParams


async def chat_job(llm: AsyncLLM, request: ChatRequest, answer_id: str, model_name: str) -> Job:
    """Validate and tokenise a request. Raises RequestError, ContextLengthExceeded or ApiError."""
    params = _params(request)
    refuse_too_many(llm, params.sequences, "n" if request.best_of is None else "best_of")
    chat = as_chat(request)
    prompt = await prompt_of(llm, chat)
    only_one = request.parallel_tool_calls is False or isinstance(request.tool_choice, dict)
    params = with_calls(llm, _offer(request), params, only_one=only_one)
    params = with_reasoning(llm, chat, prompt.tokens, params, request.thinking_budget)
    params = fitted(llm, prompt.tokens, params)
    writer = ChatReplyWriter(llm.tokenizer, request, answer_id, model_name)
    return Job(
        prompts=[prompt.tokens],
        params=params,
        priority=request.priority,
        salt=request.cache_salt,
        continuous_usage=request.continuous_usage,
        ends_with_usage=request.include_usage or not request.stream,
        parser=partial(llm.answer_parser, chat, prompt.tokens),
        one_call=request.parallel_tool_calls is False or request.functions is not None,
        headers=prompt.headers,
        writer=writer,
        progress_object=writer.progress_object,
    )


def as_chat(request: ChatRequest) -> Chat:
    """Convert to the chat template's form. `reasoning_effort` becomes a template variable, as in vLLM and SGLang;
    `functions`, the older form of `tools`, become tools."""
    variables = dict(request.chat_template_kwargs)
    if request.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", request.reasoning_effort)
    return Chat(
        messages=read_messages(request.messages),
        tools=_offer(request).tools,
        template_kwargs=variables,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )


def _offer(request: ChatRequest) -> Offer:
    if request.functions is None:
        return offer_tools(request.tools, request.tool_choice)
    return offer_tools([{"type": "function", "function": f} for f in request.functions], request.function_call)


def _params(request: ChatRequest) -> SamplingParams:
    most = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    try:
        return request.sampling(
            max_tokens=most,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            return_progress=request.return_progress and request.stream,
        )
    except RequestError as error:
        param = "top_logprobs" if error.param == "logprobs" else error.param
        raise RequestError(error.message, error.remedy, param=param) from error


class ChatReplyWriter:
    """Writes chat completion objects: per choice a role delta, deltas of content, reasoning and tool calls, an empty
    delta with finish_reason."""

    def __init__(self, tokenizer: Tokenizer, request: ChatRequest, answer_id: str, model_name: str) -> None:
        self._tokenizer = tokenizer
        self._request = request
        self._id = f"chatcmpl-{answer_id}"
        self._model = model_name
        self._created = int(time.time())
        self._opened: set[int] = set()
        self._is_legacy = request.functions is not None

    def objects(self, prompt_index: int, chunk: Chunk, parsed: Parsed, usage: Usage | None) -> Iterator[ChatChunk]:
        if chunk.index not in self._opened:
            self._opened.add(chunk.index)
            yield self._opening(chunk, usage)
        has_logprobs = self._request.logprobs and chunk.logprobs
        choices = [ChatChunkChoice(chunk.index, self._delta(event)) for event in parsed.events]
        if not choices and (has_logprobs or (chunk.tokens and self._request.return_token_ids)):
            choices = [ChatChunkChoice(chunk.index, Delta(content=""))]
        if choices and has_logprobs:
            choices[0].logprobs = chat_logprobs(self._tokenizer, chunk.logprobs or [])
        if choices and self._request.return_token_ids:
            choices[0].token_ids = chunk.tokens
        if chunk.finish is not None:
            is_legacy = self._is_legacy and parsed.finish == "tool_calls"
            finish = "function_call" if is_legacy else parsed.finish
            choices.append(ChatChunkChoice(chunk.index, Delta(), None, finish, chunk.stop_reason))
        for choice in choices:
            yield self._object([choice], usage)

    def _delta(self, event: Event) -> Delta:
        match event:
            case Text(text):
                return Delta(content=text)
            case Reasoning(text):
                return Delta(reasoning_content=text)
            case ToolCall(index, call_id, name):
                call = ToolCallDelta(index, call_id, "function", FunctionDelta(name))
            case ToolArguments(index, json):
                call = ToolCallDelta(index, function=FunctionDelta(arguments=json))
        return Delta(function_call=call.function) if self._is_legacy else Delta(tool_calls=[call])

    def _opening(self, chunk: Chunk, usage: Usage | None) -> ChatChunk:
        opening = self._object([ChatChunkChoice(chunk.index, Delta(role="assistant", content=""))], usage)
        if chunk.prompt_logprobs is not None and chunk.index == 0:
            opening.prompt_logprobs = prompt_logprobs(self._tokenizer, chunk.prompt_logprobs)
        if self._request.return_token_ids and chunk.prompt_tokens is not None and chunk.index == 0:
            opening.prompt_token_ids = chunk.prompt_tokens
        return opening

    def _object(self, choices: list[ChatChunkChoice], usage: Usage | None) -> ChatChunk:
        written = usage_field(usage, comes_last=self._request.include_usage)
        return ChatChunk(self._id, self._created, self._model, FINGERPRINT, choices, written)

    def progress_object(self, progress: PromptProgress) -> ChatChunk:
        """Write the progress of a prompt, as an object without choices."""
        made = self._object([], None)
        made.prompt_progress = progress
        return made

    def last_objects(self, usage: Usage) -> Iterator[ChatChunk]:
        yield self._object([], usage)

    def fold(self, objects: Sequence[ChatChunk]) -> ChatAnswer:
        pieces: dict[int, list[ChatChunkChoice]] = {}
        answer = ChatAnswer(self._id, self._created, self._model, FINGERPRINT, [], Usage())
        for made in objects:
            for piece in made.choices:
                pieces.setdefault(piece.index, []).append(piece)
            if made.prompt_logprobs is not UNSET:
                answer.prompt_logprobs = made.prompt_logprobs
            if made.prompt_token_ids is not UNSET:
                answer.prompt_token_ids = made.prompt_token_ids
            if isinstance(made.usage, Usage):
                answer.usage = made.usage
        answer.choices = [_fold_choice(index, pieces[index], self._request.logprobs) for index in sorted(pieces)]
        return answer


def _fold_choice(index: int, pieces: Sequence[ChatChunkChoice], wants_logprobs: bool) -> ChatChoice:
    texts = [piece.delta.content for piece in pieces if piece.delta.content is not UNSET]
    reasoning = [piece.delta.reasoning_content for piece in pieces if piece.delta.reasoning_content is not UNSET]
    calls = _fold_calls([piece.delta for piece in pieces])
    called = [piece.delta.function_call for piece in pieces if piece.delta.function_call is not UNSET]
    logprobs = [entry for piece in pieces if piece.logprobs is not None for entry in piece.logprobs.content]
    tokens = [piece.token_ids for piece in pieces if piece.token_ids is not UNSET]
    return ChatChoice(
        index=index,
        message=Message(
            "".join(texts) or (None if calls or called else ""),
            reasoning_content="".join(reasoning) if reasoning else UNSET,
            tool_calls=calls or UNSET,
            function_call=_fold_function(called) if called else UNSET,
        ),
        logprobs=ChatLogprobs(logprobs) if wants_logprobs else None,
        finish_reason=pieces[-1].finish_reason,
        stop_reason=pieces[-1].stop_reason,
        token_ids=[token for some in tokens for token in some] if tokens else UNSET,
    )


def _fold_calls(deltas: Sequence[Delta]) -> list[WrittenCall]:
    by_index: dict[int, list[ToolCallDelta]] = {}
    for delta in deltas:
        for piece in delta.tool_calls or []:
            by_index.setdefault(piece.index, []).append(piece)
    return [WrittenCall(p[0].id or "", _fold_function([one.function for one in p])) for p in by_index.values()]


def _fold_function(pieces: Sequence[FunctionDelta]) -> Function:
    return Function(pieces[0].name or "", "".join(piece.arguments for piece in pieces))
