"""What --deferred-experts loses: the KL divergence of the next-token distributions from those without it. Belongs here:
decoding the same tokens on both paths. Never: bounds of types, which a lossy path does not keep.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from proa.check.sample import Sample
from proa.config.options import EngineOptions
from proa.engine.building.load import fill, new_build
from proa.engine.building.timeline import Timeline
from proa.engine.executors.batch import Span, StepBatch
from proa.engine.executors.executor import Executor
from proa.errors import ProaError
from proa.plan.plan import Plan

T = TypeVar("T")
STEPS = 24  # decode steps per prompt
_STEP_BATCH = 64  # most prompt tokens per step: CONTEXT_TOKENS and BATCH_TOKENS of run.py have room for more


class Apart(Protocol):
    def __call__(self, work: Callable[[], T]) -> T:
        """The result of `work`, computed in a process of its own."""


@dataclass(frozen=True)
class Loss:
    """KL(exact || lossy) in nats of `steps` next-token distributions in decode: mean and largest. same_best: fraction
    of them with the same most likely token. path: the device and the placement of experts."""

    option: str
    path: str
    mean_nats: float
    most_nats: float
    same_best: float
    steps: int

    def __str__(self) -> str:
        return (
            f"lossy: {self.option}, {self.path}: KL divergence from the exact path {self.mean_nats:.3g} nats on "
            f"average, at most {self.most_nats:.3g}, over {self.steps} next-token distributions in decode; the most "
            f"likely token is the same in {100 * self.same_best:.0f} %"
        )


@dataclass(frozen=True)
class Decoded:
    """tokens: generated after each prompt. logits: float32 [all generated tokens, vocab], after each of them."""

    tokens: list[list[int]]
    logits: Tensor


def exact_options(asked: EngineOptions) -> EngineOptions:
    """The options of the path without the loss. The placement is static, so that both paths compute the same pairs on
    the same device; unless one is asked for, no expert is in VRAM, and the most is deferred."""
    gpus = replace(asked.gpus, deferred_experts=0, expert_placement="uniform", co_fetch="off")
    if gpus.gpu_experts == "auto" and gpus.gpu_resident_layers is None:
        gpus = replace(gpus, gpu_experts="none")
    return replace(asked, gpus=gpus)


def measure(
    asked: EngineOptions, of: Sample, prompts: Sequence[list[int]], seed: int, make: Callable[[EngineOptions], Plan],
    run: Apart,
) -> Loss:  # fmt: skip
    """Decode after the prompts, exactly and then with the same tokens and asked.gpus.deferred_experts. Raises what
    `make` and `run` raise, and ProaError for values that are not finite."""
    count, options = asked.gpus.deferred_experts, exact_options(asked)
    lossy = make(replace(options, gpus=replace(options.gpus, deferred_experts=count)))  # refused if it has no effect
    exact = run(partial(_decode, make(options), of, prompts, seed))
    kl, same = run(partial(_compare, lossy, of, prompts, exact))
    placed = "experts in RAM" if options.gpus.gpu_experts == "none" else "experts placed as asked"
    path = f"{lossy.gpus[0].device}, {placed}"
    return Loss(f"--deferred-experts {count}", path, sum(kl) / len(kl), max(kl), sum(same) / len(same), len(kl))


def _compare(plan: Plan, of: Sample, prompts: Sequence[list[int]], exact: Decoded) -> tuple[list[float], list[bool]]:
    """KL(exact || plan) of each distribution, and whether the most likely token is the same."""
    got = _decode(plan, of, prompts, 0, exact.tokens).logits
    kl = kl_nats(exact.logits, got)
    if not bool(kl.isfinite().all()):
        raise ProaError("logits of the lossy path are not finite")
    return kl.tolist(), (exact.logits.argmax(1) == got.argmax(1)).tolist()


def kl_nats(exact: Tensor, other: Tensor) -> Tensor:
    """KL(exact || other) of each row of logits [T, vocab], float64 [T]."""
    p, q = (torch.log_softmax(logits.double(), 1) for logits in (exact, other))
    return (p.exp() * (p - q)).sum(1).clamp(min=0.0)


def _decode(
    plan: Plan, of: Sample, prompts: Sequence[list[int]], seed: int, forced: Sequence[list[int]] | None = None
) -> Decoded:
    """Compute each prompt, then STEPS decode steps, with tokens that are drawn from the distributions, or `forced`."""
    checkpoint, declared = of.opened.checkpoint, of.opened.declared
    torch.set_flush_denormal(True)
    build = new_build(plan, checkpoint, declared, Timeline())
    fill(build, plan, checkpoint, declared, lambda loading: None)
    executor = build.bind(lambda loading: None).executor
    generator = torch.Generator().manual_seed(seed)
    tokens, rows = [], []
    for number, prompt in enumerate(prompts):
        given = None if forced is None else forced[number]
        mine, logits = _continue(executor, plan, prompt, number, given, generator)
        tokens.append(mine)
        rows += logits
    return Decoded(tokens, torch.stack(rows))


def _continue(
    executor: Executor[object], plan: Plan, prompt: list[int], number: int, forced: list[int] | None,
    generator: torch.Generator,
) -> tuple[list[int], list[Tensor]]:  # fmt: skip
    """The tokens after a prompt and the logits after each of them. number: of the prompt, which has its own slot of
    recurrent states; pages are used again."""
    pages = list(range(-(-(len(prompt) + STEPS) // plan.page_tokens)))
    most = min(_STEP_BATCH, plan.max_batch_tokens)

    def step(new: list[int], start: int) -> Tensor:
        span = Span(new, start, pages, len(prompt), number)
        launched = executor.launch(StepBatch((span,)))
        executor.sample(launched, (), ())
        executor.wait(launched)
        return executor.logits_of(launched, range(len(new) - 1, len(new)))[0].float().to("cpu", copy=True)

    for first in range(0, len(prompt), most):
        last = step(prompt[first : first + most], first)
    tokens, logits = [], []
    steps = min(STEPS, plan.context_tokens - len(prompt))
    for i in range(steps):
        drawn = torch.multinomial(torch.softmax(last.double(), 0), 1, generator=generator)
        tokens.append(int(drawn) if forced is None else forced[i])
        last = step(tokens[-1:], len(prompt) + i)
        logits.append(last)
    return tokens, logits
