"""Engines that keep the prefix cache in files, for prompts of a few hundred tokens. Never: tests."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from engines import finish_all, request
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.engine.building.load import load_engine
from proa.engine.engine import Engine
from proa.types import TokenLogprob
from quick_plan import prepare

NATIVE = {"dtype": "bfloat16", "gpu": "none"}
PROMPT = [(7 * i * i + 3) % 97 + 1 for i in range(389)]  # the same in both directions
RUN_TOKENS = 32


@dataclass
class Answer:
    tokens: list[int]
    logprobs: list[TokenLogprob]
    cached_tokens: int


def start(model: Path, folder: Path, **options: Any) -> Engine:
    asked = {
        "context": 512, "max_batch_tokens": 64, "threads": 2, "cpu_binding": "none", "prefix_cache_dir": str(folder),
        "prefix_cache_disk": 1 << 30, **options,
    }  # fmt: skip
    plan = prepare(str(model), from_keywords(EngineOptions, **asked)).plan
    return load_engine(plan, lambda loading: None)[0]


def ask(engine: Engine, name: str, tokens: list[int] = PROMPT, **wishes: object) -> Answer:
    engine.submit(msgspec.structs.replace(request(name, tokens, 6, logprobs=3), **wishes))
    events = finish_all(engine)[name]
    cached = next(event.cached_tokens for event in events if event.cached_tokens is not None)
    return Answer([t for e in events for t in e.tokens], [p for e in events for p in e.logprobs or ()], cached)


def wait_until_stored(engine: Engine) -> None:
    end = time.monotonic() + 20
    while engine.keep_up():
        assert time.monotonic() < end
        time.sleep(0.001)
    engine.scheduler.check()


def stop(engine: Engine) -> None:
    wait_until_stored(engine)
    engine.settle()
