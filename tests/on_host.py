"""GraphExecutor without a GPU: its queue computes at once on the CPU, its decoder has reference ops. Never: tests."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import cast

import torch
from torch import Tensor

from have_gpu import HAVE_GPU
from proa.engine.executors.batch import StepLimits
from proa.engine.executors.device_queue import Cut, Mark
from proa.engine.executors.graphs import GraphExecutor
from proa.engine.executors.queues import Queues
from proa.engine.executors.session import Session
from proa.layers.decoder import Decoder
from proa.layers.step import Step
from proa.ops.caches import Caches
from proa.ops.cuda_device import device_ops
from proa.ops.table import AttentionBatch


class HostQueue:
    """Computes on the calling thread as soon as work is launched."""

    device = torch.device("cpu")

    def current(self) -> AbstractContextManager[None]:
        return nullcontext()

    def mark(self, *, timed: bool = False) -> Mark:
        return HostMark()

    def after(self, mark: Mark) -> None:
        pass

    def capture(self, launch: Callable[[], None]) -> Callable[[], None]:
        return launch

    def capture_in_pieces(self, launch: Callable[[Cut], None]) -> Callable[[], None]:
        return partial(launch, lambda action: action())

    def finish(self) -> None:
        pass

    def finish_device(self) -> None:
        pass


class HostMark:
    passed = True

    def __init__(self) -> None:
        self._time_s = time.perf_counter()

    def wait(self) -> None:
        pass

    def seconds_since(self, earlier: HostMark) -> float:
        return self._time_s - earlier._time_s


class OnHost:
    """A decoder that reads a step's sequences from the device tensors at each call, as kernels in a graph do, and skips
    rows of padding."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.spec, self.blocks = decoder.spec, decoder.blocks
        self.argmax, self.logits, self.embedded = decoder.argmax, decoder.logits, decoder.embedded

    def __call__(self, tokens: Tensor, step: Step, kept: Mapping[int, Tensor] | None = None) -> Tensor:
        live, inputs = _live(step)
        out = torch.zeros(len(tokens), self.spec.hidden, dtype=torch.bfloat16)
        if live:
            out[:live] = self._decoder(tokens[:live], inputs, kept)
        return out

    def block(self, number: int, x: Tensor, step: Step) -> Tensor:
        live, inputs = _live(step)
        out = torch.zeros_like(x)
        if live:
            out[:live] = self._decoder.block(number, x[:live], inputs)
        return out

    def by_parts(self, tokens: Tensor, step: Step) -> Iterator[Tensor | None]:
        live, inputs = _live(step)
        out = torch.zeros(len(tokens), self.spec.hidden, dtype=torch.bfloat16)
        if not live:
            yield from [out] * len(self.blocks)
            return
        for hidden in self._decoder.by_parts(tokens[:live], inputs):
            if hidden is None:  # between groups of experts
                yield None
                continue
            out = out.clone()
            out[:live] = hidden
            yield out


def _live(step: Step) -> tuple[int, Step]:
    at = step.batch.on_device
    starts, kv_lens = at.q_starts.tolist(), at.kv_lens.tolist()
    alive = [i for i, length in enumerate(kv_lens) if length]
    q_lens = [starts[i + 1] - starts[i] for i in alive]
    live = sum(q_lens)
    if at.rows_each:
        assert set(q_lens) <= {at.rows_each}
    assert bool((step.batch.slots[live:] == -1).all()), "padding writes nowhere"
    batch = AttentionBatch(
        tuple(q_lens), tuple(kv_lens[i] for i in alive), tuple(at.page_table[i].long() for i in alive),
        step.batch.slots[:live], states=tuple(at.states[i].item() for i in alive),
    )  # fmt: skip
    angles = {rope: (cos[:live], sin[:live]) for rope, (cos, sin) in step.angles.items()}
    return live, Step(batch, angles, step.caches)


def host_executor(
    decoder: Decoder, caches: Caches, limits: StepLimits, *, kept_blocks: Sequence[int] = (),
    session: Session | None = None, queues: Queues | None = None,
) -> GraphExecutor:  # fmt: skip
    """A GraphExecutor on the CPU. decoder: with reference ops in bfloat16."""
    if not HAVE_GPU:  # a test without the fixture `device`: the interpreter would take twice the time
        from interpreter import repair

        repair()
    queue = HostQueue()
    return GraphExecutor(
        cast(Decoder, OnHost(decoder)),
        caches,
        limits,
        queues or Queues(queue),
        device_ops(queue.device),
        session,
        kept_blocks=kept_blocks,
    )
