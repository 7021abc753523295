"""`proa check`: compares every path that this machine has for a model with the reference, and answers yes or no."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from proa.check.paths import LIMIT_S
from proa.config.env import child_environ
from proa.config.field import argument, option
from proa.config.options import MODEL_HELP, EngineOptions
from proa.config.parse import parse
from proa.errors import ModelError, ModelNotFound, UsageError
from proa.hub.lookup import look_up
from proa.obs.console import console_err, console_out, write_out

if TYPE_CHECKING:
    from proa.check.run import Report

NO_ANSWER = 7  # exit code; those of errors are in proa/errors.py

SUMMARY = "compare a model on every path of this machine with the reference"
EPILOG = """\
Each path (instruction set, placement of experts, streamed prompts, type of the KV cache, prefixes out of each tier of
the cache) computes the same prompts as the reference: plain torch in float32, with weights that it reads from the files
itself. Without a GPU, --gpu sim:SIZE checks the paths of a simulated one. An op that differs by more than rounding
explains is named with its layer and experts. Large models are checked on a sample of their layers. The last line is yes
(exit code 0), no (exit code 1), or "no answer" (exit code 7) if the time limit left a path or a layer out. The check
itself sets context, KV type, steps, concurrent requests and the placement of experts; --deterministic, --vram-moves and
--fp8-activations are off. --deferred-experts is lossy: it is off on these paths, and its KL divergence from the exact
path is shown without effect on the answer. docs/check.md explains the table. Stop other engines first: they hold
memory."""


@dataclass(frozen=True)
class CheckCommand:
    """options"""

    model: str = argument(help=MODEL_HELP, metavar="MODEL")
    engine: EngineOptions = field(default_factory=EngineOptions)
    seed: int = option(0, help="draws the prompts, and the sampled layers of large models", low=0, common=True)
    time_limit: int = option(
        LIMIT_S,
        help="seconds for paths and reference; what is left out then is listed",
        metavar="S",
        low=1,
        high=86400,
        common=True,
    )
    json: bool = option(False, help="print the result as JSON", common=True)


def run(argv: Sequence[str]) -> int:
    command = parse(CheckCommand, argv, prog="proa check", summary=SUMMARY, epilog=EPILOG).options
    if command.engine.model.load_format == "dummy":
        raise UsageError(
            "proa check compares with the checkpoint's weights, but --load-format dummy has none.",
            "Leave it out.",
            param="load_format",
        )
    look_up(command.model, command.engine.model.revision)  # refuses a name that does not exist
    os.environ.update(child_environ())  # the engine's environment, before torch is imported
    # Torch takes seconds to import: only after the options are checked.
    from proa.check.report import as_json
    from proa.check.run import check
    from proa.obs.progress import show_progress

    try:
        with show_progress(console_err()) as show:
            report = check(command.model, command.engine, command.seed, show, limit_s=command.time_limit)
    except ModelNotFound:
        raise
    except ModelError as error:
        if command.json:
            write_out(json.dumps({"agrees": False, "answer": "no", "error": str(error)}) + "\n")
        else:
            write_out(f"no: {error}\n")
        return 1
    if command.json:
        write_out(json.dumps(as_json(report), indent=2) + "\n")
    else:
        _print(report)
    return {"yes": 0, "no": 1}.get(report.answer.value, NO_ANSWER)


def _print(report: Report) -> None:
    from rich.table import Table
    from rich.text import Text

    from proa.check.report import COLUMNS, answer, notes, problems, rows, scope

    table = Table(title="worst difference / bound", title_justify="left", title_style="", box=None, pad_edge=False)
    for column in COLUMNS:
        table.add_column(column, justify="left" if column in ("path", "") else "right", overflow="fold")
    for row in rows(report):
        table.add_row(*(Text(cell) for cell in row))
    console = console_out()
    console.print(scope(report), markup=False, soft_wrap=True)
    console.print(table)
    for line in (*notes(report), *problems(report), answer(report)):
        console.print(line, markup=False, soft_wrap=True)
