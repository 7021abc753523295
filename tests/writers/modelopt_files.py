"""Writes one checkpoint for each configuration of ModelOpt: argv[1] is a model folder, argv[2] where they go, the rest
names of configurations. Beside each lies exact.safetensors: what ModelOpt's own types say that the weights are.

Run in a process of its own, with the library on its path; see tests/families/test_library_files.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.quantization.qtensor import FP8QTensor, MXFP4QTensor, MXFP8QTensor, NVFP4QTensor
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM


def exact_of(name: str, codes: torch.Tensor, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """[rows, columns] in float32."""
    scale, wide = parts["weight_scale"], torch.Size((codes.shape[0], 2 * codes.shape[1]))
    if name.startswith("NVFP4"):
        of, more = NVFP4QTensor(wide, torch.float32, codes), {"block_sizes": {-1: 16}}
        more["double_scale"] = parts["weight_scale_2"]
    elif name.startswith("MXFP4"):
        of, more = MXFP4QTensor(wide, torch.float32, codes), {"block_sizes": {-1: 32}}
    elif name.startswith("MXFP8"):
        of, more = MXFP8QTensor(codes.shape, torch.float32, codes), {}
    else:
        blocks = scale.dim() == 4  # [rows / 128, 1, columns / 128, 1]
        of, more = (
            FP8QTensor(codes.shape, torch.float32, codes),
            {"block_sizes": {-1: 128, -2: 128} if blocks else None},
        )
        scale = scale[:, 0, :, 0] if blocks else scale
    return of.dequantize(torch.float32, scale=scale, **more).contiguous()


def write(source: Path, folder: Path, name: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    tokens = torch.arange(3, 35)[None]
    model = mtq.quantize(model, getattr(mtq, name), forward_loop=lambda calibrated: calibrated(tokens))
    export_hf_checkpoint(model, export_dir=folder)
    stored = load_file(folder / "model.safetensors")
    exact = {}
    for path in [path.removesuffix(".weight_scale") for path in stored if path.endswith(".weight_scale")]:
        parts = {of.removeprefix(f"{path}."): tensor for of, tensor in stored.items() if of.startswith(f"{path}.")}
        exact[f"{path}.weight"] = exact_of(name, parts["weight"], parts)
    save_file(exact, folder / "exact.safetensors")


source, target = Path(sys.argv[1]), Path(sys.argv[2])
for name in sys.argv[3:]:
    write(source, target / name, name)
