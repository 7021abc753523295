"""A check's result as text and as JSON. Never: computing it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from proa.check.drive import CACHED, PHASES
from proa.check.paths import LIMIT_S
from proa.check.run import Answer, Report

_LISTED = 12  # problems of one path


COLUMNS = ("path", *(phase.removeprefix("prefix ") for phase in PHASES), "")


def rows(report: Report) -> Iterator[tuple[str, ...]]:
    """Lines of the table: path, worst difference / bound of each phase, answer."""
    for path in report.observed:
        graphs = "; decode as CUDA graphs" if path.graphs else ""
        shown = (f"{path.worst[phase]:.2f}" if phase in path.worst else "-" for phase in PHASES)
        yield f"{path.name}{graphs}", *shown, "no" if path.problems else "yes"
    for failed in report.failed:
        yield failed.name, *("-" for _ in PHASES), "no"


def notes(report: Report) -> Iterator[str]:
    """Lines about paths that failed or are missing in the table."""
    for failed in report.failed:
        yield f"{failed.name} failed: {failed.why}"
    for path in report.observed:
        if CACHED not in path.worst:
            yield f"{path.name}: no prompt reused a cached prefix"
    for phase, why, names in left_out(report):
        yield f"not checked: {phase}: {'; '.join(names)}: {why}"
    for name in report.late:
        yield f"not compared: {name}: the time limit of {report.limit_s:.0f} s"
    for loss in report.losses:
        yield str(loss)
    for name, why in report.unmeasured.items():
        yield f"not measured: {name}: {why}"
    for skipped in report.skipped:
        yield f"not checked: {skipped.name}: {skipped.why}"


def left_out(report: Report) -> list[tuple[str, str, list[str]]]:
    """Phases of compared paths that could not be checked, why, and the paths' names."""
    found: dict[tuple[str, str], list[str]] = {}
    for path in report.observed:
        for phase, why in path.left_out.items():
            found.setdefault((phase, why), []).append(path.name)
    return [(phase, why, names) for (phase, why), names in found.items()]


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
        return f"{text}; not compared, for lack of time: layers {', '.join(map(str, report.left))}, and the logits"
    if report.observed and not report.has_logits:
        return f"{text}; not compared, for lack of time: the logits"
    return text


def _layers(layers: Sequence[int], of: int) -> str:
    if len(layers) == of:
        return f"all {of} layers"
    return f"{len(layers)} of {of} layers ({', '.join(map(str, layers))})"


def answer(report: Report) -> str:
    """The last line: yes, no or no answer, and why."""
    count, took = len(report.observed) + len(report.failed), f"in {report.seconds:.0f} s"
    if report.answer is Answer.NO:
        return f"no: {report.wrong} of {count} paths differ from the reference, {took}"
    if report.answer is Answer.NONE:
        return f"no answer: {_missing(report)}. The check took {report.seconds:.0f} s"
    left = len(report.skipped)
    more = f"; {left} {'was' if left == 1 else 'were'} not checked" if left else ""
    return f"yes: {count} path{'s' * (count > 1)} agree{'s' * (count == 1)} with the reference{more}, {took}"


def _missing(report: Report) -> str:
    """What an answer lacks, and what to do."""
    if not report.observed and not report.late:
        return "this machine has no path that can be checked for this model (the lines above say why)"
    parts = []
    if report.late:
        parts.append(f"{len(report.late)} paths")
    if report.left:
        parts.append(f"{len(report.left)} of {len(report.layers)} layers")
    if report.observed and not report.has_logits:
        parts.append("the logits")
    more = max(2 * report.limit_s, 2 * LIMIT_S)
    return f"the time limit left out {' and '.join(parts)}; what was compared agrees. Give --time-limit {more:.0f}"


def as_json(report: Report) -> dict[str, Any]:
    """The --json output."""
    return {
        "agrees": report.agrees,
        "answer": report.answer.value,
        "model": report.model,
        "layers": list(report.layers),
        "layers_of_model": report.of_layers,
        "layers_left": report.left,
        "logits_compared": report.has_logits,
        "paths_left": report.late,
        "seed": report.seed,
        "seconds": round(report.seconds, 1),
        "paths": [
            {
                "path": path.name,
                "decode_graphs": path.graphs,
                "over_bound": {phase: _number(worst) for phase, worst in path.worst.items()},
                "left_out": path.left_out,
                "problems": [
                    {"layer": p.layer, "op": p.op, "experts": p.detail, "phase": p.phase, "over_bound": _number(p.over),
                     "rows": p.rows}
                    for p in path.problems
                ],
            }
            for path in report.observed
        ],
        "lossy": [
            {"option": loss.option, "path": loss.path, "kl_mean_nats": loss.mean_nats, "kl_most_nats": loss.most_nats,
             "same_best": loss.same_best, "distributions": loss.steps}
            for loss in report.losses
        ],
        "not_measured": report.unmeasured,
        "failed": {failed.name: failed.why for failed in report.failed},
        "not_checked": {skipped.name: skipped.why for skipped in report.skipped},
    }  # fmt: skip


def _number(value: float) -> float | str:
    """JSON has no infinity."""
    return "infinite" if value == float("inf") else round(value, 4)
