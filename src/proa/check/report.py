"""A check's result as text and as JSON. Never: computing it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from proa.check.drive import CACHED, DECODE, PROMPT
from proa.check.run import Report

_LISTED = 12  # problems of one path


COLUMNS = ("path", PROMPT, DECODE, CACHED, "")


def rows(report: Report) -> Iterator[tuple[str, ...]]:
    """Lines of the table: path, worst difference / bound of each phase, answer."""
    for path in report.observed:
        graphs = "; decode as CUDA graphs" if path.graphs else ""
        shown = (f"{path.worst[phase]:.2f}" if phase in path.worst else "-" for phase in (PROMPT, DECODE, CACHED))
        yield f"{path.name}{graphs}", *shown, "no" if path.problems else "yes"
    for failed in report.failed:
        yield failed.name, "-", "-", "-", "no"


def notes(report: Report) -> Iterator[str]:
    """Lines about paths that failed or are missing in the table."""
    for failed in report.failed:
        yield f"{failed.name} failed: {failed.why}"
    for path in report.observed:
        if CACHED not in path.worst:
            yield f"{path.name}: no prompt reused a cached prefix"
    for skipped in report.skipped:
        yield f"not checked: {skipped.name}: {skipped.why}"


def problems(report: Report) -> Iterator[str]:
    """One line for each op that is wrong, the first op of a path first."""
    for path in report.observed:
        for problem in path.problems[:_LISTED]:
            yield f"{path.name}: {problem}"
        if len(path.problems) > _LISTED:
            yield f"{path.name}: and {len(path.problems) - _LISTED} more"


def scope(report: Report) -> str:
    """What was compared."""
    text = f"{report.model}: {_layers(report.layers, report.of_layers)}, --seed {report.seed}"
    if report.left:
        text += f"; not compared, for lack of time: layers {', '.join(map(str, report.left))}, and the logits"
    return text


def _layers(layers: Sequence[int], of: int) -> str:
    if len(layers) == of:
        return f"all {of} layers"
    return f"{len(layers)} of {of} layers ({', '.join(map(str, layers))})"


def answer(report: Report) -> str:
    """The last line: yes or no, and why."""
    count = len(report.observed) + len(report.failed)
    wrong = sum(bool(path.problems) for path in report.observed) + len(report.failed)
    took = f"in {report.seconds:.0f} s"
    if not report.observed and not report.failed:
        return f"no: no path could be checked, {took}"
    if not report.agrees and not wrong:
        return f"no: there was no time to compare a layer, {took}"
    if not report.agrees:
        return f"no: {wrong} of {count} paths differ from the reference, {took}"
    more = f"; {len(report.skipped)} were not checked" if report.skipped else ""
    return f"yes: {count} path{'s' * (count > 1)} agree{'s' * (count == 1)} with the reference{more}, {took}"


def as_json(report: Report) -> dict[str, Any]:
    """The --json output."""
    return {
        "agrees": report.agrees,
        "model": report.model,
        "layers": list(report.layers),
        "layers_of_model": report.of_layers,
        "layers_left": report.left,
        "seed": report.seed,
        "seconds": round(report.seconds, 1),
        "paths": [
            {
                "path": path.name,
                "decode_graphs": path.graphs,
                "over_bound": {phase: _number(worst) for phase, worst in path.worst.items()},
                "problems": [
                    {"layer": p.layer, "op": p.op, "experts": p.detail, "phase": p.phase, "over_bound": _number(p.over),
                     "rows": p.rows}
                    for p in path.problems
                ],
            }
            for path in report.observed
        ],
        "failed": {failed.name: failed.why for failed in report.failed},
        "not_checked": {skipped.name: skipped.why for skipped in report.skipped},
    }  # fmt: skip


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return "infinite" if value == float("inf") else round(value, 4)
