"""Types by the quantisation config alone: the same as the files have."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open

from families.hub_texts import CONFIGS
from proa.config.options import ModelOptions
from proa.errors import ConfigError, ModelNotFound, WeightsError
from proa.plan.headers import open_headers
from proa.plan.opened import Opened, open_model
from proa.plan.packed_size import packed_size
from proa.plan.stored import kept_types
from tiny import make_tiny
from tiny_quantised import OTHER_NAMES, SCHEMES, make_quantised
from tiny_quantised import make_gpt_oss as quantise_gpt_oss

ASKED = ModelOptions()
ALL = SCHEMES | OTHER_NAMES
UNCLEAR = {"int4 paired": "w4afp8 says it only in the tensors"}
# What no config says: the type of a matrix's scales; or that all matrices are stored as experts are.
OTHER_SCALES, EXPERTS_ONLY = {"int4 f16", "int4 f32"}, {"mxfp4 paired"}
WRONG_GROUPS = {"gptq v2"}  # the scheme writes other groups than its config says
PLAIN = {"BF16", "F16", "F32"}
INDEX = "model.safetensors.index.json"


def types(opened: Opened) -> dict[str, str]:
    return kept_types(ASKED, opened.declared, opened.checkpoint)


def same(one: str, other: str, *, any_scales: bool = False) -> bool:
    """Plain types are packed alike; any_scales: integers' scales may have another plain type."""
    if any_scales:
        one, other = one.rpartition(" ")[0], other.rpartition(" ")[0]
    return one == other or {one, other} <= PLAIN


def without_weights(folder: Path, *, index: bool) -> Path:
    """A copy of a checkpoint without its weight file; index: with the index that a checkpoint of parts would have."""
    bare = folder.with_name("bare")
    shutil.copytree(folder, bare)
    with safe_open(bare / "model.safetensors", "pt") as file:
        names = list(file.keys())
    (bare / "model.safetensors").unlink()
    text = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps(text | {"dtype": "bfloat16"}))
    if index:
        (bare / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model-00001-of-00001.safetensors")}))
    return bare


@pytest.mark.parametrize("index", [False, True], ids=["config", "index"])
@pytest.mark.parametrize("name", sorted(ALL.keys() - WRONG_GROUPS))
def test_types_are_those_of_the_files(name: str, index: bool, tmp_path: Path) -> None:
    folder, _ = make_quantised(ALL[name], "qwen3-moe", tmp_path / "m", moe_intermediate_size=96)
    there = open_model(folder, "auto", ASKED)
    bare = without_weights(folder, index=index)
    if name in UNCLEAR:
        with pytest.raises(ConfigError, match=UNCLEAR[name]) as raised:
            types(open_headers(str(bare), ASKED))
        assert "headers" in raised.value.remedy
        return
    opened = open_headers(str(bare), ASKED)
    assert opened.checkpoint.load_format == "config"
    exact, expected = types(there), types(opened)
    assert expected.keys() == exact.keys()
    if name in EXPERTS_ONLY:
        exact = {of: kept for of, kept in exact.items() if ".experts." in of}
    for of, kept in exact.items():
        assert same(expected[of], kept, any_scales=name in OTHER_SCALES), of
    if name not in EXPERTS_ONLY:
        sizes = [packed_size(of.declared.spec, types(of)).total_bytes for of in (there, opened)]
        assert sizes[1] == pytest.approx(sizes[0], rel=0.15 if name in OTHER_SCALES else 0.01)


def test_the_index_says_which_matrices_are_quantised(tmp_path: Path) -> None:
    only = r"(?!.*layers\.1\.mlp\.experts).*"
    folder, _ = make_quantised(SCHEMES["fp8 block"], "qwen3-moe", tmp_path / "m", only=only)
    found = types(open_headers(str(without_weights(folder, index=True)), ASKED))
    assert found["blocks.1.ffn.experts.0.up.weight"] in PLAIN
    assert found["blocks.0.ffn.experts.0.up.weight"] == "FP8 block 128"


def test_stacked_experts(tmp_path: Path) -> None:
    plain = make_tiny("gpt-oss", tmp_path / "plain")
    folder = tmp_path / "m"
    folder.mkdir()
    quantise_gpt_oss(folder, plain)
    exact = types(open_model(folder, "auto", ASKED))
    for index in (False, True):
        found = types(open_headers(str(without_weights(folder, index=index)), ASKED))
        assert {n: t for n, t in found.items() if t == "MXFP4"} == {n: t for n, t in exact.items() if t == "MXFP4"}
        shutil.rmtree(tmp_path / "bare")


def published(name: str, tmp_path: Path) -> Counter[str]:
    """The types of a published config's matrices, counted by the part of the layer."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS[name]))
    found = types(open_headers(str(tmp_path), ASKED))
    parts = {".experts.": "experts", ".shared.": "shared", ".mixer.": "mixer", ".ffn.": "mlp"}

    def part(of: str) -> str:
        return next((word for piece, word in parts.items() if piece in of), of)

    return Counter(f"{part(of)} {kept}" for of, kept in found.items() if kept not in ("BF16", "F32"))


@pytest.mark.parametrize(
    ("name", "quantised"),
    [
        ("deepseek-ai/DeepSeek-V3", {"experts FP8 block 128", "shared FP8 block 128", "mixer FP8 block 128",
                                     "mlp FP8 block 128"}),
        ("moonshotai/Kimi-K2-Instruct", {"experts FP8 block 128", "shared FP8 block 128", "mixer FP8 block 128",
                                         "mlp FP8 block 128"}),
        ("MiniMaxAI/MiniMax-M2", {"experts FP8 block 128", "mixer FP8 block 128"}),
        ("nvidia/MiniMax-M2.5-NVFP4", {"experts NVFP4"}),
        ("openai/gpt-oss-120b", {"experts MXFP4"}),
    ],
)  # fmt: skip
def test_published_configs(name: str, quantised: set[str], tmp_path: Path) -> None:
    assert set(published(name, tmp_path)) == quantised


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"quant_method": "hqq"}, "the quantisation 'hqq' is not implemented"),
    ({"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"}, "quant_algo MIXED_PRECISION has several"),
    (
        {"quant_method": "gptq", "bits": 4, "sym": True, "group_size": "32"},
        "'group_size' must be .* int, but it is '32'",
    ),
]


@pytest.mark.parametrize(("config", "message"), REFUSED)
def test_what_a_config_leaves_open_is_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    folder = make_tiny("qwen3-moe", tmp_path / "m")
    (folder / "model.safetensors").unlink()
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"quantization_config": config}))
    with pytest.raises(ConfigError, match=message) as raised:
        types(open_headers(str(folder), ASKED))
    assert raised.value.remedy


def test_a_folder_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"has no config\.json"):
        open_headers(str(tmp_path) + "/", ASKED)


def test_missing_parts_are_planned_but_not_served(tmp_path: Path) -> None:
    folder = without_weights(make_tiny("qwen3-moe", tmp_path / "m"), index=True)
    with pytest.raises(WeightsError, match="1 of 1 weight files are missing"):
        open_model(folder, "auto", ASKED)
    assert open_headers(str(folder), ASKED).checkpoint.load_format == "config"


def test_more_layers_than_the_index_are_refused(tmp_path: Path) -> None:
    folder = without_weights(make_tiny("qwen3-moe", tmp_path / "m"), index=True)
    text = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(text | {"num_hidden_layers": 1000}))
    with pytest.raises(ConfigError, match="num_hidden_layers is 1000, but the weight files hold"):
        open_headers(str(folder), ASKED)
