"""RAM for KV pages behind VRAM in the plan: its size, what it leaves, its row, its errors."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from proa.config.options import CacheOptions
from proa.errors import ResourceError, UsageError
from proa.machine.machine import Gpu
from proa.plan import state_copies
from proa.plan.plan import Plan
from unit import test_resolve as on_cpu
from unit.plan_cases import NEXT
from unit.vram_cases import DENSE, GIB, QWEN3_30B, check, gpu, machine, plan, row

ROW = "prefix cache in RAM"
RUN = 256 * QWEN3_30B.kv_bytes_per_token(2)  # 24 MiB


def tier(of: Plan) -> int:
    return of.memory.prefix_cache_bytes


def test_auto_is_eight_times_the_kv_cache() -> None:
    got = plan(QWEN3_30B, machine(512, gpu(80)))
    on = check(got, QWEN3_30B)
    assert tier(got) == 8 * on.vram.kv_bytes
    assert row(got, ROW)[0] == "auto"
    assert row(got, ROW)[1].endswith(f": {tier(got) // RUN * 256} tokens")
    assert (
        row(got, ROW)[2] == "8 times the KV cache in VRAM, pinned as it fills; pages are copied there behind the steps"
    )


def test_auto_is_a_quarter_of_the_free_ram() -> None:
    got = plan(QWEN3_30B, machine(100, gpu(80)))
    assert tier(got) == 25 * GIB
    assert row(got, ROW)[2].startswith("a quarter of the free RAM, ")


def test_auto_takes_what_is_left() -> None:
    got = plan(QWEN3_30B, machine(190, gpu(40)), ram=70 * GIB)
    assert tier(got) == got.memory.usable_bytes - (got.memory.used_bytes - tier(got))
    assert row(got, ROW)[2].startswith("what is left of RAM, ")


def test_auto_does_without_if_less_than_four_runs_are_left() -> None:
    full = plan(QWEN3_30B, machine(190, gpu(40)), prefix_cache_ram=0)
    ram = full.memory.used_bytes + 4 * RUN
    assert tier(plan(QWEN3_30B, machine(190, gpu(40)), ram=ram)) == 4 * RUN
    got = plan(QWEN3_30B, machine(190, gpu(40)), ram=ram - 1)
    assert (tier(got), row(got, ROW)[:2]) == (0, ("auto", "none"))
    assert row(got, ROW)[2] == "no room: what is left of RAM is 96.0 MiB, and 1024 tokens take 96.0 MiB"


def test_a_size_is_taken_before_experts_are_placed() -> None:
    box = machine(128, gpu(40))
    without, got = (plan(QWEN3_30B, box, prefix_cache_ram=size) for size in (0, 80 * GIB))
    check(got, QWEN3_30B)
    assert tier(got) == 80 * GIB
    assert row(got, ROW)[:2] == ("80.0 GiB", f"80.0 GiB: {80 * GIB // RUN * 256} tokens")
    assert got.memory.usable_bytes == without.memory.usable_bytes
    assert got.memory.used_bytes <= got.memory.usable_bytes
    assert without.gpu is not None
    assert got.gpu is not None
    assert (without.gpu.inclusive, got.gpu.inclusive) == (True, False)


@pytest.mark.parametrize(
    ("asked", "spec", "gpus", "why"),
    [
        ({"prefix_cache_ram": 0}, QWEN3_30B, [gpu(80)], "as asked"),
        ({"prefix_cache_ram": 0}, QWEN3_30B, [], "as asked"),
        ({}, QWEN3_30B, [], "the KV cache is in RAM already: see --kv-memory"),
        ({"prefix_cache_ram": GIB}, QWEN3_30B, [], "the KV cache is in RAM already: see --kv-memory"),
        ({"prefix_cache": False}, QWEN3_30B, [gpu(80)], "the prefix cache is off"),
        ({"prefix_cache": False, "prefix_cache_ram": GIB}, QWEN3_30B, [gpu(80)], "the prefix cache is off"),
        ({"gpu": "sim:64GiB"}, QWEN3_30B, [], "a simulated GPU's KV cache is in RAM already"),
    ],
)
def test_the_row_says_why_there_is_none(asked: dict[str, Any], spec: Any, gpus: list[Gpu], why: str) -> None:
    got = plan(spec, machine(512, *gpus), **asked)
    assert tier(got) == 0
    assert row(got, ROW)[1] == "none"
    assert row(got, ROW)[2].startswith(why)


STATES = 14 * 256 * NEXT.kv_bytes_per_token(2)  # 73.6 MiB in 13 parts of 6 MiB, and the pages behind the last run


def test_the_row_says_what_a_copy_of_states_takes() -> None:
    got = plan(NEXT, machine(512, gpu(80)))
    assert tier(got) > 0
    assert row(got, ROW)[2].endswith("; a copy of states takes 84.0 MiB, as 3584 tokens do")
    assert STATES == 84 << 20


def test_states_are_part_of_the_least_size() -> None:
    least = 4 * 256 * NEXT.kv_bytes_per_token(2) + STATES
    with pytest.raises(UsageError, match="is too small: 1024 tokens and a copy of states of some/model"):
        plan(NEXT, machine(512, gpu(80)), prefix_cache_ram=least - 1)
    assert tier(plan(NEXT, machine(512, gpu(80)), prefix_cache_ram=least)) == least


@pytest.mark.parametrize("asked", [None, GIB])
def test_a_model_without_room_for_a_copy_keeps_nothing(asked: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without copies there is no prefix cache, and the RAM that was asked for stays free."""
    monkeypatch.setattr(state_copies, "SHARE_OF_REST", 1 << 30)
    bare, got = (plan(NEXT, machine(512, gpu(80)), prefix_cache_ram=size) for size in (0, asked))
    assert not got.prefix_cache
    assert (tier(got), row(got, ROW)[1]) == (0, "none")
    assert row(got, ROW)[2] == "there are no copies of states, so the prefix cache is off"
    assert got.memory.usable_bytes == bare.memory.usable_bytes


def test_no_room_for_a_copy_keeps_no_files() -> None:
    files = {"prefix_cache_dir": "/x", "prefix_cache_disk": GIB}
    for free_gib, kept in ((190, True), (151, False)):
        got = on_cpu.plan(NEXT, on_cpu.machine(free_gib, 192), **files)
        assert (got.prefix_cache, got.prefix_files is not None) == (kept, kept)
        assert row(got, "prefix cache files")[1:] == (
            ("1.00 GiB", "in /x; written behind the steps, 18.0 MiB of RAM for buffers; a copy of states takes 84.0 "
             "MiB, as 3584 tokens do")
            if kept else ("none", "there are no copies of states, so the prefix cache is off")
        )  # fmt: skip


def test_files_hold_at_least_a_run_and_a_copy_of_states() -> None:
    files = {"prefix_cache_dir": "/x", "prefix_cache_disk": 80 << 20}
    with pytest.raises(UsageError, match="too small: 256 tokens and a copy of states of some/model take 90"):
        on_cpu.plan(NEXT, on_cpu.machine(190, 192), **files)


def test_less_ram_than_the_buffers_of_files_take() -> None:
    with pytest.raises(ResourceError, match=r"but 0 B may be used"):
        plan(NEXT, machine(8), ram=1 << 20, prefix_cache_dir="/x", prefix_cache_disk=GIB)


def test_a_simulated_gpu_has_one_by_size() -> None:
    got = plan(QWEN3_30B, machine(190), gpu="sim:64GiB", prefix_cache_ram=GIB)
    check(got, QWEN3_30B)
    assert tier(got) == GIB
    assert row(got, ROW)[2].startswith("as asked, in the RAM of this simulated GPU's host")


@pytest.mark.parametrize("kind", ["auto", "0"])
def test_a_size_that_does_not_fit_is_refused_with_one_that_does(kind: str) -> None:
    box, asked = machine(128, gpu(40)), {"gpu": kind}
    with pytest.raises(UsageError, match="--prefix-cache-ram 120 GiB does not fit") as refused:
        plan(QWEN3_30B, box, prefix_cache_ram=120 * GIB, **asked)
    assert refused.value.param == "prefix_cache_ram"
    helps = refused.value.remedy.removeprefix("Use --prefix-cache-ram ").split("M ")[0]
    assert tier(plan(QWEN3_30B, box, prefix_cache_ram=int(helps) << 20, **asked)) == int(helps) << 20


def test_a_size_of_less_than_four_runs_is_refused() -> None:
    with pytest.raises(UsageError, match=r"90\.0 MiB is too small: 1024 tokens of some/model") as refused:
        plan(QWEN3_30B, machine(128, gpu(40)), prefix_cache_ram=90 << 20)
    assert "Use --prefix-cache-ram 96M or more" in refused.value.remedy
    assert tier(plan(QWEN3_30B, machine(128, gpu(40)), prefix_cache_ram=96 << 20)) == 96 << 20


def test_a_model_that_does_not_fit_is_refused_for_itself() -> None:
    with pytest.raises(ResourceError, match="does not fit into VRAM and RAM together"):
        plan(QWEN3_30B, machine(24, gpu(16)), gpu="0", prefix_cache_ram=GIB)


@pytest.mark.parametrize(
    ("asked", "spec", "mib"),
    [
        ({}, QWEN3_30B, 78),
        ({"prefix_cache_ram": 0}, QWEN3_30B, 0),
        ({"prefix_cache": False}, QWEN3_30B, 0),
        ({"prefix_cache_ram": 0, "prefix_cache_dir": "/x", "prefix_cache_disk": GIB}, QWEN3_30B, 78),
        ({}, DENSE, 66),
        ({"page_tokens": 256}, QWEN3_30B, 78),
        ({}, NEXT, 66),
    ],
)
def test_the_copies_of_pages_are_counted_in_vram(asked: dict[str, Any], spec: Any, mib: int) -> None:
    def workspace(**asked: Any) -> int:
        got = plan(spec, machine(512, gpu(140)), context=4096, kv_memory=GIB, max_batch_tokens=512, **asked)
        assert got.gpu is not None
        return got.gpu.vram.workspace_bytes

    page_tokens = {name: value for name, value in asked.items() if name == "page_tokens"}
    least = workspace(prefix_cache_ram=0, **page_tokens)
    assert workspace(**asked) - least == mib << 20


@settings(max_examples=examples(60), deadline=None)
@given(
    ram_gib=st.floats(8, 400),
    vram_gib=st.floats(12, 140),
    asked=st.none() | st.integers(0, 200 * GIB),
    ram=st.none() | st.floats(8, 400),
)
def test_ram_is_never_exceeded(ram_gib: float, vram_gib: float, asked: int | None, ram: float | None) -> None:
    limit = None if ram is None else int(ram * GIB)
    try:
        got = plan(QWEN3_30B, machine(ram_gib, gpu(vram_gib)), prefix_cache_ram=asked, ram=limit)
    except (ResourceError, UsageError):
        return
    memory = got.memory
    assert memory.used_bytes <= memory.usable_bytes
    if got.gpu is None:
        assert memory.prefix_cache_bytes == 0
    elif asked is None:
        assert memory.prefix_cache_bytes <= min(8 * got.gpu.vram.kv_bytes, memory.free_bytes // 4)
        bare = plan(QWEN3_30B, machine(ram_gib, gpu(vram_gib)), prefix_cache_ram=0, ram=limit)
        assert bare.memory.usable_bytes == memory.usable_bytes
    else:
        assert memory.prefix_cache_bytes == asked


def test_the_option_is_a_size() -> None:
    assert CacheOptions().prefix_cache_ram is None
    assert on_cpu.plan(NEXT, on_cpu.machine(190, 192), prefix_cache_ram=0).memory.prefix_cache_bytes == 0
