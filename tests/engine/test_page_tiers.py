"""Runs of KV pages through RAM and files: the same bytes come back, from RAM if they are there."""

from __future__ import annotations

import os
import threading
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engines import load_decoder, make_engine, request
from proa.cache.files import FileStore
from proa.cache.ram import RamStore
from proa.engine.executors import restore_rates
from proa.engine.executors.page_copies import AT_ONCE
from proa.engine.executors.page_tiers import READERS, EntryCopies, PageTiers
from proa.engine.executors.restore_rates import RestoreRates
from proa.engine.executors.run_buffers import RunBuffers
from proa.engine.scheduling.tiers import Entry, Restore, Run, StatePart, Store
from proa.ops.caches import Caches, KvPages, LatentPages, RecurrentState
from tiny import make_tiny

ROOT, RUN_PAGES, PAGES = b"root", 4, 24
KINDS = [("ram",), ("files",), ("ram", "files")]


def caches() -> Caches:
    random = torch.Generator().manual_seed(1)

    def pages(*shape: int) -> Tensor:
        return torch.rand(PAGES, 16, *shape, generator=random).to(torch.bfloat16)

    return (KvPages(pages(2, 8), pages(2, 8)),), (LatentPages(pages(20), 16),)


def tensors(of: Caches) -> list[Tensor]:
    return [tensor for layer in of for cache in layer for tensor in cache.page_tensors]


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def pages_of(number: int) -> list[int]:
    return list(range(number * RUN_PAGES, (number + 1) * RUN_PAGES))


@dataclass
class Box:
    """Tiers over pages, and their bytes at first. ram_runs: room in RAM."""

    folder: Path
    kinds: tuple[str, ...]
    ram_runs: int = 10
    pages: Caches = field(default_factory=caches)
    new: Callable[[Caches, int], EntryCopies] = EntryCopies

    def __post_init__(self) -> None:
        self.before = [tensor.clone() for tensor in tensors(self.pages)]
        copies = partial(self.new, self.pages, RUN_PAGES)
        buffers = RunBuffers(copies().nbytes, torch.device("cpu"))
        self.files = FileStore(self.folder, ROOT, 1 << 20) if "files" in self.kinds else None
        self.ram = RamStore(self.ram_runs * buffers.nbytes, buffers) if "ram" in self.kinds else None
        self.tiers = PageTiers(ROOT, RUN_PAGES, copies, {0}, self.files, self.ram)

    def store(self, *numbers: int) -> None:
        for number in numbers:
            job = Store([Run(key_of(number), pages_of(number))])
            self.tiers.store(job)
            _wait(job)

    def restore(self, *numbers: int, skipped: int = 0) -> int:
        """Restore these runs to pages that were cleared; returns how many pages came back, which must be right."""
        to = [page for number in numbers for page in pages_of(number)][skipped:]
        for tensor in tensors(self.pages):
            tensor[to] = 0
        first = [skipped, *(0 for _ in numbers[1:])]
        runs = [Run(key_of(n), pages_of(n)[at:], at) for n, at in zip(numbers, first, strict=True)]
        job = Restore(runs)
        self.tiers.restore(job)
        _wait(job)
        good = to[: sum(len(run.pages) for run in runs[: job.num_restored])]
        for tensor, before in zip(tensors(self.pages), self.before, strict=True):
            assert torch.equal(tensor[good], before[good])
            tensor.copy_(before)
        return len(good)


def _wait(job: Store | Restore) -> None:
    end = time.monotonic() + 20
    while not job.done:
        assert time.monotonic() < end
        time.sleep(0.0005)


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_pages_come_back(kinds: tuple[str, ...], tmp_path: Path) -> None:
    box = Box(tmp_path, kinds)
    box.store(0, 1, 2)
    assert [box.tiers.has(key_of(number)) for number in range(4)] == [True, True, True, False]
    assert [box.tiers.lacks(key_of(number)) for number in range(4)] == [False, False, False, True]
    assert box.restore(0, 1, 2) == 12
    assert box.restore(1, 2, skipped=3) == 5
    assert box.restore(0, 5, 1) == 4
    files, ram = box.tiers.file_stats(), box.tiers.ram_stats()
    by_kind = {"ram": ram.restored_pages, "files": files.restored_pages}
    assert by_kind.pop(kinds[0]) == 21
    assert sum(by_kind.values()) == 0
    assert (ram.written_runs, files.written_files) == (3 * ("ram" in kinds), 3 * ("files" in kinds))
    assert (ram.stored_bytes > 0, files.stored_bytes > 0) == ("ram" in kinds, "files" in kinds)
    assert ram.restored_bytes + files.restored_bytes == 6 * box.tiers._entry_bytes
    box.tiers.close()


def test_threads_leave_the_cpu_to_workers(tmp_path: Path) -> None:
    others = set(threading.enumerate())
    box = Box(tmp_path, ("files",))
    box.store(0, 1)
    box.restore(0, 1)
    copying = [thread for thread in threading.enumerate() if thread not in others]
    assert {thread.name.split("_")[0] for thread in copying} == {"prefix-reader", "prefix-writer"}
    values = {os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) for thread in copying}
    assert values == {os.getpriority(os.PRIO_PROCESS, 0) + 10}
    box.tiers.close()


def test_runs_evicted_from_ram_come_from_files_and_return_to_ram(tmp_path: Path) -> None:
    box = Box(tmp_path, ("ram", "files"), ram_runs=2)
    box.store(0, 1, 2, 3)
    assert box.tiers.ram_stats().evicted_runs == 2
    assert box.restore(0, 1) == 8
    assert box.tiers.file_stats().restored_pages == 8
    assert box.tiers.ram_stats().restored_pages == 0
    assert box.restore(0, 1) == 8
    assert box.tiers.file_stats().restored_pages == 8
    assert box.tiers.ram_stats().restored_pages == 8
    assert (box.tiers.ram_stats().written_runs, box.tiers.file_stats().written_files) == (4, 4)
    box.tiers.close()


def test_a_restore_from_both_counts_both(tmp_path: Path) -> None:
    box = Box(tmp_path, ("ram", "files"), ram_runs=2)
    box.store(0, 1, 2)
    assert box.restore(1, 0, 2) == 12
    files, ram = box.tiers.file_stats(), box.tiers.ram_stats()
    assert files.restored_pages + ram.restored_pages == 12
    assert files.restored_pages >= 4
    assert files.restore_bytes_per_s > 0
    box.tiers.close()


def test_a_run_that_only_files_lack_is_written_from_ram(tmp_path: Path) -> None:
    box = Box(tmp_path, ("ram", "files"))
    box.store(0)
    for file in tmp_path.glob("*.kv"):
        file.unlink()
    assert box.files is not None
    box.files._list()
    assert box.tiers.has(key_of(0))
    assert box.tiers.lacks(key_of(0))
    for tensor in tensors(box.pages):
        tensor[pages_of(0)] = 0  # must not be read again
    box.store(0)
    assert not box.tiers.lacks(key_of(0))
    for tensor, before in zip(tensors(box.pages), box.before, strict=True):
        tensor.copy_(before)
    box.tiers.close()
    again = Box(tmp_path, ("files",))
    assert again.restore(0) == 4
    again.tiers.close()


def test_a_damaged_file_does_not_enter_ram(tmp_path: Path) -> None:
    first = Box(tmp_path, ("files",))
    first.store(0, 1)
    first.tiers.close()
    for file in tmp_path.glob("*.kv"):
        raw = bytearray(file.read_bytes())
        raw[-1] ^= 1
        file.write_bytes(raw)
    box = Box(tmp_path, ("ram", "files"))
    assert box.restore(0, 1) == 0
    assert box.tiers.file_stats().bad_files >= 1
    assert box.tiers.ram_stats().stored_bytes == 0
    box.tiers.close()


def test_ram_without_a_free_buffer_still_serves_files(tmp_path: Path) -> None:
    first = Box(tmp_path, ("files",))
    first.store(0, 1)
    first.tiers.close()
    box = Box(tmp_path, ("ram", "files"), ram_runs=1)
    assert box.ram is not None
    with box.ram.filling(key_of(99)):
        assert box.restore(0, 1) == 8
        box.store(2)
        assert box.tiers.file_stats().written_files == 1
    assert box.tiers.ram_stats().stored_bytes == 0
    box.tiers.close()


# Tokens take 1 ms each, a byte of RAM 1 us, one of files 100 us.
@pytest.mark.parametrize(
    ("ram", "files", "tokens", "good"),
    [
        (1000, 0, 2, True),
        (3000, 0, 2, False),
        (0, 1000, 99, False),
        (0, 1000, 101, True),
        (1000, 1000, 100, False),
        (1000, 1000, 102, True),
    ],
)
def test_each_tier_has_a_rate(ram: int, files: int, tokens: int, good: bool) -> None:
    rates = RestoreRates()
    assert rates.worthwhile({"ram": ram, "files": files}, tokens)
    rates.learn(restore_rates.LEAST_PREFILL_TOKENS, restore_rates.LEAST_PREFILL_TOKENS * 1e-3)
    assert rates.worthwhile({"ram": ram, "files": files}, tokens)
    rates.restore["ram"].add(1e6, 1.0)
    assert rates.worthwhile({"ram": 0, "files": 1 << 40}, tokens)
    rates.restore["files"].add(1e4, 1.0)
    assert rates.worthwhile({"ram": ram, "files": files}, tokens) == good
    assert rates.refused == (not good)


class Learning:
    """Tiers that only note what they are to learn."""

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def learn(self, num_tokens: int, seconds: float) -> None:
        self.tokens.append(num_tokens)


def test_decode_says_nothing_about_the_rate_of_prefill(tmp_path: Path) -> None:
    """However many sequences decode in a step."""
    engine, _ = make_engine(load_decoder(make_tiny("llama2", tmp_path)), prefix_cache=False)
    engine._tiers = tiers = Learning()  # type: ignore[assignment]
    for i in range(3):
        engine.submit(request(f"r{i}", [5, 6, 7 + i], 4))
    while engine.has_work:
        engine.step()
    assert tiers.tokens == [9, 0, 0, 0]


def test_one_of_many_refusals_restores() -> None:
    rates = RestoreRates()
    rates.learn(1000, 1e-6)
    rates.restore["ram"].add(1, 1.0)
    answers = [rates.worthwhile({"ram": 1000, "files": 0}, 1000) for _ in range(2 * restore_rates.TRY_EVERY)]
    assert sum(answers) == 2


def test_a_restore_that_fails_does_not_stop_others(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    box = Box(tmp_path, ("ram",))
    box.store(0)
    job = Restore([Run(key_of(0), [PAGES + 5] * RUN_PAGES)])
    box.tiers.restore(job)
    _wait(job)
    assert job.num_restored == 0
    assert "could not be restored" in caplog.text
    assert box.restore(0) == 4
    box.tiers.close()


@dataclass
class Late:
    """What `LateCopies` share. made: all of them; begun: a release for each `finish` that has something to copy, which
    then waits for `go`."""

    made: list[LateCopies] = field(default_factory=list)
    begun: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    go: threading.Event = field(default_factory=threading.Event)

    def new(self, pages: Caches, run_pages: int) -> LateCopies:
        self.made.append(LateCopies(pages, run_pages))
        self.made[-1].late = self
        return self.made[-1]


class LateCopies(EntryCopies):
    """Copies as a GPU may: nothing is written before `finish`, and the buffer is read only then. The last page cannot
    be written."""

    late: Late

    def __init__(self, pages: Caches, run_pages: int) -> None:
        super().__init__(pages, run_pages)
        self.begun: list[tuple[Tensor, Entry]] = []
        self.most = 0
        self.finish = self._finish

    def begin_write(self, source: Tensor, entry: Entry) -> None:
        if isinstance(entry, Run) and PAGES - 1 in entry.pages:
            raise RuntimeError("no such page")
        self.begun.append((source, entry))
        self.most = max(self.most, len(self.begun))

    def _finish(self) -> None:
        if self.begun:
            self.late.begun.release()
            assert self.late.go.wait(20)
        for source, entry in self.begun:
            super().begin_write(source, entry)
        self.begun.clear()


def test_runs_are_not_evicted_before_their_copies_have_ended(tmp_path: Path) -> None:
    """There is room for one run besides the four that are being copied."""
    late = Late()
    box = Box(tmp_path, ("ram",), ram_runs=5, new=late.new)
    box.store(0, 1, 2, 3)
    for tensor in tensors(box.pages):
        tensor[: 4 * RUN_PAGES] = 0
    job = Restore([Run(key_of(number), pages_of(number)) for number in range(4)])
    box.tiers.restore(job)
    for _ in range(READERS):
        assert late.begun.acquire(timeout=20)
    box.store(*(number for number in range(4, 6)))
    assert [box.tiers.has(key_of(number)) for number in range(6)] == [True] * 4 + [False, True]
    assert not job.done
    late.go.set()
    _wait(job)
    assert job.num_restored == 4
    for tensor, before in zip(tensors(box.pages), box.before, strict=True):
        assert torch.equal(tensor, before)
    box.tiers.close()


def test_runs_in_ram_are_written_several_at_once(tmp_path: Path) -> None:
    late = Late()
    late.go.set()
    box = Box(tmp_path, ("ram",), new=late.new)
    box.store(0, 1, 2, 3, 4)
    job = Restore([Run(key_of(n), pages_of(n)) for n in (0, 1, 2, 3, 4, 0, 1, 2, 3, 4)])
    box.tiers.restore(job)
    _wait(job)
    assert job.num_restored == 10
    assert max(each.most for each in late.made) == AT_ONCE
    box.tiers.close()


@pytest.mark.parametrize(
    ("kinds", "runs", "parts"),
    [(("ram",), 1, [1]), (("ram",), 3, [2, 1]), (("ram",), 5, [3, 2]), (("files",), 3, [1, 1, 1])],
    ids=str,
)
def test_threads_divide_a_restore(
    kinds: tuple[str, ...], runs: int, parts: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    """What is in RAM in parts for both threads, files one by one."""
    box, seen, read = Box(tmp_path, kinds), list[int](), PageTiers.read_entries

    def note(tiers: PageTiers, entries: Sequence[Entry]) -> list[restore_rates.Tier]:
        seen.append(len(entries))
        return read(tiers, entries)

    monkeypatch.setattr(PageTiers, "read_entries", note)
    box.store(*range(runs))
    assert box.restore(*range(runs)) == runs * RUN_PAGES
    assert sorted(seen, reverse=True) == parts
    box.tiers.close()


def test_copies_end_before_a_failed_restore_does(tmp_path: Path) -> None:
    """The pages would be used otherwise while they are written."""
    late = Late()
    late.go.set()
    box = Box(tmp_path, ("ram",), new=late.new)
    box.store(0, 1)
    job = Restore([Run(key_of(0), pages_of(0)), Run(key_of(1), [PAGES - 1]), Run(key_of(0), pages_of(2))])
    box.tiers.restore(job)
    _wait(job)
    assert job.num_restored == 0
    assert not any(each.begun for each in late.made)
    box.tiers.close()


SLOTS = 3


def with_states() -> Caches:
    """Pages and two layers of states, which end inside a part and begin inside another."""
    random = torch.Generator().manual_seed(2)

    def state(channels: int) -> RecurrentState:
        rule = torch.rand(SLOTS, 2, 16, 200, generator=random)
        return RecurrentState(rule, torch.rand(SLOTS, 3, channels, generator=random).to(torch.bfloat16))

    return (*caches(), (state(36),), (state(7),))


@pytest.mark.parametrize("kinds", KINDS, ids="+".join)
def test_states_and_the_pages_behind_the_last_run_come_back(kinds: tuple[str, ...], tmp_path: Path) -> None:
    box = Box(tmp_path, kinds, ram_runs=20, pages=with_states())
    states = [state for layer in box.pages for cache in layer for state in cache.states]
    before = [state.clone() for state in states]
    count = box.tiers.state_parts
    assert count == -(-sum(state[0].nbytes for state in states) // box.tiers._entry_bytes)
    assert count > 2
    tail = Run(key_of(50), [7, 9])
    store = Store([tail, *(StatePart(key_of(60 + part), 1, part) for part in range(count))])
    box.tiers.store(store)
    _wait(store)
    for state in states:
        state[1:] = 0
    restore = Restore([Run(key_of(50), [3], 1), *(StatePart(key_of(60 + part), 2, part) for part in range(count))])
    box.tiers.restore(restore)
    _wait(restore)
    assert restore.num_restored == count + 1
    for state, was in zip(states, before, strict=True):
        assert torch.equal(state[2], was[1])
        assert torch.equal(state[0], was[0])
        assert int(state[1].count_nonzero()) == 0
    for tensor, was in zip(tensors(box.pages), box.before, strict=True):
        assert torch.equal(tensor[3], was[9])
    assert (box.tiers.ram_stats() if "ram" in kinds else box.tiers.file_stats()).restored_pages == 1
    box.tiers.close()


def test_a_part_that_is_missing_ends_the_restore(tmp_path: Path) -> None:
    box = Box(tmp_path, ("files",), pages=with_states())
    parts = [StatePart(key_of(60 + part), 1, part) for part in range(box.tiers.state_parts)]
    store = Store(parts)
    box.tiers.store(store)
    _wait(store)
    assert box.files is not None
    (tmp_path / box.files._name(key_of(61))).unlink()
    restore = Restore(parts)
    box.tiers.restore(restore)
    _wait(restore)
    assert restore.num_restored == 1
    box.tiers.close()


def test_a_forked_process_drops_nothing_of_the_threads(tmp_path: Path) -> None:
    """Seen: kernels are compiled in a forked process, which ended with a CUDA error, because it had dropped buffers in
    VRAM that only the threads' own variables held."""
    dropped = tmp_path / "dropped"
    dropped.mkdir()

    class Noting(EntryCopies):
        def __del__(self) -> None:
            (dropped / str(os.getpid())).touch()

    box = Box(tmp_path / "files", ("ram",), new=Noting)
    box.store(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*use of fork", DeprecationWarning)
        child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    assert not (dropped / str(child)).exists()
    box.tiers.close()
