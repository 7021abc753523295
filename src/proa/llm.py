"""The Python API for asyncio programs, with streaming. One AsyncLLM owns one engine process. blocking.py has LLM."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, cast

import msgspec

from proa.beam.driver import beam_search
from proa.config.options import EngineOptions
from proa.engine.processes.client import EngineClient
from proa.engine.processes.early import EarlyProcess
from proa.engine.processes.handle import EngineHandle
from proa.engine.processes.restarting import RestartingEngine
from proa.errors import EngineDead, RequestError, UsageError
from proa.grammar.checker import GrammarChecker
from proa.parsers.calls import Tools
from proa.parsers.choose import AUTO, Chosen, ModelFacts, choose
from proa.parsers.events import AnswerParser
from proa.parsers.thinking import describe
from proa.plan.plan import Plan
from proa.plan.prepare import Prepared, prepare
from proa.text.answer import Answer, AnswerFold, require_complete
from proa.text.choice import ChoiceStream
from proa.text.conversation import Rendered, SystemTools, render
from proa.text.merge import merge
from proa.text.settle import RequestRules, sampling_defaults
from proa.text.tokenizer import Tokenizer
from proa.text.tokenizer_source import token_ids
from proa.types import Chat, Chunk, Constraint, EngineRequest, ProgressCallback, SamplingParams, Thinking

Prompt = str | list[int] | Chat

_PROMPT_END_TOKENS = 64  # enough to see in which state a prompt leaves its answer


class TextSource(msgspec.Struct, frozen=True, kw_only=True):
    """Everything with which another process can tokenise and check this model's requests."""

    plan: Plan
    tokenizer_path: str
    chat_template: str | None
    tool_call_parser: str
    reasoning_parser: str
    vocab_size: int
    config: dict[str, Any]
    generation_config: dict[str, Any] | None

    def load_tokenizer(self) -> Tokenizer:
        return Tokenizer.load(Path(self.tokenizer_path), self.chat_template)

    def answers(self, tokenizer: Tokenizer) -> Chosen:
        """Choose how answers are parsed. Raises UsageError."""
        return choose(self.tool_call_parser, self.reasoning_parser, _described(tokenizer, self.config))


class AsyncLLM:
    """One model, loaded or loading, for asyncio programs.

    `plan`, `engine`, `tokenizer`, `model_name`, `context_tokens` and `sampling_defaults` are read-only.
    """

    def __init__(
        self,
        plan: Plan,
        engine: EngineHandle,
        tokenizer: Tokenizer,
        *,
        vocab_size: int | None = None,
        config: Mapping[str, Any] | None = None,
        generation_config: Mapping[str, Any] | None = None,
        answers: Chosen | None = None,
    ) -> None:
        """Wrap a running engine; use `launch` to start one. `vocab_size` defaults to the tokenizer's; `config` and
        `generation_config` are the checkpoint's JSON files; `answers`: how answers are parsed, by default chosen from
        template and vocabulary. Raises ConfigError."""
        self.source: TextSource | None = None
        self.plan = plan
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_name = plan.model
        self.context_tokens = plan.context_tokens
        self.sampling_defaults = sampling_defaults(generation_config or {})
        eos = token_ids(*((c or {}).get("eos_token_id") for c in (config, generation_config)))
        self.answers = answers or choose(AUTO, AUTO, _described(tokenizer, config or {}))
        self._checker = GrammarChecker()
        self._taught: asyncio.Task[None] | None = None  # gives the engine the vocabulary, once
        self._rules = RequestRules(
            context_tokens=plan.context_tokens,
            vocab_size=tokenizer.vocab_size if vocab_size is None else vocab_size,
            eos_token_ids=tokenizer.eos_token_ids | eos,
            defaults=self.sampling_defaults,
            max_running=plan.max_running,
            max_queued=plan.max_queued,
        )

    @classmethod
    async def launch(
        cls, model: str | Path, options: EngineOptions | None = None, progress: ProgressCallback | None = None, *,
        own_thread: bool = False,
    ) -> AsyncLLM:  # fmt: skip
        """Find and plan `model`, start its engine, and return while it loads (`await llm.engine.wait_ready()`).

        own_thread: the event loop's thread runs only this LLM, so its CPU affinity may be changed to keep it off the
        engine's CPU while requests run. Raises ProaError.
        """
        if not isinstance(model, str | Path):
            raise UsageError(
                f"The model is {model!r}, of type {type(model).__name__}.", "Give its name or path as a str or a Path."
            )
        options = options or EngineOptions()
        with EarlyProcess() as early:
            prepared = await asyncio.to_thread(prepare, str(model), options, progress, when_measured=early.begin)
            return await cls.launch_prepared(prepared, options, own_thread=own_thread, early=early)

    @classmethod
    async def launch_prepared(
        cls, prepared: Prepared, options: EngineOptions, *, early: EarlyProcess, own_thread: bool = False,
        restart: bool = False,
    ) -> AsyncLLM:  # fmt: skip
        """Load the tokenizer, start the engine of a planned model in the process of `early`, and return while it loads.
        own_thread: see `launch`; restart: start the engine again when it dies (RestartingEngine). Raises TokenizerError
        before it takes the process."""
        checkpoint = prepared.checkpoint
        asked = options.model.tokenizer
        path = checkpoint.path if asked is None else Path(asked)
        source = TextSource(
            plan=prepared.plan,
            tokenizer_path=str(path),
            chat_template=options.model.chat_template,
            tool_call_parser=options.model.tool_call_parser,
            reasoning_parser=options.model.reasoning_parser,
            vocab_size=prepared.declared.spec.vocab,
            config=dict(checkpoint.config),
            generation_config=checkpoint.generation_config,
        )
        tokenizer = await asyncio.to_thread(source.load_tokenizer)
        answers = source.answers(tokenizer)  # may raise: before the engine is started
        launch = partial(EngineClient.launch, prepared.plan, own_thread=own_thread, joins=True)
        first = await launch(process=early.take())
        engine: EngineHandle = RestartingEngine(first, launch) if restart else first
        try:
            return cls._of(source, engine, tokenizer, answers)
        except BaseException:
            await engine.close()
            raise

    @classmethod
    def without_engine(cls, source: TextSource) -> AsyncLLM:
        """Load what tokenises and checks requests; such an LLM cannot generate. Raises TokenizerError."""
        tokenizer = source.load_tokenizer()
        return cls._of(source, cast(EngineHandle, None), tokenizer, source.answers(tokenizer))

    @classmethod
    def _of(cls, source: TextSource, engine: EngineHandle, tokenizer: Tokenizer, answers: Chosen) -> AsyncLLM:
        llm = cls(
            source.plan,
            engine,
            tokenizer,
            vocab_size=source.vocab_size,
            config=source.config,
            generation_config=source.generation_config,
            answers=answers,
        )
        llm.source = source
        return llm

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Convert a prompt to token ids: a text, a Chat (rendered with the chat template), or a list of ids (returned
        as is). Raises RequestError."""
        if isinstance(prompt, Chat):
            _check_messages(prompt.messages)
            return self.tokenizer.encode(self.render(prompt).text, add_special_tokens=False)
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, list | tuple):
            raise RequestError(
                f"A prompt is of type {type(prompt).__name__}.",
                "Give a str, a list of token ids or a Chat.",
                param="prompt",
            )
        return list(prompt)

    def render(self, chat: Chat) -> Rendered:
        """Render a conversation with the chat template, rewritten if the template needs it (text/conversation.py).
        Raises RequestError."""
        return render(self.tokenizer.render, chat, self._system_tools)

    @cached_property
    def _system_tools(self) -> SystemTools | None:
        template, written = self.tokenizer.template, self.answers.system_call
        return SystemTools(written, template.renders_calls) if written and template is not None else None

    def answer_parser(self, chat: Chat, prompt_tokens: list[int]) -> AnswerParser:
        """Make the parser of one answer to a conversation, which was rendered to these tokens. Calls are parsed if the
        conversation has tools; else they stay text."""
        calls = sum(len(message.get("tool_calls") or ()) for message in chat.messages)
        tools = Tools.of(chat.tools) if chat.tools else None
        return self.answers.format.parser(tools, *self._ends(chat, prompt_tokens), calls)

    def thinking(self, chat: Chat, prompt_tokens: list[int], budget: int | None = None) -> Thinking | None:
        """Describe the reasoning of an answer to a conversation, for SamplingParams: `budget` is its most tokens, and a
        constraint begins after it. None if the model has no known form of reasoning, or the prompt has ended it."""
        begins = self.answers.format.place(*self._ends(chat, prompt_tokens))
        encode = partial(self.tokenizer.encode, add_special_tokens=False)
        return describe(self.answers.format, begins, encode, has_tools=bool(chat.tools), budget=budget)

    def _ends(self, chat: Chat, prompt_tokens: list[int]) -> tuple[str, str]:
        """Return the end of a rendered prompt, and the text of a final message that is continued."""
        end = self.tokenizer.decode(prompt_tokens[-_PROMPT_END_TOKENS:], skip_special_tokens=False)
        last = chat.messages[-1].get("content") if chat.continue_final_message else ""
        return end, last if isinstance(last, str) else ""

    def check(self, prompt_tokens: list[int], params: SamplingParams) -> None:
        """Raise the RequestError or ContextLengthExceeded that `stream` would raise for this request."""
        self._rules.settle(prompt_tokens, params)

    async def stream(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        priority: int = 0,
        salt: str = "",
        markers: Mapping[int, str] = MappingProxyType({}),
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of all n choices as generated (beam search: at the end). Closing it aborts the request.

        markers: tokens whose text is in the chunks though special tokens are skipped, and whose offsets are in
        Chunk.markers; for parsers.

        Raises RequestError, ContextLengthExceeded, QueueFull, ResourceError, ShuttingDown, EngineDead.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(
                f"params is of type {type(params).__name__}.", "Give SamplingParams(...).", param="params"
            )
        tokens = list(prompt) if isinstance(prompt, list) else await asyncio.to_thread(self.tokenize, prompt)
        requests = self._rules.requests(tokens, params, priority=priority, salt=salt)
        if params.constraint is not None or params.thinking is not None:
            await self._prepare(params.constraint)
        if params.use_beam_search:
            sources = [self._beams(requests[0], params, markers)]
        else:
            sources = [self._choice(i, request, params, markers) for i, request in enumerate(requests)]
        async with aclosing(merge(sources)) as chunks:
            async for _, chunk in chunks:
                yield chunk

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0, salt: str = ""
    ) -> Answer:
        """Generate the complete answer. Raises what `stream` raises; also EngineDead for an answer that finished with
        "abort", NumericsError for one that finished with "error"."""
        answer = AnswerFold()
        async with aclosing(self.stream(prompt, params, priority=priority, salt=salt)) as chunks:
            async for chunk in chunks:
                answer.add(chunk)
        return require_complete(answer.result())

    async def close(self) -> None:
        """Stop the engine; running requests finish with "abort"."""
        await self._checker.close()
        await self.engine.close()

    async def _prepare(self, constraint: Constraint | None) -> None:
        """Refuse a constraint that cannot be compiled; give the engine the vocabulary before its first one, or before
        the first budget."""
        if self._taught is None:
            self._taught = asyncio.create_task(self._teach())
        if constraint is not None:
            await self._checker.check(constraint)
        await asyncio.shield(self._taught)

    async def _teach(self) -> None:
        self.engine.learn(await asyncio.to_thread(self.tokenizer.vocabulary, self._rules.vocab_size))

    async def _choice(
        self, index: int, request: EngineRequest, params: SamplingParams, markers: Mapping[int, str]
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the chunks of one choice. Returning early, as after a stop string, aborts its sequence."""
        choice = self._choice_stream(index, request, params, markers)
        events = self.engine.generate(request)
        async with aclosing(events):
            async for event in events:
                chunk = choice.feed(event)
                if chunk is not None:
                    yield chunk
                if choice.finished:
                    return
        raise EngineDead("An answer ended without a finish reason.", "This is a bug in Proa: please report it.")

    async def _beams(
        self, request: EngineRequest, params: SamplingParams, markers: Mapping[int, str]
    ) -> AsyncGenerator[Chunk, None]:
        """Yield the answers of a beam search, best first, each as one chunk."""
        for index, found in enumerate(await beam_search(self.engine, request, params)):
            chunk = self._choice_stream(index, request, params, markers).feed(found.event)
            if chunk is not None:
                yield msgspec.structs.replace(chunk, score=found.score)

    def _choice_stream(
        self, index: int, request: EngineRequest, params: SamplingParams, markers: Mapping[int, str]
    ) -> ChoiceStream:
        detokenizer = self.tokenizer.detokenizer(params.skip_special_tokens, kept=markers)
        hidden = self.tokenizer.special_ids if params.skip_special_tokens else frozenset[int]()
        return ChoiceStream(index, request, params, detokenizer, markers=markers, hidden=hidden)


def _described(tokenizer: Tokenizer, config: Mapping[str, Any]) -> ModelFacts:
    """Describe a model for the choice of its parsers."""
    template = tokenizer.template
    return ModelFacts(
        template="" if template is None else template.source,
        renders_tools=template is None or template.renders_tools,
        added=tokenizer.added_tokens,
        model_type=str(config.get("model_type", "")),
    )


def _check_messages(messages: list[dict[str, Any]]) -> None:
    if not isinstance(messages, list | tuple) or not all(isinstance(m, dict) for m in messages):
        raise RequestError(
            f"messages is {messages!r}.",
            'Give a list of dicts, such as [{"role": "user", "content": "Hello"}].',
            param="messages",
        )
