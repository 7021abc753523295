"""Combining the tensors of quantised checkpoints into matrices: what fits, what is refused, and that no tensor is
lost."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from proa.errors import ConfigError, WeightsError
from proa.models.quantisation import legacy_modelopt, quantisation
from proa.weights.index import PLAIN_BYTES, TensorInfo
from proa.weights.quantised import collapse

W, SCALE, INV = "weight", "weight_scale", "weight_scale_inv"
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


MODELOPT = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
PACKED = {"weight_packed": ("I32", 16, 8), "weight_shape": ("I64", 2)}
ZERO = "weight_zero_point"


def compressed(*groups: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = {f"group_{i}": group for i, group in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": found, **more}


def integers(bits: int, *targets: str, **weights: Any) -> dict[str, Any]:
    of = {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}
    return {"targets": list(targets or ("Linear",)), "weights": of | weights}


INT4, INT8 = compressed(integers(4)), compressed(integers(8))


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
AWQ_PARTS = {"qweight": ("I32", 64, 2), "qzeros": ("I32", 2, 2), "scales": ("F16", 2, 16)}


AUTO_ROUND = {
    "quant_method": "auto-round", "packing_format": "auto_round:auto_gptq", "bits": 4, "group_size": 32, "sym": True,
}  # fmt: skip
AUTO_AWQ_ROUND = AUTO_ROUND | {"packing_format": "auto_round:auto_awq"}
W4AFP8 = {"quant_method": "w4afp8", "activation_scheme": "static", "weight_block_size": [128, 128], "group_size": 128}
QUARK_FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False, "group_size": None}
QUARK_FP4 = {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0", "is_dynamic": False}


def quark(weight: dict[str, Any], **more: Any) -> dict[str, Any]:
    of = {"weight": weight, "input_tensors": None, "output_tensors": None, "bias": None, "target_device": None}
    return {"quant_method": "quark", "global_quant_config": of, "exclude": ["lm_head"], "algo_config": None, **more}


def gptq(bits: int = 4, groups: int = 2, **parts: tuple[Any, ...]) -> dict[str, Any]:
    """GPTQ tensors of a matrix [16, 64]."""
    words = {"qweight": ("I32", 64 * bits // 32, 16), "qzeros": ("I32", groups, 16 * bits // 32)}
    return {**words, "scales": ("F16", groups, 16), **parts}


def blocks(*size: int) -> dict[str, Any]:
    return {**FP8, "weight_block_size": list(size)}


def tensor(dtype: str, *shape: int) -> TensorInfo:
    nbytes = PLAIN_BYTES[dtype]
    for size in shape:
        nbytes *= size
    return TensorInfo(dtype, shape, Path("m.safetensors"), 0, nbytes)


def collapsed(config: dict[str, Any], **tensors: TensorInfo) -> dict[str, TensorInfo]:
    of = quantisation({"quantization_config": config})
    assert of is not None
    return collapse({name.replace("__", "."): t for name, t in tensors.items()}, of)


@pytest.mark.parametrize(
    ("config", "tensors", "name", "shape"),
    [
        (FP8, {W: ("F8_E4M3", 300, 200), INV: ("BF16", 3, 2)}, "FP8 block 128", (300, 200)),
        (FP8, {W: ("F8_E4M3", 9, 20), INV: ("F32", 1, 1)}, "FP8 block 128", (9, 20)),
        (FP8, {W: ("F8_E4M3", 4, 256, 200), INV: ("F32", 4, 2, 2)}, "FP8 block 128", (4, 256, 200)),
        (FP8, {W: ("F8_E4M3", 300, 200), SCALE: ("F32", 300, 1)}, "FP8 channel", (300, 200)),
        (FP8, {W: ("F8_E4M3", 300, 200), SCALE: ("F32",)}, "FP8 tensor", (300, 200)),
        (MODELOPT, {W: ("F8_E4M3", 256, 256), SCALE: ("F32", 2, 1, 2, 1)}, "FP8 block 128", (256, 256)),
        (FP8, {W: ("F8_E4M3", 30, 64), INV: ("U8", 30, 2)}, "MXFP8", (30, 64)),
        (FP8, {W: ("F8_E4M3", 30, 64), INV: ("F8_E8M0", 30, 2)}, "MXFP8", (30, 64)),
        (INT4, {**PACKED, SCALE: ("BF16", 16, 4)}, "INT4 16 BF16", (16, 64)),
        (INT4, {**PACKED, SCALE: ("F16", 16, 1)}, "INT4 channel F16", (16, 64)),
        (INT4, {**PACKED, SCALE: ("BF16", 16, 2), ZERO: ("I32", 2, 2)}, "UINT4 32", (16, 64)),
        (INT8, {**PACKED, SCALE: ("BF16", 16, 1)}, "INT8 channel", (16, 32)),
        (INT8, {W: ("I8", 16, 64), SCALE: ("F32", 16)}, "INT8 channel", (16, 64)),
        (MODELOPT, {W: ("U8", 16, 32), SCALE: ("F8_E4M3", 16, 4), "weight_scale_2": ("F32",)}, "NVFP4", (16, 64)),
        (GPTQ, gptq(), "INT4 32 F16", (16, 64)),
        (GPTQ | {"sym": False}, gptq(), "UINT4 32", (16, 64)),
        (GPTQ | {"desc_act": True, "static_groups": True}, gptq(g_idx=("I32", 64)), "INT4 32 F16", (16, 64)),
        (GPTQ | {"desc_act": True}, gptq(groups=1), "INT4 channel F16", (16, 64)),
        (GPTQ | {"bits": 8}, gptq(bits=8), "INT8 32", (16, 64)),
        (AWQ, AWQ_PARTS, "UINT4 32", (16, 64)),
        # Blocks of FP8 whose scales are powers of two.
        (FP8, {W: ("F8_E4M3", 300, 200), INV: ("F8_E8M0", 3, 2)}, "FP8 block 128", (300, 200)),
        (FP8, {W: ("F8_E4M3", 300, 200), INV: ("U8", 3, 2)}, "FP8 block 128", (300, 200)),
        (blocks(64, 64), {W: ("F8_E4M3", 300, 200), INV: ("F8_E8M0", 5, 4)}, "FP8 block 64", (300, 200)),
        (FP8, {W: ("F8_E4M3", 300, 200), "scale": ("F8_E8M0", 3, 2)}, "FP8 block 128", (300, 200)),
        (FP8, {W: ("I8", 16, 32), "scale": ("F8_E8M0", 16, 2)}, "MXFP4", (16, 64)),
        # Each tensor's own type decides: FP8 beside integers.
        (INT4, {W: ("F8_E4M3", 300, 200), INV: ("F32", 3, 2)}, "FP8 block 128", (300, 200)),
        (GPTQ, {W: ("F8_E4M3", 300, 200), INV: ("F32", 3, 2)}, "FP8 block 128", (300, 200)),
        (AWQ, {W: ("F8_E4M3", 300, 200), SCALE: ("F32", 300, 1)}, "FP8 channel", (300, 200)),
        (GPTQ | {"linear_fp8_config": blocks(64, 64)}, {W: ("F8_E4M3", 300, 200), INV: ("F32", 5, 4)},
         "FP8 block 64", (300, 200)),
        (INT4 | {"linear_fp8_config": blocks(64, 64)}, {W: ("F8_E4M3", 300, 200), INV: ("F32", 5, 4)},
         "FP8 block 64", (300, 200)),
        # Codes of 4 bits in tensors of int8: two in a byte, and one.
        (W4AFP8, {W: ("I8", 16, 32), INV: ("BF16", 16, 2)}, "INT4 32 BF16", (16, 64)),
        (W4AFP8, {W: ("I8", 4, 16, 32), INV: ("F32", 4, 16, 2)}, "INT4 32 F32", (4, 16, 64)),
        (W4AFP8, {W: ("F8_E4M3", 300, 200), INV: ("F32", 3, 2)}, "FP8 block 128", (300, 200)),
        (W4AFP8, {W: ("I8", 16, 32), INV: ("F8_E8M0", 16, 2)}, "MXFP4", (16, 64)),
        (MODELOPT | {"quant_algo": "MIXED_PRECISION"}, {W: ("I8", 16, 32), INV: ("F32", 16, 2)}, "INT4 32 F32",
         (16, 64)),
        (INT4, {W: ("I8", 16, 64), SCALE: ("BF16", 16, 2)}, "INT8 32", (16, 64)),
        # Known forms under other names.
        (AUTO_ROUND, gptq(), "INT4 32 F16", (16, 64)),
        (AUTO_ROUND | {"sym": False}, gptq(), "UINT4 32", (16, 64)),
        (AUTO_ROUND | {"bits": 8}, gptq(bits=8), "INT8 32", (16, 64)),
        (AUTO_ROUND | {"extra_config": {"a.b": {"sym": False}}}, gptq(), "UINT4 32", (16, 64)),
        (AUTO_ROUND | {"extra_config": {"a.c": {"sym": False}}}, gptq(), "INT4 32 F16", (16, 64)),
        (GPTQ | {"dynamic": {"+:a": {"sym": False, "bits": 8}}}, gptq(bits=8), "UINT8 32", (16, 64)),
        (GPTQ | {"dynamic": {"a": {"desc_act": True}}}, gptq(g_idx=("I32", 64)), "INT4 32 F16 in another order",
         (16, 64)),
        (AUTO_ROUND | {"extra_config": {"a.b": {"bits": 8}}}, gptq(bits=8), "INT8 32", (16, 64)),
        (AUTO_AWQ_ROUND, AWQ_PARTS, "INT4 32 F16", (16, 64)),
        (AUTO_AWQ_ROUND | {"sym": False}, AWQ_PARTS, "UINT4 32", (16, 64)),
        (quark(QUARK_FP8), {W: ("F8_E4M3", 300, 200), SCALE: ("F32",)}, "FP8 tensor", (300, 200)),
        (quark(QUARK_FP8 | {"qscheme": "per_channel"}), {W: ("F8_E4M3", 300, 200), SCALE: ("F32", 300)},
         "FP8 channel", (300, 200)),
        (quark(QUARK_FP4), {W: ("U8", 16, 32), SCALE: ("U8", 16, 2)}, "MXFP4", (16, 64)),
        (MODELOPT | {"quant_algo": "fp8_pb_wo"}, {W: ("F8_E4M3", 256, 256), SCALE: ("F32", 2, 1, 2, 1)},
         "FP8 block 128", (256, 256)),
        (MODELOPT | {"quant_algo": "mxfp4"}, {W: ("U8", 16, 32), SCALE: ("U8", 16, 2)}, "MXFP4", (16, 64)),
        # What no packed format keeps.
        (GPTQ | {"desc_act": True}, gptq(g_idx=("I32", 64)), "INT4 32 F16 in another order", (16, 64)),
        # Groups of 48 and 16 columns, as g_idx says.
        (GPTQ | {"group_size": 48}, gptq(g_idx=("I32", 64)), "INT4 32 F16 in another order", (16, 64)),
        (GPTQ | {"group_size": 128}, gptq(groups=1), "INT4 channel F16", (16, 64)),
        (blocks(8, 128), {W: ("F8_E4M3", 16, 128), INV: ("F32", 2, 1)}, "FP8 block 8 x 128", (16, 128)),
        (blocks(128, 24), {W: ("F8_E4M3", 16, 48), INV: ("F32", 1, 2)}, "FP8 block 24", (16, 48)),
        (INT4, {**PACKED, SCALE: ("BF16", 16, 8)}, "INT4 8 BF16", (16, 64)),
        (INT8, {**PACKED, SCALE: ("BF16", 16, 1), ZERO: ("I32", 4, 1)}, "UINT8 channel", (16, 32)),
        (GPTQ | {"bits": 8, "sym": False}, gptq(bits=8), "UINT8 32", (16, 64)),
        (INT4, {"weight_packed": ("U8", 16, 32), SCALE: ("U8", 16, 2)}, "MXFP4", (16, 64)),
    ],
)  # fmt: skip
def test_a_matrix(config: dict[str, Any], tensors: dict[str, Any], name: str, shape: tuple[int, ...]) -> None:
    index = {f"a.b.{part}": tensor(*of) for part, of in tensors.items()}
    other = tensor("BF16", 16)
    of = quantisation({"quantization_config": config})
    assert of is not None
    got = collapse({**index, "a.b.bias": other, "a.norm.weight": other}, of)
    assert got.keys() == {"a.b.weight", "a.b.bias", "a.norm.weight"}
    matrix = got["a.b.weight"]
    assert (matrix.dtype, matrix.shape) == (name, shape)
    assert matrix.nbytes == sum(t.nbytes for name, t in index.items() if not name.endswith("weight_shape"))


def test_experts_stacked_in_one_tensor() -> None:
    of = quantisation({"quantization_config": FP8})
    assert of is not None
    name = "model.layers.0.mlp.experts.gate_up_proj"
    index = {name: tensor("F8_E4M3", 4, 320, 200), f"{name}_scale_inv": tensor("F32", 4, 3, 2)}
    got = collapse(index, of)
    assert {key: (of.dtype, of.shape) for key, of in got.items()} == {name: ("FP8 block 128", (4, 320, 200))}
    index[f"{name}_scale_inv"] = tensor("F32", 4, 2, 2)
    with pytest.raises(WeightsError, match=r"experts\.gate_up_proj_scale_inv is F32"):
        collapse(index, of)


def test_experts_of_gpt_oss() -> None:
    name, config = "model.layers.0.mlp.experts.gate_up_proj", {"quant_method": "mxfp4", "modules_to_not_convert": ["a"]}
    of = quantisation({"quantization_config": config})
    assert of is not None
    index = {
        f"{name}_blocks": tensor("U8", 4, 10, 3, 16), f"{name}_scales": tensor("U8", 4, 10, 3),
        f"{name}_bias": tensor("BF16", 4, 10),
    }  # fmt: skip
    got = collapse(index, of)
    assert got.keys() == {name, f"{name}_bias"}
    assert (got[name].dtype, got[name].shape, got[name].nbytes) == ("MXFP4", (4, 10, 96), 4 * 10 * 3 * 17)
    for part, wrong in (
        ("scales", ("U8", 4, 10, 2)), ("scales", ("BF16", 4, 10, 3)), ("blocks", ("U8", 4, 10, 3, 8)),
        ("blocks", ("U8", 40, 3, 16)),
    ):  # fmt: skip
        with pytest.raises(WeightsError, match=r"gate_up_proj_scales is .* was expected"):
            collapse(index | {f"{name}_{part}": tensor(*wrong)}, of)


@pytest.mark.parametrize(
    ("config", "tensors", "problem"),
    [
        (FP8, {W: ("F8_E4M3", 300, 200)}, "but no weight_scale_inv or weight_scale"),
        (FP8, {W: ("F8_E4M3", 300, 200), INV: ("F32", 2, 3)}, "was expected. Another"),
        (FP8, {W: ("F8_E4M3", 300, 200), INV: ("I32", 3, 2)}, "was expected. Another"),
        (FP8, {W: ("F8_E4M3", 4, 256, 200), INV: ("F32", 3, 2, 2)}, "was expected. Another"),
        (FP8, {W: ("BF16", 16, 128)}, "no tensor is"),
        (GPTQ, {"qweight": ("I32", 8, 16), "scales": ("F16", 2, 16)}, "no qzeros"),
        (GPTQ, gptq(scales=("F16", 2, 15)), "was expected. Another"),
        (GPTQ, gptq(scales=("F16", 3, 16)), "was expected. Another"),
        (GPTQ, gptq(scales=("I32", 2, 16)), "was expected. Another"),
        (GPTQ, gptq(qzeros=("I32", 2, 3)), "was expected. Another"),
        (GPTQ, gptq(g_idx=("I32", 63)), "was expected. Another"),
        (AUTO_ROUND | {"group_size": 48}, gptq(), "groups of 48 columns, the last one smaller, .* without g_idx"),
        (AUTO_ROUND | {"extra_config": {"a": {"group_size": 48}}}, gptq(), "groups of 48 columns, the last one"),
        (AWQ | {"group_size": 48}, AWQ_PARTS, "groups of 48 columns, the last one"),
        (GPTQ | {"dynamic": {"a": {"group_size": 48}}}, gptq(), "groups of 48 columns, the last one"),
        (GPTQ | {"desc_act": True}, gptq(), "no g_idx"),
        (INT4, {**PACKED, SCALE: ("F16", 16, 2), "weight_g_idx": ("I32", 63)}, "was expected. Another"),
        (GPTQ | {"dynamic": {"-:a": {}}}, gptq(), "for a the config .* declares no integers"),
        (AWQ, AWQ_PARTS | {"qweight": ("I32", 64, 3)}, "was expected. Another"),
        (INT4, {"weight_packed": ("I32", 16, 8), SCALE: ("BF16", 16, 4)}, "no weight_shape"),
        (INT4, {**PACKED, SCALE: ("BF16", 16, 5)}, "was expected. Another"),
        (INT4, {**PACKED, SCALE: ("BF16", 15, 4)}, "was expected. Another"),
        (INT4, {**PACKED, SCALE: ("BF16", 16, 2), ZERO: ("I32", 16, 2)}, "was expected. Another"),
        (INT8, {**PACKED, SCALE: ("BF16", 16, 1), ZERO: ("I32", 2, 1)}, "was expected. Another"),
        (W4AFP8, {W: ("I8", 16, 32), INV: ("BF16", 16, 5)}, "was expected. Another"),
        (W4AFP8, {W: ("I8", 16, 32), INV: ("I32", 16, 2)}, "was expected. Another"),
        (W4AFP8, {W: ("I8", 16, 32), INV: ("F8_E8M0", 16, 4)}, "was expected. Another"),
        (FP8, {W: ("F8_E4M3", 300, 200), INV: ("F8_E8M0", 2, 3)}, "was expected. Another"),
        (FP8, {W: ("I8", 16, 64), SCALE: ("F32", 16, 1)}, "for a the config .* declares no integers"),
        (AUTO_ROUND | {"extra_config": {"^a$": {"bits": 16}}}, gptq(), "for a the config .* declares no integers"),
        (FP8, {**PACKED, SCALE: ("BF16", 16, 4)}, "for a the config .* declares no integers"),
        (MODELOPT, {W: ("U8", 16, 32), SCALE: ("F8_E4M3", 16, 4)}, "no weight_global_scale or weight_scale_2"),
        (MODELOPT, {W: ("U8", 16, 32), SCALE: ("F8_E4M3", 16, 2), "weight_scale_2": ("F32",)}, "was expected. Another"),
        (MODELOPT, {W: ("U8", 16, 32), SCALE: ("F8_E4M3", 16, 4), "weight_scale_2": ("F32", 2)}, "was expected"),
    ],
)  # fmt: skip
def test_refused(config: dict[str, Any], tensors: dict[str, Any], problem: str) -> None:
    with pytest.raises(WeightsError, match=problem):
        collapsed(config, **{f"a__{part}": tensor(*of) for part, of in tensors.items()})


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"fmt": "float8_e5m2"}, "fmt = 'float8_e5m2'"),
        ({"dequantize": True}, "dequantize"),
        ({"export": {"pack_method": "order"}}, "pack_method = 'order'"),
        ({"activation_scheme": "other"}, "activation_scheme"),
        ({"weight_block_size": [128]}, "two sizes"),
        ({"surprise": 1}, "--ignore-config-key surprise"),
    ],
)
def test_config_is_read_strictly(change: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        quantisation({"quantization_config": FP8 | change})


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (compressed(integers(4, actorder="other")), "actorder = 'other'"),
        (compressed(integers(4, dynamic=True)), "dynamic = True"),
        (compressed(integers(4, "re:(")), "not a valid regular expression"),
        (GPTQ | {"dynamic": {"+:*": {"bits": 8}}}, "not a valid regular expression"),
        (compressed(integers(4, strategy="other")), "strategy = 'other'"),
        (compressed(integers(5)), "num_bits = 5"),
        (compressed(integers(6, type="float")), "num_bits = 6"),
        (compressed(integers(4, surprise=1)), "config_groups: group_0: weights.*--ignore-config-key surprise"),
        (compressed(), "'config_groups' is empty"),
        (compressed(integers(4), sparsity_config={"format": "sparse-24-bitmask"}), "sparse-24-bitmask"),
        (compressed(integers(4), transform_config={"config_groups": {}}), "transform_config"),
        (compressed(integers(4), quantization_status="calibration"), "quantization_status"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format = 'marlin'"),
        (GPTQ | {"bits": 3}, "only 4, 8"),
        (GPTQ | {"dynamic": {"+:a": {"surprise": False}}}, "--ignore-config-key surprise"),
        (GPTQ | {"linear_fp8_config": {"fmt": "e5m2"}}, "linear_fp8_config: fmt = 'e5m2'"),
        (INT4 | {"linear_fp8_config": {"surprise": 1}}, "linear_fp8_config.*--ignore-config-key surprise"),
        (compressed(integers(4), moe_sparsity_config={"format": "a"}), "--ignore-config-key moe_sparsity_config"),
        (AUTO_ROUND | {"packing_format": "auto_round:fp8_static"}, "packing_format = 'auto_round:fp8_static'"),
        (AUTO_ROUND | {"bits": 2}, "bits = 2"),
        (AUTO_AWQ_ROUND | {"bits": 8}, "bits = 8"),
        (AUTO_ROUND | {"data_type": "mx_fp"}, "data_type = 'mx_fp'"),
        (AUTO_ROUND | {"act_bits": 8}, "act_bits = 8"),
        (AUTO_ROUND | {"extra_config": {"a(": {"bits": 8}}}, "not a valid regular expression"),
        (AUTO_ROUND | {"extra_config": {"a": {"surprise": 8}}}, "--ignore-config-key surprise"),
        (W4AFP8 | {"moe_weight_format": "int3"}, "moe_weight_format = 'int3'"),
        (quark(QUARK_FP8 | {"qscheme": "per_group"}), "fp8_e4m3 per_group is not implemented"),
        (quark(QUARK_FP8 | {"dtype": "int4"}), "int4 per_tensor is not implemented"),
        (quark(QUARK_FP4 | {"scale_format": "e4m3"}), "scale_format = 'e4m3'"),
        (quark(QUARK_FP8, layer_quant_config={"*": {"weight": QUARK_FP8 | {"dtype": "int8"}}}), "int8 per_tensor"),
        (quark(QUARK_FP8 | {"qscheme": "per_channel", "ch_axis": 1}), "ch_axis = 1"),
        (quark(QUARK_FP8, algo_config=[{"name": "rotation"}]), "algo_config"),
        (quark(QUARK_FP8, surprise=1), "--ignore-config-key surprise"),
        (MODELOPT | {"kv_cache_scheme": 8}, "kv_cache_scheme"),
        (GPTQ | {"surprise": 1}, "--ignore-config-key surprise"),
        (AWQ | {"version": "gemv"}, "version = 'gemv'"),
        (AWQ | {"zero_point": False}, "zero_point = False"),
        ({**MODELOPT, "quant_algo": "W4A8_AWQ"}, "quant_algo = 'W4A8_AWQ'"),
        ({**MODELOPT, "quant_algo": "w4a8_mxfp4_fp8"}, "quant_algo = 'w4a8_mxfp4_fp8'"),
    ],
)
def test_what_is_not_implemented(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        quantisation({"quantization_config": config})
    assert re.search(problem, str(caught.value) + caught.value.remedy, re.DOTALL)


def test_names_take_precedence_over_linear() -> None:
    """Names take precedence over "Linear", whatever their order."""
    config = compressed(integers(4), integers(8, "re:.*attn.*", "model.layers.0.mlp.up_proj"))
    of = quantisation({"quantization_config": config})
    assert of is not None
    names = ("model.layers.3.self_attn.q_proj", "model.layers.0.mlp.up_proj", "model.layers.10.mlp.up_proj")
    assert [of.integers(name).bits for name in names] == [8, 8, 4]


def test_bits_of_auto_round() -> None:
    """Names match whole names, and take precedence over regular expressions, which match anywhere."""
    extra = {".*mlp\\.gate.*": {"bits": 16}, "a.mlp.gate_proj": {"bits": 8}, "a.mlp.gate": {"bits": 16}}
    of = quantisation({"quantization_config": AUTO_ROUND | {"extra_config": extra}})
    assert of is not None
    names = ("a.mlp.gate", "a.mlp.gate_proj", "a.mlp.gate_proj_2", "a.mlp.up_proj", "b.a.mlp.gate_proj")
    assert [of.integers(name).bits for name in names] == [0, 8, 0, 4, 0]


def test_activation_formats() -> None:
    scheme = {"num_bits": 8, "type": "float", "dynamic": True}
    group = integers(4) | {"input_activations": scheme}
    of = quantisation({"quantization_config": compressed(group, kv_cache_scheme=scheme)})
    assert of is not None
    assert of.activations == "FP8 and a KV cache of FP8"


LLM_COMPRESSOR = {
    "config_groups": {
        "group_0": {
            "input_activations": {
                "actorder": None, "block_structure": None, "dynamic": True, "group_size": None, "num_bits": 8,
                "observer": None, "observer_kwargs": {}, "strategy": "token", "symmetric": True, "type": "float",
            },
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {
                "actorder": None, "block_structure": None, "dynamic": False, "group_size": None, "num_bits": 8,
                "observer": "minmax", "observer_kwargs": {}, "strategy": "channel", "symmetric": True, "type": "float",
            },
        }
    },
    "format": "float-quantized", "global_compression_ratio": 1.36, "ignore": ["lm_head"], "kv_cache_scheme": None,
    "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {},
    "transform_config": {}, "version": "0.11.0",
}  # fmt: skip
OPTIMUM = {
    "batch_size": 1, "bits": 4, "block_name_to_quantize": None, "cache_block_outputs": True, "damp_percent": 0.01,
    "dataset": None, "desc_act": False, "exllama_config": {"version": 1}, "group_size": 128, "max_input_length": None,
    "model_seqlen": None, "module_name_preceding_first_block": None, "modules_in_block_to_quantize": None,
    "pad_token_id": None, "quant_method": "gptq", "sym": True, "tokenizer": None, "true_sequential": True,
    "use_cuda_fp16": False, "use_exllama": True,
}  # fmt: skip
AUTO_GPTQ = {  # of AutoGPTQ 0.7.1, which names static_groups whatever desc_act is
    "bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": False, "static_groups": False, "sym": True,
    "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model", "is_marlin_format": False,
    "quant_method": "gptq",
}  # fmt: skip
AUTO_AWQ = {"bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm"}
MODELOPT_NOW = {
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {"num_bits": 4, "group_size": 16}}},
    "ignore": ["lm_head"], "quant_algo": "NVFP4", "producer": {"name": "modelopt", "version": "0.29.0"},
    "quant_method": "modelopt", "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
}  # fmt: skip
MODELOPT_31 = {  # Qwen3-32B-FP8-Static-PerTensor: without quant_method
    "config_groups": {"group_0": {"weights": {"dynamic": False, "num_bits": 8, "type": "float"}}},
    "ignore": ["lm_head"], "quant_algo": "FP8", "kv_cache_scheme": "FP8",
    "producer": {"name": "modelopt", "version": "0.31.0"},
}  # fmt: skip
MINIMAX = {
    "activation_scheme": "dynamic", "fmt": "float8_e4m3fn", "quant_method": "fp8", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}  # fmt: skip
MODELOPT_OLD = {
    "producer": {"name": "modelopt", "version": "0.23.0"},
    "quantization": {
        "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8", "group_size": 16, "exclude_modules": ["lm_head"],
    },
}  # fmt: skip


QUARK_EXPORT = {
    "kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder", "weight_format": "real_quantized",
    "weight_merge_groups": None,
}  # fmt: skip
QUARK_AS_FP8 = {
    "activation_scheme": "dynamic", "export": QUARK_EXPORT, "ignored_layers": ["lm_head"], "kv_cache_scheme": None,
    "quant_method": "fp8",
}  # fmt: skip


def quark_013(dtype: str, qscheme: str, **more: Any) -> dict[str, Any]:
    """A config as written by amd-quark 0.13."""
    weight = {
        "block_size": None, "ch_axis": None, "dtype": dtype, "enable_buffer_reuse": False, "group_size": None,
        "is_dynamic": False, "is_scale_quant": False, "max_input_numel": 4194304, "mx_element_dtype": None,
        "observer_cls": "PerTensorMinMaxObserver", "qscheme": qscheme, "round_method": "half_even",
        "scale_calculation_mode": None, "scale_format": None, "scale_type": None, "symmetric": True,
        "zero_point_type": "int32", **more,
    }  # fmt: skip
    layer = {"weight": weight, "input_tensors": weight | {"is_dynamic": True}, "output_tensors": None, "bias": None}
    return {
        "algo_config": None, "exclude": ["lm_head"], "export": QUARK_EXPORT, "kv_cache_post_rope": False,
        "global_quant_config": {**layer, "target_device": None}, "kv_cache_quant_config": {}, "layer_quant_config": {},
        "layer_type_quant_config": {}, "quant_method": "quark", "quant_mode": "eager_mode", "softmax_quant_spec": None,
        "version": "0.13",
    }  # fmt: skip


QUARK_MXFP4 = quark_013("fp4", "per_group", ch_axis=-1, group_size=32, scale_format="e8m0", scale_type="float",
                        scale_calculation_mode="even", symmetric=None)  # fmt: skip


@pytest.mark.parametrize(
    ("config", "activations"),
    [
        (LLM_COMPRESSOR, "FP8"),
        (OPTIMUM, ""),
        (AUTO_GPTQ, ""),
        (AUTO_GPTQ | {"desc_act": True, "static_groups": True}, ""),
        (quark_013("fp8_e4m3", "per_tensor"), "FP8"),
        (quark_013("fp8_e4m3", "per_channel", ch_axis=0, scale_type="float"), "FP8"),
        (QUARK_MXFP4, "MXFP4"),
        (QUARK_AS_FP8, "FP8, dynamic"),
        (LLM_COMPRESSOR | {"moe_sparsity_config": None}, "FP8"),
        (MINIMAX, "FP8, dynamic"),
        (MODELOPT_31, "FP8 and a KV cache of FP8"),
        (AUTO_AWQ | {"zero_point": True}, ""),
        (MODELOPT_NOW, "NVFP4 and a KV cache of FP8"),
        (legacy_modelopt(MODELOPT_OLD), "NVFP4 and a KV cache of FP8"),
    ],
)
def test_configs_as_tools_write_them(config: dict[str, Any], activations: str) -> None:
    of = quantisation({"quantization_config": config})
    assert of is not None
    assert of.activations == activations


def test_a_key_may_be_ignored() -> None:
    assert quantisation({"quantization_config": FP8 | {"surprise": 1}}, ["surprise"])


def test_not_quantised() -> None:
    assert quantisation({"quantization_config": None}) is None
