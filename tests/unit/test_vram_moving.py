"""Plans with moving experts, co-fetch and expert counts: conditions, reasons, memory."""

from __future__ import annotations

from typing import Any

import pytest

from proa.errors import UsageError
from proa.machine.machine import Machine
from unit.vram_cases import DENSE, GIB, QWEN3_30B, check, counts, gpu, machine, plan, row


@pytest.mark.parametrize(
    ("box", "asked", "placement", "why"),
    [
        (machine(124, gpu(24)), {}, "dynamic", "at most 16 at a time; 144 MiB of VRAM"),
        (machine(124, gpu(24)), {"expert_placement": "dynamic"}, "dynamic", "hot experts move in"),
        (machine(124, gpu(24)), {"expert_placement": "uniform"}, "uniform", "as asked"),
        (machine(124, gpu(24)), {"expert_placement": "front-loading"}, "front-loading", "as asked"),
        (machine(50, gpu(24)), {}, "uniform", "a swap would copy two experts"),
        (machine(50, gpu(24)), {"expert_placement": "dynamic"}, "dynamic", "evicted ones are copied back to RAM"),
        (
            machine(124, gpu(140)),
            {"expert_placement": "dynamic"},
            "uniform",
            "no layer has experts both in VRAM and in RAM",
        ),
        (machine(124, gpu(24)), {"gpu_experts": "none"}, "uniform", "no layer has experts both in VRAM and in RAM"),
    ],
)
def test_placement_and_its_reason(box: Machine, asked: dict[str, Any], placement: str, why: str) -> None:
    got = plan(QWEN3_30B, box, **asked)
    assert check(got, QWEN3_30B).placement == placement
    said = row(got, "expert placement")
    assert said[:2] == (asked.get("expert_placement", "auto"), placement)
    assert why in said[2]


def test_co_fetch_only_with_experts_in_ram() -> None:
    for asked, box, fetches in (("auto", 24, True), ("auto", 140, False), ("off", 24, False)):
        got = plan(QWEN3_30B, machine(124, gpu(box)), co_fetch=asked)
        assert check(got, QWEN3_30B).co_fetch is fetches
    assert row(got, "co-fetch") == ("off", "off", "as asked")


def test_placement_by_expert_counts() -> None:
    """frequency: the most used experts of all layers; otherwise the most used of each layer, the same number."""
    rows = tuple(tuple((e * 37 + i) % 128 * (i + 1) for e in range(128)) for i in range(48))
    box = machine(124, gpu(24))
    by_frequency = plan(QWEN3_30B, box, experts_used=rows, expert_placement="frequency")
    got = check(by_frequency, QWEN3_30B)
    assert (got.placement, got.spare) == ("frequency", 0)
    assert row(by_frequency, "expert placement") == ("frequency", "frequency", "the placement is static, as asked")
    assert len(got.resident[0]) < len(got.resident[47]), "whose counts are larger"
    assert max(counts(by_frequency)) > max(counts(plan(QWEN3_30B, box)))
    moving = plan(QWEN3_30B, box, experts_used=rows)
    got = check(moving, QWEN3_30B)
    assert got.placement == "dynamic"
    assert max(counts(moving)) - min(counts(moving)) <= 1
    assert row(moving, "expert placement")[2].startswith("at first the most used by --expert-counts")
    for ids, used in zip(got.resident, rows, strict=True):
        assert min(used[e] for e in ids) >= max(used[e] for e in range(128) if e not in ids)


def test_frequency_without_counts_is_refused() -> None:
    with pytest.raises(UsageError, match="needs expert counts"):
        plan(QWEN3_30B, machine(124, gpu(24)), expert_placement="frequency")


def test_row_for_saving_counts() -> None:
    asked = {"save_expert_counts": "/tmp/counts"}
    got = plan(QWEN3_30B, machine(124, gpu(24)), **asked)
    assert check(got, QWEN3_30B).save_counts == "/tmp/counts"
    assert row(got, "expert counts") == ("/tmp/counts", "/tmp/counts", "every minute and at the end")
    got = plan(QWEN3_30B, machine(124), **asked)
    assert got.gpu is None
    assert row(got, "expert counts") == ("/tmp/counts", "none", "choices are counted only with a GPU")
    got = plan(DENSE, machine(124, gpu(24)), **asked)
    assert row(got, "expert counts") == ("/tmp/counts", "none", "the model has no routed experts")


def test_doorbell_only_with_experts_in_ram() -> None:
    for box, rows in ((24, []), (140, [("memops", "none", "the CPU computes no experts")])):
        got = plan(QWEN3_30B, machine(124, gpu(box)), doorbell="memops")
        assert check(got, QWEN3_30B).doorbell == "memops"
        assert [(d.asked, d.got, d.why) for d in got.decisions if d.name == "doorbell"] == rows


def test_rows_for_gpu_options_without_a_gpu() -> None:
    """Each GPU option that was given has a row, except --gpu-experts none, which is met."""
    asked: dict[str, Any] = {"vram": 3 * GIB, "doorbell": "memops", "co_fetch": "off", "gpu_experts": "none"}
    asked |= {"expert_placement": "frequency", "expert_counts": "/tmp/counts"}
    got = plan(QWEN3_30B, machine(124), **asked)
    assert got.gpu is None
    shown = {f"--{name.replace('_', '-')}": value for name, value in asked.items() if value != "none"}
    rows = {d.name: (d.asked, d.got, d.why) for d in got.decisions if d.name.startswith("--")}
    assert rows == {name: (value, "none", "no GPU is used") for name, value in (shown | {"--vram": "3.00 GiB"}).items()}
    assert not any(d.name.startswith("--") for d in plan(QWEN3_30B, machine(124)).decisions)


def test_no_spare_slots_beside_asked_experts() -> None:
    """Spare slots never take the place of requested experts, nor of the context that was asked for."""
    tight = machine(124, gpu(24))
    asked = {"context": 1024, "max_running": 1, "prefill": "cpu"}
    most = max(counts(plan(QWEN3_30B, tight, expert_placement="uniform", **asked)))
    dynamic = {"gpu_experts": str(most - 2), "expert_placement": "dynamic", **asked}
    got = plan(QWEN3_30B, tight, **dynamic)
    assert counts(got) == [most - 2] * 48
    left = got.gpu.vram.usable_bytes - got.gpu.vram.used_bytes if got.gpu else 0
    vram = tight.gpus[0].free_bytes - (256 << 20) - left - (1 << 20)
    got = plan(QWEN3_30B, tight, vram=vram, **dynamic)
    assert counts(got) == [most - 2] * 48
    assert row(got, "expert placement")[1:] == ("uniform", "no room for the 144 MiB of VRAM that moving experts need")


def test_kv_gets_what_is_asked_for_where_idle_pages_hold_experts() -> None:
    """Each request may have a whole context, as far as experts keep a quarter of the VRAM beside dense weights."""
    box, asked = machine(124, gpu(48)), {"context": 32768, "max_running": 4}
    fixed, moving = (plan(QWEN3_30B, box, vram_moves=moves, **asked) for moves in ("off", "on"))
    assert not check(fixed, QWEN3_30B).vram_moves
    assert check(moving, QWEN3_30B).vram_moves
    assert fixed.num_pages * fixed.page_tokens == 32768 + 3 * 8192
    assert moving.num_pages * moving.page_tokens == 4 * 32768
    assert row(moving, "VRAM moves") == ("on", "on", "idle pages of the KV cache hold experts, which RAM has too")
    assert all(decision.name != "VRAM moves" for decision in fixed.decisions)
    for options in (asked, {"max_running": 8}):
        small, large = (check(plan(QWEN3_30B, machine(124, gpu(24)), vram_moves=m, **options), QWEN3_30B).vram
                        for m in ("off", "on"))  # fmt: skip
        assert large.kv_bytes >= small.kv_bytes
        left = large.usable_bytes - large.used_bytes + large.kv_bytes + large.experts_bytes + large.ring_bytes
        assert large.experts_bytes + large.spare_bytes + large.ring_bytes >= 0.2 * left


@pytest.mark.parametrize(
    ("box", "asked", "why"),
    [
        (machine(50, gpu(24)), {}, "RAM keeps no copies"),
        (machine(50, gpu(24)), {"expert_placement": "dynamic", "context": 4096}, "RAM has no room for a copy of every"),
        (machine(124, gpu(24)), {"expert_placement": "front-loading"}, "placement is static"),
        (machine(124, gpu(24)), {"deterministic": True}, "deterministic"),
        (machine(124), {}, "needs a GPU"),
    ],
)
def test_vram_cannot_move_everywhere(box: Machine, asked: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=why):
        plan(QWEN3_30B, box, vram_moves="on", **asked)
