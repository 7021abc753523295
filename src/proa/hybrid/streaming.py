"""Streamed prefill: while a prompt passes through the layers, each layer's experts in RAM are divided. Some are copied
to the ring, and the GPU computes them; the CPU computes the others meanwhile. Belongs here: the order of copies, tables
and launches in a pass. Never: the division (machine/cost/prefill.py), what its rates learn from a pass (pass_rates.py),
kernels, chunks of the prompt (engine/executors).

A pass computes a prefill step layer by layer, each layer for all chunks of the step, so that an expert crosses PCIe
once. The experts of a layer are one group, or several if a bank of the ring does not hold them all. Groups use the two
banks in turn. The order on the device, for group n in bank b:

    copies      after the last launch that reads bank b (group n - 2): the experts of group n
    launches    once: the tables of the pass; for each chunk of group n: pairs are located, and the CPU's are pushed;
                wait for the copies; the GPU's experts; the CPU's sum

Copies of a group thus run beside the launches of the group before it, and the copy engine never waits for routing. The
tables of a pass are its own: decode steps between the parts of a pass read theirs, in which these experts are the
CPU's. During a pass no expert moves, but for those of layers that it has passed (promotions.py), whose tables it reads
no more: so no table of either kind gets stale. Where they may, the choices of a layer are fetched, and the host waits
for them once it has launched the layer's experts for the last chunk: the device computes these meanwhile.

A pass of one chunk whose layers are one group each begins divided by the routing, unless that gained nothing for the
last ones as long (machine/cost/probes.py). After its first layers it goes on so if that gains more than it costs, else
like other passes, for which its tables are sent anew. The copies of a layer come in two parts then: the head, before
its routing is known, and the tail, which the routing decides:

    head of l   queued behind the tail of l - 1, so that the copy engine has work until the tail is known
    launches    the choice of experts is fetched, and the host waits for it; the layer's table is sent anew; pairs are
                located, and the CPU's are pushed; only then the tail is queued, since the CPU waits for its pairs and
                the copy engine does not; wait for head and tail; the GPU's experts; the head of l + 1 is queued

The host is thus at most one layer ahead of the device. An expert that no token chose is in no tail. The bank of the
head of l + 1 is free by then: the choice of l was made behind the launches of l - 1, the last that read it. The table
that is sent anew is that of l alone, on the stream of the launches; in this pass none before reads it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.pass_rates import after_layer, after_no_job, after_pass
from proa.hybrid.pass_state import Asked, Pass
from proa.hybrid.pass_totals import DECIDED, EXPERTS, OF_CPU, OWN, WAITED, PassTotals
from proa.hybrid.promotions import Promotions
from proa.hybrid.ring import Ring, groups_of
from proa.hybrid.routed_layer import Divided, RoutedLayer, place, tokens_of_each
from proa.hybrid.tables import Elsewhere, Overlay, Tables
from proa.hybrid.uploads import Fetched, Uploads, transfers_of
from proa.machine.cost.prefill import (
    PROBED_LAYERS,
    Division,
    PrefillRates,
    divide_routed,
    divisions,
    head,
    routing_gain_s,
    taken_of,
)
from proa.machine.cost.probes import FIRST_SKIPPED, Probes
from proa.machine.cost.turns import beside_pays
from proa.models.ranks import CPU
from proa.native.doorbell import Counters
from proa.ops.sizes import RING_BANKS as BANKS


class Streaming:
    """Passes of one model. Called by one thread."""

    def __init__(
        self, layers: Sequence[LayerMemory], tables: Tables, ring: Ring, uploads: Uploads[Any], rates: PrefillRates,
        asked: Asked,
    ) -> None:  # fmt: skip
        self.totals, self.rates = PassTotals(), rates
        # Tests and benchmarks set it. 0: no pass is divided by its routing; more than all layers: a pass is to its end.
        self.probed_layers = PROBED_LAYERS
        self.promotions: Promotions | None = None
        self.jobs: Callable[[], Counters] | None = None  # counts the CPU's jobs so far
        self.ring, self._layers, self._tables, self._uploads, self._asked = ring, layers, tables, uploads, asked
        self._streamed = [i for i, layer in enumerate(layers) if layer.cpu_computes]  # in the order of the model
        sets = max((ring.groups(i, len(layers[i].in_ram)) for i in self._streamed), default=1)
        # Passes count choices where nothing else does, if it matters which experts are copied.
        self.overlay = Overlay(tables, sets, counted=tables.counted or asked.mode == "auto")
        self._counts = np.zeros(tables.counts.shape, np.int32)  # until the last look
        self._fetched: Fetched | None = None  # counts behind the last pass
        self._pieces = {i: layers[i].pieces() for i in self._streamed}
        self._free: list[Any] = [None] * BANKS  # reached once no launch reads the bank
        self._pass: Pass | None = None
        self._launched: Pass | None = None  # launched whole, not yet measured
        self._active = False
        self._seen: NDArray[np.float32] | None = None  # [layers, experts], choices of passes that had no other heat
        self._later: Callable[[], None] | None = None  # launches the wait for the CPU's sum of a chunk
        self._probes, self._trial = Probes(), rates.cpu
        self._begun = Counter[int]()  # passes, by the number of bits of their chunks' tokens
        self._do: Callable[[Callable[[], None]], None] = _call  # what the host does between two launches of a layer

    @property
    def under_way(self) -> bool:
        return self._pass is not None

    @property
    def midway(self) -> bool:
        """Whether a pass is under way that has more groups of experts to launch than the ring has banks."""
        return self._pass is not None and self._pass.at + BANKS < len(self._pass.groups)

    @property
    def active(self) -> bool:
        """Whether launches belong to the pass."""
        return self._active

    @property
    def alone(self) -> bool:
        """Whether there is a pass of which the CPU gets no job, not even an empty one."""
        return self._pass is not None and self._pass.alone

    @property
    def regular(self) -> bool:
        """Whether the pass under way has the launches of every other regular one of as many tokens."""
        one = self._pass
        return one is not None and not (one.alone or one.routed) and all(group.of == 1 for group in one.groups)

    @contextmanager
    def cutting(self, cut: Callable[[Callable[[], None]], None]) -> Iterator[None]:
        """Within the context, launches of a regular pass are captured: `cut` gets what the host does between two."""
        self._do = cut
        try:
            yield
        finally:
            self._do = _call

    @contextmanager
    def launching(self) -> Iterator[None]:
        """Within the context, launches belong to the pass, if there is one."""
        self._active = self._pass is not None
        try:
            yield
        finally:
            self._active = False

    def begin(
        self, tokens: int, chunks: int, heat: NDArray[np.float32] | None, counters: Counters, *, promotes: bool = False,
        beside: float | None = None,
    ) -> None:  # fmt: skip
        """Begin a pass of `tokens` tokens in `chunks` chunks; start the copies of its first layers.

        heat: [layers, experts], how often each expert is chosen, to stream the most chosen; None: as often as former
        passes did. counters: of the CPU's jobs so far. promotes: hot experts may take the slots of others. beside: see
        Session.begin_pass.
        """
        divisions = self._divided(tokens, chunks, beside or 0.0)
        alone = beside is not None and all(map(self._is_whole, self._streamed, divisions))
        routed = not alone and self._is_routed(tokens, chunks)
        promotes &= not alone  # decode steps that run at the same time may read the slots
        own, self._fetched = heat is None and self._asked.mode == "auto", None  # a fetch ends the one before
        heat = self._seen if heat is None else heat
        one = Pass(tokens, chunks, [], divisions, counters, alone, heat, own, routed, promotes, left=chunks)
        self._pass = one
        one.typical = self._begun[one.chunk_tokens.bit_length()] >= FIRST_SKIPPED
        self._begun[one.chunk_tokens.bit_length()] += 1
        self.totals.passes += 1
        self.totals.pass_tokens += tokens
        self._mark(one, OWN)
        self._free = [one.marks[0][1]] * BANKS
        for layer, division in zip(self._streamed, divisions, strict=True):
            count = head(division.streamed, self._nbytes(layer), tokens, self.rates) if routed else division.streamed
            experts = self._in_order(layer, self._hottest(layer, heat)[:count])
            for group in groups_of(layer, experts, self.ring.groups(layer, len(experts))):
                one.groups.append(group)
                if len(one.groups) <= (1 if routed else BANKS):  # at once: PCIe is idle until copies start
                    self._copy(one, len(one.groups) - 1, group.experts)
        self._publish(one)
        if not routed:
            self._count(one, sum(len(group.experts) for group in one.groups), sum(map(self._in_ram, self._streamed)))

    def _is_routed(self, tokens: int, chunks: int) -> bool:
        """Whether a pass is divided by its routing."""
        if self._asked.mode != "auto" or chunks > 1 or not self.probed_layers:
            return False
        if any(self.ring.groups(layer, self._in_ram(layer)) > 1 for layer in self._streamed):
            return False
        return self.probed_layers > len(self._streamed) or self._probes.due(tokens)

    def _count(self, one: Pass, streamed: int, of: int) -> None:
        """Count the experts of layers that are divided: so many `of` those in RAM are streamed."""
        one.streamed += streamed
        self.totals.streamed += streamed
        self.totals.left_to_cpu += of - streamed

    def _mark(self, one: Pass, what: int) -> None:
        one.marks.append((what, self._uploads.mark()))

    def _divided(self, tokens: int, chunks: int, share: float) -> list[Division]:
        """The layers' divisions: all experts are copied if the pass is then done sooner beside decode steps than in
        turns with them, where it would get this share of the time (0: none decode)."""
        if self._asked.mode == "stream":
            counts = [(self._in_ram(i), self._nbytes(i)) for i in self._streamed]
            return [Division(count, count * nbytes / self.rates.copy_bytes_per_s, 0.0) for count, nbytes in counts]
        kinds = [(self._in_ram(i), self._layers[i].experts, self._nbytes(i)) for i in self._streamed]
        # once for layers that are alike: nothing is copied meanwhile
        every = {kind: self._divisions(*kind, tokens, chunks) for kind in dict.fromkeys(kinds)}
        if self._asked.mode == "half":
            return [every[kind][len(every[kind]) // 2] for kind in kinds]
        taken = {kind: taken_of(of) for kind, of in every.items()}
        found = [taken[kind] for kind in kinds]
        if not share:
            return found
        whole = [every[kind][-1] for kind in kinds]
        copied_s, divided_s = (sum(division.seconds for division in of) for of in (whole, found))
        return whole if beside_pays(copied_s, divided_s, share) else found

    def _is_whole(self, layer: int, division: Division) -> bool:
        return division.streamed == self._in_ram(layer)

    def _divisions(self, in_ram: int, experts: int, nbytes: int, tokens: int, chunks: int) -> list[Division]:
        """The divisions of a layer with so many experts, and with so many of these in RAM, of nbytes each."""
        return divisions(in_ram, nbytes, tokens, self._chosen(in_ram, experts), self.rates, chunks)

    def _chosen(self, in_ram: int, experts: int) -> float:
        """How many of its experts in RAM a token of such a layer chooses on average."""
        return self._asked.top_k * in_ram / experts

    def _nbytes(self, layer: int) -> int:
        """Bytes of an expert of the layer."""
        bank = self.ring.bank(layer, 0)
        return bank.up_bytes + bank.down_bytes

    def _in_ram(self, layer: int) -> int:
        """Number of the layer's experts that the CPU owns."""
        return int(np.count_nonzero(self._tables.owners[layer, : self._layers[layer].experts] == CPU))

    def _hottest(self, layer: int, heat: NDArray[np.float32] | None) -> NDArray[np.int64]:
        """The CPU's experts, the most chosen first."""
        own = np.flatnonzero(self._tables.owners[layer, : self._layers[layer].experts] == CPU)
        return own if heat is None else own[np.argsort(-heat[layer, own], kind="stable")]

    def _in_order(self, layer: int, experts: NDArray[np.int64]) -> list[int]:
        """The experts in the order of their numbers in RAM."""
        found: list[int] = experts[self._tables.numbers(layer, experts).argsort()].tolist()
        return found

    def _copy(self, one: Pass, at: int, experts: Sequence[int], first: int = 0) -> None:
        """Start the copies of these experts of the group at this position, once its bank is free: to number `first` of
        the bank and the next ones."""
        group = one.groups[at]
        bank = self.ring.bank(group.layer, at % BANKS)
        numbers: list[int] = self._tables.numbers(group.layer, experts).tolist()
        if not numbers:
            return
        up, down = self._pieces[group.layer]
        transfers = transfers_of(numbers, up, bank.up + first * bank.up_bytes)
        transfers += transfers_of(numbers, down, bank.down + first * bank.down_bytes)
        upload = self._uploads.start(transfers, self._free[at % BANKS], (self._layers, self.ring))
        one.uploads.setdefault(at, []).append(upload)
        one.arriving.append(upload)
        nbytes = sum(transfer.nbytes for transfer in transfers)
        one.copied_s = max(one.copied_s, time.perf_counter()) + nbytes / self.rates.copy_bytes_per_s
        one.nbytes += nbytes
        self.totals.streamed_bytes += nbytes

    def route(self, ids: Tensor) -> None:
        """Divide the experts of the layer under way by its routing, for which the host waits. ids [T, k]: the layer's
        choice, -1: none."""
        one = self._under_way
        fetched = self._uploads.fetch(ids, one.marks[-1][1])  # behind the CPU's last sum
        self._mark(one, OWN)
        ahead, group = self._prepared(one), one.groups[one.at]  # after the wait the device has nothing to do
        one.add_up()
        nbytes, experts = self._nbytes(group.layer), self._layers[group.layer].experts
        one.chosen = tokens_of_each(fetched.wait(), experts)
        tokens_of = one.chosen[ahead.own]
        found = divide_routed(tokens_of, ahead.started, nbytes, one.tokens, self.rates, self._queued_s(one))
        one.tail = ahead.send(found.more)
        self._mark(one, DECIDED)
        one.groups[one.at] = replace(group, experts=[*group.experts, *one.tail])
        one.divided = Divided(found.of, tokens_of, None if self.jobs is None else self.jobs())

    def _prepared(self, one: Pass) -> RoutedLayer:
        layer, head_of = one.groups[one.at].layer, np.array(one.groups[one.at].experts, np.int64)
        own, bank = self._hottest(layer, one.heat), self.ring.bank(layer, one.at % BANKS)
        numbers = self._tables.numbers(layer, own)
        draft = self.overlay.draft(layer)
        place(draft, bank, head_of)
        return RoutedLayer(own, numbers, np.isin(own, head_of), bank, draft)

    def _go_on(self, one: Pass, divided: Divided) -> None:
        """Once the layer's experts have been launched: start the copies of the next head, and what may wait so long."""
        at, layer = one.at, one.groups[one.at].layer
        one.gain_s += routing_gain_s(divided.tokens_of, divided.of, self._nbytes(layer), one.tokens, self.rates)
        self.rates = after_layer(self.rates, one, self._nbytes(one.groups[max(0, at - 1)].layer), divided.jobs)
        one.jobs = divided.jobs
        one.divisions[at] = divided.of
        self._count(one, divided.of.streamed, len(divided.tokens_of))
        one.decided += 1
        if at + 1 == self.probed_layers:
            self._probes.note(one.tokens, gained=one.gain_s > 0)
            if one.gain_s <= 0:
                self._divide_rest(one)
        if at + 1 < len(one.groups):
            self._copy(one, at + 1, one.groups[at + 1].experts)

    def _divide_rest(self, one: Pass) -> None:
        """Go on like a pass that was divided beforehand, from the next layer on."""
        one.routed = one.typical = False
        for at in range(one.at + 1, len(one.groups)):
            group, streamed = one.groups[at], one.divisions[at].streamed
            experts = self._in_order(group.layer, self._hottest(group.layer, one.heat)[:streamed])
            one.groups[at] = replace(group, experts=experts)
            self._count(one, streamed, self._in_ram(group.layer))
        self._publish(one)

    @property
    def routed(self) -> bool:
        """Whether the pass under way is divided by its routing."""
        return self._pass is not None and self._pass.routed

    def _queued_s(self, one: Pass) -> float:
        """Expected time until all copies that were started have arrived."""
        if all(upload.seconds() is not None for upload in one.uploads.get(one.at, ())):
            return 0.0
        return max(0.0, one.copied_s - time.perf_counter())

    def _see(self) -> None:
        """Note what passes chose since the last look, for those without another heat."""
        if self._fetched is None:
            return
        now = self._fetched.wait().reshape(self._counts.shape).copy()
        chosen = (now - self._counts).astype(np.float32)  # int32 wraps as the device's counters do
        self._seen = chosen if self._seen is None else np.float32(0.5) * (self._seen + chosen)
        self._counts, self._fetched = now, None

    def _publish(self, one: Pass) -> None:
        """Send the tables of the pass, on the current stream. A kernel reads them from pinned memory, so that they do
        not wait for the experts that are under way."""
        self.overlay.publish([self._elsewhere(one, at) for at in range(len(one.groups))])

    def _elsewhere(self, one: Pass, at: int) -> Elsewhere:
        group = one.groups[at]
        bank = self.ring.bank(group.layer, at % BANKS)
        (up, up_bytes), (down, down_bytes) = bank.strides
        number = np.arange(len(group.experts))
        return Elsewhere(group.layer, group.number, group.experts, up + number * up_bytes, down + number * down_bytes)

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

    @property
    def waits(self) -> bool:
        """Whether a chunk was handed over whose sum no launch has waited for."""
        return self._later is not None

    def join(self) -> None:
        """Let the next launches read the ring's experts of the group under way."""
        self._do(self._join)

    def _join(self) -> None:
        one = self._under_way
        if one.divided is not None:
            self._copy(one, one.at, one.tail, len(one.groups[one.at].experts) - len(one.tail))
        if one.left == 1 and one.promotes and not one.routed and self.promotions is not None:
            one.counts = self._uploads.fetch(self.promotions.counts(one.groups[one.at].layer))
        self._mark(one, OWN)
        if one.left == one.chunks:
            for upload in one.uploads.get(one.at, ()):
                upload.join()
        self._mark(one, WAITED)

    def summed(self) -> None:
        """Note that the wait for the CPU's sum of a chunk has been launched."""
        self._do(self._summed)

    def _summed(self) -> None:
        self._mark(self._under_way, OF_CPU)

    @property
    def _under_way(self) -> Pass:
        if self._pass is None:
            raise ValueError("no pass is under way")
        return self._pass

    def leave(self) -> None:
        """Note that the experts of one chunk of the group under way have been launched."""
        self._do(self._leave)

    def _leave(self) -> None:
        one = self._under_way
        self._mark(one, EXPERTS)
        one.left -= 1
        if one.left:
            return
        counts, one.counts = one.counts, None
        if not one.routed:  # else it was done
            one.add_up()
        if one.promotes and self.promotions is not None:
            group = one.groups[one.at]
            chosen = one.chosen if counts is None else self.promotions.unseen(group.layer, counts.wait())
            # Not if it is routed: such copies wait for launches, and would hold up the next head.
            fetches = group.number == group.of - 1 and not one.routed
            self.totals.promoted += self.promotions.take(
                group.layer, group.experts, one.at % BANKS, chosen, fetches=fetches
            )
            self._mark(one, OWN)
        self._free[one.at % BANKS] = one.marks[-1][1]
        if one.divided is not None:
            self._go_on(one, one.divided)
            one.divided = None
        ahead = one.at + BANKS
        if not one.routed and ahead < len(one.groups):
            self._copy(one, ahead, one.groups[ahead].experts)
        one.at, one.left = one.at + 1, one.chunks
        if one.at == len(one.groups) and one.own_heat:
            self._fetched = self._uploads.fetch(self._tables.counts)

    def end(self) -> float:
        """The pass was launched whole, or is given up: then all its launches have ended. Returns the fraction of the
        experts in RAM that were copied."""
        one, self._pass = self._pass, None
        if one is None:
            return 0.0
        if one.at == len(one.groups):
            self._launched = one
            self.totals.routed += one.routed
        return one.streamed / max(1, sum(map(self._in_ram, self._streamed)))

    def measure(self, counters: Counters) -> None:
        """Update the rates by the last pass, all of whose launches have ended. counters: see `begin`."""
        one, self._launched = self._launched, None
        if one is None:
            return
        self._see()
        one.add_up()
        if one.arriving:
            return
        if not one.routed:  # else each layer was learned from
            self.rates = self.rates.after_copies(one.nbytes, one.copy_s)
        jobs = one.chunks * sum(of.cpu_s > 0 for of in one.divisions)
        if counters.jobs - one.before.jobs != jobs:
            return  # decode ran in between, whose jobs cost other times
        times, took_s = one.times, time.perf_counter() - one.began_s
        self.rates = after_pass(self.rates, one, times, counters)
        if not jobs and not one.alone and self._asked.mode == "auto":
            layer = self._streamed[0]
            in_ram, chosen = self._in_ram(layer), self._chosen(self._in_ram(layer), self._layers[layer].experts)
            self.rates = after_no_job(self.rates, self._trial, one, in_ram, self._nbytes(layer), chosen)
        totals = self.totals
        totals.copy_s += one.copy_s
        totals.predicted_s += sum(of.seconds for of in one.divisions)
        totals.took_s += took_s
        totals.own_s += times.own
        totals.experts_s += times.experts
        totals.waited_s += times.waited
        totals.cpu_wait_s += times.cpu
        totals.decided_s += times.decided

    def counted(self, counters: Counters) -> Counters:
        """The counters with those of the passes."""
        rates = self.rates
        return replace(
            counters, **vars(self.totals), copy_bytes_per_s=rates.copy_bytes_per_s,
            cpu_expert_s=rates.counted_cpu.expert_s, cpu_pair_s=rates.counted_cpu.pair_s,
        )  # fmt: skip

    def close(self) -> None:
        self._uploads.close()


def _call(action: Callable[[], None]) -> None:
    action()
