"""Real engines over tiny checkpoints that write down the logits of every row they compute. Never: tests."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import torch
from torch import Tensor

from proa.cache.pages import PageAllocator
from proa.cache.radix import PrefixCache
from proa.engine.engine import Engine
from proa.engine.policy import Limits
from proa.engine.runner import Runner, StepOutput
from proa.engine.scheduler import Scheduler, StepPlan
from proa.layers.decoder import Decoder
from proa.layers.step import Step
from proa.ops.reference import REFERENCE
from proa.types import EngineRequest, Sampling, TokenEvent
from proa.weights.checkpoint import open_checkpoint
from proa.weights.load import load_weights


class RecordingDecoder(Decoder):
    """Keeps the hidden states of the last forward pass."""

    hidden: Tensor

    def __call__(self, tokens: Tensor, step: Step) -> Tensor:
        self.hidden = super().__call__(tokens, step)
        return self.hidden


class RecordingRunner(Runner):
    """logits[request id][position] of every row computed, the latest computation winning."""

    def __init__(self, model: RecordingDecoder, num_pages: int, page_tokens: int, dtype: torch.dtype) -> None:
        super().__init__(model, num_pages, page_tokens, dtype)
        self.recording = model
        self.logits: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self.rows_computed = 0

    def run(self, plan: StepPlan) -> StepOutput:
        out = super().run(plan)
        with torch.inference_mode():
            logits = iter(self.recording.logits(self.recording.hidden))
        for item in plan.items:
            for position in range(item.start, item.start + item.num_tokens):
                self.logits[item.request.id][position] = next(logits)
                self.rows_computed += 1
        return out


def load_decoder(folder: Path, dtype: torch.dtype = torch.float32, **override_config: object) -> RecordingDecoder:
    checkpoint = open_checkpoint(folder, "auto", override_config)
    declared = checkpoint.declare()
    model = RecordingDecoder(declared.spec, REFERENCE, dtype)
    load_weights(checkpoint, declared, dict(model.parameters()), lambda done, total: None)
    return model


def make_engine(
    model: RecordingDecoder,
    *,
    num_pages: int = 64,
    page_tokens: int = 4,
    max_running: int = 8,
    max_batch_tokens: int = 256,
    prefix_cache: bool = True,
) -> tuple[Engine, RecordingRunner]:
    allocator = PageAllocator(num_pages)
    runner = RecordingRunner(model, num_pages, page_tokens, model.embed.dtype)
    limits = Limits(
        context_tokens=num_pages * page_tokens,
        page_tokens=page_tokens,
        max_running=max_running,
        max_batch_tokens=max_batch_tokens,
        max_queued=1000,
        max_queued_tokens=1_000_000,
    )
    tree = PrefixCache(page_tokens, allocator) if prefix_cache else None
    return Engine(runner, Scheduler(limits, allocator, tree), model.spec.vocab), runner


def request(request_id: str, tokens: list[int], max_tokens: int, **wishes: object) -> EngineRequest:
    sampling = Sampling(max_tokens=max_tokens, **{"temperature": 0.0, **wishes})
    return EngineRequest(id=request_id, tokens=tokens, sampling=sampling)


def finish_all(engine: Engine) -> dict[str, list[TokenEvent]]:
    """Step until nothing is left to do; the events of each request."""
    events: dict[str, list[TokenEvent]] = defaultdict(list)
    while engine.has_work:
        for event in engine.step():
            events[event.id].append(event)
    engine.scheduler.check()
    return events


def tokens_of(events: list[TokenEvent]) -> list[int]:
    return [t for event in events for t in event.tokens]
