"""Bytes of dense weights in VRAM, in bfloat16 and in a checkpoint's formats."""

from __future__ import annotations

from proa.native.formats import Format
from proa.plan.vram import dense_bytes, dense_read_bytes, linear_bytes, vram_demand
from unit.vram_cases import DEMO, QWEN3_30B


def test_dense_weights_are_all_but_routed_experts() -> None:
    """Qwen3 needs no padding: 2 bytes per parameter, 4 per parameter of a norm."""
    routed, norms = 48 * 128 * 3 * 2048 * 768, (48 * 2 + 1) * 2048
    assert dense_bytes(QWEN3_30B, {}) == 2 * (QWEN3_30B.num_params - routed) + 2 * norms
    assert dense_bytes(QWEN3_30B, {}) - dense_read_bytes(QWEN3_30B, {}) == 151936 * 2048 * 2
    assert dense_read_bytes(DEMO, {}) == dense_bytes(DEMO, {})  # tied: the head is read


def test_dense_weights_in_the_formats_of_a_checkpoint() -> None:
    """Q4_K_M simplified: values in Q6_K, routers in F32. A panel of 256 columns: 2368 bytes in Q4_K, 3360 in Q6_K."""
    stored = {name: "Q4_K" if len(shape) == 2 else "F32" for name, shape in QWEN3_30B.params()}
    stored |= {name: "Q6_K" for name in stored if name.endswith("mixer.v.weight")}
    stored |= {name: "F32" for name in stored if name.endswith("router.weight")}
    values, routers = 48 * 512 * 2048, 48 * 128 * 2048
    codes = 48 * (2 * 4096 + 512) * 2048 + 151936 * 2048  # q, o, k; the head
    want = {Format.Q4_K: codes // 4096 * 2368, Format.Q6_K: values // 4096 * 3360, Format.BF16: routers * 2}
    assert linear_bytes(QWEN3_30B, stored) == want
    vectors, embedding = 4 * (48 * 2 + 1) * 2048, 151936 * 2048 * 2
    assert dense_bytes(QWEN3_30B, stored) == sum(want.values()) + vectors + embedding
    assert dense_read_bytes(QWEN3_30B, stored) == sum(want.values()) + vectors
    packed, plain = (vram_demand(QWEN3_30B, 16, 4, 512, False, types) for types in (stored, {}))
    assert packed.workspace_base_bytes - plain.workspace_base_bytes == 77 << 20
    assert packed.weights_bytes == dense_bytes(QWEN3_30B, stored)
