"""The result of `proa plan` as text and as JSON.

The JSON is that of the start-up report (cli/report.py; url, port and ready are null), and:

    machine      of the machine file or of this machine (machine/machine_file.py)
    machine_file its path, or null
    nodes        [{node, workers, free_bytes, weights_bytes}]  packed weights in RAM by memory node
    longest_prompt_tokens
    predictions  {decode: [{tokens, requests, tokens_per_s, limit_tokens_per_s, seconds, bound_by, terms}],
                  prefill: the same for prompts, speeds: {ram, cpu, vram, pcie, gpu: {per_s, source}}, notes}
    summary      the sentences of the text
    seconds      that planning took, measuring included
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from proa.cli.report import Report, decisions_table, facts_table, grid, options_table, report_json
from proa.machine.machine import Machine
from proa.obs.units import format_bytes, format_duration, format_flops, format_rate
from proa.plan.nodes import NodeShare
from proa.plan.plan import Plan
from proa.plan.predict import Prediction, Predictions
from proa.plan.speeds import Speeds


@dataclass(frozen=True)
class PlanReport:
    """The contents of the report. machine_file: the path given; None: this machine."""

    start_up: Report
    machine: Machine
    machine_file: str | None
    nodes: Sequence[NodeShare]
    predictions: Predictions
    seconds: float

    @property
    def longest_prompt_tokens(self) -> int:
        """The context without one token, for the answer."""
        return self.start_up.plan.context_tokens - 1


def plan_json(report: PlanReport) -> dict[str, Any]:
    """Build the JSON object described at the top of this file."""
    return {
        **report_json(report.start_up),
        "machine": msgspec.to_builtins(report.machine),
        "machine_file": report.machine_file,
        "nodes": msgspec.to_builtins(report.nodes),
        "longest_prompt_tokens": report.longest_prompt_tokens,
        "predictions": msgspec.to_builtins(report.predictions),
        "summary": list(summary(report)),
        "seconds": report.seconds,
    }


def render_planned(report: PlanReport) -> RenderableType:
    """Build the text: the summary, then memory, predictions, decisions and options as tables."""
    where = f"for {report.machine.cpu}" + (f", as {report.machine_file} describes it" if report.machine_file else "")
    start_up = report.start_up
    facts = facts_table(start_up)
    for name, text in _node_rows(report.nodes):
        facts.add_row(name, text)
    for name, text in _speed_rows(report.predictions.speeds):
        facts.add_row(name, text)
    notes = grid()
    for note in report.predictions.notes:
        notes.add_row("note", Text(note))
    return Group(
        Text(f"Proa {start_up.version}: plan of {start_up.plan.model} {where}", style="bold"),
        Text(" ".join(summary(report)) + "\n"),
        facts,
        _predictions_table(report.predictions),
        *([notes] if report.predictions.notes else []),
        decisions_table(start_up.plan.decisions),
        *([options_table(start_up.asked)] if start_up.asked else []),
    )


def summary(report: PlanReport) -> Iterator[str]:
    """Yield the plan in sentences: whether it fits, where the weights are, the longest prompt, the speed."""
    plan = report.start_up.plan
    yield f"{plan.model} fits. {_placement(plan)}"
    requests = f"{plan.max_running} requests run at once" if plan.max_running > 1 else "one request runs at a time"
    yield f"A prompt may have {report.longest_prompt_tokens} tokens, and {requests}."
    one = [of for of in report.predictions.decode if of.requests == 1]
    if one:
        yield (
            f"One request decodes {_rate(one[0])} tokens/s at a context of {one[0].tokens}"
            + (f" and {_rate(one[-1])} at {one[-1].tokens}" if len(one) > 1 else "")
            + f", limited mostly by {one[0].bound_by}."
        )
    if report.predictions.prefill:
        last = report.predictions.prefill[-1]
        yield (
            f"A prompt of {last.tokens} tokens takes {format_duration(last.seconds)} ({_rate(last)} tokens/s), limited "
            f"mostly by {last.bound_by}."
        )
    for node in report.nodes:
        if node.missing_bytes:
            yield (
                f"Memory node {node.node} has {format_bytes(node.free_bytes or 0)} free for "
                f"{format_bytes(node.weights_bytes)} of weights: the rest would lie on another node, which is slower."
            )


def _placement(plan: Plan) -> str:
    weights = format_bytes(plan.memory.weights_bytes)
    gpu = plan.gpu
    if gpu is None:
        return f"The CPU computes everything, from {weights} of weights in RAM."
    name = "The simulated GPU" if gpu.simulated else gpu.name
    experts, resident = sum(gpu.experts), sum(map(len, gpu.resident))
    if not experts or gpu.gpu_only:
        return f"{name} holds all of it, and RAM keeps no weights."
    held = f"{resident} of {experts} routed experts" if resident else "no routed expert"
    copies = "all of them" if gpu.inclusive or not resident else "the others"
    return f"{name} holds everything but routed experts, and {held}; RAM holds {copies}, {weights}, for the CPU."


def _rate(of: Prediction) -> str:
    rate = of.tokens_per_s
    return f"{rate:.0f}" if rate >= 99.5 else f"{rate:.1f}" if rate >= 9.95 else f"{rate:.2f}"


def _node_rows(nodes: Sequence[NodeShare]) -> Iterator[tuple[str, str]]:
    for node in nodes:
        if node.node is None or not node.weights_bytes:
            continue
        free = "" if node.free_bytes is None else f" of {format_bytes(node.free_bytes)} free"
        yield f"node {node.node}", f"weights {format_bytes(node.weights_bytes)}{free}, {node.workers} workers"


def _speed_rows(speeds: Speeds) -> Iterator[tuple[str, str]]:
    bandwidths = {"VRAM speed": speeds.vram, "PCIe speed": speeds.pcie}
    for name, speed in bandwidths.items():
        if speed is not None and speed.per_s is not None:
            yield name, f"{format_rate(speed.per_s)} ({speed.source})"
    for name, speed in {"CPU products": speeds.cpu, "GPU products": speeds.gpu}.items():
        if speed is not None and speed.per_s is not None:
            yield name, f"{format_flops(speed.per_s)} ({speed.source})"


def _predictions_table(of: Predictions) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("predicted", "tokens", "requests", "tokens/s", "at most", "time", "what takes it"):
        table.add_column(title, overflow="fold", justify="left" if title in ("predicted", "what takes it") else "right")
    for name, rows in (("decode", of.decode), ("prompt", of.prefill)):
        for row in rows:
            limit = msgspec.structs.replace(row, tokens_per_s=row.limit_tokens_per_s)
            seconds = f"{1e3 * row.seconds:.1f} ms" if row.seconds < 1 else format_duration(row.seconds)
            table.add_row(name, str(row.tokens), str(row.requests), _rate(row), _rate(limit), seconds, _terms(row))
    return table


def _terms(of: Prediction) -> str:
    """Format the parts of the predicted time, longest first, without those below 1 %."""
    parts = sorted(of.terms.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {seconds / of.seconds:.0%}" for name, seconds in parts if seconds >= 0.01 * of.seconds)
