"""Non-finite rows: `combine` records the first layer that finds one, and its non-finite inputs."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from proa.hybrid.faults import Fault, FaultRecords
from proa.ops.added import Added
from proa.ops.faults import LayerFaults
from proa.ops.triton.expert_sum import Into, Watch, combine

TOKENS, TOP_K, HIDDEN = 5, 3, 700  # columns of two programs
BAD_COLUMNS = (3, 699)


class Sums:
    """A layer's sum: choices 0 and 2 of each row are on the device; row t has experts 10 t, 10 t + 1, 10 t + 2."""

    def __init__(self, rng: torch.Generator, device: torch.device) -> None:
        self.partial = torch.randn(TOKENS * TOP_K, HIDDEN, generator=rng).to(device)
        self.partial[1::TOP_K] = torch.nan  # the CPU's, not written here
        self.weights = torch.rand(TOKENS, TOP_K, generator=rng).to(device)
        self.address = torch.tensor([16, 0, 16]).repeat(TOKENS, 1).to(device)
        self.cpu, self.shared, self.x = (torch.randn(TOKENS, HIDDEN, generator=rng).to(device) for _ in range(3))
        self.ids = (torch.arange(TOKENS)[:, None] * 10 + torch.arange(TOP_K)).int().to(device)

    def combine(self, faults: LayerFaults) -> Tensor:
        out = torch.full((TOKENS, HIDDEN), torch.nan, dtype=torch.bfloat16, device=self.x.device)
        watch = Watch(faults, self.ids, self.x.bfloat16())
        combine(self.partial, self.weights, self.address, Added(self.cpu, self.shared.bfloat16()), Into(out), watch)
        return out

    def spoil(self, what: str, row: int, value: float, column: int) -> None:
        parts = {"x": self.x, "cpu": self.cpu, "shared": self.shared}
        if what in parts:
            parts[what][row, column] = value
        else:
            self.partial[row * TOP_K + int(what), column] = value
        if what == "x":  # from there it goes everywhere
            self.partial[row * TOP_K], self.shared[row] = value, value


@pytest.mark.parametrize("column", BAD_COLUMNS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(
    ("what", "source"),
    [
        ("0", "expert 30 on the GPU"),
        ("2", "expert 32 on the GPU"),
        ("cpu", "expert 31 on the CPU"),
        ("shared", "the shared expert"),
        ("x", "the input of its experts"),
    ],
)
def test_the_source_is_named(
    what: str, source: str, value: float, column: int, rng: torch.Generator, device: torch.device
) -> None:
    sums, records = Sums(rng, device), FaultRecords(TOKENS + 1, TOKENS + 1, TOP_K, device)
    assert sums.combine(records.of(6)).isfinite().all()
    assert records.take(TOKENS) == []
    sums.spoil(what, 3, value, column)
    out = sums.combine(records.of(7))
    assert out.isfinite().all(1).tolist() == [True, True, True, False, True], "never scrubbed"
    sums.combine(records.of(8))
    assert records.take(TOKENS) == [Fault(3, 7, source)], "the first layer, not a later one"
    assert records.take(TOKENS) == []


def test_the_cpus_sum_may_have_deferred_experts(rng: torch.Generator, device: torch.device) -> None:
    sums, records = Sums(rng, device), FaultRecords(TOKENS, TOKENS, TOP_K, device, defers=True)
    sums.spoil("cpu", 3, float("nan"), 5)
    sums.combine(records.of(7))
    why = "expert 31 on the CPU or experts that the MoE layer before deferred"
    assert records.take(TOKENS) == [Fault(3, 7, why)]


@pytest.mark.filterwarnings("ignore:overflow")  # NumPy's, of the interpreter
def test_several_rows_and_sources(rng: torch.Generator, device: torch.device) -> None:
    sums, records = Sums(rng, device), FaultRecords(TOKENS, TOKENS, TOP_K, device)
    for what in ("0", "2", "cpu"):
        sums.spoil(what, 1, float("nan"), 9)
    sums.combine(records.of(0))
    sums.partial[4 * TOP_K] = 3e38  # finite, but not their sum
    sums.partial[4 * TOP_K + 2] = 3e38
    sums.weights[4] = 1.0
    sums.combine(records.of(1))
    assert records.take(TOKENS) == [
        Fault(1, 0, "experts 10, 12 on the GPU and expert 11 on the CPU"),
        Fault(4, 1, "the sum of experts 40, 41, 42 together"),
    ]


def test_padding_rows_are_not_recorded(rng: torch.Generator, device: torch.device) -> None:
    sums, records = Sums(rng, device), FaultRecords(TOKENS, TOKENS, TOP_K, device)
    sums.ids[2], sums.address[2] = -1, 0
    sums.spoil("shared", 2, float("nan"), 0)
    assert not sums.combine(records.of(0)).isfinite().all()
    assert records.take(TOKENS) == []


def test_what_does_not_fit_is_refused(rng: torch.Generator, device: torch.device) -> None:
    sums = Sums(rng, device)
    for records in (
        FaultRecords(TOKENS - 1, TOKENS - 1, TOP_K, device),
        FaultRecords(TOKENS, TOKENS, TOP_K + 1, device),
    ):
        with pytest.raises(ValueError, match="records must be"):
            sums.combine(records.of(0))
    sums.x = sums.x[:, :-1]
    with pytest.raises(ValueError, match="and x"):
        sums.combine(FaultRecords(TOKENS, TOKENS, TOP_K, device).of(0))
