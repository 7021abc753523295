"""--kv-dtype in the plan: the type of K and V, their memory, refusals."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from proa.bench.hybrid import HybridOptions, case_of
from proa.bench.hybrid_shapes import MODEL_SHAPES
from proa.cache.pool import KvStorage, allocate_pool
from proa.errors import UsageError
from proa.models.families import declare
from proa.models.names import Declared, NameTable
from proa.models.spec import Block, LatentAttention, Rope
from proa.plan.kv_type import kv_type
from proa.plan.plan import Plan
from proa.plan.roof import ROOF_CONTEXT_TOKENS, roof_at
from unit import test_resolve, test_vram
from unit.plan_cases import NEXT, QWEN3_30B, FakeCheckpoint


def on_cpu(**asked: Any) -> Plan:
    return test_resolve.plan(QWEN3_30B, test_resolve.machine(124, 128), **asked)


def on_gpu(**asked: Any) -> Plan:
    return test_resolve.plan(QWEN3_30B, test_vram.machine(124, test_vram.gpu(24)), **asked)


@pytest.mark.parametrize(
    ("asked", "dtype", "got", "shown", "why"),
    [
        ("auto", "auto", "bfloat16", "bfloat16", "nothing is rounded"),
        ("auto", "float32", "float32", "float32", "nothing is rounded"),
        ("bf16", "auto", "bfloat16", "bfloat16", "as asked"),
        ("bf16", "float32", "bfloat16", "bfloat16", "rounded from float32"),
        ("fp8", "auto", "float8_e4m3fn", "fp8 (E4M3)", "the checkpoint has no scales"),
        ("fp8", "float32", "float8_e4m3fn", "fp8 (E4M3)", "4 significant bits"),
    ],
)
def test_start_up_row(asked: str, dtype: str, got: str, shown: str, why: str) -> None:
    plan = on_cpu(kv_dtype=asked, dtype=dtype, context=4096)
    row = test_resolve.row(plan, "KV type")
    assert (plan.kv_dtype, row[:2]) == (got, (asked, shown))
    assert why in row[2]


def test_other_caches_are_refused() -> None:
    """A narrower type is refused for a cache that stays wide."""
    blocks = (Block(LatentAttention(2048, 16, None, 512, 128, 128, Rope(64)), QWEN3_30B.blocks[0].ffn),)
    declared = Declared(replace(QWEN3_30B, blocks=blocks), NameTable())
    assert kv_type("auto", "bfloat16", FakeCheckpoint(), declared).dtype == "bfloat16"  # type: ignore[arg-type]
    assert kv_type("bf16", "bfloat16", FakeCheckpoint(), declared).dtype == "bfloat16"  # type: ignore[arg-type]
    for asked, dtype in (("fp8", "bfloat16"), ("bf16", "float32")):
        with pytest.raises(UsageError, match="Latent"):
            kv_type(asked, dtype, FakeCheckpoint(), declared)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [on_cpu, on_gpu])
def test_fp8_halves_the_bytes(make: Any) -> None:
    """FP8 halves the memory for the same tokens, and the bytes read for a token's past."""
    wide, narrow = (make(kv_dtype=kv, context=8192) for kv in ("auto", "fp8"))
    a, b = (of.memory if of.gpu is None else of.gpu.vram for of in (wide, narrow))
    assert wide.num_pages == narrow.num_pages
    assert a.kv_bytes == 2 * b.kv_bytes == wide.num_pages * 16 * QWEN3_30B.kv_bytes_per_token(2)
    for context in (ROOF_CONTEXT_TOKENS, 8192):
        read = [
            r.vram[0][0].dense_bytes_per_token if r.vram else r.bytes_per_token
            for r in (roof_at(p, context) for p in (wide, narrow))
        ]
        assert read[0] - read[1] == context * QWEN3_30B.kv_bytes_per_token(1)


def test_kv_memory_holds_twice_the_tokens_in_fp8() -> None:
    wide, narrow = (on_gpu(kv_dtype=kv, kv_memory=1 << 30) for kv in ("auto", "fp8"))
    assert narrow.num_pages in (2 * wide.num_pages, 2 * wide.num_pages + 1)


def test_latents_are_not_stored_in_fp8() -> None:
    spec = declare(MODEL_SHAPES["tiny-latent"].config()).spec
    for asked, got in (("auto", "bfloat16"), ("bf16", "bfloat16")):
        assert test_resolve.plan(spec, test_resolve.machine(8, 16), kv_dtype=asked).kv_dtype == got
    with pytest.raises(UsageError, match=r"Latent pages.* --kv-dtype auto"):
        test_resolve.plan(spec, test_resolve.machine(8, 16), kv_dtype="fp8")
    with pytest.raises(ValueError, match="float8"):
        allocate_pool(spec, 1, 16, torch.bfloat16, sequences=1, kv=KvStorage(torch.float8_e4m3fn))


def test_states_keep_their_type() -> None:
    box = test_resolve.machine(190, 192)
    wide, narrow = (test_resolve.plan(NEXT, box, kv_dtype=kv, context=8192) for kv in ("auto", "fp8"))
    assert wide.memory.states_bytes == narrow.memory.states_bytes > 0
    assert wide.memory.kv_bytes == 2 * narrow.memory.kv_bytes


def test_bench_hybrid_accepts_kv_dtype() -> None:
    wide, narrow = (case_of(HybridOptions(kv_dtype=kv)).engine.cache for kv in ("auto", "fp8"))
    assert (wide.kv_dtype, narrow.kv_dtype) == ("auto", "fp8")
    assert wide.kv_memory == 2 * (narrow.kv_memory or 0)
