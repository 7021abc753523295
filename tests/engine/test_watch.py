"""The sequences of a step that are reported as non-finite, with the reason."""

from __future__ import annotations

import pytest

from proa.engine.executors.batch import Span, StepBatch
from proa.engine.executors.session import NoSession
from proa.engine.executors.watch import WatchedSession, WatchedStep
from proa.errors import NativeError, NumericsError
from proa.hybrid.faults import Fault
from proa.models.spec import Attention, Block, Mlp, Model, Moe, Rope, Router

ATTENTION = Attention(8, 2, 1, 4, Rope(4))
MOE = Block(ATTENTION, Moe(8, 4, 2, 8, Router("softmax", True), None, False))
SPEC = Model(8, 16, (Block(ATTENTION, Mlp(8, 8)), MOE, MOE), 1e-6, 64, False)
STEP = [Span([1] * n, 0, [0], n) for n in (1, 4, 2)]  # rows 0, 1 to 4, 5 to 6


class Device(NoSession):
    def __init__(self, faults: list[Fault], error: Exception | None) -> None:
        self.found, self.error, self.asked = faults, error, []

    def end(self) -> None:
        if self.error is not None:
            raise self.error

    def faults(self, rows: int) -> list[Fault]:
        self.asked.append(rows)
        return self.found


@pytest.mark.parametrize(
    ("faults", "said", "look", "want"),
    [
        ([], "", True, {}),
        ([Fault(3, 0, "x")], "", False, {}),
        ([Fault(4, 0, "x"), Fault(5, 1, "y")], "", True, {1: "layer 1, from x", 2: "layer 2, from y"}),
        ([Fault(1, 1, "x"), Fault(2, 0, "y")], "", True, {1: "layer 2, from x"}),
        ([Fault(0, 1, "x")], "somewhere", False, {0: "layer 2, from x"}),
        ([], "somewhere", False, dict.fromkeys(range(3), "somewhere")),
    ],
)
def test_rows_become_sequences(faults: list[Fault], said: str, look: bool, want: dict[int, str]) -> None:
    device = Device(faults, NumericsError(said) if said else None)
    session = WatchedSession(device, SPEC)
    session.begin()
    session.end_until(1)
    got = session.read(STEP, look=look)
    assert {place: why.partition(" in ")[2].rstrip(".") or why for place, why in got.items()} == want
    assert device.asked == ([7] if look or said else [])
    assert session.read(STEP, look=False) == {}, "the error is reported once"


def test_other_errors_are_raised() -> None:
    session = WatchedSession(Device([], NativeError("dead")), SPEC)
    session.begin()
    with pytest.raises(NativeError):
        session.end_until(1)


def test_an_early_fault_waits_for_its_own_step() -> None:
    """Two steps in flight: faults of the second are read with the first, but a request fails only by its own logits."""
    device = Device([Fault(0, 0, "a"), Fault(5, 1, "b")], None)
    session = WatchedSession(device, SPEC)
    decode = StepBatch([Span([1], 3, [0], 1)] * 6)
    second = WatchedStep(decode, followed=True)
    found = session.faults_of(WatchedStep(decode, next_step=second), {0}, all_scored=True)
    assert {i: why.partition(", ")[2] for i, why in found.items()} == {0: "from a."}
    device.found = []
    assert second.doubtful, "row 0 is computed in the next step too"
    assert session.faults_of(second, {5}, all_scored=True) == {5: "NaN or infinity in layer 2, from b."}


def test_moved_rows_get_no_reason() -> None:
    device = Device([Fault(1, 0, "a")], None)
    session = WatchedSession(device, SPEC)
    decode = [Span([1], 3, [0], 1)] * 3
    fewer = WatchedStep(StepBatch(decode[:2]), followed=True)
    assert session.faults_of(WatchedStep(StepBatch(decode), next_step=fewer), {1}, all_scored=True) == {}
    assert fewer.early == {}


def test_decode_with_finite_logits_reads_nothing() -> None:
    device = Device([Fault(1, 0, "a")], None)
    session = WatchedSession(device, SPEC)
    step = WatchedStep(StepBatch(STEP))
    assert session.faults_of(step, (), all_scored=True) == {}
    assert device.asked == []
    assert session.faults_of(step, (), all_scored=False), "prefill: notes are always read"
