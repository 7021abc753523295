"""FreeToken on a model of random weights: decode tokens per second. See README.md; beside_freetoken.py runs both.

The process is FreeToken's alone. Its own measurement of RAM and link (`ft bench bw`) comes right before its engine
starts, which divides the work by that: a profile of another minute would be judged here, not FreeToken.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from beside import main
from freetoken_calls import STRATEGIES, Case, Decoded, Program, module, need_gpu, version
from freetoken_files import FORMATS, provide, write_model
from rich.console import Console
from rich.table import Table

from proa.bench.asked import parse_numbers
from proa.bench.hybrid import MOST_REQUESTS
from proa.bench.prefill import MOST_PROMPT
from proa.bench.hybrid_shapes import MODEL_SHAPES, ModelShape
from proa.bench.limit import busy_notes
from proa.config.field import option
from proa.config.parse import parse
from proa.errors import ProaError, UsageError
from proa.machine.probe import probe

RATES_TIMEOUT_S = 240.0
CLEARLY_FASTER = 1.02  # another number of workers than FreeToken's own choice
SPARE_CORES = 2  # with these free its workers wait spinning


@dataclass(frozen=True)
class Options:
    """What to run."""

    wheels: str | None = option(
        None, help="folder of wheels (see README.md); default: what is installed", metavar="FOLDER", common=True
    )
    keep: str | None = option(
        None, help="folder for what is unpacked and compiled once; default: a temporary one",
        metavar="FOLDER", common=True,
    )  # fmt: skip
    shape: str = option("qwen3-30b-a3b", help="model", choices=tuple(MODEL_SHAPES), common=True)
    layers: int | None = option(None, help="so many of its layers; default: all", low=1, high=1000, common=True)
    format: str = option("bf16", help="format of the weights", choices=FORMATS, common=True)
    mode: str = option(
        "hybrid", help="experts: an LRU cache in VRAM and both processors (hybrid), on the CPU, or all in VRAM",
        choices=tuple(STRATEGIES), common=True,
    )  # fmt: skip
    requests: str = option("1,4", help="how many requests decode together", metavar="LIST", common=True)
    prompt_tokens: int = option(128, help="length of each prompt", low=2, high=1 << 16, common=True)
    output_tokens: int = option(128, help="steps that are timed, of each answer", low=2, high=1 << 15, common=True)
    cache_share: float = option(
        10.0,
        help="percent of all experts in the cache, in hybrid mode",
        metavar="PERCENT",
        low=1,
        high=100,
        common=True,
    )
    runs: int = option(3, help="answers to each number of requests; medians count", low=1, high=1000, common=True)
    threads: int | None = option(
        None, help="CPU workers; default: its own choice, or two cores fewer where its bench finds that faster",
        low=1, high=4096, common=True,
    )  # fmt: skip
    prefill: str | None = option(
        None, help="lengths of single prompts whose first token is timed, instead of decoding", metavar="LIST",
        common=True,
    )  # fmt: skip
    misses: bool = option(False, help="count how often the cache misses, too, after the timed runs", common=True)
    json: bool = option(False, help="one object a number of requests instead of a table", common=True)


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What ran. Shares are fractions of 1, null where there is none.

    resident_share: experts that the cache in VRAM holds; fetch_share: of a step's missing experts, those that are read
    over the link instead of by the CPU.
    """

    peer: str
    shape: str
    layers: int
    format: str
    mode: str
    resident_share: float
    fetch_share: float | None
    cpu_threads: int | None
    cpu_isa: str | None
    attention: str
    load_s: float
    vram_bytes: int
    rates: list[dict[str, Any]]  # by freetoken_rates.py, GB/s
    cpu: str
    notes: list[str]


@dataclass(frozen=True, kw_only=True)
class Row(Facts):
    """One number of requests; rates are medians of `runs`. hit_share: counted, with --misses."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    tokens_per_s: float
    tokens_per_s_runs: list[float]
    step_ms: float
    hit_share: float | None


@dataclass(frozen=True, kw_only=True)
class PromptRow(Facts):
    """One length of prompts, each alone: seconds to the first token, median and all of `runs`."""

    tokens: int
    ttft_s: float
    ttft_s_runs: list[float]


def run(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="run_freetoken.py", summary="times FreeToken on random weights").options
    shape = MODEL_SHAPES[options.shape].cut(options.layers)
    counts = (1,) if options.prefill else parse_numbers(options.requests, "requests", 1, MOST_REQUESTS)
    lengths = parse_numbers(options.prefill, "prefill", 2, MOST_PROMPT) if options.prefill else ()
    with _folder(options.keep) as kept, redirect_stdout(sys.stderr):  # it prints, too
        notes = list(busy_notes())
        rows = _measure(options, shape, counts, lengths, Path(kept), notes)
    if options.json:
        sys.stdout.write("".join(json.dumps(asdict(row)) + "\n" for row in rows))
    else:
        _print(rows)


def _folder(keep: str | None) -> AbstractContextManager[str]:
    return nullcontext(keep) if keep else tempfile.TemporaryDirectory(prefix="proa-freetoken-")


def _measure(
    options: Options, shape: ModelShape, counts: tuple[int, ...], lengths: tuple[int, ...], kept: Path,
    notes: list[str],
) -> list[Row] | list[PromptRow]:  # fmt: skip
    notes += provide(options.wheels, kept)
    peer = f"FreeToken {version()}"
    module("freetoken.llm")  # what is missing is said before anything is measured
    need_gpu()
    model = write_model(kept / f"{shape.name}-{shape.layers}-{options.format}", shape, options.format)
    rates = [] if options.mode == "vram" else _rates(kept, model, options)
    threads = options.threads or pick_threads(rates, options.mode)
    share = options.cache_share / 100
    case = Case(
        model, shape, options.mode, share, threads, counts, options.prompt_tokens, options.output_tokens, lengths
    )
    program = Program(case)
    common = dict(peer=peer, rates=rates, cpu=probe().cpu, notes=notes, shape=shape.name, layers=shape.layers,
                  format=options.format, mode=options.mode)  # fmt: skip
    if lengths:
        firsts = program.first_tokens(options.runs)
        return [
            PromptRow(tokens=tokens, ttft_s=median(seconds), ttft_s_runs=seconds, **common, **program.facts())
            for tokens, seconds in firsts.items()
        ]
    measured = program.measure(options.runs)
    common |= program.facts()
    return [
        _row(options, found, program.misses(count) if options.misses else None, common)
        for count, found in measured.items()
    ]


def _row(options: Options, found: Sequence[Decoded], misses: Any, common: dict[str, Any]) -> Row:
    requests, rate = found[0].requests, median(one.tokens_per_s for one in found)
    return Row(
        requests=requests, prompt_tokens=options.prompt_tokens, output_tokens=options.output_tokens, tokens_per_s=rate,
        tokens_per_s_runs=[one.tokens_per_s for one in found], step_ms=1e3 * requests / rate,
        hit_share=None if misses is None else misses.hit_share, **common,
    )  # fmt: skip


def _rates(kept: Path, model: Path, options: Options) -> list[dict[str, Any]]:
    """Rates of FreeToken's own bench, in a separate process: the engine needs a GPU that is not in use yet. The bench also
    writes the profile that the engine reads."""
    numbers = [options.threads] if options.threads else thread_candidates(len(os.sched_getaffinity(0)))
    out = kept / "rates.json"
    script = Path(__file__).with_name("freetoken_rates.py")
    command = [sys.executable, str(script), str(out), str(model), *map(str, numbers)]
    try:
        found = subprocess.run(command, stdout=sys.stderr, timeout=RATES_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise ProaError(f"FreeToken's own bench took more than {RATES_TIMEOUT_S:.0f} s.") from None
    if found.returncode:
        raise ProaError(
            f"FreeToken's own bench failed (exit code {found.returncode}).", "See what it wrote above; it needs nvcc."
        )
    rows: list[dict[str, Any]] = json.loads(out.read_text())
    if not rows:
        raise UsageError("FreeToken has no CPU kernel for these experts here.", "Use --mode vram.")
    return rows


def thread_candidates(cpus: int) -> list[int]:
    """0: its own choice, a worker a physical core but one."""
    return [0, cpus - SPARE_CORES] if cpus > 2 * SPARE_CORES else [0]


def pick_threads(rates: Sequence[dict[str, Any]], mode: str) -> int:
    """The number of workers that reads experts fastest, in hybrid mode together with the link; 0: its own choice."""

    def speed(row: dict[str, Any]) -> float:
        return float((row["cpu_beside_pcie"] or 0) + (row["pcie_beside_cpu"] or 0) if mode == "hybrid" else row["cpu"])

    best: dict[str, Any] = {}
    for row in rates:
        if not best or speed(row) > CLEARLY_FASTER * speed(best):
            best = row
    return int(best.get("asked_threads", 0))


def _print(rows: Sequence[Row] | Sequence[PromptRow]) -> None:
    console = Console(file=sys.stdout, width=120)
    if isinstance(rows[0], PromptRow):
        console.print(_prompts_table([row for row in rows if isinstance(row, PromptRow)]))
    else:
        console.print(_decode_table([row for row in rows if isinstance(row, Row)]))
    for note in rows[0].notes:
        console.print(f"note: {note}")


def _prompts_table(rows: Sequence[PromptRow]) -> Table:
    table = Table("mode", "tokens", "first token, ms", "in VRAM", title=rows[0].peer)
    for row in rows:
        table.add_row(row.mode, str(row.tokens), f"{1e3 * row.ttft_s:.1f}", f"{row.resident_share:.1%}")
    return table


def _decode_table(rows: Sequence[Row]) -> Table:
    table = Table("mode", "requests", "tokens/s", "ms a step", "in VRAM", "hits", "CPU workers", title=rows[0].peer)
    for row in rows:
        table.add_row(
            row.mode, str(row.requests), f"{row.tokens_per_s:.1f}", f"{row.step_ms:.2f}", f"{row.resident_share:.1%}",
            "" if row.hit_share is None else f"{row.hit_share:.1%}", str(row.cpu_threads or ""),
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main(run)
    sys.stdout.flush()
    os._exit(0)  # its threads are no daemons
