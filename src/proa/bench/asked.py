"""Option checks that several benchmarks share: lists of numbers, and the planned GPU."""

from __future__ import annotations

from proa.errors import UsageError
from proa.plan.plan import GpuPlan, Plan


def parse_numbers(text: str, param: str, least: int, most: int) -> tuple[int, ...]:
    """Parse numbers such as "1,2,4,8", each once. Raises UsageError."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and least <= int(word) <= most for word in words):
        takes = f"Give numbers from {least} to {most}, separated by commas."
        raise UsageError(f"--{param} is {text!r}.", takes, param=param)
    return tuple(dict.fromkeys(map(int, words)))


def gpu_of(plan: Plan) -> GpuPlan:
    """The plan's GPU. Raises UsageError if it has none."""
    if plan.gpu is None:
        why = next((d.why for d in plan.decisions if d.name == "GPU"), "none was found")
        raise UsageError(f"No GPU is used: {why}.", "Simulate one with --gpu sim:6GiB.")
    return plan.gpu
