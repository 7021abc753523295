"""Test doubles: engine, plan, tokenizer.

FakeEngine implements engine.handle.EngineHandle (limits, eos and stop tokens, logprobs, abort on close) for scripted
tokens, so that text, LLM and server tests run without a model.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers, trainers

from proa.engine.ipc import Loading, Ready
from proa.engine.processes.handle import EngineState
from proa.engine.stats import SchedulerStats, Stats
from proa.errors import EngineDead, ProaError, QueueFull, ShuttingDown
from proa.grammar.vocabulary import Vocabulary
from proa.plan.plan import MemoryBudget, Plan, Roof
from proa.types import EngineRequest, FinishReason, PromptExperts, TokenEvent, TokenLogprob


@dataclass(frozen=True)
class Reply:
    """The scripted answer to one request. The request's limits (max_tokens, eos, stop tokens) apply; `finish` is the
    finish reason if no limit ends it first. `error` is raised after `error_after` tokens."""

    tokens: Sequence[int] = ()
    finish: FinishReason = "stop"
    stop_token: int | None = None
    tokens_per_event: int = 1
    delay_s: float = 0.0  # before each event
    error: ProaError | None = None
    error_after: int = 0
    cached_tokens: int = 0
    prompt_experts: PromptExperts | None = None


def logprob_of(token: int, top: int) -> TokenLogprob:
    """Return the fake logprob of a token, -(token % 7 + 1) / 8, with `top` alternatives: token, token+1, ..."""
    best = -(token % 7 + 1) / 8
    return TokenLogprob(token, best, [(token + i, best - i) for i in range(top)])


@dataclass
class FakeEngine:
    """An engine.handle.EngineHandle with scripted answers; `reply`: one Reply, or a function of the request."""

    reply: Reply | Callable[[EngineRequest], Reply] = Reply()
    max_in_flight: int = 1_000_000  # further requests raise QueueFull
    state: EngineState = "ready"
    loading: Loading | None = None
    failure: ProaError | None = None
    stats: Stats = field(default_factory=lambda: Stats(SchedulerStats(pages_total=64, pages_free=64)))
    requests: list[EngineRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)  # ids of requests whose stream was closed before its end
    finished: list[str] = field(default_factory=list)
    in_flight: set[str] = field(default_factory=set)
    most_in_flight: int = 0
    closed: bool = False
    vocabulary: Vocabulary | None = None

    def __post_init__(self) -> None:
        self._settled = asyncio.Event()  # set when the state is no longer "loading"
        self._ended = asyncio.Event()
        if self.state != "loading":
            self._settled.set()

    # ---- controlled by tests ----

    def become_ready(self) -> None:
        self.state = "ready"
        self._settled.set()

    def die(self, error: ProaError | None = None) -> None:
        """Simulate a killed engine process: loading fails, running requests raise at their next event."""
        self.failure = error or EngineDead("The engine process died (exit code -9).", "See its log.")
        self.state = "failed"
        self._settled.set()
        self._ended.set()

    # ---- EngineHandle ----

    async def wait_ready(self) -> Ready:
        await self._settled.wait()
        if self.failure is not None:
            raise self.failure
        return Ready(
            load_seconds=0.1,
            weights_bytes=1,
            ops={"linear": "fake"},
            decode_threads=1,
            prefill_threads=2,
            peak_rss_bytes=1,
        )

    async def wait_ended(self) -> None:
        await self._ended.wait()

    async def generate(self, request: EngineRequest) -> AsyncGenerator[TokenEvent, None]:
        self._admit(request)
        script = self.reply if isinstance(self.reply, Reply) else self.reply(request)
        try:
            async for event in self._events(request, script):
                if event.finish is not None:
                    self.finished.append(request.id)
                yield event
        except ProaError:
            self.finished.append(request.id)
            raise
        finally:
            self.in_flight.discard(request.id)
            if request.id not in self.finished:
                self.aborted.append(request.id)

    def learn(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary

    async def close(self) -> None:
        self.closed = True
        self.state = "stopped"
        self._settled.set()
        self._ended.set()

    # ---- inside ----

    def _admit(self, request: EngineRequest) -> None:
        if any(r.id == request.id for r in self.requests):
            raise AssertionError(f"request id {request.id} was used twice")
        if self.state == "failed" and self.failure is not None:
            raise self.failure
        if self.state == "stopped":
            raise ShuttingDown("The engine is stopped.")
        if len(self.in_flight) >= self.max_in_flight:
            raise QueueFull(f"{len(self.in_flight)} requests are waiting.", "Try again later.")
        self.requests.append(request)
        self.in_flight.add(request.id)
        self.most_in_flight = max(self.most_in_flight, len(self.in_flight))

    async def _events(self, request: EngineRequest, script: Reply) -> AsyncIterator[TokenEvent]:
        sampling, sent, first = request.sampling, 0, True
        tokens, finish, stop_token = _until_limits(request, script)
        while True:
            await asyncio.sleep(script.delay_s)
            if self.failure is not None:
                raise self.failure
            if script.error is not None and sent >= script.error_after:
                raise script.error
            if self.state == "stopped":
                yield TokenEvent(id=request.id, finish="abort")
                return
            now = tokens[sent : sent + script.tokens_per_event]
            sent += len(now)
            last = sent == len(tokens) and not (script.error and script.error_after >= sent)
            yield TokenEvent(
                id=request.id,
                tokens=list(now),
                logprobs=_logprobs(now, sampling.logprobs),
                prompt_logprobs=_prompt_logprobs(request) if first else None,
                cached_tokens=script.cached_tokens if first else None,
                prompt_experts=script.prompt_experts if first else None,
                finish=finish if last else None,
                stop_token=stop_token if last else None,
            )
            first = False
            if last:
                return


def _until_limits(request: EngineRequest, script: Reply) -> tuple[list[int], FinishReason, int | None]:
    sampling, tokens = request.sampling, []
    for token in script.tokens:
        if token in sampling.eos_token_ids or token in sampling.stop_token_ids:
            return tokens, "stop", token
        tokens.append(token)
        if len(tokens) == sampling.max_tokens:
            return tokens, "length", None
    return tokens, script.finish, script.stop_token


def _logprobs(tokens: Sequence[int], top: int | None) -> list[TokenLogprob] | None:
    return None if top is None else [logprob_of(t, top) for t in tokens]


def _prompt_logprobs(request: EngineRequest) -> list[TokenLogprob | None] | None:
    top = request.sampling.prompt_logprobs
    if top is None:
        return None
    return [None, *(logprob_of(t, top) for t in request.tokens[1:])]


def make_plan(**changes: Any) -> Plan:
    """Make a Plan of a tiny model; `changes`: fields to replace (context_tokens=64, max_queued=2, ...)."""
    budget = MemoryBudget(
        free_bytes=2**30,
        reserve_bytes=2**27,
        weights_bytes=2**20,
        kv_bytes=2**20,
        workspace_bytes=2**20,
        loading_bytes=2**16,
    )
    plan = Plan(
        model="fake",
        path="/models/fake",
        load_format="safetensors",
        dtype="float32",
        context_tokens=4096,
        page_tokens=16,
        num_pages=512,
        prefix_cache=True,
        max_running=4,
        max_batch_tokens=512,
        max_queued=256,
        max_queued_tokens=4_000_000,
        threads=1,
        memory=budget,
        roof=Roof(bytes_per_token=10**6, bandwidth_bytes_per_s=1e10),
    )
    return msgspec.structs.replace(plan, **changes)


CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CORPUS = (
    "Hello world, the quick brown fox jumps over the lazy dog.\n\n",
    "A proa is a boat with two unequal hulls: one is fast.",
    "héllo wörld, naïve café; größer, 你好世界, 日本語テキスト, Привет мир, مرحبا, नमस्ते",
    "user assistant system 0123456789 + - = { } [ ] def f(x):\n    return x * 2\n" * 4,
)


def make_tokenizer(folder: Path, chat_template: str | None = CHATML, vocab_size: int = 512) -> Path:
    """Write a small real byte-level BPE tokenizer; every byte is a token, so any text round-trips.

    Special tokens: <|endoftext|> 0, <|im_start|> 1, <|im_end|> 2 (the eos). An emoji is one token per UTF-8 byte,
    because the training text has none.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(t, special=True) for t in ("<|endoftext|>", "<|im_start|>", "<|im_end|>")],
    )
    backend.train_from_iterator(_CORPUS, trainer)
    folder.mkdir(parents=True, exist_ok=True)
    backend.save(str(folder / "tokenizer.json"))
    config: dict[str, object] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "bos_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 4096,
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder
