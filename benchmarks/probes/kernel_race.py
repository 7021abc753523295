"""Which build of the native library computes experts faster, alone and while a GPU reads RAM?

    python benchmarks/probes/kernel_race.py before=/tmp/a.so after=/tmp/b.so --formats fp8-block --tokens 64 128 512 \
        --threads 16 --copies 0

Each library is loaded by a process of its own. Only one of them computes at a time; they take turns in random order,
--rounds times, since RAM's bandwidth changes within minutes. --copies: the GPU to which another process copies 4 GiB of
registered RAM, --piece MiB at a time, in half of the rounds; without it all rounds are alone. A JSON line for each format
and number of tokens: by library the median ms of a call, GB/s of weights, and GB/s of copies meanwhile. The first line
is for reading alone, as `proa bench kernels` measures it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing as mp
import random
import time
from collections import defaultdict
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

COPIED_BYTES, AT_ONCE_BYTES = 4 << 30, 256 << 20
READ = "read"


def compute(
    to: Connection, path: str, formats: str, threads: int, isa: str | None, experts: int | None
) -> None:  # fmt: skip
    """A process that loads the library of `path` and answers (format, tokens, seconds) with (ms, GB/s)."""
    import proa.native.library as native

    native.PATH = Path(path)
    from proa.bench.kernel_weights import ExpertLayers
    from proa.bench.kernels import KernelOptions, open_bench

    with open_bench(KernelOptions(formats=formats, threads=threads, tokens="1", isa=isa, ram=8 << 30)) as bench:
        planned = bench.plan.shapes[0]
        weights = {
            of.name: (of, ExpertLayers(of, planned.shape, bench.plan.layers(of, planned.shape), bench.teams))
            for of in bench.plan.formats
        }
        to.send(weights[next(iter(weights))][1].pages)
        while asked := to.recv():
            name, tokens, seconds = asked
            if name == READ:
                to.send((0.0, bench.meter.now().read_gbytes_per_s))
                continue
            cell = one_cell(bench, planned.shape, *weights[name], tokens, seconds, experts)
            to.send(cell)


def one_cell(
    bench: Any, shape: Any, of: Any, weights: Any, tokens: int, seconds: float, experts: int | None
) -> tuple[float, float]:
    import numpy as np

    from proa.bench.kernel_weights import expert_bytes
    from proa.bench.kernels import RoutedBatch

    batch = RoutedBatch(shape, tokens)
    if experts is not None:
        batch.ids[batch.ids >= experts] = -1
        batch.touched = np.array([len(np.unique(ids[ids >= 0])) for ids in batch.ids])
    trial = batch.trial(bench.pool, weights)
    batch.result(trial)
    times: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        times += trial.run(3 + len(times), 4)
    each = expert_bytes(of, shape)
    touched = float(np.mean(batch.touched[np.arange(3, 3 + len(times)) % len(batch.touched)]))
    return 1e3 * median(times), touched * each / median(times) / 1e9


def copy(to: Connection, gpu: int, piece_bytes: int) -> None:
    """A process that copies while asked to: True starts, False ends and gives the GB/s since the start."""
    import torch

    source = torch.empty(COPIED_BYTES, dtype=torch.uint8, pin_memory=True)
    target = torch.empty(piece_bytes, dtype=torch.uint8, device=f"cuda:{gpu}")
    pieces = source.split(piece_bytes)
    to.send("registered")
    while to.recv():
        done, begun = 0, time.perf_counter()
        while not to.poll():
            for piece in random.sample(pieces, AT_ONCE_BYTES // piece_bytes):
                target.copy_(piece, non_blocking=True)
                done += piece_bytes
            torch.cuda.synchronize()
        to.recv()
        to.send(done / (time.perf_counter() - begun) / 1e9)


def started(function: Any, *arguments: Any) -> Connection:
    ours, theirs = mp.get_context("spawn").Pipe()
    mp.get_context("spawn").Process(target=function, args=(theirs, *arguments), daemon=True).start()
    theirs.close()  # so that waiting for a process that has died is an error
    return ours


def main() -> None:
    arguments = _arguments()
    libraries = dict(one.split("=", 1) for one in arguments.libraries)
    racing = {
        name: started(compute, path, arguments.formats, arguments.threads, arguments.isa, arguments.experts)
        for name, path in libraries.items()
    }
    copying = None if arguments.copies is None else started(copy, arguments.copies, arguments.piece << 20)
    for name, one in (*racing.items(), *([("copies", copying)] if copying else [])):
        print(json.dumps({"ready": name, "pages": one.recv()}), flush=True)
    for name in (READ, *arguments.formats.split(",")):
        for tokens in arguments.tokens if name != READ else (0,):
            found = race(racing, copying, (name, tokens, arguments.seconds), arguments.rounds)
            print(json.dumps({"format": name, "tokens": tokens, **found}), flush=True)
    for one in racing.values():
        one.send(None)


def race(
    racing: dict[str, Connection], copying: Connection | None, asked: tuple[str, int, float], rounds: int
) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[tuple[float, ...]]]] = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        for beside in (False, True) if copying else (False,):
            for name in random.sample(sorted(racing), len(racing)):
                if copying and beside:
                    copying.send(True)
                racing[name].send(asked)
                figures = racing[name].recv()
                if copying and beside:
                    copying.send(False)
                    figures = (*figures, copying.recv())
                found["beside copies" if beside else "alone"][name].append(figures)
    return {
        where: {name: [round(median(one), 2) for one in zip(*of, strict=True)] for name, of in by.items()}
        for where, by in found.items()
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("libraries", nargs="+", metavar="NAME=FILE")
    parser.add_argument("--formats", default="fp8-block")
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--isa")
    parser.add_argument("--copies", type=int, metavar="GPU")
    parser.add_argument("--piece", type=int, default=16, help="MiB of a copy")
    parser.add_argument("--experts", type=int, help="of a layer, for the CPU; default: all")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.15)
    return parser.parse_args()


if __name__ == "__main__":
    main()
