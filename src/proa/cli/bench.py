"""`proa bench`: selects the benchmark."""

from __future__ import annotations

from collections.abc import Sequence

from proa.cli.command import full_help, load_command
from proa.config.parse import HelpShown
from proa.config.suggest import did_you_mean
from proa.errors import UsageError

# Modules with `run(argv)`, imported only when called: they import the engine's client and httpx.
BENCHMARKS = {
    "latency": "proa.cli.bench_latency",
    "serve": "proa.cli.bench_serve",
    "kernels": "proa.cli.bench_kernels",
    "load": "proa.cli.bench_load",
    "hybrid": "proa.cli.bench_hybrid",
    "prefill": "proa.cli.bench_prefill",
    "restart": "proa.cli.bench_restart",
}
OVERVIEW = """\
usage: proa bench latency|serve|kernels|load|hybrid|prefill|restart [options]

Measure a model or the CPU's kernels on this machine, and compare with the hardware limit (the roof).

  latency  one request at a time: time to first token, time per token, tokens/s
  serve    many concurrent requests over HTTP: throughput and latency
  kernels  the experts of one layer on the CPU, in every weight format, without a model
  load     loading a model from its files into memory: GB/s and peak memory
  hybrid   a GPU and the CPU together, with random weights: tokens/s, where a step's time goes
  prefill  a GPU and the CPU together, with random weights: time to first token by the prompt's length, the bound
  restart  kill a server and start it again: its prefix cache is restored from files

latency and serve load a model themselves, or measure a running server with --url. --json prints all figures.
`proa bench latency --help` etc. show the options of each.
"""


def run(argv: Sequence[str]) -> int:
    word = argv[0] if argv else ""
    if word in ("-h", "--help"):
        raise HelpShown(OVERVIEW)
    if word == "--help-all":
        raise HelpShown("\n".join([OVERVIEW, *map(full_help, BENCHMARKS.values())]))
    if word not in BENCHMARKS:
        shown = f"There is no benchmark {word}." if word else "No benchmark is given."
        *names, last = BENCHMARKS
        hint = did_you_mean(word, BENCHMARKS)
        raise UsageError(shown, f"{hint} Choose {', '.join(names)} or {last}.".strip())
    return load_command(BENCHMARKS[word])(argv[1:])
