"""The Python interface: AsyncLLM (streams) and LLM (plain calls). Belongs here: one engine, its tokenizer and the
tasks of running requests. Never: HTTP, sampling, a second scheduler."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping, Sequence, Set
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar, cast

from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.engine.processes.client import EngineClient
from proa.engine.processes.handle import EngineHandle
from proa.errors import EngineDead, RequestError, ShuttingDown, UsageError
from proa.plan.plan import Plan
from proa.plan.prepare import Prepared, prepare
from proa.text.answer import Answer, AnswerFold, complete
from proa.text.choice import ChoiceStream
from proa.text.merge import merge
from proa.text.settle import RequestRules, sampling_defaults
from proa.text.tokenizer import Tokenizer
from proa.text.tokenizer_source import token_ids
from proa.types import Chat, Chunk, EngineRequest, SamplingParams

Prompt = str | list[int] | Chat
Progress = Callable[[str, int, int], None]
T = TypeVar("T")


class AsyncLLM:
    """One loaded (or loading) model for an asyncio program.

    `plan`, `engine`, `tokenizer`, `model_name`, `context_tokens` and `sampling_defaults` are for reading.
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
    ) -> None:
        """`vocab_size` is the model's, `config` and `generation_config` the checkpoint's. Raises ConfigError."""
        self.plan = plan
        self.engine = engine
        self.tokenizer = tokenizer
        self.model_name = plan.model
        self.context_tokens = plan.context_tokens
        self.sampling_defaults = sampling_defaults(generation_config or {})
        eos = token_ids(*((c or {}).get("eos_token_id") for c in (config, generation_config)))
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
        cls, model: str | Path, options: EngineOptions | None = None, progress: Progress | None = None, *,
        own_thread: bool = False,
    ) -> AsyncLLM:  # fmt: skip
        """Find, plan and start `model`; return while it loads (`await llm.engine.wait_ready()`). own_thread: nobody
        else's is the event loop's thread, so that it may keep off the engine's CPU while requests run."""
        if not isinstance(model, str | Path):
            raise UsageError(f"The model is {model!r}.", "Give its name or folder, as a str or a Path.")
        options = options or EngineOptions()
        prepared = await asyncio.to_thread(prepare, str(model), options, progress)
        return await cls.start(prepared, options, own_thread=own_thread)

    @classmethod
    async def start(cls, prepared: Prepared, options: EngineOptions, *, own_thread: bool = False) -> AsyncLLM:
        """Start the engine of a model already planned; return while it loads. own_thread: as for `launch`. Raises
        TokenizerError first."""
        checkpoint = prepared.checkpoint
        asked = options.model.tokenizer
        path = checkpoint.tokenizer_path if asked is None else Path(asked)
        tokenizer = await asyncio.to_thread(Tokenizer.load, path, options.model.chat_template)
        return cls(
            prepared.plan,
            await EngineClient.launch(prepared.plan, own_thread=own_thread),
            tokenizer,
            vocab_size=prepared.declared.spec.vocab,
            config=checkpoint.config,
            generation_config=checkpoint.generation_config,
        )

    def tokenize(self, prompt: Prompt) -> list[int]:
        """Tokens of a text, of a conversation (by the checkpoint's chat template), or the tokens given.
        Raises RequestError."""
        if isinstance(prompt, Chat):
            _check_messages(prompt.messages)
            return self.tokenizer.encode_chat(prompt)
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt)
        if not isinstance(prompt, list | tuple):
            raise RequestError(
                f"A prompt is a {type(prompt).__name__}.", "Give a str, a list of tokens or a Chat.", param="prompt"
            )
        return list(prompt)

    def check(self, prompt_tokens: list[int], params: SamplingParams) -> None:
        """Raise RequestError or ContextLengthExceeded for what `stream` would refuse."""
        self._rules.settle(prompt_tokens, params)

    async def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0, salt: str = ""
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks of all n choices as they come. Closing the iterator aborts the request.

        Raises RequestError, ContextLengthExceeded, QueueFull, ResourceError, ShuttingDown, EngineDead.
        """
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is a {type(params).__name__}.", "Give SamplingParams(...).", param="params")
        tokens = prompt if isinstance(prompt, list) else await asyncio.to_thread(self.tokenize, prompt)
        requests = self._rules.requests(tokens, params, priority=priority, salt=salt)
        sources = [self._choice(i, request, params) for i, request in enumerate(requests)]
        async with aclosing(merge(sources)) as chunks:
            async for _, chunk in chunks:
                yield chunk

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, priority: int = 0, salt: str = ""
    ) -> Answer:
        """The whole answer: what the chunks of `stream` add up to. Raises as `stream` does, and EngineDead or
        ProaError for an answer that ended with "abort" or "error"."""
        answer = AnswerFold()
        async with aclosing(self.stream(prompt, params, priority=priority, salt=salt)) as chunks:
            async for chunk in chunks:
                answer.add(chunk)
        return complete(answer.result())

    async def close(self) -> None:
        """Stop the engine; running requests end with finish "abort"."""
        await self.engine.close()

    async def _choice(self, index: int, request: EngineRequest, params: SamplingParams) -> AsyncGenerator[Chunk, None]:
        """One sibling's chunks; leaving early, as after a stop string, aborts it in the engine."""
        choice = ChoiceStream(index, request, params, self.tokenizer.detokenizer(params.skip_special_tokens))
        events = self.engine.generate(request)
        async with aclosing(events):
            async for event in events:
                chunk = choice.feed(event)
                if chunk is not None:
                    yield chunk
                if choice.finished:
                    return
        raise EngineDead("The engine ended an answer without saying why.", "This is a bug in Proa: report it.")


class LLM:
    """One model for a plain program; its engine runs beside it until `close`, the end of a `with`, or exit.

        with LLM("demo", context=2048) as llm:
            print(llm.generate("A proa is")[0].text)

    Keywords are the options of EngineOptions by name. Raises UsageError for an unknown one, and whatever keeps
    the model from loading.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        asked = from_keywords(EngineOptions, **options)
        self._loop = _LoopThread()
        try:
            self._llm = self._loop.run(_launch_and_wait(model, asked))
        except BaseException:
            self._loop.stop()
            raise
        # Also when the last reference goes and at exit: no engine process outlives its LLM.
        self._closer = weakref.finalize(self, _close, self._loop, self._llm)

    @property
    def plan(self) -> Plan:
        return self._llm.plan

    @property
    def tokenizer(self) -> Tokenizer:
        return self._llm.tokenizer

    def generate(
        self, prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None = None
    ) -> list[Answer]:
        """Answers in the order of the prompts: texts, token lists or Chats, one or many; `params` for all or one
        for each. The first failure ends the others and is raised."""
        many = _as_list(prompts)
        each = _params_as_list(params, len(many))
        if len(each) != len(many):
            raise UsageError(
                f"There are {len(many)} prompts but {len(each)} SamplingParams.", "Give one for all, or one for each."
            )
        return self._loop.run(_generate_all(self._llm, many, each))

    def chat(
        self,
        messages: list[dict[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: list[dict[str, Any]] | None = None,
        **template_kwargs: Any,
    ) -> Answer:
        """The answer to a conversation in OpenAI's form; other keywords go to the chat template. Raises UsageError
        for one that belongs into SamplingParams."""
        misplaced = {*SamplingParams.__struct_fields__, "sampling_params"} & set(template_kwargs)
        if misplaced:
            raise UsageError(
                f"{', '.join(sorted(misplaced))}: other keywords of chat go to the chat template.",
                "What shapes the answer goes into SamplingParams: chat(messages, SamplingParams(...)).",
            )
        chat = Chat(messages=messages, tools=tools, template_kwargs=template_kwargs)
        return self.generate(chat, params)[0]

    def close(self) -> None:
        """Stop the engine. Idempotent."""
        self._closer()

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class _LoopThread:
    """An event loop in a thread of its own, so that plain code (and notebooks with a loop) can wait for it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proa-llm", daemon=True)
        self._thread.start()

    @property
    def is_elsewhere(self) -> bool:
        """This is a forked child: the thread stayed in the parent, waiting for it would never end."""
        return os.getpid() != self._pid

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` there and wait; an exception here (Ctrl-C) cancels it there."""
        if self.is_elsewhere:
            work.close()
            raise UsageError(f"This LLM belongs to process {self._pid}.", "Make a new one after a fork.")
        if self._loop.is_closed():
            work.close()
            raise ShuttingDown("This LLM was closed.", "Make a new one.")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def stop(self) -> None:
        """Cancel what still runs, let it clean up, end the thread."""
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def _launch_and_wait(model: str | Path, options: EngineOptions) -> AsyncLLM:
    llm = await AsyncLLM.launch(model, options, own_thread=True)
    try:
        await llm.engine.wait_ready()
    except BaseException:
        await llm.close()
        raise
    return llm


def _close(loop: _LoopThread, llm: AsyncLLM) -> None:
    if loop.is_elsewhere:  # the parent's engine runs on
        return
    try:
        loop.run(llm.close())
    finally:
        loop.stop()


async def _generate_all(llm: AsyncLLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Answer]:
    """All answers. Enough are submitted at once to keep the engine full, few enough not to overflow its queue."""
    widest = max((p.n for p in params), default=1)
    running, queued = llm.plan.max_running, llm.plan.max_queued
    places = asyncio.Semaphore(max(1, min(2 * running, running + queued) // widest))

    async def one(prompt: Prompt, wanted: SamplingParams) -> Answer:
        async with places:
            return await llm.generate(prompt, wanted)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(*pair)) for pair in zip(prompts, params, strict=True)]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many; a list of numbers is one prompt of tokens."""
    if isinstance(prompts, str | Chat):
        return [prompts]
    if isinstance(prompts, bytes | bytearray | Mapping | Set) or not isinstance(prompts, Iterable):
        raise UsageError(
            f"The prompts are a {type(prompts).__name__}.", "Give a str, a list of tokens or a Chat, or a list of them."
        )
    many = list(prompts)
    if many and all(isinstance(p, int) for p in many):
        return [cast(list[int], many)]
    return cast(list[Prompt], many)


def _params_as_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """`count` times the same, or what was given for each."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, list | tuple) or not all(isinstance(p, SamplingParams) for p in params):
        raise UsageError(f"params is {params!r}.", "Give SamplingParams(...), or a list of them.", param="params")
    return list(params)


def _check_messages(messages: list[dict[str, Any]]) -> None:
    if not isinstance(messages, list | tuple) or not all(isinstance(m, dict) for m in messages):
        raise RequestError(
            f"messages is {messages!r}.",
            'Give a list of dicts, such as [{"role": "user", "content": "Hello"}].',
            param="messages",
        )
