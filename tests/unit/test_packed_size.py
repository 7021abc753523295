"""The plan's arithmetic for packed weights equals what loading takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo_model import demo_gguf
from proa.layers.decoder import Decoder
from proa.native.pool import Pool
from proa.ops.cpu import CpuOps, Recorder
from proa.ops.packed import Memory
from proa.plan.packed_size import packed_size
from proa.weights.checkpoint import open_checkpoint
from proa.weights.load import load_weights
from proa.weights.sources import resolve, stored_types
from tiny import TINY, make_tiny
from tiny_gguf import SAID, make_tiny_gguf


def loaded(path: Path) -> tuple[int, int, int]:
    """Planned bytes, bytes read per token, and bytes that the packed weights actually take."""
    checkpoint = open_checkpoint(path)
    declared = checkpoint.declare()
    with Pool([[]], pin=False) as pool:
        memory = Memory(pool, [None])
        model = Decoder(declared.spec, CpuOps(Recorder(pool, memory, 4, 1, 1)).table())
        load_weights(checkpoint, declared, dict(model.parameters()), lambda done, total: None, pool)
    plain = sum(t.nbytes for _, t in model.parameters() if hasattr(t, "nbytes"))
    size = packed_size(declared.spec, stored_types(resolve(declared, checkpoint.tensors), checkpoint.tensors))
    return size.total_bytes, size.active_bytes, sum(memory.bytes_by_format.values()) + plain


@pytest.mark.parametrize("family", sorted(TINY))
def test_tiny_models(family: str, tmp_path: Path) -> None:
    planned, active, took = loaded(make_tiny(family, tmp_path))
    assert took == pytest.approx(planned, rel=0.25)  # one-dimensional weights, and parts that fill up a panel together
    assert 0 < active <= planned


@pytest.mark.parametrize("quant", ["F16", "Q5_0", "MXFP4"])
@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v3", "qwen3-next"])
def test_tiny_gguf_files(family: str, quant: str, tmp_path: Path) -> None:
    planned, _, took = loaded(make_tiny_gguf(family, tmp_path / "m.gguf", quant, **SAID[family]))
    assert took == pytest.approx(planned, rel=0.25)


@pytest.mark.demo
def test_packed_blocks_count_with_their_packed_size() -> None:
    planned, _, took = loaded(demo_gguf())
    assert took == pytest.approx(planned, rel=0.01)
    assert took < 134_515_008 * 2 * 0.45  # of 4.5 to 8.5 bits each, not 16
