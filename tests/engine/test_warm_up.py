"""Warm-up before the first request, and the choice of the planned GPU."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from proa.engine.building.gpu_plan import cuda_index
from proa.engine.building.start_time import WARM_UP_S, within
from proa.engine.building.warm_up import warm_up
from proa.engine.ipc import Loading
from proa.errors import ResourceError
from proa.ops import sizes
from proa.plan.plan import GpuPlan, VramBudget

A, B = "6dd8c5a1-0000-1111-2222-333344445555", "77777777-0000-1111-2222-333344445555"
BUDGET = VramBudget(**dict.fromkeys(VramBudget.__struct_fields__, 0))
PLAN = GpuPlan(index=0, name="Test GPU", vram=BUDGET, placement="uniform")


@pytest.mark.parametrize(
    ("index", "uuid", "uuids", "want"),
    [
        (0, f"GPU-{A}", [A], 0),
        (0, f"GPU-{A}", [B, A], 1),
        (1, f"GPU-{B}", [B, A], 0),
        (0, "", [A], 0),
        (0, f"GPU-{A}", [B], 0),
        (1, f"GPU-{A}", [B], None),
        (0, f"GPU-{A}", [B, B], None),
        (0, "", [A, B], None),
        (0, f"GPU-{A}", [], None),
    ],
)
def test_the_gpu_with_the_same_uuid(index: int, uuid: str, uuids: list[str], want: int | None) -> None:
    plan = msgspec.structs.replace(PLAN, index=index, uuid=uuid)
    if want is not None:
        assert cuda_index(plan, uuids) == want
        return
    with pytest.raises(ResourceError, match=r"not among the . GPUs.* CUDA_DEVICE_ORDER"):
        cuda_index(plan, uuids)


@pytest.mark.parametrize(
    ("each_s", "done", "got", "why"),
    [(1.0, 4, "tried", "4 batch sizes in 4"), (WARM_UP_S / 2.5, 3, "in part", "3 of 4 batch sizes")],
)
def test_tasks_run_until_the_time_limit(each_s: float, done: int, got: str, why: str) -> None:
    now, ran = [100.0], []

    def task(i: int) -> Callable[[], None]:
        def run() -> None:
            now[0] += each_s
            ran.append(i)

        return run

    reports: list[Loading] = []
    go_on = within(WARM_UP_S, lambda: now[0])
    row = warm_up([task(i) for i in range(4)], reports.append, go_on, lambda: now[0])
    assert ran == list(range(done))
    assert (row.got, row.why[: len(why)]) == (got, why)
    assert [report.done_bytes for report in reports] == [0, 1, 2, 3, 4][: done + 1]
    assert {report.total_bytes for report in reports} == {4}


def test_rows_of_warm_up() -> None:
    assert sizes.warm_rows(1) == []
    assert sizes.warm_rows(20) == [2, 3, 4, 5, 8, 9, 16, 17, 20]
    assert max(sizes.warm_rows(8192)) == 8192
