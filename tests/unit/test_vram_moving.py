"""Plans in which experts change places, or are read in RAM: when, why, and what it costs others."""

from __future__ import annotations

from typing import Any

import pytest

from proa.machine.machine import Machine
from unit.test_vram import QWEN3_30B, check, counts, gpu, machine, plan, row


@pytest.mark.parametrize(
    ("box", "asked", "placement", "why"),
    [
        (machine(124, gpu(24)), {}, "dynamic", "at most 8 at a time; 72.0 MiB of VRAM"),
        (machine(124, gpu(24)), {"expert_placement": "dynamic"}, "dynamic", "hot experts come in"),
        (machine(124, gpu(24)), {"expert_placement": "uniform"}, "uniform", "as asked"),
        (machine(124, gpu(24)), {"expert_placement": "front-loading"}, "front-loading", "as asked"),
        (machine(50, gpu(24)), {}, "uniform", "copied both ways"),
        (machine(50, gpu(24)), {"expert_placement": "dynamic"}, "dynamic", "one that goes back to RAM"),
        (machine(124, gpu(140)), {"expert_placement": "dynamic"}, "uniform", "no layer has experts in VRAM and"),
        (machine(124, gpu(24)), {"gpu_experts": "none"}, "uniform", "no layer has experts in VRAM and"),
    ],
)
def test_who_may_change_places(box: Machine, asked: dict[str, Any], placement: str, why: str) -> None:
    got = plan(QWEN3_30B, box, **asked)
    assert check(got, QWEN3_30B).placement == placement
    said = row(got, "expert placement")
    assert said[:2] == (asked.get("expert_placement", "auto"), placement)
    assert why in said[2]


def test_co_fetch_is_for_experts_in_ram() -> None:
    for asked, box, fetches in (("auto", 24, True), ("auto", 140, False), ("off", 24, False)):
        got = plan(QWEN3_30B, machine(124, gpu(box)), co_fetch=asked)
        assert check(got, QWEN3_30B).co_fetch is fetches
    assert row(got, "co-fetch") == ("off", "off", "as asked")


def test_a_doorbell_is_for_experts_in_ram() -> None:
    for box, rows in ((24, []), (140, [("memops", "none", "the CPU computes no experts")])):
        got = plan(QWEN3_30B, machine(124, gpu(box)), doorbell="memops")
        assert check(got, QWEN3_30B).doorbell == "memops"
        assert [(d.asked, d.got, d.why) for d in got.decisions if d.name == "doorbell"] == rows


def test_asked_experts_leave_no_room_to_move() -> None:
    """Slots for experts in motion never cost one that was asked for."""
    most = max(counts(plan(QWEN3_30B, machine(124, gpu(24)), context=1024, expert_placement="uniform")))
    got = plan(QWEN3_30B, machine(124, gpu(24)), context=1024, gpu_experts=str(most - 1), expert_placement="dynamic")
    assert counts(got) == [most - 1] * 48
    tight = machine(124, gpu(24))
    left = got.gpu.vram.usable_bytes - got.gpu.vram.used_bytes if got.gpu else 0
    vram = tight.gpus[0].free_bytes - (256 << 20) - left - (1 << 20)
    got = plan(QWEN3_30B, tight, context=1024, gpu_experts=str(most - 1), expert_placement="dynamic", vram=vram)
    assert counts(got) == [most - 1] * 48
    assert row(got, "expert placement")[1:] == ("uniform", "no room for the 72.0 MiB of VRAM that moving experts need")
