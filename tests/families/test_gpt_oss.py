"""gpt-oss as OpenAI stores it: MXFP4 blocks of experts with interleaved gate and up. Other forms of the family are in
test_logits.py, test_native_logits.py and test_split_logits.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Mxfp4Config

from engines import load_decoder, load_native
from hybrid_engines import SPLITS, Kept, load_split
from proa.models.families import declare
from proa.native.formats import Form, Format
from proa.native.pool import Pool
from proa.weights.checkpoint import open_checkpoint
from proa.weights.sources import resolve, stored_types
from teacher_forced import all_experts, forced, prompts
from tiny import TINY
from tiny_quantised import make_gpt_oss

# What transformers takes for a config without rope_parameters and rope_scaling.
DEFAULT_YARN = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
DEVICES = ["sim", pytest.param("cuda", marks=pytest.mark.gpu)]
TEXTS, PROMPT_TOKENS = prompts([9, 30, 4]), [1, 22, 2]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Checkpoints in MXFP4, and with the same values in bfloat16."""
    made = tmp_path_factory.mktemp("mxfp4"), tmp_path_factory.mktemp("plain")
    make_gpt_oss(*made)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_are_those_of_the_plain_checkpoint(dtype: torch.dtype, folders: tuple[Path, Path]) -> None:
    checkpoint = open_checkpoint(folders[0])
    stored = stored_types(resolve(checkpoint.declare(), checkpoint.tensors), checkpoint.tensors)
    of_experts = {of for name, of in stored.items() if ".experts." in name and name.endswith(".weight")}
    assert of_experts == {"MXFP4"}
    models = [load_decoder(folder, dtype).decoder for folder in folders]
    got, want = (dict(model.parameters()) for model in models if model is not None)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_logits_are_those_of_transformers(folders: tuple[Path, Path]) -> None:
    asked = {"dtype": torch.float32, "quantization_config": Mxfp4Config(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(folders[0], **asked).float().eval()
    with torch.inference_mode():
        want = model(torch.tensor([TEXTS[1]])).logits[0]
    got = forced(load_decoder(folders[0]), [TEXTS[1]], [len(TEXTS[1])])
    assert (got - want).abs().max() <= 1e-4 * want.abs().max()


def test_native_is_no_further_from_float32_than_torch(pool: Pool, folders: tuple[Path, Path]) -> None:
    override = all_experts(folders[0])
    assert_near(forced(load_native(folders[0], pool, **override), TEXTS, PROMPT_TOKENS), *yardsticks(folders[0]))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("split", SPLITS)
def test_split_is_no_further_from_float32_than_torch(
    split: str, device: str, pool: Pool, folders: tuple[Path, Path]
) -> None:
    keep: list[Kept] = []
    override = all_experts(folders[0])
    got = forced(load_split(folders[0], pool, SPLITS[split], device, keep=keep, **override), TEXTS, PROMPT_TOKENS)
    shapes = [layer.memory.shape for layer in keep[0].hybrid.layers]
    assert {of.up_form for of in shapes} == {of.down_form for of in shapes} == {Form(Format.MXFP4, 32)}
    assert_near(got, *yardsticks(folders[0]))


def yardsticks(folder: Path) -> list[torch.Tensor]:
    """Logits of plain torch in bfloat16, and in float32."""
    override = all_experts(folder)
    kinds = (torch.bfloat16, torch.float32)
    return [forced(load_decoder(folder, dtype, **override), TEXTS, PROMPT_TOKENS) for dtype in kinds]


def assert_near(got: torch.Tensor, plain: torch.Tensor, exact: torch.Tensor) -> None:
    scale = exact.abs().max()
    off_plain, off_got = ((rows - exact).pow(2).mean().sqrt() for rows in (plain, got))
    assert off_plain <= 0.05 * scale, "the yardstick itself is off"
    assert off_got <= 1.05 * off_plain + 1e-4 * scale


def test_a_config_without_rope_parameters_means_yarn() -> None:
    config: dict[str, Any] = {"architectures": ["GptOssForCausalLM"], **TINY["gpt-oss"].config}
    config.pop("rope_parameters")
    want = declare(config | {"rope_parameters": DEFAULT_YARN | {"rope_theta": 1.5e5}}).spec
    assert declare(config).spec == want
    assert declare(config | {"rope_theta": 1e4, "rope_scaling": None}).spec.ropes == {
        replace(rope, base=1e4) for rope in want.ropes
    }
    theirs = GptOssConfig(**TINY["gpt-oss"].config | {"rope_parameters": None}).rope_parameters
    assert theirs == DEFAULT_YARN | {"rope_theta": 1.5e5}
