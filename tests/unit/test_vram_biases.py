"""What experts' biases take in VRAM and in RAM: those of all experts lie in both, see decision 030."""

from __future__ import annotations

from dataclasses import replace

from proa.models.spec import Block
from proa.plan.vram import dense_bytes, dense_read_bytes
from unit.test_vram import GPT_OSS, GPT_OSS_MOE, SUNK, check, gpu, machine, plan


def test_biases_of_experts_are_dense_weights() -> None:
    """Those of all experts, in float32: widths of gpt-oss are whole panels."""
    without = replace(GPT_OSS, blocks=(Block(SUNK, replace(GPT_OSS_MOE, bias=False)),) * 36)
    assert dense_bytes(GPT_OSS, {}) - dense_bytes(without, {}) == 36 * 128 * 3 * 2880 * 4
    assert dense_read_bytes(GPT_OSS, {}) - dense_read_bytes(without, {}) == 36 * 4 * 3 * 2880 * 4


def test_ram_has_the_biases_of_its_experts_by_number_too() -> None:
    inclusive = check(plan(GPT_OSS, machine(512, gpu(80))), GPT_OSS)
    exclusive = check(plan(GPT_OSS, machine(200, gpu(80)), context=4096), GPT_OSS)
    whole = check(plan(GPT_OSS, machine(64, gpu(280))), GPT_OSS)
    assert (inclusive.inclusive, exclusive.inclusive, whole.gpu_only) == (True, False, True)
