"""The plan's arithmetic for packed weights equals what loading takes."""

from __future__ import annotations

from pathlib import Path

import pytest

from demo_model import demo_gguf, demo_moe
from proa.native.formats import Format, layout
from proa.plan.packed_size import packed_bytes, packed_size
from tiny import TINY, make_tiny, tiny_spec
from tiny_gguf import SAID, make_tiny_gguf
from unit.loaded_weights import loaded


@pytest.mark.parametrize("family", sorted(TINY))
def test_tiny_models(family: str, tmp_path: Path) -> None:
    planned, active, took = loaded(make_tiny(family, tmp_path))
    assert took == pytest.approx(planned, rel=0.25)  # one-dimensional weights, and parts that fill up a panel together
    assert 0 < active <= planned


@pytest.mark.parametrize("family", sorted(TINY))
def test_bfloat16_is_the_sum_over_all_parameters(family: str) -> None:
    spec = tiny_spec(family)
    each = packed_size(spec, {name: "BF16" for name, _ in spec.params()})
    assert packed_size(spec, {}).total_bytes == each.total_bytes


@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (16, 32), (17, 33), (576, 48), (100, 1856), (151936, 2048)])
def test_padding_of_bfloat16_is_the_layouts(rows: int, columns: int) -> None:
    assert packed_bytes(rows, columns) == layout(Format.BF16, rows, columns).matrix_bytes


@pytest.mark.demo
def test_unquantised_weights_count_with_their_padding() -> None:
    planned, _, took = loaded(demo_moe())
    assert took == pytest.approx(planned, rel=0.01)


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
