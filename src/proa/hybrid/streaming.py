"""Streamed prefill: while a prompt passes through the layers, each layer's experts in RAM are divided. Some are copied
to the ring, and the GPU computes them; the CPU computes the others meanwhile. Belongs here: the order of copies, tables
and launches in a pass. Never: the division (machine/cost/prefill.py), kernels, chunks of the prompt (engine/executors).

A pass computes a prefill step layer by layer, each layer for all chunks of the step, so that an expert crosses PCIe
once. Layers use the ring's two banks in turn. The order on the device, for layer n in bank b:

    copies      after the last launch that reads bank b (layer n - 2): the experts of layer n
    launches    once: the tables of the pass, before the first copy; for each chunk of layer n: pairs are located, and
                the CPU's are pushed; wait for the copies; the GPU's experts; the CPU's sum

Copies of a layer thus run beside the launches of the layer before it, and the copy engine never waits for routing. The
tables of a pass are its own: decode steps between the parts of a pass read theirs, in which these experts are the
CPU's. During a pass no expert moves (moves.py), so no table of either kind gets stale.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.ring import Ring
from proa.hybrid.tables import Elsewhere, Overlay, Tables
from proa.hybrid.uploads import Transfer, Upload, Uploads
from proa.machine.cost.prefill import Division, PrefillRates, divide
from proa.models.ranks import CPU
from proa.native.doorbell import Counters
from proa.native.weights import Piece
from proa.ops.sizes import RING_BANKS as BANKS


@dataclass(frozen=True)
class Asked:
    """mode: what computes experts in RAM for prompts, a value of --prefill. top_k: the largest of the model's
    layers."""

    mode: str
    top_k: int


@dataclass
class PassTotals:
    """Sums over all passes since the start."""

    passes: int = 0
    pass_tokens: int = 0
    streamed: int = 0  # experts copied to the ring, over all layers
    left_to_cpu: int = 0  # experts in RAM that were not
    streamed_bytes: int = 0
    copy_s: float = 0.0  # of passes that were measured, as the following ones
    predicted_s: float = 0.0  # sum over layers of the longer of copies and computing, as divided
    took_s: float = 0.0  # from the begin of each pass to the end of its launches
    own_s: float = 0.0  # of this, the GPU's time for all but experts
    experts_s: float = 0.0  # for experts
    waited_s: float = 0.0  # its waits for copies
    cpu_wait_s: float = 0.0  # its waits for the CPU's sums


class Times(NamedTuple):
    """Device time of a pass, in seconds. own: all that is not experts; waited: for copies; experts: the device's
    experts; cpu: waits for the CPU's sums."""

    own: float
    waited: float
    experts: float
    cpu: float


@dataclass
class _Pass:
    """A pass under way. left: chunks of the layer under way that were not launched yet. marks: at the pass's begin;
    then for each layer and chunk before and after the wait for copies, after the experts, after the CPU's sum."""

    tokens: int
    chunks: int
    experts: list[list[int]]  # to be copied, by layer
    divisions: list[Division]
    before: Counters  # of the CPU's jobs when the pass began
    at: int = 0  # position in the order of layers
    left: int = 0
    uploads: dict[int, Upload] = field(default_factory=dict)
    nbytes: int = 0
    began_s: float = field(default_factory=time.perf_counter)
    marks: list[Any] = field(default_factory=list)

    def times(self) -> Times:
        """Add up the times between the marks. All launches of the pass must have ended."""
        sums, marks = [0.0] * len(Times._fields), self.marks
        for i in range(1, len(marks)):
            sums[(i - 1) % len(sums)] += marks[i].seconds_since(marks[i - 1])
        return Times(*sums)


def transfers_of(numbers: Sequence[int], pieces: Sequence[Piece], to: int) -> list[Transfer]:
    """Copies of the matrices with these ascending numbers to address `to`, one behind the other. Neighbours are copied
    at once if each lies in one piece."""
    if len(pieces) > 1:
        sources = [(piece.address + number * piece.stride, piece.nbytes) for number in numbers for piece in pieces]
        firsts = itertools.accumulate((nbytes for _, nbytes in sources), initial=to)
        return [Transfer(first, *source) for first, source in zip(firsts, sources, strict=False)]
    (piece,), found, first = pieces, list[Transfer](), 0
    for i, number in enumerate(numbers, 1):
        if i == len(numbers) or numbers[i] != number + 1:
            source = piece.address + numbers[first] * piece.stride
            found.append(Transfer(to + first * piece.nbytes, source, (i - first) * piece.nbytes))
            first = i
    return found


class Streaming:
    """Passes of one model. Called by one thread."""

    def __init__(
        self, layers: Sequence[LayerMemory], tables: Tables, ring: Ring, uploads: Uploads[Any], rates: PrefillRates,
        asked: Asked,
    ) -> None:  # fmt: skip
        self.totals, self.rates = PassTotals(), rates
        self._layers, self._tables, self._ring, self._uploads, self._asked = layers, tables, ring, uploads, asked
        self.overlay = Overlay(tables)
        self._streamed = [i for i, layer in enumerate(layers) if layer.cpu_computes]  # in the order of the model
        self._pieces = {i: layers[i].pieces() for i in self._streamed}
        self._free: list[Any] = [None] * BANKS  # reached once no launch reads the bank
        self._pass: _Pass | None = None
        self._launched: _Pass | None = None  # launched whole, not yet measured
        self._active = False

    @property
    def under_way(self) -> bool:
        return self._pass is not None

    @property
    def active(self) -> bool:
        """Whether launches belong to the pass."""
        return self._active

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Within the context, launches belong to the pass, if there is one."""
        self._active = self._pass is not None
        try:
            yield
        finally:
            self._active = False

    def begin(self, tokens: int, chunks: int, heat: NDArray[np.float32] | None, counters: Counters) -> float:
        """Begin a pass of `tokens` tokens in `chunks` chunks; start the copies of its first layers. Returns the
        fraction of the experts in RAM that are copied.

        heat: [layers, experts], how often each expert is chosen, to stream the most chosen; None: unknown. counters: of
        the CPU's jobs so far.
        """
        divisions = [self._divide(i, tokens, chunks) for i in self._streamed]
        experts = [self._hottest(i, of.streamed, heat) for i, of in zip(self._streamed, divisions, strict=True)]
        self._pass = one = _Pass(tokens, chunks, experts, divisions, counters, left=chunks)
        self.totals.passes += 1
        self.totals.pass_tokens += tokens
        streamed, in_ram = sum(map(len, experts)), sum(map(self._in_ram, self._streamed))
        self.totals.streamed += streamed
        self.totals.left_to_cpu += in_ram - streamed
        self._publish(one)
        one.marks.append(self._uploads.mark())
        self._free = [one.marks[0]] * BANKS
        for at in range(min(BANKS, len(one.experts))):
            self._copy(one, at)
        return streamed / max(1, in_ram)

    def _divide(self, layer: int, tokens: int, chunks: int) -> Division:
        memory, count, bank = self._layers[layer], self._in_ram(layer), self._ring.bank(layer, 0)
        room, nbytes = min(bank.room, count), bank.up_bytes + bank.down_bytes
        if self._asked.mode == "stream":
            return Division(room, room * nbytes / self.rates.copy_bytes_per_s, 0.0)
        chosen = self._asked.top_k * count / memory.experts
        return divide(count, nbytes, tokens, chosen, self.rates, jobs=chunks, most=room)

    def _in_ram(self, layer: int) -> int:
        """Number of the layer's experts that the CPU owns."""
        return int((self._tables.owners[layer, : self._layers[layer].experts] == CPU).sum())

    def _hottest(self, layer: int, count: int, heat: NDArray[np.float32] | None) -> list[int]:
        """The `count` most chosen experts of the CPU, in the order of their numbers in RAM."""
        own = np.flatnonzero(self._tables.owners[layer, : self._layers[layer].experts] == CPU)
        if heat is not None:
            own = own[np.argsort(-heat[layer, own], kind="stable")]
        numbers = self._tables.numbers(layer, own[:count].tolist())
        return [int(expert) for _, expert in sorted(zip(numbers, own[:count], strict=True))]

    def _copy(self, one: _Pass, at: int) -> None:
        """Start the copies of the layer at this position, once its bank is free."""
        layer, bank = self._streamed[at], self._ring.bank(self._streamed[at], at % BANKS)
        numbers = self._tables.numbers(layer, one.experts[at])
        if not numbers:
            return
        up, down = self._pieces[layer]
        transfers = [*transfers_of(numbers, up, bank.up), *transfers_of(numbers, down, bank.down)]
        one.uploads[at] = self._uploads.start(transfers, self._free[at % BANKS])
        nbytes = sum(transfer.nbytes for transfer in transfers)
        one.nbytes += nbytes
        self.totals.streamed_bytes += nbytes

    def _publish(self, one: _Pass) -> None:
        """Send the tables of the pass, on the current stream, before any copy to the ring: the copy engine takes copies
        in order, and a table sent later would wait for all experts that are under way."""
        self.overlay.publish([self._elsewhere(one, at) for at in range(len(one.experts))])

    def _elsewhere(self, one: _Pass, at: int) -> Elsewhere:
        layer, experts = self._streamed[at], one.experts[at]
        bank = self._ring.bank(layer, at % BANKS)
        up, down = ([to + i * of for i in range(len(experts))] for to, of in bank.strides)
        return Elsewhere(layer, experts, up, down)

    def join(self) -> None:
        """What is launched from now on may read the ring's experts of the layer under way."""
        one = self._under_way
        one.marks.append(self._uploads.mark())
        if one.left == one.chunks and one.at in one.uploads:
            one.uploads[one.at].join()
        one.marks.append(self._uploads.mark())

    def summed(self) -> None:
        """The wait for the CPU's sum of a chunk has been launched."""
        self._under_way.marks.append(self._uploads.mark())

    @property
    def _under_way(self) -> _Pass:
        if self._pass is None:
            raise ValueError("no pass is under way")
        return self._pass

    def leave(self) -> None:
        """The experts of one chunk of the layer under way have been launched."""
        one = self._under_way
        one.marks.append(self._uploads.mark())
        one.left -= 1
        if one.left:
            return
        self._free[one.at % BANKS] = one.marks[-1]
        if one.at + BANKS < len(one.experts):
            self._copy(one, one.at + BANKS)
        one.at, one.left = one.at + 1, one.chunks

    def end(self) -> None:
        """The pass was launched whole, or is given up: then all its launches have ended."""
        one, self._pass = self._pass, None
        if one is not None and one.at == len(one.experts):
            self._launched = one

    def measure(self, counters: Counters) -> None:
        """Update the rates by the last pass, all of whose launches have ended. counters: see `begin`."""
        one, self._launched = self._launched, None
        if one is None:
            return
        seconds = [upload.seconds() for upload in one.uploads.values()]
        if None in seconds:
            return
        copy_s = sum(second for second in seconds if second is not None)
        self.rates = self.rates.after_copies(one.nbytes, copy_s)
        jobs = one.chunks * sum(of.cpu_s > 0 for of in one.divisions)
        if counters.jobs - one.before.jobs != jobs:
            return  # decode ran in between, whose jobs cost other times
        times, cpu_s, took_s = one.times(), counters.moe_s - one.before.moe_s, time.perf_counter() - one.began_s
        each, launches = -(-one.tokens // one.chunks), one.chunks * len(one.divisions)
        self.rates = self.rates.after_jobs(sum(of.cpu_s for of in one.divisions), cpu_s)
        self.rates = self.rates.after_launches(each, launches, times.own, times.experts)
        totals = self.totals
        totals.copy_s += copy_s
        totals.predicted_s += sum(of.seconds for of in one.divisions)
        totals.took_s += took_s
        totals.own_s += times.own
        totals.experts_s += times.experts
        totals.waited_s += times.waited
        totals.cpu_wait_s += times.cpu

    def counted(self, counters: Counters) -> Counters:
        """The counters with those of the passes."""
        rates = self.rates
        return replace(
            counters, **asdict(self.totals), copy_bytes_per_s=rates.copy_bytes_per_s,
            cpu_expert_s=rates.cpu.expert_s, cpu_pair_s=rates.cpu.pair_s,
        )  # fmt: skip

    def close(self) -> None:
        self._uploads.close()
