"""The Python API for synchronous programs: LLM, an AsyncLLM on an event loop in its own thread."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Coroutine, Iterable, Mapping, Sequence, Set
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.errors import ShuttingDown, UsageError
from proa.llm import AsyncLLM, Prompt
from proa.plan.plan import Plan
from proa.text.answer import Answer
from proa.text.merge import all_results
from proa.text.tokenizer import Tokenizer
from proa.types import Chat, SamplingParams

T = TypeVar("T")


class LLM:
    """One model for synchronous programs. Its engine process runs until `close`, the end of a `with`, or exit.

        with LLM("demo", context=2048) as llm:
            print(llm.generate("A proa is")[0].text)

    Keywords are the option names of EngineOptions. Raises UsageError for an unknown one, and the ProaError that
    prevents the model from loading.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        asked = from_keywords(EngineOptions, **options)
        self._loop = _LoopThread()
        try:
            self._llm = self._loop.run(_launch_and_wait(model, asked))
        except BaseException:
            self._loop.stop()
            raise
        # Also runs when the LLM is garbage collected and at exit: no engine process outlives its LLM.
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
        """Generate an answer for each prompt, in order. `prompts`: one or a list of texts, token id lists or Chats;
        `params`: one for all, or one per prompt. The first error cancels the other prompts and is raised."""
        many = _as_list(prompts)
        each = _params_as_list(params, len(many))
        if len(each) != len(many):
            raise UsageError(
                f"There are {len(many)} prompts but {len(each)} SamplingParams.",
                "Give one SamplingParams for all prompts, or one per prompt.",
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
        """Answer a conversation in OpenAI's message format; other keywords become chat template variables. Raises
        UsageError for a keyword that is a field of SamplingParams."""
        misplaced = {*SamplingParams.__struct_fields__, "sampling_params"} & set(template_kwargs)
        if misplaced:
            raise UsageError(
                f"{', '.join(sorted(misplaced))}: keywords of chat() are passed to the chat template.",
                "Pass sampling parameters in SamplingParams: chat(messages, SamplingParams(...)).",
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
    """An event loop in its own thread, so that synchronous code, also in notebooks that run a loop, can wait on it."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="proa-llm", daemon=True)
        self._thread.start()

    @property
    def is_forked_child(self) -> bool:
        """True in a forked child: the loop's thread exists only in the parent, so waiting on it would hang."""
        return os.getpid() != self._pid

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` on the loop and wait for its result; an exception while waiting (Ctrl-C) cancels it."""
        if self.is_forked_child:
            work.close()
            raise UsageError(
                f"This LLM was created in process {self._pid}, of which this process is a fork.",
                "Create a new LLM after the fork.",
            )
        if self._loop.is_closed():
            work.close()
            raise ShuttingDown("This LLM is closed.", "Create a new LLM.")
        tasks, given_up = list[asyncio.Task[Any]](), False

        async def tracked() -> T:
            if given_up:
                work.close()
                raise asyncio.CancelledError
            if task := asyncio.current_task():
                tasks.append(task)
            return await work

        def give_up() -> None:
            nonlocal given_up
            given_up = True
            for task in tasks:
                task.cancel()

        try:  # Ctrl-C may come before the call that submits has returned, and find the work begun
            return asyncio.run_coroutine_threadsafe(tracked(), self._loop).result()
        except BaseException:
            with suppress(RuntimeError):  # another thread has stopped the loop, which cancelled the work
                self._loop.call_soon_threadsafe(give_up)
            raise

    def stop(self) -> None:
        """Cancel running tasks, wait for their cleanup, end the thread."""
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
    if loop.is_forked_child:  # the engine belongs to the parent process, which may still use it
        return
    try:
        loop.run(llm.close())
    finally:
        loop.stop()


async def _generate_all(llm: AsyncLLM, prompts: Sequence[Prompt], params: Sequence[SamplingParams]) -> list[Answer]:
    """Generate all answers. Submits enough prompts at a time to keep the engine full, and few enough to fit its
    queue."""
    widest = max((p.sequences for p in params), default=1)
    running, queued = llm.plan.max_running, llm.plan.max_queued
    places = asyncio.Semaphore(max(1, min(2 * running, running + queued) // widest))

    async def one(prompt: Prompt, wanted: SamplingParams) -> Answer:
        async with places:
            return await llm.generate(prompt, wanted)

    return await all_results(one(*pair) for pair in zip(prompts, params, strict=True))


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Normalise one prompt or several to a list; a list of ints is one prompt of token ids."""
    if isinstance(prompts, str | Chat):
        return [prompts]
    if isinstance(prompts, bytes | bytearray | Mapping | Set) or not isinstance(prompts, Iterable):
        raise UsageError(
            f"The prompts are of type {type(prompts).__name__}.",
            "Give a str, a list of token ids or a Chat, or a list of these.",
        )
    many = list(prompts)
    if many and all(isinstance(p, int) for p in many):
        return [cast(list[int], many)]
    return cast(list[Prompt], many)


def _params_as_list(params: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Normalise params to a list; one SamplingParams is repeated `count` times."""
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if not isinstance(params, list | tuple) or not all(isinstance(p, SamplingParams) for p in params):
        raise UsageError(f"params is {params!r}.", "Give SamplingParams(...), or a list of them.", param="params")
    return list(params)
