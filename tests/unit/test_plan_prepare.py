"""prepare(): from a folder on disk to a Plan, without torch."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from safetensors.torch import load_file, save_file

import proa.plan.prepare
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, MachineOptions, ModelOptions
from proa.errors import ModelNotFound, ResourceError, UsageError, WeightsError
from proa.machine.machine import Gpu
from proa.machine.probe import probe
from proa.machine.rates import RamRate
from proa.native.formats import Format, layout
from proa.plan.overrides import config_overrides
from proa.plan.packed_size import packed_size
from proa.plan.prepare import with_paths
from quick_plan import prepare, ram_of
from tiny import make_tiny
from tiny_gguf import make_tiny_gguf

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
}
DUMMY = ModelOptions(load_format="dummy")
CARD = Gpu(index=0, name="Card", total_bytes=8 << 30, free_bytes=7 << 30, capability=(9, 0))
FOUND = msgspec.structs.replace(probe(), gpus=(CARD,), torch_cuda="12.8")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    return tmp_path


def test_a_folder_becomes_a_plan(folder: Path) -> None:
    asked = EngineOptions(model=DUMMY, cache=CacheOptions(context=100), gpus=GpuOptions("none"))
    prepared = prepare(str(folder), asked)
    plan = prepared.plan
    assert (plan.model, plan.path) == (str(folder), str(folder))
    assert (plan.load_format, plan.dtype, plan.context_tokens) == ("dummy", "bfloat16", 100)
    assert plan.memory.weights_bytes == packed_size(prepared.declared.spec, {}).total_bytes
    assert plan.roof.bandwidth_bytes_per_s > 1e8
    assert plan.memory.free_bytes == prepared.machine.available_bytes


def test_tensors_are_compared_with_the_config(tmp_path: Path) -> None:
    """The mismatch is found before an engine starts."""
    folder = make_tiny("llama2", tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(WeightsError, match=r"layers.1.mlp.up_proj.weight: not in the checkpoint; .* \[112, 64\]"):
        prepare(str(folder))
    file = make_tiny_gguf("llama2", tmp_path / "m.gguf")
    wrong = EngineOptions(model=ModelOptions(override_config=("intermediate_size=113",)))
    with pytest.raises(WeightsError, match=r"ffn_gate.weight: the config says \[113, 64\], m.gguf has \[112, 64\]"):
        prepare(str(file), wrong)


def test_gguf_blocks_count_as_packed(tmp_path: Path) -> None:
    file = make_tiny_gguf("llama2", tmp_path / "m.gguf", "Q4_0", hidden_size=128, intermediate_size=256)
    prepared = prepare(str(file))
    assert prepared.plan.isa
    assert prepared.plan.memory.weights_bytes < 1.5 * prepared.declared.spec.num_params


def test_gguf_experts_in_vram_are_packed_as_in_ram(tmp_path: Path) -> None:
    file = make_tiny_gguf("qwen3-moe", tmp_path / "m.gguf", "Q4_0", down="Q8_0", moe_intermediate_size=32)
    prepared = prepare(str(file), EngineOptions(gpus=GpuOptions(gpu="sim:64MiB", gpu_experts="3")))
    gpu, layers = prepared.plan.gpu, len(prepared.declared.spec.blocks)
    assert gpu is not None
    up, down = layout(Format.INT4_F16, 64, 64, 32), layout(Format.INT8_F16, 64, 32, 32)
    assert gpu.expert_bytes == (up.matrix_bytes + down.matrix_bytes,) * layers
    assert gpu.resident == ((0, 1, 2),) * layers
    row = next(d for d in prepared.plan.decisions if d.name == "weights")
    assert row.why.startswith("Q4_0, ")
    assert "on a simulated GPU all but routed experts is bfloat16" in row.why


@pytest.mark.parametrize("form", ["fp8", "int4", "nvfp4", "mxfp4"])
def test_random_weights_have_a_format(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = make_tiny("qwen3-moe", tmp_path, hidden_size=128, moe_intermediate_size=128)
    monkeypatch.setattr("proa.plan.prepare.probe", lambda: FOUND)
    (plain, coded), (plain_cpu, coded_cpu), (plain_gpu, coded_gpu) = (
        [
            prepare(str(made), EngineOptions(model=replace(DUMMY, dtype="bfloat16", dummy_format=f), gpus=gpu)).plan
            for f in ("bf16", form)
        ]
        for gpu in (GpuOptions(gpu="sim:256MiB"), GpuOptions(gpu="none"), GpuOptions(gpu="0"))
    )
    assert plain.gpu is not None
    assert coded.gpu is not None
    halves = 2 if form == "fp8" else 4
    for of, bf16 in zip(coded.gpu.expert_bytes, plain.gpu.expert_bytes, strict=True):
        assert bf16 / halves < of < bf16 / halves * 1.2
    assert coded.gpu.vram.dense_bytes == plain.gpu.vram.dense_bytes
    shapes = prepare(str(made), EngineOptions(model=DUMMY)).declared.spec.params()
    linear_bytes = sum(2 * math.prod(shape) for name, shape in shapes if ".mixer." in name and len(shape) == 2)
    bf16_bytes = sum(8 * b for b in plain.gpu.expert_bytes) + linear_bytes
    saved = plain_cpu.memory.weights_bytes - coded_cpu.memory.weights_bytes
    assert saved == pytest.approx(bf16_bytes * (1 - 1 / halves), rel=0.2)
    assert plain_gpu.gpu is not None
    assert coded_gpu.gpu is not None
    of_gpu = plain_gpu.gpu.vram.dense_bytes - coded_gpu.gpu.vram.dense_bytes
    assert of_gpu == pytest.approx(linear_bytes * (1 - 1 / halves), rel=0.2)
    assert of_gpu == plain_gpu.gpu.vram.dense_read_bytes - coded_gpu.gpu.vram.dense_read_bytes


def test_row_for_formats_of_linear_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_tiny_gguf("qwen3-moe", tmp_path / "m.gguf", "Q4_0", down="Q8_0", moe_intermediate_size=32)
    monkeypatch.setattr("proa.plan.prepare.probe", lambda: FOUND)
    rows = {}
    for name in ("0", "sim:64MiB"):
        plan = prepare(str(file), EngineOptions(gpus=GpuOptions(gpu=name))).plan
        rows[name] = next(d for d in plan.decisions if d.name == "linear layers")
    assert "int4_f16" in rows["0"].got
    assert "kept as stored if a packed format allows it" in rows["0"].why
    assert "int4" not in rows["sim:64MiB"].got
    assert "simulated" in rows["sim:64MiB"].why


@pytest.mark.parametrize(
    "model", [ModelOptions(dummy_format="int4"), replace(DUMMY, dummy_format="int4", dtype="float32")]
)
def test_dummy_format_needs_random_weights_and_bfloat16(model: ModelOptions, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--dummy-format int4 needs random weights"):
        prepare(str(make_tiny("qwen3-moe", tmp_path)), EngineOptions(model=model))


def test_overrides_reach_the_config(folder: Path) -> None:
    model = ModelOptions(load_format="dummy", override_config=("num_hidden_layers=2",))
    prepared = prepare(str(folder), EngineOptions(model=model))
    assert len(prepared.declared.spec.blocks) == 2
    assert prepared.plan.override_config == {"num_hidden_layers": 2}


def test_a_missing_folder_is_refused() -> None:
    with pytest.raises(ModelNotFound):
        prepare("./no-such-folder")


def test_too_large_is_refused_before_loading(folder: Path) -> None:
    giant = CONFIG | {"hidden_size": 65536, "head_dim": 128, "intermediate_size": 1 << 22, "num_hidden_layers": 100}
    (folder / "config.json").write_text(json.dumps(giant))
    with pytest.raises(ResourceError, match=r"does not fit into memory: it needs \d+ TiB"):
        prepare(str(folder), EngineOptions(model=DUMMY, gpus=GpuOptions("none")))


def test_probed_machine_reaches_the_plan(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proa.plan.prepare.probe", lambda: FOUND)
    plan = prepare(str(folder), EngineOptions(model=DUMMY)).plan
    assert plan.gpu is not None
    assert (plan.gpu.name, plan.gpu.vram.free_bytes) == ("Card", 7 << 30)


def test_a_plan_for_another_machine_looks_at_no_folder_of_this_one(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    asked = EngineOptions(cache=CacheOptions(prefix_cache_dir=str(tmp_path / "file" / "kept"), prefix_cache_disk=1))
    assert with_paths(asked, elsewhere=True) == asked
    with pytest.raises(UsageError, match="cannot be created"):
        with_paths(asked)


def test_a_hub_model_is_planned_before_it_is_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's preview (headers without weights) gets the same plan; a refusal stops the fetch."""
    fetched = []

    def locate(
        model: str, revision: str | None, progress: object, *, check: Callable[[Path, str], object], config_only: bool
    ) -> Path:
        check(folder, "dummy")
        fetched.append(model)
        return folder

    monkeypatch.setattr("proa.plan.prepare.locate", locate)
    assert prepare("org/name", EngineOptions(model=DUMMY)).plan.model == "org/name"
    assert fetched == ["org/name"]
    with pytest.raises(UsageError, match="--context 513"):
        prepare("org/name", EngineOptions(model=DUMMY, cache=CacheOptions(context=513)))
    assert fetched == ["org/name"]


def test_needs_no_torch(folder: Path) -> None:
    code = (
        "import sys; from proa.plan.prepare import prepare; from proa.config.options import *;"
        f"prepare({str(folder)!r}, EngineOptions(model=ModelOptions(load_format='dummy')));"
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("rope_theta=1e6", "rope_theta", 1e6),
        ('name="x=y"', "name", "x=y"),
        ('rope_scaling={"factor": 2}', "rope_scaling", {"factor": 2}),
        ("off=null", "off", None),
    ],
)
def test_config_overrides(text: str, key: str, value: object) -> None:
    assert config_overrides([text]) == {key: value}


@pytest.mark.parametrize("text", ["rope_theta", "=1", "name=text", "a={"])
def test_wrong_overrides_are_refused(text: str) -> None:
    with pytest.raises(UsageError, match="JSON"):
        config_overrides([text])


def test_unknown_isa_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROA_ISA", "sse9")
    with pytest.raises(UsageError, match=r"PROA_ISA sse9: There are no kernels named sse9; there are .*scalar"):
        prepare(str(folder), EngineOptions(model=DUMMY))


def test_the_process_may_begin_once_ram_is_measured(folder: Path) -> None:
    """when_measured is called even if the plan is refused afterwards; its caller must then end the process."""
    events: list[str] = []

    def measure(asked: object, machine: object) -> RamRate:
        events.append("measured")
        return ram_of()

    begun = lambda: events.append("begun")  # noqa: E731
    proa.plan.prepare.prepare(str(folder), EngineOptions(model=DUMMY), measure=measure, when_measured=begun)
    assert events == ["measured", "begun"]
    with pytest.raises(ResourceError):
        proa.plan.prepare.prepare(
            str(folder), EngineOptions(model=DUMMY, machine=MachineOptions(ram=1 << 16)), measure=measure,
            when_measured=begun,
        )  # fmt: skip
    assert events == ["measured", "begun"] * 2
