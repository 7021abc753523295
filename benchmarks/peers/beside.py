"""Another program's expert kernels beside Proa's: the same shapes, routing and threads, limits of the same run.

A peer is a function that loads weights of one format and shape and gives back a function for one call. Every cell that
Proa measures is printed as `proa bench kernels --json` prints it, and after it the peer's, with the same field names.
Never: what belongs to one peer.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np
import numpy.typing as npt

from proa.bench.kernel_cases import ExpertShape
from proa.bench.kernel_plan import KernelOptions
from proa.bench.kernel_weights import bf16_bits
from proa.bench.kernels import LEAST_CALLS, MOST_CALLS, RoutedBatch, KernelBench, Cell, open_bench, roof
from proa.config.parse import HelpShown, parse
from proa.errors import ProaError, UsageError

CHECKED_TOKENS = 4  # up to which results are compared with float32
_REPEATED = 1 << 22  # random values that fill all weights
_PERIOD = 1021  # experts begin at other places of them


@dataclass(frozen=True)
class Dense:
    """bfloat16 weights of one layer as bits: gate and up [experts, width, hidden], down [experts, hidden, width]."""

    gate: npt.NDArray[np.uint16]
    up: npt.NDArray[np.uint16]
    down: npt.NDArray[np.uint16]


@dataclass(frozen=True)
class Call:
    """One call's arguments: rows of bfloat16 bits, ids [tokens, top_k], weights [tokens, top_k] float32."""

    x: npt.NDArray[np.uint16]
    ids: npt.NDArray[np.int32]
    weights: npt.NDArray[np.float32]


@dataclass(frozen=True)
class Loaded:
    """A peer with weights. `prepare` makes a function that does call number i, and one that gives its float32 rows."""

    prepare: Callable[[Sequence[Call]], tuple[Callable[[int], None], Callable[[], npt.NDArray[np.float32]]]]
    weight_bits: float  # of one weight, scales included
    close: Callable[[], None] = lambda: None


@dataclass(frozen=True)
class Peer:
    """`formats`: Proa's name of a format -> the nearest that the peer has, in its own words."""

    name: str
    version: str
    threads: int
    formats: Mapping[str, str]
    load: Callable[[str, ExpertShape, int, Dense, int], Loaded]  # format, shape, layers, weights, most tokens


@dataclass(frozen=True)
class _Command:
    """options"""

    bench: KernelOptions = field(default_factory=KernelOptions)


def options_of(argv: Sequence[str], prog: str, formats: Sequence[str]) -> KernelOptions:
    """The options of `proa bench kernels`; of formats, those that the peer has."""
    options = parse(_Command, argv, prog=prog, summary="prints Proa's cells and the peer's").options.bench
    if options.formats == "all":
        return replace(options, formats=",".join(formats))
    unknown = set(options.formats.split(",")) - set(formats)
    if unknown:
        raise UsageError(f"{prog} has no {', '.join(sorted(unknown))}.", f"It has {', '.join(formats)}.")
    return options


def main(run: Callable[[Sequence[str]], None]) -> None:
    """Run a peer's script. What the peer itself writes to stdout goes to stderr."""
    rows = os.dup(1)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(rows, "w")
    try:
        run(sys.argv[1:])
    except HelpShown as shown:
        sys.stdout.write(shown.text + "\n")
    except ProaError as error:
        sys.exit(str(error))


def compare(make_peer: Callable[[int], Peer], options: KernelOptions) -> None:
    """Print both programs' cells. `make_peer` is given the threads that Proa uses."""
    with open_bench(options) as bench:
        with _unbound(bench):
            peer = make_peer(bench.pool.threads)
        loaded: Loaded | None = None
        key: tuple[str, str] | None = None
        for cell in bench.cells():
            _print(json.loads(cell.json()))
            shape = ExpertShape(cell.shape, cell.hidden, cell.width, cell.experts, cell.top_k)
            with _unbound(bench):
                if loaded is None or key != (cell.format, cell.shape):
                    if loaded is not None:
                        loaded.close()
                    key, dense = (cell.format, cell.shape), random_layer(shape)
                    loaded = peer.load(cell.format, shape, cell.layers, dense, max(bench.plan.tokens))
                _print(_row(bench, peer, cell, shape, loaded, dense))


@contextmanager
def _unbound(bench: KernelBench) -> Iterator[None]:
    """Proa binds its threads, the calling one too; a peer's threads begin with all CPUs, as they would alone."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, bench.plan.machine.usable_cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def random_layer(shape: ExpertShape) -> Dense:
    """Normal weights with variance 1 / columns, repeated with a shift: the same as nowhere else in an expert."""
    base = np.random.default_rng(0).standard_normal(_REPEATED + _PERIOD, np.float32)

    def make(rows: int, columns: int) -> npt.NDArray[np.uint16]:
        bits = bf16_bits(base / np.float32(np.sqrt(columns)))
        return np.resize(bits, shape.experts * rows * columns).reshape(shape.experts, rows, columns)

    gate, up = make(shape.width, shape.hidden), make(shape.width, shape.hidden)
    return Dense(gate, np.roll(up, _PERIOD, axis=-1), make(shape.hidden, shape.width))


def bf16_values(bits: npt.NDArray[np.uint16]) -> npt.NDArray[np.float32]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)


def exact(dense: Dense, call: Call) -> npt.NDArray[np.float32]:
    """The experts in float32, from the unrounded weights."""
    x, y = bf16_values(call.x), np.zeros((len(call.x), dense.down.shape[1]), np.float32)
    for token, (ids, weights) in enumerate(zip(call.ids, call.weights, strict=True)):
        for expert, weight in zip(ids, weights, strict=True):
            gate, up = bf16_values(dense.gate[expert]) @ x[token], bf16_values(dense.up[expert]) @ x[token]
            y[token] += weight * (bf16_values(dense.down[expert]) @ (gate / (1 + np.exp(-gate)) * up))
    return y


def _row(bench: KernelBench, peer: Peer, cell: Cell, shape: ExpertShape, loaded: Loaded, dense: Dense) -> dict[str, Any]:
    batch = RoutedBatch(shape, cell.tokens)
    calls = [Call(batch.x, ids, weights) for ids, weights in zip(batch.ids, batch.weights, strict=True)]
    call, result = loaded.prepare(calls)
    call(0)
    error = _relative_error(result(), exact(dense, calls[0])) if cell.tokens <= CHECKED_TOKENS else None
    estimate_s = min(_seconds(call, i) for i in (1, 2))
    before = bench.meter.now()
    call(3)  # its workers may have gone to sleep
    times = [
        _seconds(call, 4 + i) for i in range(min(max(int(bench.plan.seconds / estimate_s), LEAST_CALLS), MOST_CALLS))
    ]
    after = bench.meter.now()
    us = 1e6 * median(times)
    touched = float(np.mean(batch.touched[np.arange(4, 4 + len(times)) % len(batch.touched)]))
    nbytes = touched * shape.expert_parameters * loaded.weight_bits / 8
    flops = 2.0 * cell.tokens * shape.top_k * shape.expert_parameters
    bound, roof_us = roof(nbytes, flops, before, after)
    us_p10, us_p90 = (1e6 * np.percentile(times, (10, 90))).tolist()
    return {
        "peer": f"{peer.name} {peer.version}", "format": cell.format, "peer_format": peer.formats[cell.format],
        "shape": cell.shape, "tokens": cell.tokens, "us": us, "us_p10": us_p10,
        "us_p90": us_p90, "gbytes_per_s": nbytes / us / 1e3, "gflops": flops / us / 1e3,
        "bound": bound, "roof_us": roof_us, "roof_share": roof_us / us, "experts": cell.experts, "layers": cell.layers,
        "threads": peer.threads, "calls": len(times), "relative_error": error, "proa_us": cell.us,
        "times_of_proa": us / cell.us,
        "before": {"read_gbytes_per_s": before.read_gbytes_per_s, "peak_gflops": before.peak_gflops},
        "after": {"read_gbytes_per_s": after.read_gbytes_per_s, "peak_gflops": after.peak_gflops},
    }  # fmt: skip


def _relative_error(got: npt.NDArray[np.float32], expected: npt.NDArray[np.float32]) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


def _seconds(call: Callable[[int], None], number: int) -> float:
    begin = time.perf_counter()
    call(number)
    return time.perf_counter() - begin


def _print(row: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
