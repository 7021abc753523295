"""Option checks that several benchmarks share: lists of numbers, the planned context, and the planned GPU."""

from __future__ import annotations

from collections.abc import Mapping

from proa.config.options import GpuOptions
from proa.config.value import parse_tokens
from proa.errors import UsageError
from proa.machine.probe import probe
from proa.plan.plan import GpuPlan, Plan


def parse_numbers(text: str, param: str, least: int, most: int) -> tuple[int, ...]:
    """Parse numbers such as "1,2,4k,8", each once. Raises UsageError."""
    try:
        numbers = [parse_tokens(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < least or max(numbers) > most:
        takes = f"Give numbers from {least} to {most}, separated by commas."
        raise UsageError(f"--{param} is {text!r}.", takes, param=param)
    return tuple(dict.fromkeys(numbers))


def need_context(plan: Plan, lengths: Mapping[str, int], answer: int = 0) -> None:
    """Raise UsageError if a request of these lengths, by option, with an answer of `answer` tokens more, is longer than
    the planned context, before the model is loaded."""
    tokens = sum(lengths.values()) + answer
    if tokens <= plan.context_tokens:
        return
    options = " and ".join(f"--{name.replace('_', '-')} {value}" for name, value in lengths.items())
    more = f" with answers of {answer} tokens" if answer else ""
    row = next(row for row in plan.decisions if row.name == "context")
    raise UsageError(
        f"{options}{more} need a context of {tokens} tokens, but it has {plan.context_tokens} ({row.why}).",
        f"Lower them to {plan.context_tokens - answer} tokens together.",
        param=next(iter(lengths)),
    )


def need_gpu(asked: GpuOptions) -> None:
    """Raise UsageError if there can be no GPU, before a plan for the CPU alone is refused for lack of memory."""
    if asked.gpu == "none":
        raise _no_gpu("--gpu none")
    if asked.gpu == "auto":
        machine = probe()
        if not machine.gpus:
            raise _no_gpu(machine.gpus_note or "none found")


def gpu_of(plan: Plan) -> GpuPlan:
    """The plan's GPU. Raises UsageError if it has none."""
    if plan.gpu is None:
        why = next((d.why for d in plan.decisions if d.name == "GPU"), "none was found")
        raise _no_gpu(why)
    return plan.gpu


def _no_gpu(why: str) -> UsageError:
    return UsageError(f"No GPU is used: {why}.", "Simulate one with --gpu sim:6GiB.")
