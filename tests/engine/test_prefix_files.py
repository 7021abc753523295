"""Runs of pages as files: whatever happens to a file, a read returns what was written under its key, or nothing."""

from __future__ import annotations

import errno
import logging
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from examples import examples
from proa.cache import files
from proa.cache.files import FileStore
from proa.cache.keys import RunKeys, run_pages, state_key
from proa.errors import ResourceError

ROOT, OTHER = b"model one", b"model two"
SIZE = 5000
LIMIT = 6 * (SIZE + 200)


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def payload_of(number: int, root: bytes = ROOT) -> bytes:
    return (root + number.to_bytes(7, "little") * SIZE)[:SIZE]


def read(store: FileStore, number: int, size: int = SIZE) -> bytes | None:
    into = bytearray(size)
    return bytes(into) if store.read(key_of(number), memoryview(into)) else None


def write(store: FileStore, number: int, root: bytes = ROOT) -> bool:
    return store.write(key_of(number), memoryview(payload_of(number, root)))


def found(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.kv"))


def test_a_run_is_read_back_by_another_store(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "b"
    assert write(FileStore(folder, ROOT, LIMIT), 1)
    again = FileStore(folder, ROOT, LIMIT)
    assert again.has(key_of(1))
    assert not again.has(key_of(2))
    assert read(again, 1) == payload_of(1)
    assert read(again, 2) is None
    assert (again.bad_files, again.foreign_files) == (0, 0)


def test_only_the_owner_may_read_files_and_folder(tmp_path: Path) -> None:
    write(FileStore(tmp_path / "cache", ROOT, LIMIT), 1)
    (file,) = found(tmp_path / "cache")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_other_models_files_are_ignored_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(FileStore(tmp_path, OTHER, LIMIT), 1, OTHER)
    with caplog.at_level(logging.INFO):
        store = FileStore(tmp_path, ROOT, LIMIT)
    assert not store.has(key_of(1))
    assert read(store, 1) is None
    assert (store.foreign_files, store.bad_files) == (1, 0)
    assert "1 files of other models" in caplog.text
    assert read(FileStore(tmp_path, OTHER, LIMIT), 1) == payload_of(1, OTHER)


@pytest.mark.parametrize("at", [0, 9, 30, 60, 70, 900, SIZE])
@pytest.mark.parametrize("how", ["flip", "cut"])
def test_a_damaged_file_is_counted_said_once_and_deleted(
    tmp_path: Path, how: str, at: int, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(tmp_path, ROOT, LIMIT)
    for number in (1, 2):
        write(store, number)
    for file in found(tmp_path):
        raw = bytearray(file.read_bytes())
        raw[at] ^= 4
        file.write_bytes(raw if how == "flip" else raw[:at])
    assert read(store, 1) is None
    assert read(store, 2) is None
    assert store.bad_files == 2
    assert found(tmp_path) == []
    assert len(caplog.records) == 1
    assert write(store, 1)
    assert read(store, 1) == payload_of(1)


def test_a_file_that_cannot_be_read_is_counted_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(*_: object) -> str | None:
        raise OSError(errno.EMFILE, "Too many open files")

    store = FileStore(tmp_path, ROOT, LIMIT)
    write(store, 1)
    with monkeypatch.context() as patch:
        patch.setattr("proa.cache.files._read", refused)
        assert read(store, 1) is None
    assert (store.bad_files, len(found(tmp_path))) == (1, 1)
    assert "cannot be read: Too many open files" in caplog.text
    assert read(FileStore(tmp_path, ROOT, LIMIT), 1) == payload_of(1)


def test_a_file_under_another_name_is_not_used(tmp_path: Path) -> None:
    store = FileStore(tmp_path, ROOT, LIMIT)
    write(store, 1)
    write(store, 2)
    first, second = found(tmp_path)
    second.write_bytes(first.read_bytes())
    assert {read(store, 1), read(store, 2)} == {None, payload_of(1)}
    assert store.bad_files == 1


def test_another_size_is_refused(tmp_path: Path) -> None:
    store = FileStore(tmp_path, ROOT, LIMIT)
    write(store, 1)
    assert read(store, 1, SIZE + 1) is None
    assert store.bad_files == 1


def test_a_longer_file_is_refused(tmp_path: Path) -> None:
    store = FileStore(tmp_path, ROOT, LIMIT)
    write(store, 1)
    with found(tmp_path)[0].open("ab") as file:
        file.write(b"x")
    assert read(store, 1) is None
    assert store.bad_files == 1


def test_the_least_recently_used_file_is_deleted_first(tmp_path: Path) -> None:
    store = FileStore(tmp_path, ROOT, LIMIT)
    for number in range(6):
        write(store, number)
        old_s = time.time() - 100 + number
        (newest,) = (file for file in found(tmp_path) if key_of(number).hex() in file.name)
        os.utime(newest, (old_s, old_s))
    assert read(store, 0) == payload_of(0)
    store.touch(key_of(1))
    store.keep_up()
    write(store, 6)
    assert [number for number in range(7) if store.has(key_of(number))] == [0, 1, 3, 4, 5, 6]
    assert store.stored_bytes <= LIMIT
    assert store.evicted_files == 1


def test_a_use_counts_from_when_it_was_noted(tmp_path: Path) -> None:
    """Not from when it is applied, which made a file newer than those written in between."""
    store = FileStore(tmp_path, ROOT, LIMIT)
    for number in range(6):
        write(store, number)
        store.touch(key_of(number))
        time.sleep(0.01)  # more than a tick of the file system's clock
        if number == 2:
            for early in (0, 1):
                store.touch(key_of(early))
                time.sleep(0.01)
    store.keep_up()
    for number, kept in ((6, [0, 1, 3, 4, 5, 6]), (7, [1, 3, 4, 5, 6, 7]), (8, [3, 4, 5, 6, 7, 8])):
        write(store, number)
        assert [number for number in range(9) if store.has(key_of(number))] == kept


def test_a_use_that_was_only_noted_counts_for_eviction(tmp_path: Path) -> None:
    """A prefix that many prompts take from VRAM was noted as used, and its files were deleted all the same."""
    store = FileStore(tmp_path, ROOT, LIMIT)
    for number in range(6):
        write(store, number)
    for file in found(tmp_path):
        os.utime(file, (1, 1))
    store.touch(key_of(0))
    write(store, 6)
    assert store.has(key_of(0))
    assert store.evicted_files == 1


def test_a_full_folder_is_not_listed_for_each_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing 20,000 files takes some 80 ms of Python, which a step of the engine may wait for."""
    store, lists, entries = FileStore(tmp_path, ROOT, 200 * (SIZE + 200)), 0, files._entries

    def counted(folder: Path) -> Iterator[tuple[str, os.stat_result]]:
        nonlocal lists
        lists += 1
        return entries(folder)

    monkeypatch.setattr(files, "_entries", counted)
    assert all(write(store, number) for number in range(240))
    assert 0 < lists <= 12
    assert 195 <= len(found(tmp_path)) <= 205
    kept = [number for number in range(240) if store.has(key_of(number))]
    assert kept == list(range(240 - len(found(tmp_path)), 240))


def test_a_run_beyond_the_limit_is_not_written(tmp_path: Path) -> None:
    store = FileStore(tmp_path, ROOT, SIZE)
    assert not write(store, 1)
    assert found(tmp_path) == []


def test_a_full_disk_stops_writing_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store = FileStore(tmp_path, ROOT, LIMIT)
    write(store, 1)

    def full(path: Path, head: bytes, payload: memoryview) -> None:
        path.write_bytes(head)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patched:
        patched.setattr(files, "_write", full)
        assert not write(store, 2)
    assert list(tmp_path.glob("*.tmp")) == []
    assert not store.writes
    assert not write(store, 3)
    assert read(store, 1) == payload_of(1)
    assert store.failed_writes == 1
    assert "No space left" in caplog.text
    monkeypatch.setattr(files, "PAUSE_S", 0.0)
    store._pause(OSError(errno.ENOSPC, "No space left on device"))
    assert write(store, 3)
    assert len(caplog.records) == 1


@pytest.mark.parametrize("kept", [6, 3])
def test_files_that_cannot_be_deleted_stay_known(kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full folder that is read-only by now: its files can be restored, and none counts as evicted."""
    store = FileStore(tmp_path, ROOT, LIMIT)
    for number in range(6):
        write(store, number)
        (newest,) = (file for file in found(tmp_path) if key_of(number).hex() in file.name)
        os.utime(newest, (number, number))
    stored, unlink = store.stored_bytes, Path.unlink
    readonly = [file for number in range(kept) for file in found(tmp_path) if key_of(number).hex() in file.name]

    def refused(path: Path, missing_ok: bool = False) -> None:
        if path in readonly:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", refused)
    assert write(store, 6) == (kept < 6)
    assert [store.has(key_of(number)) for number in range(kept)] == [True] * kept
    assert (store.evicted_files, store.failed_writes, store.stored_bytes) == (kept < 6, kept == 6, stored)
    assert sum(file.stat().st_size for file in found(tmp_path)) == stored


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(ResourceError, match="--prefix-cache-dir"):
        FileStore(tmp_path / "file", ROOT, LIMIT)


def test_files_of_killed_engines_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def killed(source: Path, target: Path) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", killed)
        for number in (1, 2):
            with pytest.raises(KeyboardInterrupt):
                write(FileStore(tmp_path, ROOT, LIMIT), number)
    old, new = tmp_path.glob("*.tmp")
    os.utime(old, (1, 1))
    FileStore(tmp_path, ROOT, LIMIT)
    assert not old.exists()
    assert new.exists()


@pytest.mark.parametrize("name", ["notes.tmp", "0123456789abcdef.tmp.tmp", "cache.kv", "a-b.kv"])
def test_other_programs_files_stay(name: str, tmp_path: Path) -> None:
    """Their names end as ours, they are old, and the folder is full."""
    other = tmp_path / name
    other.write_bytes(b"x" * LIMIT)
    os.utime(other, (1, 1))
    store = FileStore(tmp_path, ROOT, LIMIT)
    assert (store.stored_bytes, store.foreign_files) == (0, 0)
    assert all(write(store, number) for number in range(9))
    assert other.stat().st_size == LIMIT


def test_another_engines_files_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine, theirs = FileStore(tmp_path, ROOT, LIMIT), FileStore(tmp_path, ROOT, LIMIT)
    write(theirs, 1)
    monkeypatch.setattr(files, "LOOK_AGAIN_S", 0.0)
    mine.keep_up()
    assert mine.has(key_of(1))


def test_engines_with_the_same_process_id_write_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two containers may share the folder, and their processes' numbers are often the same."""
    mine, theirs = FileStore(tmp_path, ROOT, LIMIT), FileStore(tmp_path, ROOT, LIMIT)
    rename = os.rename

    def interrupted(source: Path, target: Path) -> None:
        monkeypatch.undo()
        assert write(mine, 2)
        rename(source, target)

    monkeypatch.setattr(os, "rename", interrupted)
    assert write(theirs, 1)
    assert (read(mine, 1), read(theirs, 2)) == (payload_of(1), payload_of(2))
    assert mine.failed_writes == theirs.failed_writes == 0


class Unread(dict[str, object]):
    """Files that may be looked up, but not gone through."""

    def __iter__(self) -> Iterator[str]:
        raise AssertionError("every file is looked at")

    values = items = keys = __iter__  # type: ignore[assignment]


def test_counts_do_not_look_at_every_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Statistics are sent after each step, and a folder may have 10^5 files."""
    theirs, mine = FileStore(tmp_path, OTHER, LIMIT), FileStore(tmp_path, ROOT, LIMIT)
    assert write(theirs, 1, OTHER)
    assert write(mine, 2)
    mine._list()
    each = mine.stored_bytes // 2
    monkeypatch.setattr(mine, "_files", Unread(mine._files))
    assert (mine.stored_bytes, mine.foreign_files) == (2 * each, 1)
    found(tmp_path)[0].unlink()
    (name,) = {file.name for file in tmp_path.iterdir()}
    monkeypatch.undo()
    mine._list()
    assert (mine.stored_bytes, mine.foreign_files) == (each, int(not name.startswith(mine._prefix)))
    for number in range(3, 12):
        assert write(mine, number)
    assert (mine.stored_bytes, mine.foreign_files) == (sum(file.stat().st_size for file in found(tmp_path)), 0)


def test_keys_depend_on_root_salt_and_all_tokens_before() -> None:
    def made(root: bytes, salt: str, tokens: list[int]) -> list[bytes]:
        keys: list[bytes] = []
        RunKeys(root, 4, 2).extend(keys, tokens, salt, len(tokens) // 4)
        return keys

    base = made(ROOT, "", list(range(12)))
    assert base[:2] == made(ROOT, "", [*range(8), 99, 98, 97, 96])[:2]
    others = [made(OTHER, "", list(range(12))), made(ROOT, "s", list(range(12))), made(ROOT, "", [7, *range(1, 12)])]
    assert not {key for keys in others for key in keys} & set(base)
    grown: list[bytes] = []
    for count in range(4):
        RunKeys(ROOT, 4, 2).extend(grown, list(range(12)), "", count)
    assert grown == base
    assert len(set(base)) == 3


def test_keys_of_prefixes_that_end_in_a_run() -> None:
    keys = RunKeys(ROOT, 6, 2)
    runs: list[bytes] = []
    keys.extend(runs, range(15), "s", 2)
    first, second, third = (keys.ends(runs, range(15), "s", run) for run in range(3))
    assert [len(ends) for ends in (first, second, third)] == [3, 3, 1]
    assert [first[-1], second[-1]] == runs
    assert second[:2] == keys.ends(runs, [*range(10), 99, 98], "s", 1)[:2]
    assert second[2:] != keys.ends(runs, [*range(10), 99, 98], "s", 1)[2:]
    assert not {*first} & {*keys.ends(runs, range(15), "t", 0)}
    parts = [state_key(end, part) for end in (*first, *second) for part in range(3)]
    assert len({*parts, *first, *second, *third}) == len(parts) + 7


@pytest.mark.parametrize(("cell", "same"), [(1, 3), (4, 3), (6, 3), (8, 2), (10, 2), (24, 0)])
def test_keys_depend_on_all_tokens_of_the_cells_in_a_run(cell: int, same: int) -> None:
    keys, tokens, changed = RunKeys(ROOT, 4, 2, cell), list(range(24)), [*range(15), 99, *range(16, 24)]
    runs: list[bytes] = []
    others: list[bytes] = []
    keys.extend(runs, tokens, "", 6)
    keys.extend(others, changed, "", 6)
    assert [one == other for one, other in zip(runs, others, strict=True)] == [run < same for run in range(6)]


def test_runs_hold_whole_pages() -> None:
    assert [run_pages(size) for size in (1, 16, 48, 256)] == [256, 16, 5, 1]


NUMBERS = st.integers(0, 7)


class Folder(RuleBasedStateMachine):
    """Two engines of one model, and one of another, share a folder whose files are cut, changed, swapped, deleted."""

    @initialize()
    def make(self) -> None:
        self.folder = Path(next(self.folders))
        self.stores = [FileStore(self.folder, root, LIMIT) for root in (ROOT, ROOT, OTHER)]

    folders: Iterator[str]

    def root(self, which: int) -> bytes:
        return OTHER if which == 2 else ROOT

    @rule(which=st.integers(0, 2), number=NUMBERS)
    def write(self, which: int, number: int) -> None:
        write(self.stores[which], number, self.root(which))

    @rule(which=st.integers(0, 2), number=NUMBERS)
    def read(self, which: int, number: int) -> None:
        assert read(self.stores[which], number) in (None, payload_of(number, self.root(which)))

    @rule(which=st.integers(0, 2), number=NUMBERS)
    def use(self, which: int, number: int) -> None:
        self.stores[which].touch(key_of(number))
        self.stores[which].keep_up()

    @rule(which=st.integers(0, 2))
    def restart(self, which: int) -> None:
        self.stores[which] = FileStore(self.folder, self.root(which), LIMIT)

    @rule(data=st.data(), how=st.sampled_from(["cut", "flip", "delete", "swap", "grow"]))
    def spoil(self, data: st.DataObject, how: str) -> None:
        names = found(self.folder)
        if not names:
            return
        file = data.draw(st.sampled_from(names))
        raw = bytearray(file.read_bytes())
        at = data.draw(st.integers(0, max(0, len(raw) - 1)))
        if how == "delete":
            file.unlink()
        elif how == "swap":
            file.write_bytes(data.draw(st.sampled_from(names)).read_bytes())
        elif how == "grow":
            file.write_bytes(raw + b"more")
        elif how == "flip" and raw:
            raw[at] ^= 1 << data.draw(st.integers(0, 7))
            file.write_bytes(raw)
        else:
            file.write_bytes(raw[:at])

    @invariant()
    def leaves_nothing_half_written(self) -> None:
        assert not list(self.folder.glob("*.tmp"))


def test_no_order_of_events_returns_wrong_bytes(tmp_path_factory: pytest.TempPathFactory) -> None:
    Folder.folders = (str(tmp_path_factory.mktemp("shared")) for _ in iter(int, 1))
    run_state_machine_as_test(
        Folder, settings=settings(max_examples=examples(100), stateful_step_count=30, deadline=None)
    )
