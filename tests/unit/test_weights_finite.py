"""Non-finite values in a checkpoint: an error at load with file, tensor and index, however weights are loaded."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from proa.errors import WeightsError
from proa.layers.decoder import Decoder
from proa.native.pool import Pool
from proa.ops.cpu import CpuOps, Recorder
from proa.ops.packed import Memory
from proa.ops.staging import DeviceRows, Staging
from proa.weights.checkpoint import open_checkpoint
from proa.weights.index import TensorInfo
from proa.weights.load import load_weights
from tiny import make_tiny, tiny_reference
from tiny_gguf import make_tiny_gguf
from tiny_quantised import DECODED, SCHEMES, make_quantised
from weights_cases import load

Edit = Callable[[torch.Tensor], None]

ATTENTION = "model.layers.1.self_attn.q_proj.weight"
EXPERTS = "model.layers.2.mlp.experts.gate_up_proj"


def by_workers(path: Path) -> None:
    """Load by workers: panels of packed formats, bfloat16 rows, float32 vectors."""
    checkpoint = open_checkpoint(path)
    declared = checkpoint.declare()
    with Pool([[0], []], pin=False) as pool:
        model = Decoder(declared.spec, CpuOps(Recorder(pool, Memory(pool, [None] * 2), 4, 1, 1)).table())
        load_weights(checkpoint, declared, dict(model.parameters()), lambda done, total: None, pool)


def by_staging(path: Path) -> None:
    """Load through the staging, as for a GPU's unpacked parameters, in parts."""
    checkpoint = open_checkpoint(path)
    declared = checkpoint.declare()
    with Pool([[0]], pin=False) as pool:
        staging = Staging(pool, 1 << 16, pinned=False)
        targets = {
            name: DeviceRows(torch.empty(shape, dtype=torch.bfloat16), staging)
            for name, shape in declared.spec.params()
        }
        load_weights(checkpoint, declared, targets, lambda done, total: None, pool, staging.flush)


WAYS = {
    "workers": by_workers,
    "staging": by_staging,
    "float32": lambda path: load(path, torch.float32),
    "bfloat16": lambda path: load(path, torch.bfloat16),
    "float16": lambda path: load(path, torch.float16),
}


def refused(path: Path, *ways: str) -> WeightsError:
    """The error of these ways to load (none given: all), which must be the same for all of them."""
    errors = []
    for way in ways or WAYS:
        with pytest.raises(WeightsError) as caught:
            WAYS[way](path)
        errors.append(caught.value)
    assert len({str(error) for error in errors}) == 1
    return errors[0]


def edited(folder: Path, name: str, edit: Edit) -> Path:
    """The checkpoint in `folder` with one tensor changed in place."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    edit(tensors[name])
    save_file(tensors, file)
    return folder


def stacked(folder: Path, dtype: torch.dtype) -> Path:
    """Qwen2-MoE with all experts of a layer in one tensor."""
    make_tiny("qwen2-moe", folder)
    tensors = {name: tensor.to(dtype) for name, tensor in tiny_reference("qwen2-moe").state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


def put(value: float, *place: int) -> Edit:
    def edit(tensor: torch.Tensor) -> None:
        tensor[place] = value

    return edit


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("name", "place", "value"),
    [
        ("model.embed_tokens.weight", (255, 63), math.nan),
        ("model.norm.weight", (5,), math.inf),
        ("model.layers.1.input_layernorm.weight", (0,), -math.inf),
        (ATTENTION, (63, 0), -math.inf),
        ("model.layers.0.self_attn.k_proj.bias", (3,), math.nan),
        ("model.layers.0.mlp.gate.weight", (7, 63), math.inf),
        ("model.layers.2.mlp.shared_expert.down_proj.weight", (0, 39), math.nan),
        (EXPERTS, (7, 47, 63), math.inf),
        (EXPERTS, (0, 3, 0), math.nan),
        ("model.layers.2.mlp.experts.down_proj", (3, 1, 23), math.nan),
    ],
)  # fmt: skip
def test_plain_numbers(stored: torch.dtype, name: str, place: tuple[int, ...], value: float, tmp_path: Path) -> None:
    folder = edited(stacked(tmp_path / "m", stored), name, put(value, *place))
    error = refused(folder)
    assert error.message == f"{folder / 'model.safetensors'}: {name} is {value} at {list(place)}."
    assert "checksum" in error.remedy


@pytest.mark.parametrize("name", ["blocks", "bias", "sinks", "turned"])
def test_gpt_oss(name: str, tmp_path: Path) -> None:
    """Experts that are stored transposed, with interleaved rows of gate and up."""
    layer = "model.layers.3"
    tensor, place = {
        "blocks": (f"{layer}.mlp.experts.down_proj", (2, 95, 63)),
        "turned": (f"{layer}.mlp.experts.gate_up_proj", (7, 63, 191)),
        "bias": (f"{layer}.mlp.experts.gate_up_proj_bias", (7, 190)),
        "sinks": (f"{layer}.self_attn.sinks", (3,)),
    }[name]
    folder = edited(make_tiny("gpt-oss", tmp_path / "m"), tensor, put(math.nan, *place))
    error = refused(folder, "workers", "float32", "bfloat16")
    assert error.message.endswith(f": {tensor} is nan at {list(place)}.")


def test_a_router_correction(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    folder = edited(make_tiny("glm4-moe", tmp_path / "m"), name, put(-math.inf, 5))
    assert refused(folder).message.endswith(f": {name} is -inf at [5].")


def test_a_file_that_only_torch_reads(tmp_path: Path) -> None:
    folder = make_tiny("qwen2-moe", tmp_path)
    tensors = tiny_reference("qwen2-moe").state_dict()
    tensors[ATTENTION][1, 2] = math.nan
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    assert refused(folder).message == f"{folder / 'pytorch_model.bin'}: {ATTENTION} is nan at [1, 2]."


def test_a_number_beyond_bfloat16(tmp_path: Path) -> None:
    folder = edited(make_tiny("qwen2-moe", tmp_path / "m"), ATTENTION, put(torch.finfo(torch.float32).max, 1, 2))
    assert f"{ATTENTION} is 3.40282e+38 at [1, 2], which is beyond bfloat16's range" in str(
        refused(folder, "workers", "staging")
    )
    assert f"{ATTENTION} has values beyond bfloat16's range. Use --dtype float32" in str(refused(folder, "bfloat16"))
    WAYS["float32"](folder)


def test_tensors_that_are_not_used_may_be_anything(tmp_path: Path) -> None:
    folder = make_tiny("llama2", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((8,), math.nan)
    save_file(tensors, folder / "model.safetensors")
    for way in WAYS.values():
        way(folder)


# Bytes of a block that are the high byte of each scale or minimum.
SCALE_BYTES = {
    "Q4_0": (1,), "Q4_1": (1, 3), "Q5_0": (1,), "Q5_1": (1, 3), "Q8_0": (1,), "Q2_K": (81, 83), "Q3_K": (109,),
    "Q4_K": (1, 3), "Q5_K": (1, 3), "Q6_K": (209,), "IQ4_NL": (1,), "IQ4_XS": (1,), "MXFP4": (0,),
}  # fmt: skip
QUANTISED_BY_GGUF = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4")  # the gguf package cannot write the others


def spoil(info: TensorInfo, block_bytes: int, block: int, byte: int) -> None:
    with info.file.open("r+b") as stream:
        stream.seek(info.offset + block * block_bytes + byte)
        stream.write(b"\xff")


@pytest.mark.parametrize("quant", QUANTISED_BY_GGUF)
def test_scales_of_blocks(quant: str, tmp_path: Path) -> None:
    sizes = {"intermediate_size": 96, "moe_intermediate_size": 32}
    path = make_tiny_gguf("qwen3-moe", tmp_path / "m.gguf", quant, **sizes)
    whole = path.read_bytes()
    for name, block, place in (
        ("blk.1.ffn_up_exps.weight", 2 * (3 * 32 + 5) + 1, [3, 5, 32]),
        ("blk.2.attn_output.weight", 0, [0, 0]),
        ("token_embd.weight", 2 * 256 - 1, [255, 32]),
    ):
        info = open_checkpoint(path).tensors[name]
        assert info.dtype == quant
        for byte in SCALE_BYTES[quant]:
            spoil(info, info.nbytes // (info.rows * info.shape[-1] // 32), block, byte)
            assert refused(path).message.startswith(f"{path}: the {quant} block of {name} at {place} has a scale")
            path.write_bytes(whole)


def test_rotary_divisors(tmp_path: Path) -> None:
    for bad in (math.nan, math.inf, 0.0, -1.0):
        path = make_tiny_gguf("llama2", tmp_path / "m.gguf", rope_factors=(1.0, bad, *[1.0] * 6))
        with pytest.raises(WeightsError, match=rf"m.gguf: rope_freqs.weight is {bad} at \[1\]"):
            open_checkpoint(path)


O_PROJ = "model.layers.1.self_attn.o_proj"
MODULES = (O_PROJ, "model.layers.2.mlp.experts.5.down_proj")
CODED = [
    ("fp8 block", "weight", 0x7F), ("fp8 block", "weight", 0xFF), ("fp8 block", "weight_scale_inv", None),
    ("fp8 block f32", "weight_scale_inv", None), ("fp8 powers", "weight_scale_inv", 0xFF),
    ("int4 paired", "weight_scale_inv", None), ("fp8 rows", "weight_scale", None), ("fp8 rows", "weight", 0xFF),
    ("fp8 tensor", "weight_scale", None), ("mxfp8", "weight_scale_inv", 0xFF), ("mxfp8", "weight", 0x7F),
    ("int8 rows", "weight_scale", None), ("int4", "weight_scale", None), ("int4 f16", "weight_scale", None),
    ("int4 f32", "weight_scale", None), ("int4 rows", "weight_scale", None), ("int4 zeros", "weight_scale", None),
    ("int8 packed", "weight_scale", None), ("gptq", "scales", None), ("gptq zeros", "scales", None),
    ("gptq 8", "scales", None), ("awq", "scales", None), ("mxfp4", "weight_scale", 0xFF),
    ("fp8 odd blocks", "weight", 0x7F), ("fp8 odd blocks", "weight_scale_inv", None),
    ("gptq in another order", "scales", None), ("int8 zeros", "weight_scale", None),
]  # fmt: skip


@pytest.mark.parametrize(("scheme", "part", "code"), CODED, ids=lambda value: str(value))
@pytest.mark.parts("number", len(MODULES))
def test_codes_and_their_scales(scheme: str, part: str, code: int | None, number: int | None, tmp_path: Path) -> None:
    folder, _ = make_quantised((SCHEMES | DECODED)[scheme], "qwen3-moe", tmp_path / "m", moe_intermediate_size=96)
    for module in MODULES if number is None else MODULES[number : number + 1]:
        whole = (folder / "model.safetensors").read_bytes()
        last: list[int] = []

        def edit(tensor: torch.Tensor, last: list[int] = last) -> None:
            last += [size - 1 for size in tensor.shape]
            if code is None:
                tensor[tuple(last)] = math.nan
            else:
                tensor.view(torch.uint8)[tuple(last)] = code

        edited(folder, f"{module}.{part}", edit)
        message = refused(folder).message
        assert message.startswith(f"{folder / 'model.safetensors'}: ")
        assert f"{module}.{part} " in message
        assert message.endswith(f"at {last}.")
        (folder / "model.safetensors").write_bytes(whole)
