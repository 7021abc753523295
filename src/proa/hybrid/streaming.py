"""Streamed prefill: while a prompt passes through the layers, each layer's experts in RAM are divided. Some are copied
to the ring, and the GPU computes them; the CPU computes the others meanwhile. Belongs here: the order of copies, tables
and launches in a pass. Never: the division (machine/cost/prefill.py), kernels, chunks of the prompt (engine/executors).

A pass computes a prefill step layer by layer, each layer for all chunks of the step, so that an expert crosses PCIe
once. The experts of a layer are one group, or several if a bank of the ring does not hold them all. Groups use the two
banks in turn. The order on the device, for group n in bank b:

    copies      after the last launch that reads bank b (group n - 2): the experts of group n
    launches    once: the tables of the pass, before the first copy; for each chunk of group n: pairs are located, and
                the CPU's are pushed; wait for the copies; the GPU's experts; the CPU's sum

Copies of a group thus run beside the launches of the group before it, and the copy engine never waits for routing. The
tables of a pass are its own: decode steps between the parts of a pass read theirs, in which these experts are the
CPU's. During a pass no expert moves (moves.py), so no table of either kind gets stale.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.ring import Ring
from proa.hybrid.tables import Elsewhere, Overlay, Tables
from proa.hybrid.uploads import Transfer, Upload, Uploads
from proa.machine.cost.prefill import Division, PrefillRates, divide, divisions
from proa.machine.cost.turns import beside_pays
from proa.models.ranks import CPU
from proa.native.doorbell import Counters
from proa.native.weights import Piece
from proa.ops.sizes import RING_BANKS as BANKS


@dataclass(frozen=True)
class Asked:
    """mode: what computes experts in RAM for prompts, a value of --prefill, or "half": of each layer's, half are
    streamed, whatever the rates. top_k: the largest of the model's layers."""

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


OWN, WAITED, EXPERTS, OF_CPU = range(4)  # fields of Times: what the device did before a mark


@dataclass(frozen=True)
class Group:
    """Experts of a layer that are in a bank together. number, of: of so many groups of the layer."""

    layer: int
    number: int
    of: int
    experts: list[int]


def groups_of(layer: int, experts: Sequence[int], count: int) -> list[Group]:
    """Divide the experts into `count` groups, as equal as possible."""
    cuts = [len(experts) * i // count for i in range(count + 1)]
    return [Group(layer, i, count, list(experts[cuts[i] : cuts[i + 1]])) for i in range(count)]


@dataclass
class _Pass:
    """A pass under way. left: chunks of the group under way that were not launched yet. marks: at the pass's begin;
    then with what the device did since the mark before."""

    tokens: int
    chunks: int
    groups: list[Group]
    divisions: list[Division]
    before: Counters  # of the CPU's jobs when the pass began
    alone: bool  # the device computes all experts: the CPU gets no job
    at: int = 0  # the group under way
    left: int = 0
    uploads: dict[int, Upload] = field(default_factory=dict)
    nbytes: int = 0
    began_s: float = field(default_factory=time.perf_counter)
    marks: list[tuple[int, Any]] = field(default_factory=list)

    def times(self) -> Times:
        """Add up the times between the marks. All launches of the pass must have ended."""
        sums = [0.0] * len(Times._fields)
        for (_, before), (what, mark) in itertools.pairwise(self.marks):
            sums[what] += mark.seconds_since(before)
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
        self._streamed = [i for i, layer in enumerate(layers) if layer.cpu_computes]  # in the order of the model
        sets = max((ring.groups(i, len(layers[i].in_ram)) for i in self._streamed), default=1)
        self.overlay = Overlay(tables, sets)
        self._pieces = {i: layers[i].pieces() for i in self._streamed}
        self._free: list[Any] = [None] * BANKS  # reached once no launch reads the bank
        self._pass: _Pass | None = None
        self._launched: _Pass | None = None  # launched whole, not yet measured
        self._active = False
        self._later: Callable[[], None] | None = None  # launches the wait for the CPU's sum of a chunk

    @property
    def under_way(self) -> bool:
        return self._pass is not None

    @property
    def active(self) -> bool:
        """Whether launches belong to the pass."""
        return self._active

    @property
    def alone(self) -> bool:
        """Whether there is a pass of which the CPU gets no job, not even an empty one."""
        return self._pass is not None and self._pass.alone

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Within the context, launches belong to the pass, if there is one."""
        self._active = self._pass is not None
        try:
            yield
        finally:
            self._active = False

    def begin(
        self, tokens: int, chunks: int, heat: NDArray[np.float32] | None, counters: Counters,
        beside: float | None = None,
    ) -> float:  # fmt: skip
        """Begin a pass of `tokens` tokens in `chunks` chunks; start the copies of its first layers. Returns the
        fraction of the experts in RAM that are copied.

        heat: [layers, experts], how often each expert is chosen, to stream the most chosen; None: unknown. counters: of
        the CPU's jobs so far. beside: see Session.begin_pass.
        """
        divisions = self._divided(tokens, chunks, beside or 0.0)
        alone = beside is not None and all(map(self._is_whole, self._streamed, divisions))
        groups = list[Group]()
        for layer, division in zip(self._streamed, divisions, strict=True):
            experts = self._hottest(layer, division.streamed, heat)
            groups += groups_of(layer, experts, self._ring.groups(layer, len(experts)))
        self._pass = one = _Pass(tokens, chunks, groups, divisions, counters, alone, left=chunks)
        streamed = sum(len(group.experts) for group in groups)
        self.totals.passes += 1
        self.totals.pass_tokens += tokens
        in_ram = sum(map(self._in_ram, self._streamed))
        self.totals.streamed += streamed
        self.totals.left_to_cpu += in_ram - streamed
        self._publish(one)
        self._mark(one, OWN)
        self._free = [one.marks[0][1]] * BANKS
        for at in range(min(BANKS, len(groups))):
            self._copy(one, at)
        return streamed / max(1, in_ram)

    def _mark(self, one: _Pass, what: int) -> None:
        one.marks.append((what, self._uploads.mark()))

    def _divided(self, tokens: int, chunks: int, share: float) -> list[Division]:
        """The layers' divisions: all experts are copied if the pass is then done sooner beside decode steps than in
        turns with them, where it would get this share of the time (0: none decode)."""
        found = [self._divide(i, tokens, chunks) for i in self._streamed]
        if not share or self._asked.mode == "half":
            return found
        whole = [self._divisions(i, tokens, chunks)[-1] for i in self._streamed]
        copied_s, divided_s = (sum(division.seconds for division in of) for of in (whole, found))
        return whole if beside_pays(copied_s, divided_s, share) else found

    def _is_whole(self, layer: int, division: Division) -> bool:
        return division.streamed == self._in_ram(layer)

    def _divisions(self, layer: int, tokens: int, chunks: int) -> list[Division]:
        memory, count, bank = self._layers[layer], self._in_ram(layer), self._ring.bank(layer, 0)
        chosen = self._asked.top_k * count / memory.experts
        return divisions(count, bank.up_bytes + bank.down_bytes, tokens, chosen, self.rates, chunks)

    def _divide(self, layer: int, tokens: int, chunks: int) -> Division:
        memory, count, bank = self._layers[layer], self._in_ram(layer), self._ring.bank(layer, 0)
        nbytes = bank.up_bytes + bank.down_bytes
        if self._asked.mode == "stream":
            return Division(count, count * nbytes / self.rates.copy_bytes_per_s, 0.0)
        chosen = self._asked.top_k * count / memory.experts
        if self._asked.mode == "half":
            return self._divisions(layer, tokens, chunks)[(count + 1) // 2]
        return divide(count, nbytes, tokens, chosen, self.rates, jobs=chunks)

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
        """Start the copies of the group at this position, once its bank is free."""
        group = one.groups[at]
        bank = self._ring.bank(group.layer, at % BANKS)
        numbers = self._tables.numbers(group.layer, group.experts)
        if not numbers:
            return
        up, down = self._pieces[group.layer]
        transfers = [*transfers_of(numbers, up, bank.up), *transfers_of(numbers, down, bank.down)]
        one.uploads[at] = self._uploads.start(transfers, self._free[at % BANKS])
        nbytes = sum(transfer.nbytes for transfer in transfers)
        one.nbytes += nbytes
        self.totals.streamed_bytes += nbytes

    def _publish(self, one: _Pass) -> None:
        """Send the tables of the pass, on the current stream, before any copy to the ring: the copy engine takes copies
        in order, and a table sent later would wait for all experts that are under way."""
        self.overlay.publish([self._elsewhere(one, at) for at in range(len(one.groups))])

    def _elsewhere(self, one: _Pass, at: int) -> Elsewhere:
        group = one.groups[at]
        bank = self._ring.bank(group.layer, at % BANKS)
        up, down = ([to + i * of for i in range(len(group.experts))] for to, of in bank.strides)
        return Elsewhere(group.layer, group.number, group.experts, up, down)

    @property
    def groups(self) -> int:
        """Number of groups of the layer under way."""
        one = self._under_way
        return one.groups[one.at].of

    @property
    def leaves_none(self) -> bool:
        """Whether passes copy all experts in RAM, so that the CPU gets no job."""
        return self._asked.mode == "stream"

    @property
    def hands_over(self) -> bool:
        """Whether the CPU gets its pairs of the chunk under way together with the group under way: chunks
        are spread evenly over the groups."""
        one = self._under_way
        group = one.groups[one.at]
        return (one.chunks - one.left) * group.of // one.chunks == group.number

    def collect(self, later: Callable[[], None] | None = None) -> None:
        """Launch the wait for the CPU's sum of the chunk that was handed over last, unless that was done; `later`
        launches that of the next one."""
        wait, self._later = self._later, later
        if wait is not None:
            self._mark(self._under_way, OWN)
            wait()
            self.summed()

    def pause(self) -> None:
        """Let other steps be launched next, with their own jobs for the CPU."""
        self.collect()

    def join(self) -> None:
        """Let the next launches read the ring's experts of the group under way."""
        one = self._under_way
        self._mark(one, OWN)
        if one.left == one.chunks and one.at in one.uploads:
            one.uploads[one.at].join()
        self._mark(one, WAITED)

    def summed(self) -> None:
        """Note that the wait for the CPU's sum of a chunk has been launched."""
        self._mark(self._under_way, OF_CPU)

    @property
    def _under_way(self) -> _Pass:
        if self._pass is None:
            raise ValueError("no pass is under way")
        return self._pass

    def leave(self) -> None:
        """Note that the experts of one chunk of the group under way have been launched."""
        one = self._under_way
        self._mark(one, EXPERTS)
        one.left -= 1
        if one.left:
            return
        self._free[one.at % BANKS] = one.marks[-1][1]
        if one.at + BANKS < len(one.groups):
            self._copy(one, one.at + BANKS)
        one.at, one.left = one.at + 1, one.chunks

    def end(self) -> None:
        """The pass was launched whole, or is given up: then all its launches have ended."""
        one, self._pass = self._pass, None
        if one is not None and one.at == len(one.groups):
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
