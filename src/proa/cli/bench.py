"""`proa bench`: which benchmark. Never: measuring, the options of one of them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import cast

from proa.config.parse import HelpShown
from proa.config.suggest import did_you_mean
from proa.errors import UsageError

# Modules as for `proa` itself: imported when called, for they load the engine's client and httpx.
BENCHMARKS = {"latency": "proa.cli.bench_latency", "serve": "proa.cli.bench_serve"}
OVERVIEW = """\
usage: proa bench latency|serve [options]

Measure a model on this machine, beside the physical limit.

  latency  one request at a time: time to the first token, time per token, tokens/s
  serve    many requests at once over HTTP: throughput, and what each of them waits

Both load the model themselves, or measure a running server with --url; --json prints everything.
`proa bench latency --help` and `proa bench serve --help` show their options.
"""


def run(argv: Sequence[str]) -> int:
    word = argv[0] if argv else ""
    if word in ("-h", "--help"):
        raise HelpShown(OVERVIEW)
    if word == "--help-all":
        raise HelpShown("\n".join([OVERVIEW, *map(_full_help, BENCHMARKS)]))
    if word not in BENCHMARKS:
        shown = f"There is no benchmark {word}." if word else "Which benchmark?"
        raise UsageError(shown, f"{did_you_mean(word, BENCHMARKS)} It is latency or serve.".strip())
    return _load(word)(argv[1:])


def _load(name: str) -> Callable[[Sequence[str]], int]:
    return cast(Callable[[Sequence[str]], int], importlib.import_module(BENCHMARKS[name]).run)


def _full_help(name: str) -> str:
    try:
        _load(name)(["--help-all"])
    except HelpShown as help_shown:
        return help_shown.text
    raise RuntimeError(f"proa bench {name} --help-all shows no help")
