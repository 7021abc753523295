"""Writes one checkpoint for each scale format of transformers' FP8: argv[1] is a model folder, argv[2] where they go,
the rest the formats. Beside each lies exact.safetensors: the model as transformers itself loads it.

Run in a process of its own; see tests/families/test_library_files.py.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import Fp8Quantize


def write(source: Path, folder: Path, scale_format: str) -> None:
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.bfloat16)
    config = FineGrainedFP8Config(scale_fmt=scale_format, modules_to_not_convert=["lm_head"])
    quantise = Fp8Quantize(SimpleNamespace(quantization_config=config))
    stored: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        stored |= quantise.convert({name: tensor}) if name.endswith("_proj.weight") else {name: tensor}
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    settings = model.config.to_dict() | {"quantization_config": config.to_dict()}
    (folder / "config.json").write_text(json.dumps(settings, default=str))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).state_dict()
    exact = {name: tensor.contiguous() for name, tensor in loaded.items() if name.endswith("_proj.weight")}
    save_file(exact, folder / "exact.safetensors")


source, target = Path(sys.argv[1]), Path(sys.argv[2])
for name in sys.argv[3:]:
    write(source, target / name, name)
