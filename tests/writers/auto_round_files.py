"""Writes one checkpoint for each format of AutoRound: argv[1] is a model folder, argv[2] where they go, the rest are
formats with "+sym" or "+asym". Beside each lies exact.safetensors: what AutoRound's layers say that the weights are.

Run in a process of its own, with the library on its path; see tests/families/test_library_files.py.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from auto_round import AutoRound
from auto_round.export.export_to_autoround.export import dynamic_import_quant_linear_for_packing
from auto_round.export.export_to_awq.utils import dequantize_gemm
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

GROUP = 32
# Modules with settings of their own: one that stays as it is, and one of 8 bits.
PLAIN, EIGHT = "model.layers.0.mlp.gate_proj", "model.layers.0.self_attn.o_proj"


class NoTokenizer:
    """AutoRound only saves it."""

    def save_pretrained(self, folder: str) -> None:
        pass


def exact_of(parts: dict[str, torch.Tensor], bits: int, form: str, sym: bool) -> torch.Tensor:
    """[rows, columns] in float32."""
    scales = parts["scales"].float()
    if "awq" in form:
        return dequantize_gemm(parts["qweight"], parts["qzeros"], scales, bits, GROUP).T.contiguous()
    make = dynamic_import_quant_linear_for_packing(form, bits, GROUP, sym)
    columns, rows = parts["qweight"].shape[0] * 32 // bits, parts["qweight"].shape[1]
    layer = make(bits, GROUP, columns, rows, False)
    layer.qweight, layer.qzeros, layer.scales = parts["qweight"], parts["qzeros"], scales
    return layer(torch.eye(columns)).T.contiguous()


def write(source: Path, folder: Path, name: str) -> None:
    form, _, kind = name.partition("+")
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    own = {} if "awq" in form else {PLAIN: {"bits": 16}, EIGHT: {"bits": 8}}
    rounding = AutoRound(
        model, tokenizer=NoTokenizer(), bits=4, group_size=GROUP, sym=kind == "sym", iters=0, disable_opt_rtn=True,
        layer_config=own or None,
    )  # fmt: skip
    rounding.quantize_and_save(output_dir=str(folder), format=form)
    written = next(folder.glob("**/config.json")).parent
    stored: dict[str, torch.Tensor] = {}
    for file in written.glob("*.safetensors"):
        stored |= load_file(file)
    modules: dict[str, dict[str, torch.Tensor]] = {}
    for path, tensor in stored.items():
        module, _, part = path.rpartition(".")
        modules.setdefault(module, {})[part] = tensor
    packed = {module: parts for module, parts in modules.items() if "qweight" in parts}
    bits = {module: 8 if module == EIGHT and own else 4 for module in packed}
    form = form if ":" in form or kind == "asym" else f"{form}:auto_gptq"  # what AutoRound makes of it
    exact = {f"{m}.weight": exact_of(parts, bits[m], form, kind == "sym") for m, parts in packed.items()}
    save_file(exact, written / "exact.safetensors")


source, target = Path(sys.argv[1]), Path(sys.argv[2])
for name in sys.argv[3:]:
    write(source, target / name.replace(":", "-"), name)
