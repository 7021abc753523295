"""Bytes of experts' biases: VRAM and RAM each hold those of all experts (decision 030)."""

from __future__ import annotations

from dataclasses import replace

from proa.models.spec import Block
from proa.plan.vram import dense_bytes, dense_read_bytes
from unit.vram_cases import GPT_OSS, GPT_OSS_MOE, SUNK, check, gpu, machine, plan


def test_biases_of_experts_are_dense_weights() -> None:
    """Biases of all experts count, in float32; gpt-oss needs no padding."""
    without = replace(GPT_OSS, blocks=(Block(SUNK, replace(GPT_OSS_MOE, bias=False)),) * 36)
    assert dense_bytes(GPT_OSS, {}) - dense_bytes(without, {}) == 36 * 128 * 3 * 2880 * 4
    assert dense_read_bytes(GPT_OSS, {}) - dense_read_bytes(without, {}) == 36 * 4 * 3 * 2880 * 4


def test_exclusive_ram_has_a_second_copy_of_its_experts_biases() -> None:
    inclusive = check(plan(GPT_OSS, machine(512, gpu(80))), GPT_OSS)
    exclusive = check(plan(GPT_OSS, machine(200, gpu(80)), context=4096), GPT_OSS)
    whole = check(plan(GPT_OSS, machine(64, gpu(280))), GPT_OSS)
    assert (inclusive.inclusive, exclusive.inclusive, whole.gpu_only) == (True, False, True)
