"""The memory bound of loading: the final weights plus at most one layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

import programs
from proa.models.families import declare
from proa.models.gguf import GGUF_NAMES
from proa.weights.index import PLAIN_BYTES

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 3584,
    "max_position_embeddings": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 8,
    "rms_norm_eps": 1e-6,
    "vocab_size": 8192,
    "torch_dtype": "bfloat16",
}
# Loads the file of each line "PATH DTYPE", in one process because importing torch takes longer, and prints bytes: peak
# while loading beyond what the process had before, final weights, the largest layer. Then it returns freed memory.
CHILD = """
import collections
import ctypes
import gc
import math
import sys
from pathlib import Path
import torch
from proa.layers.decoder import Decoder
from proa.native.pool import Pool
from proa.ops.cpu import CpuOps, Recorder
from proa.ops.packed import Memory
from proa.weights.checkpoint import open_checkpoint
from proa.weights.load import load_weights

def memory(key):
    line = next(x for x in open("/proc/self/status") if x.startswith(key))
    return int(line.split()[1]) * 1024

def load(path, dtype, pool):
    checkpoint = open_checkpoint(path)
    declared = checkpoint.declare()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    packed = Memory(pool, [None])
    if dtype is None:
        targets = dict(Decoder(declared.spec, CpuOps(Recorder(pool, packed, 4, 1, 1)).table()).parameters())
    else:
        targets = {name: torch.empty(shape, dtype=dtype) for name, shape in declared.spec.params()}
    load_weights(checkpoint, declared, targets, lambda done, total: None, pool if dtype is None else None)
    weights = sum(target.nbytes for target in targets.values() if isinstance(target, torch.Tensor))
    weights += sum(packed.bytes_by_format.values())
    blocks = collections.Counter()
    for name, shape in declared.spec.params():
        if name.startswith("blocks."):
            blocks[name.split(".")[1]] += math.prod(shape)
    layer = weights * max(blocks.values()) // declared.spec.num_params
    print(memory("VmHWM") - before, weights, layer, flush=True)

torch.set_num_threads(1)
torch.randn(1 << 20).to(torch.bfloat16).float() @ torch.randn(1 << 20)  # what torch allocates once
for line in sys.stdin:
    path, dtype = line.split()
    with Pool([[0, 0, 0]], pin=False) as pool:
        load(Path(path), getattr(torch, dtype, None), pool)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
"""


Tensors = Iterable[tuple[str, str, tuple[int, ...]]]  # name, type, shape


def write_sparse(folder: Path, tensors: Tensors, config: dict[str, Any]) -> Path:
    """Write a sparse file: its contents do not matter here."""
    header, at = {}, 0
    for name, dtype, shape in tensors:
        nbytes = PLAIN_BYTES[dtype] * torch.Size(shape).numel()
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
        at += nbytes
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + at)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def parameters() -> Iterator[tuple[str, tuple[int, ...]]]:
    """The parameters under the checkpoint's names."""
    declared = declare(CONFIG)
    return ((declared.names.candidates(name)[0], shape) for name, shape in declared.spec.params())


def write_safetensors(folder: Path) -> Path:
    return write_sparse(folder, ((name, "BF16", shape) for name, shape in parameters()), CONFIG)


def write_fp8(folder: Path) -> Path:
    def tensors() -> Tensors:
        for name, shape in parameters():
            quantised = "_proj" in name
            yield name, "F8_E4M3" if quantised else "BF16", shape
            if quantised:
                yield f"{name}_scale_inv", "F32", tuple(-(-n // 128) for n in shape)

    config = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    return write_sparse(folder, tensors(), {**CONFIG, "quantization_config": config})


def write_gptq(folder: Path) -> Path:
    def tensors() -> Tensors:
        for name, shape in parameters():
            if "_proj" not in name:
                yield name, "BF16", shape
                continue
            module, (rows, columns) = name.removesuffix("weight"), shape
            yield f"{module}qweight", "I32", (columns // 8, rows)
            yield f"{module}qzeros", "I32", (columns // 128, rows // 8)
            yield f"{module}scales", "F16", (columns // 128, rows)

    config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": False, "desc_act": False}
    return write_sparse(folder, tensors(), {**CONFIG, "quantization_config": config})


def write_bin(folder: Path) -> Path:
    declared = declare(CONFIG)
    tensors = {
        declared.names.candidates(name)[0]: torch.zeros(shape, dtype=torch.bfloat16)
        for name, shape in declared.spec.params()
    }
    torch.save(tensors, folder / "pytorch_model.bin")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def write_gguf(folder: Path) -> Path:
    file = folder / "model.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_block_count(CONFIG["num_hidden_layers"])
    writer.add_context_length(512)
    writer.add_embedding_length(1024)
    writer.add_feed_forward_length(3584)
    writer.add_head_count(8)
    writer.add_layer_norm_rms_eps(1e-6)
    end = 0
    for name, shape in declare(CONFIG).spec.params():
        kind = gguf.GGMLQuantizationType.Q4_K if len(shape) > 1 else gguf.GGMLQuantizationType.F32
        elems, block_bytes = gguf.GGML_QUANT_SIZES[kind]
        nbytes = torch.Size(shape).numel() // elems * block_bytes
        stored = (*shape[:-1], shape[-1] // elems * block_bytes) if len(shape) > 1 else shape
        dtype = gguf.np.uint8 if len(shape) > 1 else gguf.np.float32
        writer.add_tensor_info(GGUF_NAMES.candidates(name)[0], stored, dtype, nbytes, raw_dtype=kind)
        end += -(-nbytes // 32) * 32
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(file, file.stat().st_size + 32 + end)
    return file


@pytest.fixture(scope="module")
def loader() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        programs.python("-c", CHILD), env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        yield process


@pytest.mark.seldom
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's /proc")
@pytest.mark.parametrize(
    ("write", "dtype"),
    [
        (write_safetensors, "bfloat16"),  # as stored: read straight to its place
        (write_safetensors, "float32"),  # converted
        (write_bin, "bfloat16"),
        (write_gguf, "bfloat16"),
        (write_safetensors, "packed"),  # by four threads
        (write_bin, "packed"),
        (write_gguf, "packed"),
        (write_fp8, "packed"),
        (write_gptq, "packed"),
    ],
)
def test_peak(
    write: Callable[[Path], Path], dtype: str, tmp_path: Path, loader: subprocess.Popen[str]
) -> None:  # fmt: skip
    assert loader.stdin is not None
    assert loader.stdout is not None
    print(write(tmp_path), dtype, file=loader.stdin, flush=True)
    peak, weights, layer = map(int, loader.stdout.readline().split())
    assert weights > 80e6
    slack = 8 << 20  # of the allocator and of torch's first calls
    assert weights <= peak + slack
    assert peak <= weights + layer + slack, f"{(peak - weights) / 2**20:.1f} MiB on top"
