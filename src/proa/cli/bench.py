"""`proa bench`: which benchmark. Never: measuring, the options of one of them."""

from __future__ import annotations

from collections.abc import Sequence

from proa.cli.command import full_help, load
from proa.config.parse import HelpShown
from proa.config.suggest import did_you_mean
from proa.errors import UsageError

# Modules as for `proa` itself: imported when called, for they load the engine's client and httpx.
BENCHMARKS = {
    "latency": "proa.cli.bench_latency",
    "serve": "proa.cli.bench_serve",
    "kernels": "proa.cli.bench_kernels",
    "load": "proa.cli.bench_load",
    "hybrid": "proa.cli.bench_hybrid",
}
OVERVIEW = """\
usage: proa bench latency|serve|kernels|load|hybrid [options]

Measure a model or the CPU's kernels on this machine, beside the physical limit.

  latency  one request at a time: time to the first token, time per token, tokens/s
  serve    many requests at once over HTTP: throughput, and what each of them waits
  kernels  the experts of one layer on the CPU, in every weight format, without a model
  load     a model from its files into memory: GB/s, and peak memory
  hybrid   a GPU and the CPU together, with random weights: tokens/s, where a step's time goes

The first two load a model themselves, or measure a running server with --url; --json prints everything.
`proa bench latency --help` and so on show their options.
"""


def run(argv: Sequence[str]) -> int:
    word = argv[0] if argv else ""
    if word in ("-h", "--help"):
        raise HelpShown(OVERVIEW)
    if word == "--help-all":
        raise HelpShown("\n".join([OVERVIEW, *map(full_help, BENCHMARKS.values())]))
    if word not in BENCHMARKS:
        shown = f"There is no benchmark {word}." if word else "Which benchmark?"
        raise UsageError(
            shown, f"{did_you_mean(word, BENCHMARKS)} It is latency, serve, kernels, load or hybrid.".strip()
        )
    return load(BENCHMARKS[word])(argv[1:])
