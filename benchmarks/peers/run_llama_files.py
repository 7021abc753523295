"""Whole models beside llama.cpp (of llama-cpp-python): the same GGUF file, threads and prompts, in turns.

See README.md. Both programs have the model loaded; while one answers, the other sleeps. An answer is greedy and of an
exact length.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from beside import main
from demo_moe_gguf import TYPES, write_demo_moe
from llama_model import LlamaModel, bindings, version
from rich.console import Console
from rich.table import Table

from proa.bench.limit import busy_notes
from proa.bench.prompts import TEXT, distinct_prompts
from proa.bench.result import commit
from proa.config.field import option
from proa.config.options import CacheOptions, EngineOptions, MachineOptions
from proa.config.parse import parse
from proa.errors import ProaError, UsageError
from proa.hub.locate import demo_folder, locate
from proa.llm import AsyncLLM
from proa.machine.probe import probe
from proa.types import SamplingParams

REST_S = 0.05  # after an answer: its program's threads go to sleep


@dataclass(frozen=True)
class Options:
    """What to measure."""

    models: str = option(
        "demo-dense,demo-bf16,demo-q8_0",
        help=f"GGUF files, separated by commas; demo-dense, or the demo MoE as demo-{', demo-'.join(TYPES)}",
        metavar="LIST", common=True,
    )  # fmt: skip
    threads: str = option("", help="numbers of threads; default: all usable cores, and 1", metavar="LIST", common=True)
    prompt_tokens: str = option("32,512,1024,2048", help="lengths of prompts", metavar="LIST", common=True)
    output_tokens: int = option(64, help="length of each answer", low=2, high=1 << 20, common=True)
    rounds: int = option(5, help="answers of each program to each prompt", low=1, high=1000, common=True)
    json: bool = option(False, help="one object a cell instead of a table", common=True)


@dataclass(frozen=True)
class Answer:
    """Greedy tokens; seconds to the first one, and for all others together."""

    tokens: list[int]
    first_s: float
    rest_s: float


@dataclass
class Side:
    """One program's answers to prompts of one length."""

    prompt_tokens: int
    answers: list[Answer] = field(default_factory=list)

    @property
    def prefill_tokens_per_s(self) -> list[float]:
        return [self.prompt_tokens / one.first_s for one in self.answers]

    @property
    def decode_tokens_per_s(self) -> list[float]:
        return [(len(one.tokens) - 1) / one.rest_s for one in self.answers]


@dataclass(frozen=True)
class Cell:
    """Rates are medians; ratios (Proa / llama.cpp) are medians of the rounds' own ratios."""

    model: str
    threads: int
    prompt_tokens: int
    output_tokens: int
    proa_prefill_tokens_per_s: float
    llama_prefill_tokens_per_s: float
    prefill_ratio: float
    proa_decode_tokens_per_s: float
    llama_decode_tokens_per_s: float
    decode_ratio: float
    prefill_ratios: list[float]
    decode_ratios: list[float]
    equal_tokens: int  # leading tokens of Proa's answer that are llama.cpp's choice too
    logit_gap: float | None  # by how much llama.cpp's logit of Proa's next token is below its best


def run(argv: Sequence[str]) -> None:
    options = parse(Options, argv, prog="run_llama_files.py", summary="times Proa and llama.cpp on GGUF files").options
    bindings()  # before anything is loaded
    machine = probe()
    lengths = _numbers("--prompt-tokens", options.prompt_tokens)
    cores = machine.usable_cores
    threads = _numbers("--threads", options.threads) if options.threads else list(dict.fromkeys([cores, 1]))
    notes = busy_notes()
    facts = {"peer": f"llama.cpp of llama-cpp-python {version()}", "cpu": machine.cpu, "commit": commit()}
    cells = []
    for model in options.models.split(","):
        path = _file(model)
        for count in threads:
            for cell in asyncio.run(_compare(model, path, count, lengths, options)):
                cells.append(cell)
                if options.json:
                    _write(json.dumps({**asdict(cell), **facts, "notes": notes}))
    if not options.json:
        _print(cells, facts, notes)


def _file(model: str) -> Path:
    kind = model.removeprefix("demo-")
    if model != kind and kind in TYPES:
        return write_demo_moe(locate("demo-dense"), demo_folder() / "peers", kind)
    path = locate(model)
    if path.suffix != ".gguf":
        raise UsageError(f"{model} is no GGUF file.", f"For the demo MoE, say demo-{', demo-'.join(TYPES)}.")
    return path


def _numbers(flag: str, text: str) -> list[int]:
    if not all(part.isdecimal() and int(part) > 0 for part in text.split(",")):
        raise UsageError(f"{flag} is {text!r}.", "Give positive numbers, separated by commas.")
    return [int(part) for part in text.split(",")]


async def _compare(model: str, path: Path, threads: int, lengths: Sequence[int], options: Options) -> list[Cell]:
    """Rounds over all lengths; within a round both programs answer the same prompt, each first in turn."""
    context = max(lengths) + options.output_tokens
    async with _engine(path, threads, context) as llm:
        text = llm.tokenize(TEXT)
        prompts = {n: distinct_prompts(text, 1 + options.rounds, n) for n in lengths}
        sides = {n: (Side(n), Side(n)) for n in lengths}
        agreements = {}
        with LlamaModel(path, threads, context) as llama:
            for i in range(1 + options.rounds):
                for n, (ours, theirs) in sides.items():
                    for side in (ours, theirs) if i % 2 else (theirs, ours):
                        time.sleep(REST_S)
                        answer = _ask(llama, prompts[n][i], options) if side is theirs else await _ask_proa(
                            llm, prompts[n][i], options.output_tokens
                        )  # fmt: skip
                        side.answers.append(answer)
            for n, (ours, theirs) in sides.items():
                agreements[n] = llama.agreement(prompts[n][0], ours.answers[0].tokens)
                for side in (ours, theirs):
                    del side.answers[0]  # memory touched for the first time
    return [_cell(model, threads, options, sides[n], agreements[n]) for n in lengths]


@asynccontextmanager
async def _engine(path: Path, threads: int, context: int) -> AsyncIterator[AsyncLLM]:
    wanted = EngineOptions(
        cache=CacheOptions(context=context, prefix_cache=False), machine=MachineOptions(threads=threads)
    )
    llm = await AsyncLLM.launch(path, wanted)
    try:
        await llm.engine.wait_ready()
        yield llm
    finally:
        await llm.close()


async def _ask_proa(llm: AsyncLLM, prompt: list[int], count: int) -> Answer:
    """As its Python interface gives it: with the tokens' way between two processes, and their text."""
    params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
    tokens: list[int] = []
    begin = time.perf_counter()
    first = last = begin
    async for chunk in llm.stream(prompt, params):
        if chunk.tokens:
            last = time.perf_counter()
            first = last if not tokens else first
            tokens += chunk.tokens
    if len(tokens) != count:
        raise ProaError(f"Proa made {len(tokens)} tokens instead of {count}.", "Report this as a bug.")
    return Answer(tokens, first - begin, last - first)


def _ask(llama: LlamaModel, prompt: list[int], options: Options) -> Answer:
    return Answer(*llama.answer(prompt, options.output_tokens))


def _cell(model: str, threads: int, options: Options, sides: tuple[Side, Side], agreement: Any) -> Cell:
    ours, theirs = sides
    prefill = _ratios(ours.prefill_tokens_per_s, theirs.prefill_tokens_per_s)
    decode = _ratios(ours.decode_tokens_per_s, theirs.decode_tokens_per_s)
    return Cell(
        model, threads, ours.prompt_tokens, options.output_tokens,
        median(ours.prefill_tokens_per_s), median(theirs.prefill_tokens_per_s), median(prefill),
        median(ours.decode_tokens_per_s), median(theirs.decode_tokens_per_s), median(decode),
        prefill, decode, *agreement,
    )  # fmt: skip


def _ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(ours, theirs, strict=True)]


def _print(cells: Sequence[Cell], facts: dict[str, Any], notes: Sequence[str]) -> None:
    columns = ("model", "threads", "prompt", "prefill\nProa", "\nllama.cpp", "\nratio")
    table = Table(*columns, "decode\nProa", "\nllama.cpp", "\nratio", "equal tokens", title="tokens/s")
    for c in cells:
        gap = "" if c.logit_gap is None else f", then {c.logit_gap:.2g} apart"
        table.add_row(
            c.model, str(c.threads), str(c.prompt_tokens),
            f"{c.proa_prefill_tokens_per_s:.0f}", f"{c.llama_prefill_tokens_per_s:.0f}", f"{c.prefill_ratio:.2f}",
            f"{c.proa_decode_tokens_per_s:.0f}", f"{c.llama_decode_tokens_per_s:.0f}", f"{c.decode_ratio:.2f}",
            f"{c.equal_tokens}/{c.output_tokens}{gap}",
        )  # fmt: skip
    console = Console(file=sys.stdout, width=120)
    console.print(table)
    for line in (*(f"note: {note}" for note in notes), ", ".join(f"{name} {fact}" for name, fact in facts.items())):
        console.print(line)


def _write(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(run)
