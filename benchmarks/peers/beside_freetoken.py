"""Decoding, or the first token of prompts (--prefill), of random weights by Proa and FreeToken in turns: the same shape,
share of experts in VRAM and requests.

See README.md. Each run is a process of its own that has the machine to itself: `proa bench hybrid` or `prefill`, then
run_freetoken.py, which takes FreeToken's own profile first, then Proa again. Reading of RAM is measured between any two
runs, the link before each of Proa's. Three rounds at least: medians count, and their spread is shown.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from beside import main
from freetoken_files import FORMATS
from rich.console import Console
from rich.table import Table

from proa.bench.asked import parse_numbers
from proa.bench.hybrid import MOST_REQUESTS
from proa.bench.hybrid_shapes import MODEL_SHAPES
from proa.bench.limit import busy_notes, ram_meter
from proa.bench.prefill import MOST_PROMPT
from proa.bench.result import commit
from proa.config.field import option
from proa.config.options import MachineOptions
from proa.config.parse import parse
from proa.errors import ProaError, UsageError
from proa.machine.probe import probe

MODES = ("hybrid", "cpu", "vram")
LEAST_ROUNDS = 3  # fewer have no median: one slow minute would decide
LOG_LINES = 12  # of a run that failed, shown


@dataclass(frozen=True)
class Options:
    """What to measure."""

    wheels: str | None = option(
        None, help="FreeToken's wheels (see README.md); default: what is installed", metavar="FOLDER", common=True
    )
    keep: str | None = option(
        None,
        help="folder for logs and what FreeToken compiles; default: a temporary one",
        metavar="FOLDER",
        common=True,
    )
    shape: str = option("qwen3-30b-a3b", help="model", choices=tuple(MODEL_SHAPES), common=True)
    layers: int | None = option(24, help="so many of its layers", low=1, high=1000, common=True)
    modes: str = option(
        "hybrid,vram", help="where experts are: some in VRAM (hybrid), all on the CPU (cpu), all in VRAM (vram)",
        metavar="LIST", common=True,
    )  # fmt: skip
    format: str = option("bf16", help="format of the weights", choices=FORMATS, common=True)
    requests: str = option("1,4", help="how many requests decode together", metavar="LIST", common=True)
    prefill: str | None = option(
        None, help="lengths of single prompts: their time to the first token is compared instead of decoding",
        metavar="LIST", common=True,
    )  # fmt: skip
    prompt_tokens: int = option(128, help="length of each prompt", low=2, high=1 << 16, common=True)
    output_tokens: int = option(64, help="steps that are timed", low=2, high=1 << 15, common=True)
    cache_share: float = option(
        10.0, help="percent of the experts in VRAM, in hybrid mode", metavar="PERCENT", low=1, high=100, common=True
    )
    rounds: int = option(
        LEAST_ROUNDS, help="runs of each program in each mode", low=LEAST_ROUNDS, high=1000, common=True
    )
    runs: int = option(2, help="times that each number of requests is measured in a run", low=1, high=1000, common=True)
    minutes: float = option(
        20, help="time for all: what will not fit any more is left out, and said", low=0.1, high=10000, common=True
    )
    json: bool = option(False, help="one object a cell instead of a table", common=True)


@dataclass
class Machine:
    """What was measured between the runs, bytes per second."""

    ram: list[float] = field(default_factory=list)
    pcie: list[float] = field(default_factory=list)
    hbm: list[float] = field(default_factory=list)


@dataclass(frozen=True)
class Cell:
    """Rates and the ratio (Proa / FreeToken) are medians of the rounds; a round's ratio is of its two runs. Spreads are
    the least and the most of the rounds. freetoken_profiles: what FreeToken measured right before each of its runs, by
    the number of workers that it had, GB/s."""

    mode: str
    requests: int
    proa_tokens_per_s: float
    freetoken_tokens_per_s: float
    ratio: float
    ratio_spread: list[float]
    ratios: list[float]
    proa_spread: list[float]
    freetoken_spread: list[float]
    proa_rounds: list[float]
    freetoken_rounds: list[float]
    proa_roof_tokens_per_s: float
    proa_resident_share: float
    freetoken_resident_share: float
    freetoken_hit_share: float | None
    freetoken_profiles: list[dict[str, float]]


@dataclass(frozen=True)
class PromptCell:
    """Seconds to the first token of prompts of a length, each alone: medians of the rounds. ratio: FreeToken / Proa, so
    that above 1 Proa is ahead. Spreads as in Cell."""

    mode: str
    tokens: int
    proa_ttft_s: float
    freetoken_ttft_s: float
    ratio: float
    ratio_spread: list[float]
    ratios: list[float]
    proa_rounds: list[float]
    freetoken_rounds: list[float]
    proa_streamed_share: float | None
    freetoken_resident_share: float
    freetoken_profiles: list[dict[str, float]]


# Requests, or tokens of a prompt -> Proa's figures, FreeToken's row.
Pair = tuple[dict[int, dict[str, Any]], dict[int, dict[str, Any]]]


def run(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="beside_freetoken.py", summary="times Proa and FreeToken in turns").options
    modes = parse_modes(options.modes)
    lengths = parse_numbers(options.prefill, "prefill", 2, MOST_PROMPT) if options.prefill else ()
    counts = lengths or parse_numbers(options.requests, "requests", 1, MOST_REQUESTS)
    machine, notes = Machine(), list(busy_notes())
    with _folder(options.keep) as kept:
        pairs = _alternate(options, modes, Path(kept), machine, notes)
    notes += few_rounds(pairs)
    one_cell = prompt_cell if lengths else cell
    cells = [one_cell(mode, count, pairs[mode]) for mode in modes for count in counts if pairs[mode]]
    facts: dict[str, Any] = {"shape": options.shape, "layers": options.layers, "format": options.format}
    facts |= {"commit": commit(), "cpu": probe().cpu}
    facts["peer"] = next((row["peer"] for each in pairs.values() for _, rows in each for row in rows.values()), None)
    if options.json:
        for one in cells:
            sys.stdout.write(json.dumps({**asdict(one), **facts, "machine": asdict(machine), "notes": notes}) + "\n")
    else:
        _print(cells, facts, machine, notes)
    sys.stdout.flush()
    if not all(pairs.values()):
        missing = ", ".join(mode for mode in modes if not pairs[mode])
        raise ProaError(f"There is no result for {missing}.", "; ".join(notes))


def parse_modes(text: str) -> list[str]:
    """Raises UsageError."""
    modes = [word.strip() for word in text.split(",")]
    if not set(modes) <= set(MODES):
        raise UsageError(f"--modes is {text!r}.", f"It takes {', '.join(MODES)}, separated by commas.", param="modes")
    return list(dict.fromkeys(modes))


def few_rounds(pairs: Mapping[str, Sequence[Pair]]) -> list[str]:
    """A note for each mode that was measured too seldom."""
    counts = {mode: len(each) for mode, each in pairs.items() if 0 < len(each) < LEAST_ROUNDS}
    return [
        f"{mode} has {count} round{'s' if count > 1 else ''}: fewer than {LEAST_ROUNDS} tell little"
        for mode, count in counts.items()
    ]


def _folder(keep: str | None) -> AbstractContextManager[str]:
    return nullcontext(keep) if keep else tempfile.TemporaryDirectory(prefix="proa-beside-")


def _alternate(
    options: Options, modes: Sequence[str], kept: Path, machine: Machine, notes: list[str]
) -> dict[str, list[Pair]]:  # fmt: skip
    """All modes in a round, so that time that runs out costs rounds, not modes. A run that fails ends its mode."""
    meter = ram_meter(MachineOptions())
    pairs: dict[str, list[Pair]] = {mode: [] for mode in modes}
    slowest_s = dict.fromkeys(modes, 0.0)
    end = time.monotonic() + 60 * options.minutes
    machine.ram.append(meter().bytes_per_s)
    for i in range(options.rounds):
        for mode in [mode for mode in modes if len(pairs[mode]) == i]:
            begin = time.monotonic()
            if begin + slowest_s[mode] > end:
                notes.append(f"round {i + 1} of {mode} was left out: its time ran out")
                continue
            found: list[dict[int, dict[str, Any]]] = []
            try:
                for name, command in commands(options, mode, kept, first=i == 0).items():
                    rows = run_logged(command, kept / f"{i + 1}-{mode}-{name}.log", end - time.monotonic())
                    found.append(by_number(rows, "tokens" if options.prefill else "requests"))
                    machine.ram.append(meter().bytes_per_s)
            except ProaError as error:
                alone = [
                    f"Proa alone, {n}: {row['tokens_per_s']:.1f} tokens/s"
                    for n, row in (found[0] if found else {}).items()
                ]
                notes.append("; ".join([f"round {i + 1} of {mode}: {error}", *alone]))
                continue
            slowest_s[mode] = max(slowest_s[mode], time.monotonic() - begin)
            pairs[mode].append((found[0], found[1]))
            for figures in list(found[0].values())[:1]:  # all of a run's are the same
                pcie = figures.get("upload_bytes_per_s" if options.prefill else "pcie_bytes_per_s")
                machine.pcie += [pcie] if pcie else []
                machine.hbm += [figures["hbm_bytes_per_s"]] if "hbm_bytes_per_s" in figures else []
    return pairs


def commands(options: Options, mode: str, kept: Path, *, first: bool) -> dict[str, list[str]]:
    """Proa's and FreeToken's; hits are counted in the first round only, for that takes time."""
    resident = {"hybrid": options.cache_share, "cpu": 0, "vram": 100}[mode]
    common: dict[str, object] = {"shape": options.shape, "runs": options.runs, "format": options.format}
    common |= {} if options.layers is None else {"layers": options.layers}
    theirs = {**common, "mode": mode, "keep": kept / "freetoken", "cache-share": options.cache_share}
    theirs |= {} if options.wheels is None else {"wheels": options.wheels}
    ours = {**common, "resident": resident}
    if options.prefill:
        bench, counted = "prefill", list[str]()
        ours["tokens"] = theirs["prefill"] = options.prefill
    else:
        bench, counted = "hybrid", ["--misses"] if first and mode == "hybrid" else []
        decode = {"requests": options.requests, "output-tokens": options.output_tokens}
        ours |= {**decode, "context": options.prompt_tokens}
        theirs |= {**decode, "prompt-tokens": options.prompt_tokens}
    script = Path(__file__).with_name("run_freetoken.py")
    return {
        "proa": [sys.executable, "-m", "proa.cli.main", "bench", bench, "--json", *_flags(ours)],
        "freetoken": [sys.executable, str(script), "--json", *counted, *_flags(theirs)],
    }


def _flags(values: Mapping[str, object]) -> list[str]:
    return [f"--{name}={value}" for name, value in values.items()]


def run_logged(command: Sequence[str], log: Path, limit_s: float) -> list[dict[str, Any]]:
    """The JSON lines that a command prints; what else it says goes to `log`. Raises ProaError with its end."""
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("w") as errors,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        ) as process,
    ):  # fmt: skip
        try:
            out, _ = process.communicate(timeout=max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            raise ProaError(f"{log.stem} did not end within {limit_s:.0f} s.", _end_of(log)) from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # a session of its own: its workers too
    if process.returncode:
        raise ProaError(f"{log.stem} ended with exit code {process.returncode}.", _end_of(log))
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")]


def _end_of(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:])


def by_number(rows: Sequence[dict[str, Any]], of: str) -> dict[int, dict[str, Any]]:
    """Index the figures of Proa's results, or FreeToken's rows, by their number `of` requests or tokens."""
    flat = [row.get("figures", row) for row in rows]
    return {int(row[of]): row for row in flat}


def cell(mode: str, requests: int, pairs: Sequence[Pair]) -> Cell:
    """Raises ProaError if a run has no figures for so many requests."""
    try:
        ours, theirs = [pair[0][requests] for pair in pairs], [pair[1][requests] for pair in pairs]
    except KeyError:
        raise ProaError(f"A run in mode {mode} has no result for {requests} requests.") from None
    our_rates, their_rates = ([float(row["tokens_per_s"]) for row in side] for side in (ours, theirs))
    ratios = [a / b for a, b in zip(our_rates, their_rates, strict=True)]
    return Cell(
        mode, requests, median(our_rates), median(their_rates), median(ratios), spread(ratios), ratios,
        spread(our_rates), spread(their_rates), our_rates, their_rates,
        proa_roof_tokens_per_s=median(row["roof_tokens_per_s"] for row in ours),
        proa_resident_share=ours[0]["resident_share"],
        freetoken_resident_share=theirs[0]["resident_share"],
        freetoken_hit_share=theirs[0]["hit_share"],
        freetoken_profiles=[found for row in theirs if (found := profile(row))],
    )  # fmt: skip


def prompt_cell(mode: str, tokens: int, pairs: Sequence[Pair]) -> PromptCell:
    """Raises ProaError if a run has no figures for prompts of this length."""
    try:
        ours, theirs = [pair[0][tokens] for pair in pairs], [pair[1][tokens] for pair in pairs]
    except KeyError:
        raise ProaError(f"A run in mode {mode} has no result for prompts of {tokens} tokens.") from None
    our_s, their_s = [float(row["ttft_s_median"]) for row in ours], [float(row["ttft_s"]) for row in theirs]
    ratios = [b / a for a, b in zip(our_s, their_s, strict=True)]
    return PromptCell(
        mode, tokens, median(our_s), median(their_s), median(ratios), spread(ratios), ratios, our_s, their_s,
        proa_streamed_share=ours[0]["streamed_share"],
        freetoken_resident_share=theirs[0]["resident_share"],
        freetoken_profiles=[found for row in theirs if (found := profile(row))],
    )  # fmt: skip


def spread(values: Sequence[float]) -> list[float]:
    return [min(values), max(values)]


def profile(row: Mapping[str, Any]) -> dict[str, float] | None:
    """What FreeToken measured right before this run, with as many workers as it had then; None: it needs none."""
    for rates in row["rates"]:
        if rates["threads"] == row["cpu_threads"]:
            return {name: rates[name] for name in ("cpu_beside_pcie", "pcie_beside_cpu")}
    return None


def _decode_table(cells: Sequence[Cell]) -> Table:
    columns = ("mode", "requests", "Proa\ntokens/s", "FreeToken\ntokens/s", "ratio", "of each\nround", "Proa's\nroof")
    table = Table(*columns, "in VRAM\nProa", "FreeToken\n(hits)", title="decode")
    for c in cells:
        hits = "" if c.freetoken_hit_share is None else f" ({c.freetoken_hit_share:.1%})"
        table.add_row(
            c.mode, str(c.requests), _rate(c.proa_tokens_per_s, c.proa_spread),
            _rate(c.freetoken_tokens_per_s, c.freetoken_spread), f"{c.ratio:.2f}",
            " ".join(f"{ratio:.2f}" for ratio in c.ratios), f"{c.proa_roof_tokens_per_s:.1f}",
            f"{c.proa_resident_share:.1%}", f"{c.freetoken_resident_share:.1%}{hits}",
        )  # fmt: skip
    return table


def _prompts_table(cells: Sequence[PromptCell]) -> Table:
    columns = ("mode", "tokens", "Proa\nms", "FreeToken\nms", "ratio", "of each\nround", "copied\nby Proa")
    table = Table(*columns, "in VRAM\nFreeToken", title="first token")
    for c in cells:
        copied = "" if c.proa_streamed_share is None else f"{c.proa_streamed_share:.0%}"
        table.add_row(
            c.mode, str(c.tokens), f"{1e3 * c.proa_ttft_s:.0f}", f"{1e3 * c.freetoken_ttft_s:.0f}", f"{c.ratio:.2f}",
            " ".join(f"{ratio:.2f}" for ratio in c.ratios), copied, f"{c.freetoken_resident_share:.1%}",
        )  # fmt: skip
    return table


def _print(
    cells: Sequence[Cell] | Sequence[PromptCell], facts: Mapping[str, Any], machine: Machine, notes: Sequence[str]
) -> None:
    console = Console(file=sys.stdout, width=120)
    if decode := [one for one in cells if isinstance(one, Cell)]:
        console.print(_decode_table(decode))
    if prompts := [one for one in cells if isinstance(one, PromptCell)]:
        console.print(_prompts_table(prompts))
    for name, rates in (("RAM, read", machine.ram), ("PCIe, to VRAM", machine.pcie), ("VRAM", machine.hbm)):
        if rates:
            console.print(f"{name}, GB/s, between runs: {' '.join(f'{rate / 1e9:.0f}' for rate in rates)}")
    for c in cells:
        if c.freetoken_profiles:
            each = ", ".join(f"{p['cpu_beside_pcie']:.0f} and {p['pcie_beside_cpu']:.0f}" for p in c.freetoken_profiles)
            number = c.requests if isinstance(c, Cell) else c.tokens
            console.print(f"FreeToken's profile before {c.mode}, {number}, GB/s of CPU and link together: {each}")
    for line in (*(f"note: {note}" for note in notes), ", ".join(f"{name} {fact}" for name, fact in facts.items())):
        console.print(line, markup=False)


def _rate(median_rate: float, rounds: Sequence[float]) -> str:
    """With the spread of the rounds below."""
    return f"{median_rate:.1f}\n{rounds[0]:.0f}-{rounds[1]:.0f}"


if __name__ == "__main__":
    main(run)
