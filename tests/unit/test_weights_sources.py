"""Finding each parameter's source: layouts, tied heads, and everything that does not fit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa.errors import WeightsError
from proa.models.names import Declared, NameTable
from proa.models.spec import Attention, Block, Mlp, Model, Moe, Rope, Router
from proa.weights.index import TensorInfo
from proa.weights.source import Source
from proa.weights.sources import resolve

HIDDEN, EXPERTS = 8, 4


def declared(width: int = 3, tied: bool = False, names: NameTable | None = None) -> Declared:
    mixer = Attention(HIDDEN, 2, 1, 4, Rope(4))
    moe = Moe(HIDDEN, EXPERTS, 2, width, Router("softmax", True))
    blocks = (Block(mixer, moe), Block(mixer, Mlp(HIDDEN, 5)))
    return Declared(Model(HIDDEN, 16, blocks, 1e-6, 32, tied), names or NameTable())


def info(shape: tuple[int, ...], dtype: str = "BF16") -> TensorInfo:
    return TensorInfo(dtype, shape, Path("model.safetensors"), 0, 0)


def index_of(model: Declared, **stacked: tuple[int, ...]) -> dict[str, TensorInfo]:
    """Per-expert layout; if `stacked` shapes are given, those tensors of layer 0 instead of its experts'."""
    index = {model.names.candidates(name)[0]: info(shape) for name, shape in model.spec.params()}
    if stacked:
        index = {name: tensor for name, tensor in index.items() if ".experts." not in name}
    return index | {f"model.layers.0.mlp.experts.{n}_proj": info(shape) for n, shape in stacked.items()}


def expert(model: Declared, index: dict[str, TensorInfo], number: int, part: str) -> Source:
    return resolve(model, index).params[f"blocks.0.ffn.experts.{number}.{part}.weight"]


GATE_UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"


def test_one_tensor_per_expert() -> None:
    model = declared()
    assert expert(model, index_of(model), 3, "up") == Source("model.layers.0.mlp.experts.3.up_proj.weight", 0, 3, 0, 8)


def test_stacked() -> None:
    model = declared()
    index = index_of(model, gate_up=(4, 6, 8), down=(4, 8, 3))
    assert expert(model, index, 2, "gate") == Source(GATE_UP, 12, 3, 0, 8)
    assert expert(model, index, 2, "up") == Source(GATE_UP, 15, 3, 0, 8)
    assert expert(model, index, 2, "down") == Source(DOWN, 16, 8, 0, 3)


def test_stacked_and_transposed() -> None:
    model = declared()
    index = index_of(model, gate_up=(4, 8, 6), down=(4, 3, 8))
    assert expert(model, index, 2, "gate") == Source(GATE_UP, 16, 8, 0, 3, transposed=True)
    assert expert(model, index, 2, "up") == Source(GATE_UP, 16, 8, 3, 3, transposed=True)
    assert expert(model, index, 2, "down") == Source(DOWN, 6, 3, 0, 8, transposed=True)


def test_stacked_without_fused_gate_and_up() -> None:
    model = declared()
    index = index_of(model, gate=(4, 3, 8), up=(4, 3, 8), down=(4, 8, 3))
    assert expert(model, index, 1, "up") == Source("model.layers.0.mlp.experts.up_proj", 3, 3, 0, 8)


def alternating(**more: Any) -> tuple[Declared, dict[str, TensorInfo]]:
    """Experts with biases, stacked with interleaved gate and up."""
    plain = declared()
    moe = plain.spec.blocks[0].ffn
    assert isinstance(moe, Moe)
    blocks = (replace(plain.spec.blocks[0], ffn=replace(moe, bias=True)), plain.spec.blocks[1])
    model = Declared(replace(plain.spec, blocks=blocks), NameTable(alternating=True))
    shapes = {"gate_up": (4, 6, 8), "down": (4, 8, 3)} | more
    index = index_of(model, **shapes)
    biases = {f"{GATE_UP}_bias": info((4, 6)), f"{DOWN}_bias": info((4, 8))}
    return model, index | biases


def test_interleaved_gate_and_up() -> None:
    model, index = alternating()
    assert expert(model, index, 2, "gate") == Source(GATE_UP, 12, 3, 0, 8, row_step=2)
    assert expert(model, index, 2, "up") == Source(GATE_UP, 13, 3, 0, 8, row_step=2)
    assert expert(model, index, 2, "down") == Source(DOWN, 16, 8, 0, 3)
    model, index = alternating(gate_up=(4, 8, 6), down=(4, 3, 8))
    assert expert(model, index, 2, "gate") == Source(GATE_UP, 16, 8, 0, 3, transposed=True, col_step=2)
    assert expert(model, index, 2, "up") == Source(GATE_UP, 16, 8, 1, 3, transposed=True, col_step=2)
    assert expert(model, index, 2, "down") == Source(DOWN, 6, 3, 0, 8, transposed=True)


def test_biases_of_stacked_experts() -> None:
    model, index = alternating()
    found = resolve(model, index).params
    biases = {part: found[f"blocks.0.ffn.experts.2.{part}.bias"] for part in ("gate", "up", "down")}
    assert biases == {
        "gate": Source(f"{GATE_UP}_bias", 2, 1, 0, 3, col_step=2),
        "up": Source(f"{GATE_UP}_bias", 2, 1, 1, 3, col_step=2),
        "down": Source(f"{DOWN}_bias", 2, 1, 0, 8),
    }
    with pytest.raises(WeightsError, match=r"experts\.0\.gate_proj\.bias: not in the checkpoint"):
        resolve(model, {name: tensor for name, tensor in index.items() if not name.endswith("up_proj_bias")})
    index[f"{DOWN}_bias"] = info((4, 9))
    with pytest.raises(
        WeightsError, match=r"down_proj_bias: the config says \[4, 8\], model.safetensors has \[4, 9\]\."
    ):
        resolve(model, index)


@pytest.mark.parametrize("turned", [False, True])
def test_square_gate_up_is_settled_by_down(turned: bool) -> None:
    """2 x width = hidden: gate_up fits both ways, down only one, and a layer has one orientation."""
    model = declared(width=4)
    index = index_of(model, gate_up=(4, 8, 8), down=(4, 4, 8) if turned else (4, 8, 4))
    assert expert(model, index, 0, "gate").transposed is turned
    assert expert(model, index, 0, "down").transposed is turned


def test_an_ambiguous_orientation_is_an_error() -> None:
    model = declared(width=8)
    index = index_of(model, gate=(4, 8, 8), up=(4, 8, 8), down=(4, 8, 8))
    with pytest.raises(WeightsError, match="both fit, so the layout is ambiguous"):
        resolve(model, index)
    known = Declared(model.spec, NameTable(stacked_out_in=True))
    assert not expert(known, index, 0, "gate").transposed


PROBLEMS: list[tuple[str, dict[str, Any], str]] = [
    (
        "missing",
        {"model.norm.weight": None},
        r"model.norm.weight: not in the checkpoint; the config says \[8\]",
    ),
    ("unused", {"model.layers.2.mlp.gate.weight": (4, 8)}, "layers.2.mlp.gate.weight: nothing in the model"),
    ("misshapen", {"model.norm.weight": (9,)}, r"the config says \[8\], model.safetensors has \[9\]"),
    ("transposed", {"lm_head.weight": (8, 16)}, r"the config says \[16, 8\], model.safetensors has \[8, 16\]"),
    ("both layouts", {GATE_UP: (4, 6, 8)}, "gate_up_proj: nothing in the model uses it"),
    (
        "no head",
        {"lm_head.weight": None},
        "lm_head.weight: not in the checkpoint.*tie_word_embeddings=true",
    ),
]


@pytest.mark.parametrize(("what", "changes", "message"), PROBLEMS, ids=[case[0] for case in PROBLEMS])
def test_problems_are_named(what: str, changes: dict[str, Any], message: str) -> None:
    model = declared()
    index = index_of(model) | {name: info(shape) for name, shape in changes.items() if shape}
    for name in (name for name, shape in changes.items() if shape is None):
        del index[name]
    with pytest.raises(WeightsError, match=message):
        resolve(model, index)


@pytest.mark.parametrize(
    ("stacked", "message"),
    [
        ({"gate_up": (4, 6, 8), "down": (4, 3, 8)}, r"gate_up_proj: the config says \[4, 6, 8\]"),
        ({"gate_up": (5, 6, 8), "down": (5, 8, 3)}, r"model.safetensors has \[5, 6, 8\]"),
        ({"gate_up": (4, 6, 8)}, "down_proj.weight: not in the checkpoint"),
    ],
)
def test_stacked_tensors_that_do_not_fit(stacked: dict[str, tuple[int, ...]], message: str) -> None:
    model = declared()
    with pytest.raises(WeightsError, match=message):
        resolve(model, index_of(model, **stacked))


def test_many_problems_are_counted() -> None:
    model = declared()
    missing = sum(1 for _ in model.spec.params(routed=False))
    with pytest.raises(WeightsError, match=f"and {missing - 5} more"):
        resolve(model, {})


def test_a_hundred_million_experts_are_not_looked_for() -> None:
    """The router's shape says how many there are; routed experts are searched for only once it fits."""
    model = declared()
    block = model.spec.blocks[0]
    assert isinstance(block.ffn, Moe)
    blocks = (replace(block, ffn=replace(block.ffn, experts=10**8)), *model.spec.blocks[1:])
    message = rf"mlp.gate.weight: the config says \[{10**8}, 8\], model.safetensors has \[4, 8\]\."
    with pytest.raises(WeightsError, match=message):
        resolve(Declared(replace(model.spec, blocks=blocks), model.names), index_of(model))


def test_the_correction_of_a_single_expert() -> None:
    """ERNIE stores corrections as [1, experts]."""
    model = declared()
    ffn = model.spec.blocks[0].ffn
    assert isinstance(ffn, Moe)
    router = replace(ffn.router, correction=True)
    one = replace(ffn, experts=1, top_k=1, router=router)
    single = Declared(replace(model.spec, blocks=(replace(model.spec.blocks[0], ffn=one),)), model.names)
    name = "model.layers.0.mlp.gate.e_score_correction_bias"
    index = index_of(single) | {name: info((1, 1))}
    assert resolve(single, index).params["blocks.0.ffn.router.correction"] == Source(name, 0, 1, 0, 1)


def test_stored_head_of_a_tied_model() -> None:
    model = declared(tied=True)
    index = index_of(model) | {"lm_head.weight": info((16, 8))}
    sources = resolve(model, index)
    assert sources.tied_head == Source("lm_head.weight", 0, 16, 0, 8)
    assert "head.weight" not in sources.params
    assert resolve(model, index_of(model)).tied_head is None


def test_every_tensor_is_covered_exactly_once() -> None:
    """All elements of all layouts, counted."""
    layouts: list[dict[str, tuple[int, ...]]] = [
        {},
        {"gate_up": (4, 6, 8), "down": (4, 8, 3)},
        {"gate_up": (4, 8, 6), "down": (4, 3, 8)},
    ]
    for stacked in layouts:
        model = declared()
        index = index_of(model, **stacked)
        seen: dict[tuple[str, int, int], int] = {}
        for source in resolve(model, index).params.values():
            for row in range(source.first_row, source.first_row + source.rows):
                for col in range(source.first_col, source.first_col + source.cols):
                    seen[source.tensor, row, col] = seen.get((source.tensor, row, col), 0) + 1
        assert set(seen.values()) == {1}
        assert len(seen) == sum(t.rows * t.shape[-1] for t in index.values()) == model.spec.num_params
