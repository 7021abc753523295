"""Errors of the kinds that engines have had, put into the product's own functions; and a check beside them. Never:
tests.

With a GPU the check runs in a process of its own (`python check_mutations.py ...`): its paths are forked processes, and
other tests of this process may have initialised CUDA.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import proa.cache.keys
import proa.engine.executors.angles
import proa.engine.executors.eager
import proa.engine.executors.recorded
import proa.hybrid.moves
import proa.hybrid.streaming
import proa.weights.coded
from check_runs import checked, said
from proa.cache.files import FileStore
from proa.cache.radix import PrefixCache
from proa.cache.ram import RamStore
from proa.engine.executors.state_parts import StateParts
from proa.hybrid.copies import GpuCopier, HostCopier
from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.runtime import HybridExperts, InGroups
from proa.hybrid.streaming import Streaming
from proa.hybrid.tables import Tables
from proa.hybrid.transport import Transport
from proa.models.ranks import CPU
from proa.ops.cpu import CpuExperts, CpuOps, CpuUnderway
from proa.weights.coded import CodedFiles
from programs import python

LAYER, EXPERT = 1, 5
RESIDENT, IN_RAM = [0, 1, 2, 3], [4, 5, 6, 7]  # of each layer's 8 experts, if half of them are in VRAM
# If none is: half of them pass through the ring in two groups, the CPU computes the others.
GROUPS, ON_CPU = [[0, 1], [2, 3]], [4, 5, 6, 7]
RING_LAYER, RING_NUMBER = 2, 1  # its bank of the ring held layer 0 before; a place in the bank
Patch = pytest.MonkeyPatch


def nothing(patch: Patch) -> None:
    pass


def swapped_scales(patch: Patch) -> None:
    """The gate of one expert has the scales of another expert's."""
    read = CodedFiles._read_scales
    mine = f"layers.{LAYER}.mlp.experts.{EXPERT}.gate_proj"
    others: dict[str, Any] = {}

    def of_another(self: Any, info: Any, of: Any, matrix: int) -> Any:
        others[of.codes.name] = of.scales
        if mine in of.codes.name:
            of = dataclasses.replace(of, scales=others[of.codes.name.replace(f"experts.{EXPERT}", "experts.0")])
        return read(self, info, of, matrix)

    patch.setattr(CodedFiles, "_read_scales", of_another)


def reciprocal_scales(patch: Patch) -> None:
    kept = proa.weights.coded._as_kept
    patch.setattr(proa.weights.coded, "_as_kept", lambda scales, stored: 1 / kept(scales, stored))


def wrong_rope(patch: Patch) -> None:
    """Positions count twice."""
    for executor in (proa.engine.executors.recorded, proa.engine.executors.eager, proa.engine.executors.angles):
        right = executor.cos_sin
        wrong = lambda rope, positions, lengths, right=right: right(rope, 2 * positions, lengths)  # noqa: E731
        patch.setattr(executor, "cos_sin", wrong)


def page_of_another_prompt(patch: Patch) -> None:
    match, insert = PrefixCache.match, PrefixCache.insert
    kept: dict[PrefixCache, list[int]] = {}

    def remember(self: PrefixCache, node: Any, keys: Any, pages: Any) -> Any:
        kept.setdefault(self, []).extend(pages)
        return insert(self, node, keys, pages)

    def other(self: PrefixCache, keys: Any) -> Any:
        right = match(self, keys)
        others = [page for page in kept.get(self, []) if page not in right.pages]
        if not right.pages or not others:
            return right
        return dataclasses.replace(right, pages=[others[0], *right.pages[1:]])

    patch.setattr(PrefixCache, "insert", remember)
    patch.setattr(PrefixCache, "match", other)


def next_expert_on_the_cpu(patch: Patch) -> None:
    """Weights of expert e go to the place of expert e + 1."""
    parameters, made = CpuExperts.parameters, []

    def next_expert(self: CpuExperts) -> Any:
        made.append(self)
        if len(made) <= LAYER:
            yield from parameters(self)
            return
        for name, sink in parameters(self):
            number, _, part = name.partition(".")
            yield f"{(int(number) + 1) % self._experts}.{part}", sink

    patch.setattr(CpuExperts, "parameters", next_expert)


def ids_from_one(patch: Patch) -> None:
    """The router's logits are shifted by one, as if ids were counted from 1."""
    route = CpuOps.route

    def shifted(self: CpuOps, logits: torch.Tensor, slots: torch.Tensor, rule: Any) -> Any:
        return route(self, logits[:, 1:], slots, rule)

    patch.setattr(CpuOps, "route", shifted)


def next_expert_in_ram(patch: Patch) -> None:
    """The tables map one expert to the next one's weights in RAM."""
    to_cpu = Tables.to_cpu

    def next_number(self: Tables, layer: int, expert: int, number: int) -> None:
        off = layer == LAYER and expert == IN_RAM[0]
        to_cpu(self, layer, expert, (number + off) % len(self._layers[layer].in_ram))

    patch.setattr(Tables, "to_cpu", next_number)


def lost_partial_sum(patch: Patch) -> None:
    """No device computes the experts of one layer that are in RAM."""

    def lost(self: Tables, layer: int, expert: int, number: int) -> None:
        self._set(layer, expert, (0, 0, 0, 0), -1 if layer == LAYER else number, CPU)

    patch.setattr(Tables, "to_cpu", lost)


def lost_shared_expert(patch: Patch) -> None:
    patch.setattr(CpuUnderway, "finish", lambda self, shared, gate: self._routed)


def stale_slot(patch: Patch) -> None:
    """The second slot of a layer still holds the first one's expert."""
    fill, made = LayerMemory.fill_slots, []

    def one_stale(self: LayerMemory) -> None:
        fill(self)
        made.append(self)
        if len(made) == LAYER + 1:
            for slots in (self.slots.up, self.slots.down):
                slots[1].copy_(slots[0])

    patch.setattr(LayerMemory, "fill_slots", one_stale)


def torn_swap(patch: Patch) -> None:
    """One expert moves, and only its gate and up arrive."""
    choose, moved = proa.hybrid.moves.swaps_with_room, []

    def one(*args: Any) -> Any:
        found = [] if moved else choose(*args)[:1]
        moved.extend(found)
        return found

    patch.setattr(proa.hybrid.moves, "swaps_with_room", one)
    for copier in (HostCopier, GpuCopier):
        start = copier.start
        half = lambda self, pairs, start=start: start(self, pairs[: (len(pairs) + 1) // 2])  # noqa: E731
        patch.setattr(copier, "start", half)


def next_expert_in_place(patch: Patch) -> None:
    """The table of addresses in RAM has the next expert's for one expert."""
    _read_elsewhere(patch, ("up", "down"))


def torn_place(patch: Patch) -> None:
    """The table of addresses in RAM has the next expert's down for one expert."""
    _read_elsewhere(patch, ("down",))


def _read_elsewhere(patch: Patch, wrong: Sequence[str]) -> None:
    to_cpu = Tables.to_cpu

    def other_place(self: Tables, layer: int, expert: int, number: int) -> None:
        to_cpu(self, layer, expert, number)
        if layer == LAYER and expert == IN_RAM[0]:
            right, others = (self._layers[layer].addresses(n) for n in (number, number + 1))
            places = (others if "up" in wrong else right)[0], others[1]
            self._set(layer, expert, (0, 0, *places), number, CPU)

    patch.setattr(Tables, "to_cpu", other_place)


def stale_ring_slot(patch: Patch) -> None:
    """One expert of a layer is not copied to the ring: its place holds another layer's."""
    _copied_without(patch, ("up", "down"))


def torn_ring_copy(patch: Patch) -> None:
    """Of one expert of a layer only gate and up are copied to the ring."""
    _copied_without(patch, ("down",))


def _copied_without(patch: Patch, left_out: Sequence[str]) -> None:
    copy, transfers = Streaming._copy, proa.hybrid.streaming.transfers_of
    due: list[str] = []  # matrices of the expert that is not copied whole

    def noted(self: Streaming, one: Any, at: int, experts: Sequence[int], first: int = 0) -> None:
        due[:] = ["up", "down"] if one.groups[at].layer == RING_LAYER else []
        copy(self, one, at, experts, first)

    def without(numbers: Sequence[int], pieces: Any, to: int) -> Any:
        if not due or due.pop(0) not in left_out:
            return transfers(numbers, pieces, to)
        nbytes = sum(piece.nbytes for piece in pieces)
        each = [transfers([number], pieces, to + i * nbytes) for i, number in enumerate(numbers)]
        return [one for i, found in enumerate(each) if i != RING_NUMBER for one in found]

    patch.setattr(Streaming, "_copy", noted)
    patch.setattr(proa.hybrid.streaming, "transfers_of", without)


def next_expert_in_the_ring(patch: Patch) -> None:
    """The tables of a pass map one expert to the next one's place in the ring."""
    elsewhere = Streaming._elsewhere

    def next_place(self: Streaming, one: Any, at: int) -> Any:
        found = elsewhere(self, one, at)
        if found.layer != LAYER:
            return found
        up, down = ([places[1], *places[1:]] for places in (found.up, found.down))
        return dataclasses.replace(found, up=up, down=down)

    patch.setattr(Streaming, "_elsewhere", next_place)


class _Forgetful:
    """A group of a layer's experts whose sum is lost."""

    def __init__(self, of: Any) -> None:
        self._of = of

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def add(self, started: Any, x: torch.Tensor, at: Any, weights: Any, total: torch.Tensor | None) -> torch.Tensor:
        return torch.zeros_like(x, dtype=torch.float32) if total is None else total


def lost_sum_of_a_group(patch: Patch) -> None:
    """The first group of one layer is computed, but not added."""
    stream = HybridExperts.stream

    def with_loss(self: HybridExperts, device: Any, groups: Sequence[Any], streamed: Any) -> None:
        first = _Forgetful(groups[0]) if self.layer == LAYER else groups[0]
        stream(self, device, [first, *groups[1:]], streamed)

    patch.setattr(HybridExperts, "stream", with_loss)


def lost_sum_beside_groups(patch: Patch) -> None:
    """The CPU's sum of one layer is taken, but not added to those of the groups."""
    take = InGroups._take

    def lost(self: InGroups, transport: Transport) -> None:
        before = self._total
        self._total = None if before is None else before.clone()
        kept = self._total
        take(self, transport)
        if self._layer == LAYER:
            self._total = kept if before is None else before

    patch.setattr(InGroups, "_take", lost)


def page_of_another_prompt_in_ram(patch: Patch) -> None:
    """A run in RAM is restored from another one's buffer; its file, for which it is read before, is right."""
    reading, read = RamStore.reading, set[tuple[int, bytes]]()

    @contextmanager
    def other(self: RamStore, key: bytes) -> Iterator[torch.Tensor | None]:
        others = [run for run in self._runs if run != key]
        again = (id(self), key) in read
        read.add((id(self), key))
        with reading(self, others[0] if again and others else key) as buffer:
            yield buffer

    patch.setattr(RamStore, "reading", other)


def page_of_another_prompt_in_files(patch: Patch) -> None:
    """Each file but the first has the pages of the one that was written before it."""
    write, written = FileStore.write, []

    def before(self: FileStore, key: bytes, payload: memoryview) -> bool:
        written.append(bytes(payload))
        return write(self, key, memoryview(written[-2:][0]))

    patch.setattr(FileStore, "write", before)


def states_restored_in_part(patch: Patch) -> None:
    """Restoring a copy of recurrent states writes only the first half of each tensor's bytes."""

    @torch.inference_mode()
    def write(self: StateParts, source: Tensor, slot: int, part: int) -> None:
        for at, rows in self._cut(slot, part):
            half = len(rows) // 2
            rows[:half].copy_(source[at : at + half])

    patch.setattr(StateParts, "write", write)


def keys_without_tokens(patch: Patch) -> None:
    """The keys of runs in RAM and files depend on their place in the prompt alone."""
    hashed = proa.cache.keys._hashed
    patch.setattr(proa.cache.keys, "_hashed", lambda before, data: hashed(before, b""))


def checked_with(
    mutation: Callable[[Patch], None], folder: Path, monkeypatch: Patch, *, gpu: str = "none", only: str = "CPU, avx2"
) -> list[str]:
    """Check a model with the mutation, on paths with `only` in their name; the first problem of each path."""
    if gpu.isdigit():
        command = python(str(Path(__file__)), mutation.__name__, str(folder), gpu, only)
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
        problems: list[str] = json.loads(done.stdout.splitlines()[-1])
        return problems
    mutation(monkeypatch)
    report = checked(folder, monkeypatch, gpu=gpu, only=only)
    assert report.observed
    assert report.agrees == (not said(report))
    return said(report)


def main() -> None:
    name, folder, gpu, only = sys.argv[1:]
    with pytest.MonkeyPatch.context() as patch:
        globals()[name](patch)
        report = checked(Path(folder), patch, gpu=gpu, only=only)
    assert report.observed, report.skipped
    problems = said(report) + [f"{failed.name}: {failed.why}" for failed in report.failed]
    sys.stdout.write(json.dumps(problems) + "\n")


if __name__ == "__main__":
    main()
