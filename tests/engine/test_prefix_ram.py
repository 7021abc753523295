"""Runs of pages in RAM: the least recently used are evicted, none that is read or filled, and the limit holds."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Sequence
from random import Random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from examples import examples
from proa.cache.ram import RamStore
from proa.engine.executors.run_buffers import RunBuffers
from proa.errors import ResourceError

SIZE = 64
BUFFERS = 4


class CountedBuffers:
    """Buffers of SIZE bytes, of which there are `most`."""

    nbytes = SIZE

    def __init__(self, most: int = 100) -> None:
        self.made, self.most, self.closed = 0, most, False

    def new(self) -> Tensor:
        if self.made == self.most:
            raise ResourceError("no memory can be pinned (CUDA_ERROR_OUT_OF_MEMORY).")
        self.made += 1
        return torch.zeros(SIZE, dtype=torch.uint8)

    def close(self) -> None:
        self.closed = True


def store_of(runs: int = BUFFERS, most: int = 100) -> tuple[RamStore, CountedBuffers]:
    buffers = CountedBuffers(most)
    return RamStore(runs * SIZE, buffers), buffers


def key_of(number: int) -> bytes:
    return number.to_bytes(16, "little")


def fill(store: RamStore, number: int, *, full: bool = True) -> bool:
    """Returns whether the store gave a buffer."""
    with store.filling(key_of(number)) as filling:
        if filling is None:
            return False
        filling.buffer.fill_(number)
        filling.full = full
    return True


def read(store: RamStore, number: int) -> int | None:
    with store.reading(key_of(number)) as buffer:
        if buffer is None:
            return None
        (value,) = set(buffer.tolist())
        return int(value)


def stored(store: RamStore, numbers: Iterable[int] = range(20)) -> list[int]:
    return [number for number in numbers if store.has(key_of(number))]


def test_a_run_is_read_where_it_was_filled() -> None:
    store, buffers = store_of()
    assert fill(store, 1)
    assert not fill(store, 1)
    assert (read(store, 1), read(store, 2)) == (1, None)
    assert (store.stored_bytes, buffers.made) == (SIZE, 1)
    store.close()
    assert buffers.closed
    assert not store.has(key_of(1))


def test_buffers_are_allocated_when_needed_and_reused() -> None:
    store, buffers = store_of()
    assert buffers.made == 0
    for number in range(20):
        assert fill(store, number)
    assert (buffers.made, store.evicted_runs, store.stored_bytes) == (BUFFERS, 16, BUFFERS * SIZE)
    assert stored(store) == [16, 17, 18, 19]


def test_a_run_that_was_not_filled_is_not_stored() -> None:
    store, buffers = store_of()
    assert fill(store, 1, full=False)
    assert not store.has(key_of(1))
    with pytest.raises(ZeroDivisionError), store.filling(key_of(1)):
        raise ZeroDivisionError
    assert fill(store, 1)
    assert (read(store, 1), buffers.made) == (1, 1)


@pytest.mark.parametrize(
    ("use", "left"),
    [((), [1, 2, 3, 4]), (("touch",), [0, 2, 3, 4]), (("read",), [0, 2, 3, 4]), (("has",), [1, 2, 3, 4])],
)
def test_the_least_recently_used_run_is_evicted(use: Sequence[str], left: list[int]) -> None:
    store, _ = store_of()
    for number in range(BUFFERS):
        fill(store, number)
    for how in use:
        {"touch": store.touch, "read": lambda key: read(store, 0), "has": store.has}[how](key_of(0))
    fill(store, 4)
    assert stored(store) == left


def test_a_run_that_is_read_or_filled_is_not_evicted() -> None:
    store, _ = store_of(2)
    fill(store, 0)
    with store.reading(key_of(0)) as first, store.reading(key_of(0)) as second:
        assert first is second
        fill(store, 1)
        fill(store, 2)
        assert stored(store) == [0, 2]
        with store.filling(key_of(3)) as filling:
            assert filling is not None
            assert not fill(store, 3)
            assert not fill(store, 4)
        assert stored(store) == [0]
    assert fill(store, 5)
    assert fill(store, 6)
    assert stored(store) == [5, 6]


@pytest.mark.parametrize("room", [0, 1, 3])
def test_a_store_that_gets_no_memory_stays_as_it_is(room: int, caplog: pytest.LogCaptureFixture) -> None:
    store, buffers = store_of(BUFFERS, most=room)
    for number in range(10):
        assert fill(store, number) == (room > 0)
    assert len(stored(store)) == buffers.made == room
    assert store.writes == (room > 0)
    assert len(caplog.records) == 1
    assert "CUDA_ERROR_OUT_OF_MEMORY" in caplog.text


def test_less_than_a_buffer_is_no_store() -> None:
    store = RamStore(SIZE - 1, CountedBuffers())
    assert not store.writes
    assert not fill(store, 1)


@settings(max_examples=examples(200), deadline=None)
@given(
    runs=st.integers(1, 5),
    events=st.lists(st.tuples(st.sampled_from(["fill", "fail", "read", "touch"]), st.integers(0, 7)), max_size=60),
)
def test_as_a_simple_model(runs: int, events: list[tuple[str, int]]) -> None:
    store, buffers = store_of(runs)
    model: list[int] = []  # the least recently used first
    for event, number in events:
        if event in ("read", "touch"):
            if event == "read":
                assert read(store, number) == (number if number in model else None)
            store.touch(key_of(number))
            if number in model:
                model.append(model.pop(model.index(number)))
        elif number not in model:
            held = buffers.made - len(model)
            if not held and len(model) == runs:
                model.pop(0)
            assert fill(store, number, full=event == "fill")
            model += [number] if event == "fill" else []
        assert stored(store, range(8)) == sorted(model)
        assert buffers.made <= runs


def test_many_threads() -> None:
    """Readers always see the run of their key, although four threads fill and evict."""
    store, buffers = store_of(3)
    wrong: list[object] = []

    def work(seed: int) -> None:
        random = Random(seed)
        for _ in range(400):
            number = random.randrange(8)
            if random.random() < 0.5:
                fill(store, number, full=random.random() < 0.9)
            elif (got := read(store, number)) not in (None, number):
                wrong.append((number, got))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert buffers.made <= 3
    assert len(stored(store)) <= 3
    for number in range(8, 11):
        assert fill(store, number)
    assert stored(store) == [8, 9, 10]


def test_buffers_of_a_run_take_whole_memory_pages() -> None:
    buffers = RunBuffers(5000, torch.device("cpu"))
    assert buffers.nbytes == 8192
    first, second = buffers.new(), buffers.new()
    assert (len(first), first.data_ptr() % 4096, int(first.sum())) == (5000, 0, 0)
    first.fill_(7)
    assert int(second.sum()) == 0
    buffers.close()


def test_no_memory_is_an_error_that_says_so(caplog: pytest.LogCaptureFixture) -> None:
    buffers = RunBuffers(1 << 60, torch.device("cpu"))
    with pytest.raises(ResourceError, match="no memory can be allocated"):
        buffers.new()
    with caplog.at_level(logging.WARNING):
        assert not fill(RamStore(1 << 61, buffers), 1)
    assert "stays at 0 B: no memory" in caplog.text
