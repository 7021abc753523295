"""Counts of the experts that steps choose: sums, hits, bytes and the trace, with counters that wrap around."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from hybrid.table_cases import CPU, layers
from proa.hybrid.copies import Pairs
from proa.hybrid.counting import Counting
from proa.hybrid.tables import Tables
from proa.hybrid.trace import TRACE_DTYPE
from proa.native.pool import Pool

TOP_K, BYTES = 2, (10, 100, 1000)  # bytes: of one expert, for each layer
HERE = ({1, 4}, {2}, set[int]())  # experts on the device in test_tables' layers


class Arrives:
    """A copy that arrives at the second call of done()."""

    def start(self, pairs: Pairs) -> Arrives:
        self.pairs, self.asked = pairs, 0
        return self

    def done(self) -> bool:
        self.asked += 1
        if self.asked == 2:
            for to, source in self.pairs:
                to.copy_(source)
        return self.asked >= 2

    def close(self) -> None:
        pass


@pytest.fixture
def tables() -> Iterator[Tables]:
    with Pool([[]], pin=False) as pool:
        yield Tables(layers(pool), CPU, counted=True, in_place=False)


def test_sums_hits_bytes_and_a_trace(tables: Tables, tmp_path: Path) -> None:
    file = tmp_path / "trace"
    counting = Counting(tables, TOP_K, BYTES, Arrives(), file)
    rng, sizes = np.random.default_rng(0), (7, 3, 5)
    tables.counts.fill_(-1)  # as after 2^32 - 1 choices
    counting._last[:] = -1
    expected, hits, hit_bytes, missed_bytes = np.zeros((3, 7), np.int64), 0, 0, 0
    assert counting.look() is None
    for tokens in (1, 1, 3):
        chosen = np.zeros((3, 7), np.int64)
        for layer, experts in enumerate(sizes):
            for _ in range(tokens):
                chosen[layer, rng.permutation(experts)[:TOP_K]] += 1
            for e in np.flatnonzero(chosen[layer]).tolist():
                hits += int(chosen[layer, e]) if e in HERE[layer] else 0
                hit_bytes += BYTES[layer] if e in HERE[layer] else 0
                missed_bytes += 0 if e in HERE[layer] else BYTES[layer]
        tables.counts += torch.from_numpy(chosen).int()
        assert counting.look() is None, "it has not arrived"
        seen = counting.look()
        assert seen is not None
        assert (seen.chosen == chosen).all()
        assert seen.tokens.tolist() == [tokens] * 3
        expected += chosen
    assert (counting.totals == expected).all()
    tally = counting.tally
    assert (tally.choices, tally.hits) == (expected.sum(), hits)
    assert (tally.hit_bytes, tally.missed_bytes) == (hit_bytes, missed_bytes)
    looks = np.fromfile(file, TRACE_DTYPE).reshape(-1, 3, 7)  # while it is open still
    assert len(looks) == 3
    assert (looks.sum(0) == expected).all()
    tables.counts[0, 0] += 5
    counting.settle()
    assert counting.totals[0, 0] == expected[0, 0] + 5
    assert counting.totals.sum() == expected.sum() + 5
    counting.close()


def test_owners_follow_the_tables(tables: Tables) -> None:
    assert [set(np.flatnonzero(row == 0)) for row in tables.owners] == [*HERE]
    tables.to_cpu(0, 1, 1)
    assert set(np.flatnonzero(tables.owners[0] == 0)) == {4}
