"""Attention heads that the kernels cannot compute are refused before anything is loaded; all others run."""

from __future__ import annotations

import pytest

from proa.errors import UsageError
from proa.models.spec import Block, GatedDeltaNet, LatentAttention, Mixer, Mlp, Model, Rope
from unit.vram_cases import attention, gpu, machine, model, moe, plan, row


def with_heads(heads: int, kv_heads: int, head_dim: int) -> Model:
    return model(32000, 2, Block(attention(3200, heads, kv_heads, head_dim), moe(3200, 8, 2, 512)), 2048)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 32, 100), (6, 3, 18), (64, 1, 256)])
def test_accepted(heads: int, kv_heads: int, head_dim: int) -> None:
    assert plan(with_heads(heads, kv_heads, head_dim), machine(64, gpu(80))).gpu is not None
    assert plan(with_heads(heads, kv_heads, head_dim), machine(64)).gpu is None


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "why"),
    [
        (4, 2, 258, "heads have 258 dimensions, more than 256"),
        (65, 1, 64, "65 query heads share a KV head, more than 64"),
    ],
)
def test_beyond_a_gpu(heads: int, kv_heads: int, head_dim: int, why: str) -> None:
    spec = with_heads(heads, kv_heads, head_dim)
    with pytest.raises(UsageError, match=why):
        plan(spec, machine(64, gpu(80)), gpu="0")
    got = plan(spec, machine(64, gpu(80)))
    assert got.gpu is None
    assert row(got, "GPU") == ("auto", "none", f"CPU only: {why}")


def test_beyond_the_cpu() -> None:
    dense = model(32000, 2, Block(attention(3200, 4, 2, 578), Mlp(3200, 512)), 2048)
    with pytest.raises(UsageError, match="heads have 578 dimensions, more than 576") as caught:
        plan(dense, machine(64))
    assert "--dtype float32" in caught.value.remedy
    assert plan(dense, machine(64), dtype="float32").gpu is None


def latent(rank: int, rotary: int) -> LatentAttention:
    return LatentAttention(1024, 8, None, rank, 64, 64, Rope(rotary))


def delta(value_dim: int, taps: int) -> GatedDeltaNet:
    return GatedDeltaNet(1024, 2, 4, 32, value_dim, taps)


@pytest.mark.parametrize(
    ("mixer", "cpu", "gpu_why"),
    [
        (latent(512, 64), "", ""),
        (latent(536, 40), "", "latents have 536 elements and 40 rotary ones; the most are 512 and 64"),
        (latent(504, 72), "", "latents have 504 elements and 72 rotary ones; the most are 512 and 64"),
        (latent(512, 72), "latents have 584 elements with their rotary part, more than 576", "72 rotary ones"),
        (delta(16, 2), "", ""),
        (delta(24, 4), "values of the delta rule have 24 dimensions, which is no multiple of 16", ""),
        (delta(32, 8), "", ""),
        (delta(32, 9), "the convolution has 9 taps, more than 8", ""),
    ],
)
def test_other_mixers(mixer: Mixer, cpu: str, gpu_why: str) -> None:
    spec = model(32000, 2, Block(mixer, moe(1024, 8, 2, 512)), 2048)
    box = machine(64, gpu(80))
    if cpu:
        with pytest.raises(UsageError, match=cpu) as caught:
            plan(spec, machine(64))
        assert "--dtype float32" in caught.value.remedy
    else:
        assert plan(spec, machine(64)).gpu is None
    assert plan(spec, machine(64), dtype="float32").gpu is None
    if gpu_why:
        with pytest.raises(UsageError, match=gpu_why):
            plan(spec, box, gpu="0")
    else:
        assert plan(spec, box).gpu is not None
