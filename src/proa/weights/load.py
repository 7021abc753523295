"""Streams a checkpoint into its final storage: file by file, in the order of the bytes. Never: policy, names.

Files are read, not mapped, so that file pages do not count as this process's memory; the only temporary is, per reading
thread, a chunk of rows and its decoded form. With a pool, its workers fill all large parameters, each in memory of its
own NUMA node; the loading thread queues their jobs, and fills the rest itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from itertools import groupby
from math import prod
from pathlib import Path

import torch
from torch import Tensor

from proa.errors import WeightsError
from proa.models.names import Declared
from proa.models.ranks import Rank
from proa.models.spec import Model
from proa.native.fill import Fill, NotFiniteError, ReadError, StoredRows, fill
from proa.native.formats import Format, Order, layout
from proa.native.pool import Pool
from proa.ops.staging import STORED
from proa.ops.table import Sink, Target
from proa.weights.checkpoint import Checkpoint
from proa.weights.finite import is_finite, not_finite
from proa.weights.in_parts import in_parts
from proa.weights.index import FETCH_AGAIN, TensorInfo, ends_too_early
from proa.weights.narrowed import narrow
from proa.weights.rows import Rows, open_rows
from proa.weights.source import Source
from proa.weights.sources import Sources, resolve, stored_types

_CHUNK_BYTES = 1 << 20  # small enough to stay, with its decoded form, in the CPU cache between reading and writing
_BATCH_BYTES = 16 << 20  # per worker: long enough to hide the end of a batch, short enough to show progress
_SCALES_BYTES = 512 << 10  # scales held in memory for the jobs of a batch, per worker

Progress = Callable[[int, int], None]  # (bytes done, bytes in total)


def load_weights(
    checkpoint: Checkpoint,
    declared: Declared,
    targets: Mapping[str, Target],
    progress: Progress,
    pool: Pool | None = None,
    flush: Callable[[], None] | None = None,
    rank: Rank | None = None,
) -> None:
    """Fill every parameter of `declared.spec` in `targets` (by Proa's names: tensors of any float type, views too, or
    sinks). pool: fills them, required if there are sinks; the bytes are the same without. flush: called after each
    batch of the workers, so that sinks can move what was staged. rank: fill the parameters of this rank's model
    instead, of which only its parts are read.

    `progress` is called after every chunk or batch. Raises WeightsError before anything is read if a parameter has no
    source or a tensor no use, and later if a file is cut off or a value is non-finite or overflows.
    """
    sources = resolve(declared, checkpoint.tensors)
    if rank is not None:
        sources = narrow(sources, rank)
    _check((rank or declared).spec, targets)
    if pool is None and not all(isinstance(target, Tensor) for target in targets.values()):
        raise ValueError("packed weights need a pool to fill them")
    for name, stored in stored_types(sources, checkpoint.tensors).items():
        target = targets[name]
        if not isinstance(target, Tensor):
            target.expect(stored)
    _check_zeros(checkpoint, sources)
    _Copy(checkpoint.tensors, sources, targets, progress, pool, flush).run()


def _check(spec: Model, targets: Mapping[str, Target]) -> None:
    shapes = dict(spec.params())
    if targets.keys() != shapes.keys():
        raise ValueError(f"targets and parameters differ: {sorted(targets.keys() ^ shapes.keys())[:5]}")
    wrong = [name for name, shape in shapes.items() if tuple(targets[name].shape) != shape]
    if wrong:
        raise ValueError(f"targets whose shape is not the parameter's: {wrong[:5]}")


def _check_zeros(checkpoint: Checkpoint, sources: Sources) -> None:
    for name in sources.zeros:
        info = checkpoint.tensors[name]
        with open_rows(info.file, checkpoint.tensors) as rows:
            if bool(rows.read(name, 0, info.rows).any()):
                raise WeightsError(
                    f"{info.file}: {name} is not zero, but the model has no such bias.",
                    "Check that config and weights belong together.",
                )


class _Copy:
    """One pass over the files."""

    def __init__(
        self,
        tensors: Mapping[str, TensorInfo],
        sources: Sources,
        targets: Mapping[str, Target],
        progress: Progress,
        pool: Pool | None,
        flush: Callable[[], None] | None,
    ) -> None:
        self._pool, self._flush = pool, flush
        threads = pool.threads if pool else 1
        self._batch_bytes, self._most_scales_bytes = _BATCH_BYTES * threads, _SCALES_BYTES * threads
        self._tensors = tensors
        self._sources = sources
        self._targets = targets
        self._progress = progress
        self._jobs: list[Fill] = []
        self._jobs_of: list[Source] = []
        self._read: list[Tensor] = []
        self._jobs_bytes = 0
        self._scales_bytes = 0
        self._done_bytes = 0
        self._total_bytes = sum(self._bytes(source) for source in sources.all)

    def run(self) -> None:
        names = sorted(self._sources.params, key=self._place)
        for file, group in groupby(names, key=lambda name: self._place(name)[0]):
            with open_rows(file, self._tensors) as rows:
                self._fill_all(file, rows, group)
        for name, parts in self._sources.joined.items():
            self._fill_joined(parts, self._targets[name])
        for name in self._sources.blank:
            _fill_zeros(self._targets[name])
        if self._sources.tied_head is not None:
            self._compare_tied_head(self._sources.tied_head)

    def _place(self, name: str) -> tuple[Path, int, int, int]:
        source = self._sources.params[name]
        info = self._tensors[source.tensor]
        return info.file, info.offset, source.first_row, source.first_col

    def _bytes(self, source: Source) -> int:
        info = self._tensors[source.tensor]
        return info.nbytes * source.rows * source.cols // max(1, prod(info.shape))

    def _fill_all(self, file: Path, rows: Rows, names: Iterable[str]) -> None:
        """Fill all parameters of one file."""
        run = partial(self._run, file)
        for name in names:
            source, target = self._sources.params[name], self._targets[name]
            if not self._by_workers(rows, source, target, run):
                self._fill(rows, source, target)
        run()

    def _fill_joined(self, parts: Sequence[Source], target: Target) -> None:
        """Fill a parameter whose rows lie in several tensors."""
        with ExitStack() as stack:
            files = {self._tensors[part.tensor].file for part in parts}
            opened = {file: stack.enter_context(open_rows(file, self._tensors)) for file in files}
            if isinstance(target, Tensor):
                self._fill_parts(opened, parts, target)
            elif any(part.transposed or part.height % target.row_unit for part in parts):
                whole = torch.empty(target.shape, dtype=torch.float32)
                self._fill_parts(opened, parts, whole)
                self._write(target, 0, whole, *parts)
            else:
                first = 0
                for part in parts:
                    file = self._tensors[part.tensor].file
                    run, end = partial(self._run, file), first + part.height
                    if not self._by_workers(opened[file], part, target, run, first, end):
                        self._fill_sink(opened[file], part, target, first)
                    run()  # while the file is open
                    first = end

    def _fill_parts(self, opened: Mapping[Path, Rows], parts: Sequence[Source], whole: Tensor) -> None:
        first = 0
        for part in parts:
            rows = opened[self._tensors[part.tensor].file]
            self._fill_tensor(rows, part, whole[first : first + part.height])
            first += part.height

    def _by_workers(
        self, rows: Rows, source: Source, target: Target, run: Callable[[], None], begin: int = 0,
        end: int | None = None,
    ) -> bool:  # fmt: skip
        """Queue jobs that fill a parameter, or its rows from `begin` to `end`; False if workers cannot fill it."""
        if self._pool is None or source.changed or not source.whole_units(self._tensors[source.tensor]):
            return False
        plain = isinstance(target, Tensor)
        if source.col_step > 1 and (plain or not source.transposed):
            return False
        gathered = self._gather(rows, source) if source.col_step > 1 else None
        stored = _stored(rows, source, gathered)
        if stored is None:
            return False
        if isinstance(target, Tensor):
            if target.dtype != torch.bfloat16 or not target.is_contiguous() or source.transposed:
                return False
            to = layout(Format.BF16, source.rows, source.cols)
            jobs = [Fill(stored, to, target.data_ptr(), target.nbytes, plain=True)]
            self._hand_out(jobs, source, self._bytes(source), run)
            return True
        covered, nbytes, total = 0, self._bytes(source), source.height
        for first, count, some in in_parts(target, stored, run, begin, end):
            covered = first - begin + count
            before, after = (nbytes * row // total for row in (first - begin, covered))
            self._hand_out(some, source, after - before, run, gathered)
        return covered > 0

    def _gather(self, rows: Rows, source: Source) -> Tensor:
        """Read the source's rows into memory with strided columns made contiguous, so that workers can transpose."""
        step = max(1, _CHUNK_BYTES // self._tensors[source.tensor].row_bytes)
        starts = range(0, source.rows, step)
        return torch.cat([_rectangle(rows, source, at, min(step, source.rows - at)).contiguous() for at in starts])

    def _hand_out(
        self, jobs: Sequence[Fill], source: Source, nbytes: int, run: Callable[[], None], read: Tensor | None = None
    ) -> None:  # fmt: skip
        """Queue jobs of one file; run them once they are a batch. read: memory that the jobs read, kept until then."""
        self._jobs += jobs
        self._jobs_of += [source] * len(jobs)
        self._read += [] if read is None else [read]
        self._jobs_bytes += nbytes
        self._scales_bytes += max((job.rows.scales.nbytes for job in jobs if job.rows.scales), default=0)
        if self._jobs_bytes >= self._batch_bytes or self._scales_bytes >= self._most_scales_bytes:
            run()

    def _run(self, file: Path) -> None:
        """Run the queued jobs, all of one file. Raises WeightsError and OSError."""
        if self._pool is None or not self._jobs:
            return
        try:
            fill(self._pool, self._jobs)
        except ReadError as error:
            if error.errno:
                raise OSError(error.errno, os.strerror(error.errno), str(file)) from None
            raise ends_too_early(self._tensors[self._jobs_of[error.job].tensor]) from None
        except NotFiniteError as error:
            raise not_finite(self._tensors, self._jobs_of[error.job]) from None
        if self._flush:
            self._flush()
        self._done_bytes += self._jobs_bytes
        self._jobs, self._jobs_of, self._read = [], [], []
        self._jobs_bytes, self._scales_bytes = 0, 0
        self._progress(self._done_bytes, self._total_bytes)

    def _fill(self, rows: Rows, source: Source, target: Target) -> None:
        if isinstance(target, Tensor):
            self._fill_tensor(rows, source, target)
        elif source.transposed:
            whole = torch.empty(target.shape, dtype=torch.float32)
            self._fill_tensor(rows, source, whole)
            self._write(target, 0, whole, source)
        else:
            self._fill_sink(rows, source, target)

    def _fill_tensor(self, rows: Rows, source: Source, target: Tensor) -> None:
        info = self._tensors[source.tensor]
        out = target if target.dim() == 2 else target.reshape(-1, target.shape[-1])
        out = out.T if source.transposed else out
        whole_rows = source.cols == info.shape[-1] and source.row_step == 1 and not source.changed
        for first, count in self._chunks(source, 1):
            part = out[first : first + count]
            if whole_rows and rows.read_into(source.tensor, source.first_row + first, part):
                if not is_finite(part):
                    raise not_finite(self._tensors, source)
                continue
            chunk = self._numbers(rows, source, first, count)
            part.copy_(chunk)
            _refuse_overflow(chunk, part, f"{info.file}: {source.tensor}")

    def _fill_sink(self, rows: Rows, source: Source, sink: Sink, begin: int = 0) -> None:
        for first, count in self._chunks(source, sink.row_unit):
            self._write(sink, begin + first, self._numbers(rows, source, first, count), source)

    def _write(self, sink: Sink, first: int, rows: Tensor, *sources: Source) -> None:
        try:
            sink.write(first, rows)
        except NotFiniteError:  # the rows are finite, so a value overflowed bfloat16
            raise not_finite(self._tensors, *sources) from None

    def _numbers(self, rows: Rows, source: Source, first: int, count: int) -> Tensor:
        """Read `_rectangle` and undo the file's transformation (source.changed). Raises WeightsError for NaN and
        infinity."""
        found = _rectangle(rows, source, first, count)
        if not is_finite(found):
            raise not_finite(self._tensors, source)
        match source.changed:
            case "x + 1":
                return found - 1
            case "-exp(x)":
                if bool((found >= 0).any()):
                    file = self._tensors[source.tensor].file
                    raise WeightsError(f"{file}: {source.tensor} must be negative everywhere, but is not.", FETCH_AGAIN)
                return (-found).log()
        return found

    def _chunks(self, source: Source, unit: int) -> Iterator[tuple[int, int]]:
        """Yield (first row, rows) of pieces of about _CHUNK_BYTES, and report progress after each."""
        step = max(unit, _CHUNK_BYTES // self._tensors[source.tensor].row_bytes // unit * unit)
        before = self._done_bytes
        for first in range(0, source.rows, step):
            count = min(step, source.rows - first)
            yield first, count
            self._done_bytes = before + self._bytes(source) * (first + count) // source.rows
            self._progress(self._done_bytes, self._total_bytes)

    def _compare_tied_head(self, head: Source) -> None:
        """Raise WeightsError if a tied model stores a head that differs from the embedding: config or file is wrong."""
        embed = self._sources.params["embed.weight"]
        ours, theirs = self._tensors[embed.tensor], self._tensors[head.tensor]
        same = ours.shape == theirs.shape
        with open_rows(ours.file, self._tensors) as a, open_rows(theirs.file, self._tensors) as b:
            step = max(1, _CHUNK_BYTES // ours.row_bytes)
            for first in range(0, ours.rows if same else 0, step):
                count = min(step, ours.rows - first)
                same = same and torch.equal(a.read(embed.tensor, first, count), b.read(head.tensor, first, count))
        if not same:
            raise WeightsError(
                f"{theirs.file}: the config ties the head to the embedding, but {head.tensor} differs from it.",
                "If the head is right, add --override-config tie_word_embeddings=false.",
            )


def _stored(rows: Rows, source: Source, gathered: Tensor | None) -> StoredRows | None:
    """Locate the source's rows for workers; None if only Rows.read can read them. gathered: the rows, in memory."""
    if gathered is not None:
        kind, stride = STORED[gathered.dtype], gathered.stride(0) * gathered.itemsize
        return StoredRows(kind, gathered.data_ptr(), stride, order=Order.TRANSPOSED)
    stored = rows.stored(source.tensor, source.first_row, source.first_col, source.transposed)
    return stored.every(source.row_step) if stored is not None and source.row_step > 1 else stored


def _fill_zeros(target: Target) -> None:
    if isinstance(target, Tensor):
        target.zero_()
    else:
        target.write(0, torch.zeros(target.shape).view(-1, target.shape[-1]))


def _rectangle(rows: Rows, source: Source, first: int, count: int) -> Tensor:
    """Read `count` of the source's rows, from its row `first` on, restricted to its columns, as stored."""
    span = (count - 1) * source.row_step + 1
    read = rows.read(source.tensor, source.first_row + first * source.row_step, span)
    last = source.first_col + (source.cols - 1) * source.col_step
    return read[:: source.row_step, source.first_col : last + 1 : source.col_step]


def _refuse_overflow(chunk: Tensor, out: Tensor, tensor: str) -> None:
    """Raise WeightsError if finite values overflowed in the target's narrower type: float16 ends at 65504."""
    if torch.finfo(out.dtype).max < torch.finfo(chunk.dtype).max and not is_finite(out):
        wider = "bfloat16" if out.dtype == torch.float16 else "float32"
        kind = str(out.dtype).removeprefix("torch.")
        raise WeightsError(f"{tensor} has values beyond {kind}'s range.", f"Use --dtype {wider}.")
