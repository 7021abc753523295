"""A step's row numbers and page tables, in the buffers that programs and devices read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines import HEAD_ROWS, load_native
from proa.engine.executors.batch import Span, StepBatch, StepLimits
from proa.engine.executors.device_inputs import DeviceInputs
from proa.engine.executors.page_table import PageTable
from proa.engine.executors.recorded import RecordedExecutor
from proa.engine.executors.row_numbers import LONG, RowNumbers
from proa.native.pool import Pool
from tiny import make_tiny

PAGE_TOKENS = 4
MIXED = [Span([7], 9, [5, 3, 8], 4), Span([1, 2, 3, 4, 5], 3, [2, 6], 9), Span([9], 0, [1], 1)]


def test_rows_have_their_tokens_positions_and_slots() -> None:
    tokens, slots, positions = torch.full((3, 10), -7, dtype=torch.int64)
    numbers = RowNumbers(tokens, slots, positions)
    assert numbers.fill(MIXED, PAGE_TOKENS) == 7
    assert tokens[:7].tolist() == [7, 1, 2, 3, 4, 5, 9]
    assert positions[:7].tolist() == [9, 3, 4, 5, 6, 7, 0]
    assert slots[:7].tolist() == [8 * 4 + 1, 2 * 4 + 3, 6 * 4, 6 * 4 + 1, 6 * 4 + 2, 6 * 4 + 3, 1 * 4]
    assert {tuple(of[7:].tolist()) for of in (tokens, slots, positions)} == {(-7, -7, -7)}
    numbers.pad(7)
    assert (tokens[7:].tolist(), slots[7:].tolist(), positions[7:].tolist()) == ([0] * 3, [-1] * 3, [0] * 3)
    assert slots[:7].tolist()[0] == 33


@pytest.mark.parametrize("start", [0, 1, 7, 400])
@pytest.mark.parametrize("rows", [LONG - 1, LONG, LONG + 3, 300])
def test_long_spans_have_the_numbers_of_single_rows(rows: int, start: int) -> None:
    pages = [(7 * i + 3) % 211 for i in range((start + rows) // PAGE_TOKENS + 1)]
    spans = [MIXED[0], Span(list(range(5, 5 + rows)), start, pages, start + rows), MIXED[1]]
    long, single = (torch.full((3, rows + 200), -7, dtype=torch.int64) for _ in range(2))
    numbers = RowNumbers(*long)
    end = numbers.fill(spans, PAGE_TOKENS)
    numbers.pad(end)
    row = 0
    for of in spans:
        for i, token in enumerate(of.tokens):
            place = of.start + i
            slot = of.pages[place // PAGE_TOKENS] * PAGE_TOKENS + place % PAGE_TOKENS
            single[:, row] = torch.tensor([token, slot, place])
            row += 1
    single[:, row:] = torch.tensor([0, -1, 0])[:, None]
    assert end == row
    assert torch.equal(long, single)


def test_page_tables_follow_grown_and_replaced_lists() -> None:
    there = torch.full((2, 6), -7, dtype=torch.int32)
    table = PageTable(there)
    first, second = [4, 5], [9]
    for i, pages in enumerate((first, second)):
        table.set(i, pages)
    first += [6, 7]
    table.set(0, first)
    assert there.tolist() == [[4, 5, 6, 7, -7, -7], [9, -7, -7, -7, -7, -7]]
    table.set(0, [4, 8, 6])  # another list, however similar to the last one
    assert there[0, :3].tolist() == [4, 8, 6]
    table.set(0, first)
    table.set(1, first)
    assert there[:, :4].tolist() == [[4, 5, 6, 7]] * 2


def test_a_device_gets_padding_behind_a_step() -> None:
    inputs = DeviceInputs(10, 4, 6, rows_each=0, device=torch.device("cpu"))
    for spans in (MIXED, MIXED[:1]):  # the second step leaves nothing of the first
        rows = inputs.fill(spans, PAGE_TOKENS)
        inputs.copy()
        assert rows == sum(len(s.tokens) for s in spans)
        assert inputs.tokens[:rows].tolist() == [t for s in spans for t in s.tokens]
        assert inputs.slots[rows:].tolist() == [-1] * (10 - rows)
        assert inputs.tokens[rows:].tolist() == inputs.positions[rows:].tolist() == [0] * (10 - rows)
        starts = [sum(len(s.tokens) for s in spans[:i]) for i in range(len(spans))]
        assert inputs.batch.q_starts.tolist() == starts + [rows] * (5 - len(spans))
        ends = [s.start + len(s.tokens) for s in spans]
        assert inputs.batch.kv_lens.tolist() == ends + [0] * (4 - len(spans))


@pytest.mark.parametrize(("rows", "sequences"), [(1, 1), (3, 3), (7, 5), (64, 64)])
def test_device_inputs_are_aligned(rows: int, sequences: int) -> None:
    """Triton compiles once more for a tensor that does not begin at a multiple of 16 bytes."""
    inputs = DeviceInputs(rows, sequences, 5, rows_each=0, device=torch.device("meta"))
    batch = inputs.batch
    read = (
        inputs.tokens,
        inputs.slots,
        inputs.positions,
        batch.q_starts,
        batch.kv_lens,
        batch.page_table,
        batch.states,
    )
    assert [tensor.data_ptr() % 16 for tensor in read] == [0] * 7


@pytest.mark.parametrize("decode", [True, False])
def test_rows_scored_with_the_step_have_the_same_logits(decode: bool, tmp_path: Path) -> None:
    """Decode computes body and head in one call of the program; prefill computes the head in a second one."""
    folder = make_tiny("qwen3-moe", tmp_path)
    limits = StepLimits(rows=64, sequences=3, context_tokens=64, page_tokens=PAGE_TOKENS, head_rows=HEAD_ROWS)
    with Pool([[0]]) as pool:
        run = load_native(folder, pool).make(limits, 16)
        assert isinstance(run, RecordedExecutor)
        prompts = [Span([5, 6, 7, 8], 0, [1, 2], 4), Span([9, 10, 11], 0, [3, 4], 3)]
        run.launch(StepBatch(prompts))
        step = [Span([12], 4, [1, 2], 4), Span([13] if decode else [13, 14], 3, [3, 4], 5)]
        last = [0, 1] if decode else [0, 2]
        seen = []
        for sampled in ((), (0, 1), (1,)):
            launched = run.launch(StepBatch(step, sampled))
            seen.append(run.logits_of(launched, last).clone())
    assert all(torch.equal(logits, seen[0]) for logits in seen)
    assert seen[0].isfinite().all()
    assert not torch.equal(seen[0][0], seen[0][1])
