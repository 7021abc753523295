"""`proa check`: opens a model, samples its layers, runs every path and compares each with the reference. Never:
printing, options.
"""

from __future__ import annotations

import enum
import os
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from math import prod
from typing import TypeVar

import torch

from proa.check.adapt import adapt
from proa.check.apart import OutOfTime, PathFailed, run_apart
from proa.check.compare import Comparison
from proa.check.drive import ANSWER_TOKENS, PREFIX_TAIL_TOKENS, Texts, texts
from proa.check.lossy import Loss, measure
from proa.check.observe import observe
from proa.check.paths import ISAS, LIMIT_S, Facts, NoPath, Path, paths
from proa.check.sample import SAMPLE_BYTES, Sample, sample
from proa.check.truth import Truth
from proa.check.verdict import Observed
from proa.config.options import EngineOptions, MachineOptions
from proa.errors import ModelError, ProaError, ResourceError, UsageError
from proa.hub.locate import locate
from proa.machine.load import Load
from proa.machine.machine import Machine
from proa.machine.rates import RamRate
from proa.models.spec import Model
from proa.native.pool import select_isa
from proa.obs.progress import CHECKING, COMPARING
from proa.plan.opened import Opened, open_model
from proa.plan.plan import Plan
from proa.plan.prepare import prepare
from proa.types import ProgressCallback

_BEGIN_SHARE = 0.6  # of the limit: a path that may take longer is not begun
_PATHS_SHARE = 0.75  # of the limit: a path that runs then is ended; the rest is for the reference
CONTEXT_TOKENS, BATCH_TOKENS, RUNNING = 256, 64, 4
MOST_TOKENS, LEAST_TOKENS = 80, 24  # of the first prompt; the most are more than BATCH_TOKENS, and so take two steps
_PATHS, _ROWS_PER_TOKEN = 12, 4  # roughly, for the reference's work: paths, and rows of all prompts and answers
_FLOP = 4e11  # for each CPU: what the reference may take, in about 30 s
_WIDE, _THREADS = 1024, 16  # hidden size from which on the reference uses several threads; the most
_RAM_BYTES_PER_S = 100e9  # a stand-in: nothing that is compared depends on it

T = TypeVar("T")


@dataclass(frozen=True)
class Failed:
    """A path that could not be run, although the machine has it."""

    name: str
    why: str


class Answer(enum.Enum):
    YES = "yes"
    NO = "no"
    NONE = "no answer"


@dataclass
class Report:
    """observed: the paths that were compared. skipped: those that cannot be checked here. failed: those that raised.

    losses: of lossy options that were asked for; unmeasured: those that were not, and why. They change no answer.

    Left out when the limit was reached: `late` paths, `left` layers of all paths, and the logits unless
    has_logits. A layer of `left` may have been compared in part; what was found there counts."""

    model: str
    layers: tuple[int, ...]
    of_layers: int
    seed: int
    observed: list[Observed] = field(default_factory=list)
    skipped: list[NoPath] = field(default_factory=list)
    failed: list[Failed] = field(default_factory=list)
    losses: list[Loss] = field(default_factory=list)
    unmeasured: dict[str, str] = field(default_factory=dict)
    limit_s: float = LIMIT_S
    late: list[str] = field(default_factory=list)
    left: list[int] = field(default_factory=list)
    has_logits: bool = False
    seconds: float = 0.0

    @property
    def wrong(self) -> int:
        """Number of paths that failed or differ from the reference."""
        return sum(bool(path.problems) for path in self.observed) + len(self.failed)

    @property
    def answer(self) -> Answer:
        """YES if every path that can be checked here was compared in full and agrees; NO if one differs."""
        if self.wrong:
            return Answer.NO
        whole = bool(self.observed) and self.has_logits and not self.late and not self.left
        return Answer.YES if whole else Answer.NONE

    @property
    def agrees(self) -> bool:
        return self.answer is Answer.YES


def check(
    model: str, asked: EngineOptions, seed: int, show: ProgressCallback, most_bytes: int = SAMPLE_BYTES,
    limit_s: float = LIMIT_S,
) -> Report:  # fmt: skip
    """Check a model. most_bytes: of the sampled layers. limit_s: without the time in which the model is fetched and
    opened. Raises ProaError if it cannot be opened or read, a WeightsError that names the tensor if a file is
    damaged."""
    opened = open_model(locate(model, asked.model.revision, show), asked.model.load_format, asked.model)
    begin = time.perf_counter()
    chosen = sample(opened, seed, most_bytes)
    report = Report(model, chosen.layers, chosen.of, seed, limit_s=limit_s)
    spec = chosen.opened.declared.spec
    lossy = _for_check(asked, spec)
    asked = replace(lossy, gpus=replace(lossy.gpus, deferred_experts=0, gpu_resident_layers=None))
    found = paths(asked, spec, _facts(model, asked, chosen))
    prompts = texts(spec.vocab, _prompt_tokens(spec), seed)
    longest_s = 0.0
    for number, path in enumerate(found):
        show(CHECKING, number, len(found))
        start = time.perf_counter()
        if isinstance(path, NoPath):
            report.skipped.append(path)
        elif start + longest_s > begin + _BEGIN_SHARE * limit_s:
            report.late.append(path.name)
        else:
            _observe(report, model, path, chosen, prompts, begin + _PATHS_SHARE * limit_s)
            longest_s = max(longest_s, time.perf_counter() - start)
    if lossy.gpus.deferred_experts:
        start = time.perf_counter()
        _measure(report, model, lossy, opened, prompts, limit_s)
        begin += time.perf_counter() - start
    # Threads wait for each other at every op: on a busy machine this takes longer than most ops do.
    cpus = len(os.sched_getaffinity(0))
    torch.set_num_threads(max(1, min(cpus // 2, _THREADS)) if spec.hidden >= _WIDE else 1)
    if report.observed:
        _compare(report, chosen, begin + limit_s, show)
    report.seconds = time.perf_counter() - begin
    return report


def _for_check(asked: EngineOptions, spec: Model) -> EngineOptions:
    """The options with small steps and contexts, no --deterministic, no FP8 activations, and no tiers behind the prefix
    cache or placement of experts: paths ask for their own. Workers are not bound: other engines may run."""
    context = min(CONTEXT_TOKENS, spec.max_positions)
    scheduler = replace(asked.scheduler, max_running=RUNNING, max_batch_tokens=BATCH_TOKENS, max_itl="none")
    scheduler = replace(scheduler, deterministic=False)  # else steps are in parts, whose rows are noted for few paths
    cache = replace(asked.cache, context=context, kv_memory=None, kv_dtype="auto", prefix_cache=True)
    cache = replace(cache, prefix_cache_ram=0, prefix_cache_dir=None, prefix_cache_disk=None)
    machine = replace(asked.machine, cpu_binding="none")
    gpus = replace(asked.gpus, fp8_activations=False, expert_counts=None, save_expert_counts=None)
    gpus = replace(gpus, expert_placement="auto", vram_moves="off")
    return replace(asked, scheduler=scheduler, cache=cache, machine=machine, gpus=gpus)


def _unmeasured(asked: MachineOptions, machine: Machine) -> RamRate:
    return RamRate(bytes_per_s=_RAM_BYTES_PER_S, threads=1, pages=(), load=Load(None, 1))


def _plan(model: str, asked: EngineOptions, chosen: Sample) -> Plan:
    return prepare(model, asked, measure=_unmeasured, opened=chosen.opened).plan


def _facts(model: str, asked: EngineOptions, chosen: Sample) -> Facts:
    plan = _plan(model, asked, chosen)
    row = next(decision for decision in plan.decisions if decision.name == "GPU")
    gpu = "" if plan.gpu is None else "GPU" if not plan.gpu.simulated else "simulated GPU"
    return Facts(tuple(isa for isa in ISAS if _runs(isa)), gpu, row.why, plan.dtype)


def _runs(isa: str) -> bool:
    try:
        select_isa(isa)
    except ValueError:
        return False
    return True


def _prompt_tokens(spec: Model) -> int:
    """Fewer for large models: the reference computes each row of each path in two types, twice."""
    outer = spec.vocab * spec.hidden * (1 if spec.tied else 2)
    idle = sum((moe.experts - moe.top_k) * sum(prod(shape) for _, shape in moe.expert.params())
               for moe in spec.routed.values())  # fmt: skip
    each = _PATHS * _ROWS_PER_TOKEN * 4 * 2 * (spec.num_params - idle - outer)
    least = 1 + PREFIX_TAIL_TOKENS + ANSWER_TOKENS
    if spec.max_positions < least:
        raise UsageError(
            f"The model has {spec.max_positions} positions, and the check needs {least}.",
            "See max_position_embeddings in its config.json, or in --override-config.",
        )
    most = min(MOST_TOKENS, spec.max_positions - least + 1)
    return min(most, max(LEAST_TOKENS, int(_FLOP * len(os.sched_getaffinity(0)) / each)))


def _observe(report: Report, model: str, path: Path, chosen: Sample, prompts: Texts, end_s: float) -> None:
    """Run a path and add its outcome to the report. end_s: when a path that still runs is ended."""
    with tempfile.TemporaryDirectory(prefix="proa-check-") as folder:
        of = adapt(path, chosen.opened.declared.spec, folder, lambda options: _plan(model, options, chosen))
        if isinstance(of, NoPath):
            report.skipped.append(of)
            return
        _run_path(report, path, partial(observe, path, of, chosen, prompts), end_s)


def _run_path(report: Report, path: Path, work: Callable[[], Observed | str], end_s: float) -> None:
    try:
        found = run_apart(work, end_s - time.perf_counter())
    except OutOfTime:
        report.late.append(path.name)
        return
    except ModelError:
        raise  # of the checkpoint, not of the path
    except ProaError as error:
        report.failed.append(Failed(path.name, error.message))
        return
    except PathFailed as error:
        report.failed.append(Failed(path.name, f"{error}."))
        return
    if isinstance(found, str):
        report.skipped.append(NoPath(path.name, found))
    else:
        report.observed.append(found)


def _measure(report: Report, model: str, asked: EngineOptions, opened: Opened, prompts: Texts, limit_s: float) -> None:
    """Measure what the lossy option loses, on all layers: the loss of some says nothing about all."""
    whole, end_s = sample(opened, report.seed, sys.maxsize), time.perf_counter() + limit_s
    option, make = f"--deferred-experts {asked.gpus.deferred_experts}", partial(_plan, model, chosen=whole)

    def run(work: Callable[[], T]) -> T:
        return run_apart(work, end_s - time.perf_counter())

    try:
        loss = measure(asked, whole, [prompts.first, *prompts.others], report.seed, make, run)
    except OutOfTime:
        report.unmeasured[option] = f"the time limit of {limit_s:.0f} s, which it has for itself"
    except (UsageError, ResourceError) as error:
        report.unmeasured[option] = error.message
    except (ProaError, PathFailed) as error:
        report.failed.append(Failed(option, f"{error}."))
    else:
        report.losses.append(loss)


def _compare(report: Report, chosen: Sample, end_s: float, show: ProgressCallback) -> None:
    declared = chosen.opened.declared

    def check_time() -> None:
        if time.perf_counter() > end_s:
            raise OutOfTime

    truth = Truth(chosen.opened.checkpoint, declared)
    dtype = torch.float16 if report.observed[0].dtype is torch.float16 else torch.bfloat16
    done = 0
    try:
        comparison = Comparison(declared.spec, chosen.layers, truth, dtype, report.observed, check_time)
        for number in range(len(chosen.layers)):
            show(COMPARING, number, len(chosen.layers))
            comparison.block(number)
            done += 1
        comparison.head()
        report.has_logits = True
    except OutOfTime:
        report.left += chosen.layers[done:]
