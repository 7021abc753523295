"""Tiny quantised checkpoints, written tensor by tensor from the descriptions of their formats, with what they mean in
float64. Nothing here uses Proa's own readers.
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

from packing import e4m3_values
from tiny import make_tiny

# Of a matrix: tensors by what follows the module's name, and what they mean in float64.
Written = tuple[dict[str, Tensor], np.ndarray]
QUANTISED_MODULES = re.compile(r".*(self_attn|mlp|experts).*_proj\.weight")


@dataclass(frozen=True)
class Scheme:
    """config: quantization_config. write: of a matrix [rows, columns]. kept: Proa's name of what is stored."""

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


def _fp8_config(**more: Any) -> dict[str, Any]:
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
        **more,
    }


SCHEMES = {
    "fp8 block": Scheme(_fp8_config(modules_to_not_convert=["lm_head"]), fp8_block(torch.bfloat16), "FP8 block 128"),
    "fp8 block f32": Scheme(_fp8_config(scale_fmt="ue8m0"), fp8_block(torch.float32), "FP8 block 128"),
    "fp8 small blocks": Scheme(
        _fp8_config(weight_block_size=[32, 16]), fp8_block(torch.float32, 32, 16), "FP8 block 16"
    ),
}


def make_quantised(
    scheme: Scheme, model: str, folder: Path, *, only: str = r".*", **overrides: Any
) -> tuple[Path, dict[str, np.ndarray]]:
    """A checkpoint whose linear maps are quantised, those that match `only`; and the values of all its tensors."""
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
