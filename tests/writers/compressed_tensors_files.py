"""Writes one checkpoint for each preset scheme of compressed-tensors: argv[1] is a model folder, argv[2] where they go,
the rest the schemes. Beside each lies exact.safetensors: what the library itself says that the weights are.

Run in a process of its own, with the library on its path; see tests/families/test_library_files.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.initialize import initialize_module_for_quantization
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def ranges(weight: torch.Tensor, shape: torch.Size, structure: list[int] | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Smallest and largest values under each scale, as a tensor of the scales' shape."""
    rows, columns = weight.shape
    height, width = structure or (rows // shape[0] if len(shape) > 1 else rows, columns // shape[-1])
    height, width = min(height, rows), min(width, columns)
    tiles = [[weight[i : i + height, j : j + width] for j in range(0, columns, width)] for i in range(0, rows, height)]
    least, most = ([[getattr(t, of)() for t in row] for row in tiles] for of in ("min", "max"))
    return torch.tensor(least).view(shape), torch.tensor(most).view(shape)


def quantise(module: torch.nn.Linear) -> None:
    """Scales by the range of the weights, as llm-compressor's observer `minmax` finds them."""
    args, weight = module.quantization_scheme.weights, module.weight.detach().float()
    total = None
    if hasattr(module, "weight_global_scale"):
        total = generate_gparam(weight.min(), weight.max())
        module.weight_global_scale.data.copy_(total)
    least, most = ranges(weight, module.weight_scale.shape, args.block_structure)
    scale, zero = calculate_qparams(least, most, args, total)
    module.weight_scale.data = scale.to(module.weight_scale.dtype).view(module.weight_scale.shape)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data = zero.round().to(module.weight_zero_point.dtype)


def write(source: Path, folder: Path, name: str) -> None:
    # The library computes in the model's type, where NVFP4's two scales would be rounded on the way.
    dtype = torch.float32 if name.startswith("NVFP4") else torch.bfloat16
    model = AutoModelForCausalLM.from_pretrained(source, dtype=dtype)
    scheme = preset_name_to_scheme(name, ["Linear"])
    if scheme.input_activations is not None and scheme.input_activations.dynamic is not True:
        scheme.input_activations = None  # what calibration would find
    apply_quantization_config(model, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if getattr(module, "quantization_scheme", None) is not None:
            initialize_module_for_quantization(module, force_zero_point=False)
            quantise(module)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    compressor.decompress_model(model)
    exact = {name: tensor.contiguous().clone() for name, tensor in model.state_dict().items()}
    save_file({name: tensor for name, tensor in exact.items() if name.endswith("weight")}, folder / "exact.safetensors")


source, target = Path(sys.argv[1]), Path(sys.argv[2])
for name in sys.argv[3:]:
    write(source, target / name, name)
