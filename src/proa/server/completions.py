"""POST /v1/completions: build the generation job, write OpenAI's completion objects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence

from msgspec import UNSET

from proa.errors import RequestError
from proa.llm import AsyncLLM
from proa.parsers.events import Parsed
from proa.server.answer import Job, usage_field
from proa.server.logprobs import CompletionLogprobsWriter, join_completion_logprobs, prompt_logprobs
from proa.server.prompts import encode_text, fitted, refuse_too_many
from proa.server.replies import FINGERPRINT, Completion, CompletionChoice, Usage
from proa.server.schema import CompletionRequest, Prompt
from proa.types import Chunk, SamplingParams, TokenLogprob


async def completion_job(llm: AsyncLLM, request: CompletionRequest, answer_id: str, model_name: str) -> Job:
    """Validate a request and tokenise every prompt. Raises RequestError, ContextLengthExceeded or ApiError."""
    params = _params(request)
    refuse_too_many(llm, len(request.prompt) * params.sequences, "prompt")
    prompts = [await _tokens_of(llm, given, request) for given in request.prompt]
    for prompt in prompts:
        params = fitted(llm, prompt, params)
    echoed = [_text_of(llm, given, request) for given in request.prompt] if request.echo else []
    return Job(
        prompts=prompts,
        params=params,
        priority=request.priority,
        salt=request.cache_salt,
        continuous_usage=request.continuous_usage,
        ends_with_usage=request.include_usage or not request.stream,
        writer=CompletionReplyWriter(llm, request, echoed, answer_id, model_name),
        is_prompt_only=request.max_tokens == 0,
    )


async def _tokens_of(llm: AsyncLLM, given: Prompt, request: CompletionRequest) -> list[int]:
    if not isinstance(given, str):
        return given
    await asyncio.sleep(0)  # let other streams run between many short prompts
    return await encode_text(llm, given, "prompt", add_special_tokens=request.add_special_tokens)


def _text_of(llm: AsyncLLM, given: Prompt, request: CompletionRequest) -> str:
    if isinstance(given, str):
        return given
    return llm.tokenizer.decode(given, skip_special_tokens=request.skip_special_tokens)


def _params(request: CompletionRequest) -> SamplingParams:
    """Convert to SamplingParams. max_tokens 0 with echo scores the prompt: the engine's one token is discarded."""
    if request.max_tokens == 0 and not request.echo:
        raise RequestError(
            "max_tokens is 0, which is allowed only with echo true (to score a prompt).",
            "Set max_tokens to 1 or more, or set echo to true.",
            param="max_tokens",
        )
    prompt_logprobs = request.prompt_logprobs
    if request.echo and request.logprobs is not None:
        if request.use_beam_search:
            raise RequestError(
                "echo and logprobs ask for the prompt's logprobs, which beam search does not compute.",
                "Set echo to false, or leave logprobs out.",
                param="echo",
            )
        prompt_logprobs = max(request.logprobs, prompt_logprobs or 0)
    return request.sampling(
        max_tokens=1 if request.max_tokens == 0 else request.max_tokens,
        logprobs=request.logprobs,
        prompt_logprobs=prompt_logprobs,
    )


class CompletionReplyWriter:
    """Writes completion objects; choice index = prompt index * n + choice. `echoed`: the prompts' texts if echo is
    set, else empty."""

    def __init__(
        self, llm: AsyncLLM, request: CompletionRequest, echoed: list[str], answer_id: str, model_name: str
    ) -> None:
        self._tokenizer = llm.tokenizer
        self._request = request
        self._echoed = echoed
        self._id = f"cmpl-{answer_id}"
        self._model = model_name
        self._created = int(time.time())
        self._writers: dict[int, CompletionLogprobsWriter] = {}
        self._wants_scores = request.prompt_logprobs is not None or (request.echo and request.logprobs is not None)
        self._scores: dict[int, list[TokenLogprob | None]] = {}  # prompt logprobs by prompt index
        self._held: dict[int, list[Chunk]] = {}  # chunks that wait for their prompt's logprobs

    def objects(self, prompt_index: int, chunk: Chunk, parsed: Parsed, usage: Usage | None) -> Iterator[Completion]:
        """Yield the objects of one chunk. Prompt logprobs come with choice 0 only; other choices' chunks are held
        back until they arrive."""
        ready = [chunk]
        if self._wants_scores and prompt_index not in self._scores:
            if chunk.prompt_logprobs is None and not (chunk.index == 0 and chunk.finish is not None):
                self._held.setdefault(prompt_index, []).append(chunk)
                return
            self._scores[prompt_index] = chunk.prompt_logprobs or []
            ready = [*self._held.pop(prompt_index, []), chunk]
        for each in ready:
            yield from self._written(prompt_index, each, usage)

    def _written(self, prompt_index: int, chunk: Chunk, usage: Usage | None) -> Iterator[Completion]:
        index = prompt_index * self._request.n + chunk.index
        if index not in self._writers:
            self._writers[index] = self._writer()
            opening = self._opening(prompt_index, index, chunk)
            if opening is not None:
                yield self._object([opening], usage)
        piece = self._piece(index, chunk)
        if piece.text or piece.logprobs or piece.token_ids or chunk.finish is not None:
            yield self._object([piece], usage)

    def _writer(self) -> CompletionLogprobsWriter:
        request = self._request
        detokenizer = self._tokenizer.detokenizer(request.skip_special_tokens, from_start=request.echo)
        return CompletionLogprobsWriter(self._tokenizer, detokenizer, request.logprobs or 0)

    def _opening(self, prompt_index: int, index: int, chunk: Chunk) -> CompletionChoice | None:
        """Return the object with the prompt's text, logprobs or token ids; None if none of them was requested."""
        request, opening = self._request, CompletionChoice(index, "")
        tokens, scores = chunk.prompt_tokens or [], self._scores.get(prompt_index, [])
        if request.echo:
            opening.text = self._echoed[prompt_index]
            if request.logprobs is not None:
                given = request.prompt[prompt_index]
                opening.logprobs = self._writers[index].write(tokens, scores, given if isinstance(given, str) else None)
        if request.prompt_logprobs is not None:
            opening.prompt_logprobs = prompt_logprobs(self._tokenizer, scores)
        if request.return_token_ids:
            opening.prompt_token_ids = tokens
        is_asked = request.echo or request.return_token_ids or request.prompt_logprobs is not None
        return opening if is_asked else None

    def _piece(self, index: int, chunk: Chunk) -> CompletionChoice:
        piece = CompletionChoice(index, chunk.text, finish_reason=chunk.finish)
        if chunk.logprobs:
            piece.logprobs = self._writers[index].write(chunk.tokens, chunk.logprobs)
        if chunk.finish is not None:
            piece.stop_reason = chunk.stop_reason
        if self._request.return_token_ids:
            piece.token_ids = chunk.tokens
        return piece

    def _object(self, choices: list[CompletionChoice], usage: Usage | None) -> Completion:
        written = usage_field(usage, comes_last=self._request.include_usage)
        return Completion(self._id, self._created, self._model, FINGERPRINT, choices, written)

    def last_objects(self, usage: Usage) -> Iterator[Completion]:
        yield self._object([], usage)

    def fold(self, objects: Sequence[Completion]) -> Completion:
        pieces: dict[int, list[CompletionChoice]] = {}
        answer = objects[-1]
        for made in objects:
            for piece in made.choices:
                pieces.setdefault(piece.index, []).append(piece)
        answer.choices = [_fold_choice(index, pieces[index]) for index in sorted(pieces)]
        return answer


def _fold_choice(index: int, pieces: Sequence[CompletionChoice]) -> CompletionChoice:
    tokens = [piece.token_ids for piece in pieces if piece.token_ids is not UNSET]
    first, last = pieces[0], pieces[-1]
    return CompletionChoice(
        index=index,
        text="".join(piece.text for piece in pieces),
        logprobs=join_completion_logprobs([p.logprobs for p in pieces if p.logprobs is not None]),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        prompt_logprobs=first.prompt_logprobs,
        prompt_token_ids=first.prompt_token_ids,
        token_ids=[token for some in tokens for token in some] if tokens else UNSET,
    )
