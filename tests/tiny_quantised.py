"""Tiny quantised checkpoints, written tensor by tensor from the descriptions of their formats, with their exact values
in float64. Proa's own readers are not used here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from packing import E2M1, e2m1_values, e4m3_values
from tiny import make_tiny

# For one matrix: tensors by the part that follows the module's name, and their dequantised values in float64.
Written = tuple[dict[str, Tensor], np.ndarray]
QUANTISED_MODULES = re.compile(r".*(self_attn|linear_attn|mlp|experts).*(_proj(_qkvz|_with_mqa)?|w[123])\.weight")


@dataclass(frozen=True)
class Scheme:
    """A quantisation scheme. config: quantization_config. write: makes the tensors of a matrix [rows, columns]. kept:
    Proa's name of the stored type."""

    config: dict[str, Any]
    write: Callable[[Tensor], Written]
    kept: str


def _e4m3(weight: Tensor, scale: Tensor) -> tuple[Tensor, np.ndarray]:
    """`scale` [rows, columns]."""
    codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, e4m3_values(codes.view(torch.uint8).numpy()) * scale.double().numpy()


def fp8_block(dtype: torch.dtype, rows: int = 128, columns: int = 128) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        n, k = weight.shape
        scales = torch.empty(-(-n // rows), -(-k // columns))
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                part = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                scales[i, j] = part.abs().max() / 448
        scales = scales.to(dtype)
        spread = scales.float().repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        codes, values = _e4m3(weight, spread)
        return {"weight": codes, "weight_scale_inv": scales}, values

    return write


def _amax(weight: Tensor, group: int) -> Tensor:
    """Largest magnitude per row and group, [rows, groups]."""
    return weight.abs().view(len(weight), -1, group).amax(-1)


def _spread(scales: np.ndarray | Tensor, group: int) -> np.ndarray:
    return np.repeat(np.asarray(scales, dtype=np.float64), group, 1)


def fp8_block_of_powers(rows: int, columns: int, name: str = "weight_scale_inv") -> Callable[[Tensor], Written]:
    """Block-scaled FP8 with powers of two as scales, float8_e8m0fnu."""

    def write(weight: Tensor) -> Written:
        n, k = weight.shape
        power = torch.empty(-(-n // rows), -(-k // columns), dtype=torch.int32)
        for i in range(power.shape[0]):
            for j in range(power.shape[1]):
                part = weight[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                power[i, j] = torch.ceil(torch.log2(part.abs().max() / 448)).int()
        spread = (2.0 ** power.double()).repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
        codes, values = _e4m3(weight, spread)
        return {"weight": codes, name: (power + 127).to(torch.uint8).view(torch.float8_e8m0fnu)}, values

    return write


def w4afp8(group: int, dtype: torch.dtype) -> Callable[[Tensor], Written]:
    """Codes in two's complement, two in a byte of int8, that of the first column in the low bits."""

    def write(weight: Tensor) -> Written:
        scales = (_amax(weight, group) / 7).to(dtype)
        real = _spread(scales.float(), group)
        codes = np.clip(np.round(weight.numpy() / real), -8, 7).astype(np.int8)
        paired = (codes[:, ::2] & 15) | (codes[:, 1::2] << 4)
        parts = {"weight": torch.from_numpy(paired.astype(np.int8)), "weight_scale_inv": scales}
        return parts | {"input_scale": torch.ones(1)}, codes * real

    return write


def int8_groups(bits: int, group: int, dtype: torch.dtype) -> Callable[[Tensor], Written]:
    """compressed-tensors' int-quantized: a code of `bits` bits in each byte."""

    def write(weight: Tensor) -> Written:
        middle = 1 << bits - 1
        scales = (_amax(weight, group) / (middle - 1)).to(dtype)
        real = _spread(scales.float(), group)
        codes = np.clip(np.round(weight.numpy() / real), -middle, middle - 1).astype(np.int8)
        return {"weight": torch.from_numpy(codes), "weight_scale": scales}, codes * real

    return write


def renamed(write: Callable[[Tensor], Written], **names: str) -> Callable[[Tensor], Written]:
    def write_renamed(weight: Tensor) -> Written:
        parts, values = write(weight)
        return {names.get(part, part): tensor for part, tensor in parts.items()}, values

    return write_renamed


def paired_floats(weight: Tensor) -> Written:
    """DeepSeek-V4's and transformers' FP4: int8, scales as float8_e8m0fnu."""
    parts, values = mxfp4(weight)
    scales = parts["weight_scale"].view(torch.float8_e8m0fnu)
    return {"weight": parts["weight_packed"].view(torch.int8), "weight_scale_inv": scales}, values


def quark_rows(*, whole: bool) -> Callable[[Tensor], Written]:
    """fp8_rows with scales [rows]."""

    def write(weight: Tensor) -> Written:
        parts, values = fp8_rows(torch.float32, whole=whole)(weight)
        return parts | {"weight_scale": parts["weight_scale"].flatten()}, values

    return write


def fp8_rows(dtype: torch.dtype, *, whole: bool, shape: tuple[int, ...] = ()) -> Callable[[Tensor], Written]:
    """FP8 with a scale per row; whole: shape of a single scale for the matrix instead."""

    def write(weight: Tensor) -> Written:
        scales = (weight.abs().amax().view(1, 1) if whole else weight.abs().amax(1, keepdim=True)) / 448
        scales = scales.to(dtype)
        codes, values = _e4m3(weight, scales.float().expand(weight.shape))
        stored = scales.view(shape) if whole else scales
        return {"weight": codes, "weight_scale": stored, "input_scale": torch.ones(1)}, values

    return write


def int8_rows(weight: Tensor) -> Written:
    scales = (weight.abs().amax(1, keepdim=True) / 127).bfloat16()
    codes = (weight / scales.float()).round().clamp(-128, 127).to(torch.int8)
    return {"weight": codes, "weight_scale": scales}, codes.double().numpy() * scales.double().numpy()


def _words(codes: np.ndarray, bits: int) -> Tensor:
    """Pack codes [.., n] into int32 [.., n bits / 32], the first in the lowest bits."""
    parts = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 32 // bits)
    words = sum(parts[..., i] << np.uint32(bits * i) for i in range(32 // bits))
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int32))


def _group_of(columns: int, group: int, *, shuffled: bool) -> np.ndarray:
    """The group of each column."""
    groups = np.arange(columns) // group
    return np.random.default_rng(columns).permutation(groups) if shuffled else groups


def packed_integers(
    bits: int, group: int, dtype: torch.dtype, *, zeros: bool = False, shuffled: bool = False
) -> Callable[[Tensor], Written]:
    """compressed-tensors' pack-quantized; group 0: rows."""

    def write(weight: Tensor) -> Written:
        n, k = weight.shape
        g, middle = group or k, 1 << bits - 1
        scales = (_amax(weight, g) / (middle - 1)).to(dtype)
        zero = np.full(scales.shape, middle)
        if zeros:
            zero = np.random.default_rng(n + k).integers(0, 1 << bits, scales.shape)
        of = _group_of(k, g, shuffled=shuffled)
        real, zero_of = scales.double().numpy()[:, of], zero[:, of]
        codes = np.clip(np.round(weight.numpy() / real) + zero_of, 0, 2 * middle - 1)
        parts = {"weight_packed": _words(codes, bits), "weight_scale": scales, "weight_shape": torch.tensor([n, k])}
        if zeros:
            parts["weight_zero_point"] = _words(zero.T, bits).T
        if shuffled:
            parts["weight_g_idx"] = torch.from_numpy(of.astype(np.int32))
        return parts, (codes - zero_of) * real

    return write


def gptq(
    bits: int, group: int, *, symmetric: bool, v2: bool = False, shuffled: bool = False
) -> Callable[[Tensor], Written]:
    """qweight [columns bits / 32, rows], qzeros [groups, rows bits / 32], less 1 in the first version."""

    def write(weight: Tensor) -> Written:
        n, k = weight.shape
        g, middle = group or k, 1 << bits - 1
        scales = (_amax(weight, g) / (middle - 1)).half()
        zero = np.full(scales.shape, middle)
        if not symmetric:
            zero = np.random.default_rng(n + k).integers(0, 1 << bits, scales.shape)
        of = _group_of(k, g, shuffled=shuffled)
        real, zero_of = scales.double().numpy()[:, of], zero[:, of]
        codes = np.clip(np.round(weight.numpy() / real) + zero_of, 0, 2 * middle - 1)
        stored_zero = zero if v2 else (zero - 1) % (1 << bits)
        parts = {
            "qweight": _words(codes, bits).T, "qzeros": _words(stored_zero.T, bits), "scales": scales.T,
            "g_idx": torch.from_numpy(of.astype(np.int32)),
        }  # fmt: skip
        return parts, (codes - zero_of) * real

    return write


def _awq_words(codes: np.ndarray) -> Tensor:
    """[.., 8 n] to int32 [.., n]: code p of a word is number (0, 2, 4, 6, 1, 3, 5, 7)[p] of its eight."""
    eights = codes.astype(np.uint32).reshape(*codes.shape[:-1], -1, 8)
    words = sum(eights[..., of] << np.uint32(4 * p) for p, of in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    return torch.from_numpy(np.ascontiguousarray(words).view(np.int32))


def awq(weight: Tensor) -> Written:
    """qweight [columns, rows / 8], qzeros [groups, rows / 8], scales [groups, rows]; groups of 32."""
    n, k = weight.shape
    scales = (_amax(weight, 32) / 7).half()
    zero = np.random.default_rng(n + k).integers(0, 16, scales.shape)
    real = _spread(scales.float(), 32)
    codes = np.clip(np.round(weight.numpy() / real) + np.repeat(zero, 32, 1), 0, 15)
    parts = {"qweight": _awq_words(codes.T), "qzeros": _awq_words(zero.T), "scales": scales.T}
    return parts, (codes - np.repeat(zero, 32, 1)) * real


def _e2m1_codes(values: np.ndarray) -> np.ndarray:
    nearest = np.abs(np.abs(values)[..., None] - E2M1).argmin(-1)
    return nearest + 8 * (values < 0)


def _bytes(codes: np.ndarray) -> Tensor:
    return torch.from_numpy((codes[:, ::2] | codes[:, 1::2] << 4).astype(np.uint8))


def nvfp4(names: tuple[str, str], *, inverse: bool) -> Callable[[Tensor], Written]:
    """names: of codes and of the whole matrix' scale, which is stored as what others are divided by if `inverse`."""

    def write(weight: Tensor) -> Written:
        whole = (weight.abs().amax() / (6 * 448)).float()
        scales = (_amax(weight, 16) / 6 / whole).to(torch.float8_e4m3fn)
        stored = (1 / whole).view(1) if inverse else whole
        factor = 1 / stored.double().item() if inverse else stored.double().item()
        real = _spread(e4m3_values(scales.view(torch.uint8).numpy()) * factor, 16)
        codes = _e2m1_codes(weight.numpy() / np.where(real == 0, 1, real))
        parts = {names[0]: _bytes(codes), "weight_scale": scales, names[1]: stored}
        return parts, e2m1_values(codes) * real

    return write


def mxfp4(weight: Tensor) -> Written:
    power = torch.floor(torch.log2(_amax(weight, 32))) - 2
    real = _spread(2.0 ** power.double(), 32)
    codes = _e2m1_codes(weight.numpy() / real)
    return {"weight_packed": _bytes(codes), "weight_scale": (power + 127).to(torch.uint8)}, e2m1_values(codes) * real


def mxfp8(name: str) -> Callable[[Tensor], Written]:
    def write(weight: Tensor) -> Written:
        power = torch.floor(torch.log2(_amax(weight, 32))) - 8
        codes, values = _e4m3(weight, torch.from_numpy(_spread(2.0 ** power.double(), 32)))
        return {"weight": codes, name: (power + 127).to(torch.uint8)}, values

    return write


def _fp8_config(**more: Any) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        **more,
    }


def _compressed(form: str, bits: int, strategy: str, *, float_: bool = False, **weights: Any) -> dict[str, Any]:
    of = {"num_bits": bits, "type": "float" if float_ else "int", "strategy": strategy, "symmetric": True}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*gate$"],
        "kv_cache_scheme": None,
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {**of, "dynamic": False, "actorder": None, "observer": "minmax", **weights},
                "input_activations": None,
                "output_activations": None,
            }
        },
    }


def _activations(config: dict[str, Any]) -> dict[str, Any]:
    made_for = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
    config["config_groups"]["group_0"]["input_activations"] = made_for
    return config


def _pack(bits: int, group: int, **weights: Any) -> dict[str, Any]:
    strategy = "group" if group else "channel"
    return _compressed("pack-quantized", bits, strategy, group_size=group or None, **weights)


def _gptq_config(bits: int, **more: Any) -> dict[str, Any]:
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 32,
        "desc_act": False,
        "sym": True,
        "damp_percent": 0.01,
    }
    return config | {"true_sequential": True, "checkpoint_format": "gptq", "dynamic": {"-:.*mlp.gate$": {}}} | more


def _auto_round(bits: int, packing_format: str, **more: Any) -> dict[str, Any]:
    config = {"quant_method": "auto-round", "bits": bits, "group_size": 32, "sym": True, "data_type": "int"}
    return config | {"packing_format": packing_format, "autoround_version": "0.16.1", "iters": 0} | more


def _quark(weight: dict[str, Any]) -> dict[str, Any]:
    layer = {"weight": weight, "input_tensors": weight, "output_tensors": None, "bias": None}
    return {
        "quant_method": "quark", "global_quant_config": layer, "exclude": ["lm_head"], "algo_config": None,
        "layer_quant_config": {}, "layer_type_quant_config": {}, "quant_mode": "eager_mode",
        "export": {"kv_cache_group": [], "min_kv_scale": 0.0, "pack_method": "reorder",
                   "weight_format": "real_quantized", "weight_merge_groups": None},
    }  # fmt: skip


def _modelopt(algo: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": algo, "ignore": ["lm_head"], "producer": {"name": "modelopt"}}


_BF16, _F16, _F32 = torch.bfloat16, torch.float16, torch.float32
_FLOAT8 = _activations(_compressed("float-quantized", 8, "channel", float_=True))
_TENSOR8 = _activations(_compressed("float-quantized", 8, "tensor", float_=True))
SCHEMES = {
    "fp8 block": Scheme(_fp8_config(modules_to_not_convert=["lm_head"]), fp8_block(_BF16), "FP8 block 128"),
    "fp8 block f32": Scheme(_fp8_config(scale_fmt="ue8m0"), fp8_block(_F32), "FP8 block 128"),
    "fp8 small blocks": Scheme(_fp8_config(weight_block_size=[32, 16]), fp8_block(_F32, 32, 16), "FP8 block 16"),
    "fp8 rows": Scheme(_FLOAT8, fp8_rows(_BF16, whole=False), "FP8 channel"),
    "fp8 tensor": Scheme(_TENSOR8, fp8_rows(_BF16, whole=True, shape=(1,)), "FP8 tensor"),
    "fp8 modelopt": Scheme(_modelopt("FP8"), fp8_rows(_F32, whole=True), "FP8 tensor"),
    "fp8 powers": Scheme(
        _fp8_config(scale_fmt="ue8m0", weight_block_size=[32, 16]), fp8_block_of_powers(32, 16), "FP8 block 16"
    ),
    "int4 paired": Scheme({"quant_method": "w4afp8", "weight_block_size": [128, 128]}, w4afp8(32, _BF16),
                          "INT4 32 BF16"),
    "int4 in int8": Scheme(_compressed("int-quantized", 4, "group", group_size=32), int8_groups(4, 32, _BF16),
                           "INT8 32"),
    "auto-round": Scheme(_auto_round(4, "auto_round:auto_gptq"), gptq(4, 32, symmetric=True), "INT4 32 F16"),
    "auto-round zeros": Scheme(
        _auto_round(4, "auto_round:gptqmodel", sym=False), gptq(4, 32, symmetric=False, v2=True), "UINT4 32"
    ),
    "int8 rows": Scheme(_compressed("int-quantized", 8, "channel"), int8_rows, "INT8 channel"),
    "int4": Scheme(_pack(4, 32), packed_integers(4, 32, _BF16), "INT4 32 BF16"),
    "int4 f16": Scheme(_pack(4, 16), packed_integers(4, 16, _F16), "INT4 16 F16"),
    "int4 f32": Scheme(_pack(4, 32), packed_integers(4, 32, _F32), "INT4 32 F32"),
    "int4 rows": Scheme(_pack(4, 0), packed_integers(4, 0, _BF16), "INT4 channel BF16"),
    "int4 zeros": Scheme(_pack(4, 16, symmetric=False), packed_integers(4, 16, _BF16, zeros=True), "UINT4 16"),
    "int8 packed": Scheme(_pack(8, 32), packed_integers(8, 32, _F16), "INT8 32"),
    "gptq": Scheme(_gptq_config(4), gptq(4, 32, symmetric=True), "INT4 32 F16"),
    "gptq rows": Scheme(_gptq_config(4, group_size=-1), gptq(4, 0, symmetric=True), "INT4 channel F16"),
    "gptq zeros": Scheme(_gptq_config(4, sym=False), gptq(4, 32, symmetric=False), "UINT4 32"),
    "gptq v2": Scheme(
        _gptq_config(4, sym=False, checkpoint_format="gptq_v2"), gptq(4, 16, symmetric=False, v2=True), "UINT4 16"
    ),
    "gptq 8": Scheme(_gptq_config(8), gptq(8, 32, symmetric=True), "INT8 32"),
    "awq": Scheme(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
         "modules_to_not_convert": None}, awq, "UINT4 32",
    ),
    "nvfp4": Scheme(
        _compressed("nvfp4-pack-quantized", 4, "tensor_group", float_=True, group_size=16),
        nvfp4(("weight_packed", "weight_global_scale"), inverse=True), "NVFP4",
    ),
    "nvfp4 modelopt": Scheme(_modelopt("NVFP4"), nvfp4(("weight", "weight_scale_2"), inverse=False), "NVFP4"),
    "mxfp4": Scheme(_compressed("mxfp4-pack-quantized", 4, "group", float_=True, group_size=32), mxfp4, "MXFP4"),
    "mxfp8": Scheme(
        {"quant_method": "mxfp8", "weight_block_size": [1, 32], "scale_fmt": "ue8m0", "ignored_layers": []},
        mxfp8("weight_scale_inv"), "MXFP8",
    ),
    "mxfp8 compressed": Scheme(_compressed("mxfp8-quantized", 8, "group", float_=True), mxfp8("weight_scale"), "MXFP8"),
}  # fmt: skip


# Tensors of SCHEMES in the files of other tools: once they are found, nothing distinguishes them.
OTHER_NAMES = {
    "fp8 minimax": Scheme(_fp8_config(fmt="float8_e4m3fn"), fp8_block(_F32), "FP8 block 128"),
    "fp8 modelopt blocks": Scheme(
        _modelopt("fp8_pb_wo"), renamed(fp8_block(_F32), weight_scale_inv="weight_scale"), "FP8 block 128"
    ),
    "fp8 quark": Scheme(
        _quark({"dtype": "fp8_e4m3", "qscheme": "per_channel", "ch_axis": 0}), quark_rows(whole=False), "FP8 channel"
    ),
    "auto-round awq": Scheme(_auto_round(4, "auto_round:auto_awq", sym=False), awq, "UINT4 32"),
    "mxfp4 paired": Scheme(_fp8_config(expert_dtype="fp4", scale_fmt="ue8m0"), paired_floats, "MXFP4"),
    "mxfp4 quark": Scheme(
        _quark({"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"}),
        renamed(mxfp4, weight_packed="weight"),
        "MXFP4",
    ),
    "mxfp4 modelopt": Scheme(_modelopt("mxfp4"), renamed(mxfp4, weight_packed="weight"), "MXFP4"),
}


# Types that no packed format holds: they become bfloat16.
DECODED = {
    "fp8 odd blocks": Scheme(_fp8_config(weight_block_size=[24, 40]), fp8_block(_F32, 24, 40), "FP8 block 24 x 40"),
    "int4 small groups": Scheme(_pack(4, 8), packed_integers(4, 8, _BF16), "INT4 8 BF16"),
    "int8 zeros": Scheme(_pack(8, 32, symmetric=False), packed_integers(8, 32, _BF16, zeros=True), "UINT8 32"),
    "gptq in another order": Scheme(
        _gptq_config(4, desc_act=True, sym=False),
        gptq(4, 32, symmetric=False, shuffled=True),
        "UINT4 32 in another order",
    ),
    "int4 in another order": Scheme(
        _pack(4, 32, actorder="group"), packed_integers(4, 32, _BF16, shuffled=True), "INT4 32 BF16 in another order"
    ),
    "gptq 8 zeros": Scheme(_gptq_config(8, sym=False), gptq(8, 32, symmetric=False), "UINT8 32"),
}


def make_gpt_oss(folder: Path, plain: Path) -> None:
    """gpt-oss as OpenAI stores it: interleaved rows of gate and up, experts [rows, groups, 16] with two codes per byte;
    and the same values in bfloat16 as transformers stores them, transposed."""
    make_tiny("gpt-oss", folder)
    stored = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    exact = dict(stored)
    for name in [name for name in stored if name.endswith(("gate_up_proj", "down_proj"))]:
        turned = stored.pop(name).float().transpose(1, 2)
        written, values = zip(*(mxfp4(matrix) for matrix in turned), strict=True)
        codes, scales = (torch.stack([of[part] for of in written]) for part in ("weight_packed", "weight_scale"))
        stored |= {f"{name}_blocks": codes.view(*scales.shape, 16), f"{name}_scales": scales}
        exact[name] = torch.from_numpy(np.stack(values)).bfloat16().transpose(1, 2).contiguous()
    plain.mkdir(exist_ok=True)
    save_file(exact, plain / "model.safetensors")
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (plain / "config.json").write_text(json.dumps(config))
    more = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": more}))


def make_quantised(
    scheme: Scheme, model: str, folder: Path, *, only: str = r".*", **overrides: Any
) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint with quantised linear layers (those that match `only`), and the values of all its tensors."""
    make_tiny(model, folder, **overrides)
    tensors = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    values: dict[str, np.ndarray] = {}
    for name, tensor in tensors.items():
        if QUANTISED_MODULES.fullmatch(name) and re.match(only, name):
            written, values[name] = scheme.write(tensor)
            stored |= {f"{name.removesuffix('.weight')}.{part}": t.contiguous() for part, t in written.items()}
        else:
            stored[name] = tensor.bfloat16()
            values[name] = stored[name].double().numpy()
    save_file(stored, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": scheme.config}))
    return folder, values
