"""Invalid values in quantised checkpoints, and biases that the model does not have."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engines import load_decoder
from proa.errors import WeightsError
from tiny_quantised import DECODED, SCHEMES, make_quantised

O_PROJ = "model.layers.1.self_attn.o_proj"
SIZES = {"moe_intermediate_size": 96}


def changed(scheme: str, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    made, _ = make_quantised((SCHEMES | DECODED)[scheme], "qwen3-moe", folder, **SIZES)
    tensors = load_file(made / "model.safetensors")
    change(tensors)
    save_file(tensors, made / "model.safetensors")
    return made


def shuffle(tensors: dict[str, Tensor]) -> None:
    tensors[f"{O_PROJ}.g_idx"] = tensors[f"{O_PROJ}.g_idx"].flip(0).contiguous()


def beyond(tensors: dict[str, Tensor]) -> None:
    tensors[f"{O_PROJ}.g_idx"][7] = 99


def another_zero(tensors: dict[str, Tensor]) -> None:
    tensors[f"{O_PROJ}.qzeros"][0, 0] += 1 << 8


def negative_scale(tensors: dict[str, Tensor]) -> None:
    tensors[f"{O_PROJ}.weight_scale"].view(torch.uint8)[3, 1] = 0x81


def no_factor(tensors: dict[str, Tensor]) -> None:
    tensors[f"{O_PROJ}.weight_global_scale"][0] = 0


def bias(value: float) -> Callable[[dict[str, Tensor]], None]:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors[f"{O_PROJ}.bias"] = torch.full((64,), value, dtype=torch.float16)

    return add


def spare_tensor(tensors: dict[str, Tensor]) -> None:
    tensors[f"{O_PROJ}.weight_surprise"] = torch.ones(1)


@pytest.mark.parametrize(
    ("scheme", "change", "problem"),
    [
        ("gptq", shuffle, f"but {O_PROJ}.g_idx does not sort them into groups of 32"),
        (
            "gptq in another order",
            beyond,
            rf"m/model.safetensors: {O_PROJ}.g_idx is 99 at \[7\], but {O_PROJ}.scales has only the groups 0 to 3",
        ),
        ("gptq", another_zero, f"symmetric .* all zero points of {O_PROJ}.qzeros must be 8, but some differ"),
        ("gptq", bias(0.5), "o_proj.bias is not zero"),
        ("int4", bias(0.0), "o_proj.bias: nothing in the model uses it"),
        ("int4", spare_tensor, "weight_surprise: nothing in the model uses it"),
        ("nvfp4", negative_scale, rf"{O_PROJ}.weight_scale is -0.001953125 at \[3, 1\]; .* not negative"),
        ("nvfp4", no_factor, f"{O_PROJ}.weight_global_scale, the scale of a whole matrix, is 0.0"),
    ],
)
def test_refused(scheme: str, change: Callable[[dict[str, Tensor]], None], problem: str, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=problem):
        load_decoder(changed(scheme, tmp_path / "m", change))


def test_the_config_of_older_modelopt(tmp_path: Path) -> None:
    folder, _ = make_quantised(SCHEMES["nvfp4 modelopt"], "qwen3-moe", tmp_path / "m", **SIZES)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(WeightsError):  # no config, no quantisation
        load_decoder(folder)
    (folder / "hf_quant_config.json").write_text('{"producer": {}, "quantization": {"quant_algo": "NVFP4"}}')
    assert load_decoder(folder).decoder is not None


def test_a_zero_bias_of_gptq_is_ignored(tmp_path: Path) -> None:
    plain, _ = make_quantised(SCHEMES["gptq"], "qwen3-moe", tmp_path / "plain", **SIZES)
    other = changed("gptq", tmp_path / "biased", bias(0.0))
    decoders = [load_decoder(folder).decoder for folder in (plain, other)]
    parameters = [dict(decoder.parameters()) for decoder in decoders if decoder is not None]
    assert all(torch.equal(tensor, parameters[1][name]) for name, tensor in parameters[0].items())
