"""Predictions beside what was measured on GPUs, by the rates of their machines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from families.hub_texts import CONFIGS
from planned_boxes import FORMATS, GB, Box, planned, published, work_for
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, SchedulerOptions
from proa.plan.predict import decode, prefill, speeds_of


def cut_to(name: str, layers: int, form: str) -> dict[str, Any]:
    """The published config with so many layers, its experts in this format."""
    quantised = CONFIGS[name]["quantization_config"] if form == "own" else FORMATS[form][0]
    config = published(name, quantised) | {"num_hidden_layers": layers, "max_position_embeddings": 131072}
    config.pop("num_nextn_predict_layers", None)
    by_layer = {key: config[key][:layers] for key in ("layer_types", "attn_type_list") if key in config}
    return config | by_layer


# Seconds to the first token by share of experts in VRAM and --prefill, 24 layers of Qwen3-30B-A3B in bfloat16, measured
# on an H200 with AMX, 2026-11-23 and 24, all in VRAM 2026-11-27 (docs/lab/prefill-h200.md).
H200_PROMPTS = {
    ("none", "auto"): {64: 0.196, 128: 0.215, 512: 0.257, 2048: 0.345, 4096: 0.435, 8192: 0.553, 16384: 0.608},
    ("none", "stream"): {512: 0.539, 2048: 0.541, 8192: 0.550, 16384: 0.572, 32768: 0.784, 65536: 2.260},
    ("none", "cpu"): {128: 0.225, 512: 0.331, 2048: 0.703, 8192: 2.065, 16384: 4.010},
    ("13", "auto"): {128: 0.213, 512: 0.240, 2048: 0.340, 8192: 0.504, 16384: 0.520},
    ("all", "auto"): {512: 0.014, 2048: 0.025, 8192: 0.107, 16384: 0.258},
}


@pytest.mark.parametrize(
    ("experts", "mode", "tokens", "measured_s"),
    [(*key, tokens, s) for key, of in H200_PROMPTS.items() for tokens, s in of.items()],
)
def test_prompts_of_an_h200(experts: str, mode: str, tokens: int, measured_s: float, tmp_path: Path) -> None:
    """By the rates of such a machine, the limit is below what was measured, and the prediction within 15 % of it."""
    box = Box(4350 * GB, 170 * GB, pcie=55.3 * GB, cpu_flops=22e12, gpu_flops=757e12)
    config = cut_to("Qwen/Qwen3-30B-A3B", 24, "bf16")
    asked = EngineOptions(
        cache=CacheOptions(context=tokens + 64), scheduler=SchedulerOptions(max_running=4),
        gpus=GpuOptions(gpu_experts=experts, prefill=mode),
    )  # fmt: skip
    prepared = planned(tmp_path, config, box.machine, asked, 170 * GB, isa="amx")
    found = prefill(prepared.plan, work_for(prepared), speeds_of(prepared.plan, box.rates), tokens)
    assert tokens / found.limit_tokens_per_s < measured_s
    assert 0.85 * measured_s < found.seconds < 1.15 * measured_s


# The same by format and tokens, no expert in VRAM, --prefill auto, on H100s with AMX whose RAM reads 146 to 156 GB/s,
# 2026-11-28; bfloat16 before graphs of blocks.
H100_PROMPTS = {
    "bf16": {512: 0.299, 2048: 0.416},
    "fp8": {64: 0.140, 128: 0.148, 512: 0.169, 2048: 0.232, 8192: 0.277},
    "int4": {64: 0.098, 128: 0.099, 512: 0.130, 2048: 0.155, 8192: 0.180},
}


@pytest.mark.parametrize(
    ("form", "tokens", "measured_s"), [(form, n, s) for form, of in H100_PROMPTS.items() for n, s in of.items()]
)
def test_prompts_of_an_h100(form: str, tokens: int, measured_s: float, tmp_path: Path) -> None:
    """Predictions of 10 of the 12 prompts are within 15 % of the measured time."""
    box = Box(3000 * GB, 150 * GB, pcie=55.1 * GB, cpu_flops=22e12, gpu_flops=770e12)
    config = cut_to("Qwen/Qwen3-30B-A3B", 24, form)
    asked = EngineOptions(
        cache=CacheOptions(context=tokens + 64), scheduler=SchedulerOptions(max_running=4),
        gpus=GpuOptions(gpu_experts="none"),
    )  # fmt: skip
    prepared = planned(tmp_path, config, box.machine, asked, 150 * GB, isa="amx")
    found = prefill(prepared.plan, work_for(prepared), speeds_of(prepared.plan, box.rates), tokens)
    assert tokens / found.limit_tokens_per_s < measured_s
    least = {("int4", 64): 0.8, ("bf16", 2048): 0.8}.get((form, tokens), 0.85)
    assert least * measured_s < found.seconds < 1.15 * measured_s


@pytest.mark.parametrize(
    ("tokens", "mode", "most"),
    [(512, "cpu", 1.001), (1023, "cpu", 1.001), (1024, "stream", 1.001), (4096, "stream", 1.1), (16384, "auto", 1.25)],
)
def test_deterministic_prompts_of_an_h200(tokens: int, mode: str, most: float, tmp_path: Path) -> None:
    """Short prompts take as long as if the CPU computes their experts, long ones as long as if all are copied, and very
    long ones hardly longer than with both."""
    box = Box(4350 * GB, 170 * GB, pcie=55.3 * GB, cpu_flops=22e12, gpu_flops=757e12)
    config = cut_to("Qwen/Qwen3-30B-A3B", 24, "bf16")

    def seconds(deterministic: bool, prefill_mode: str) -> float:
        asked = EngineOptions(
            cache=CacheOptions(context=tokens + 64),
            scheduler=SchedulerOptions(max_running=4, deterministic=deterministic),
            gpus=GpuOptions(gpu_experts="none", prefill=prefill_mode),
        )
        prepared = planned(tmp_path, config, box.machine, asked, 170 * GB, isa="amx")
        return prefill(prepared.plan, work_for(prepared), speeds_of(prepared.plan, box.rates), tokens).seconds

    assert seconds(True, "auto") <= most * seconds(False, mode)


# Seconds to the first token without experts in VRAM, on H200s with AMX, 2026-11-28 (Qwen3-30B-A3B with up to 2048
# tokens 2026-11-29; docs/lab/prefill-h200.md); layers, format, and the part of VRAM that may be used, in GiB: all or
# little.
OTHER_PROMPTS = {
    ("deepseek-ai/DeepSeek-V3", 6, "fp8", 32): {2048: 0.468, 4096: 0.558, 8192: 0.689, 16384: 0.903, 32768: 2.022},
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", 16, "int4", 140): {8192: 0.272, 16384: 0.282, 32768: 0.365},
    ("Qwen/Qwen3-30B-A3B", 24, "int4", 140): {
        64: 0.077, 128: 0.082, 512: 0.116, 2048: 0.153, 4096: 0.158, 8192: 0.157, 16384: 0.256, 32768: 0.684,
    },
    ("Qwen/Qwen3-30B-A3B", 24, "fp8", 140): {64: 0.122, 128: 0.127, 512: 0.165, 2048: 0.231, 4096: 0.277},
    ("Qwen/Qwen3-30B-A3B", 24, "bf16", 140): {64: 0.235, 128: 0.248, 512: 0.296, 2048: 0.374, 4096: 0.455},
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "layers", "form", "vram_gib", "tokens", "measured_s"),
    [(*key, tokens, s) for key, of in OTHER_PROMPTS.items() for tokens, s in of.items()],
)
def test_prompts_of_other_models(
    name: str, layers: int, form: str, vram_gib: int, tokens: int, measured_s: float, tmp_path: Path
) -> None:
    """Within 15 %, in rings of several groups of experts too."""
    box = Box(4350 * GB, 150 * GB, pcie=55.1 * GB, cpu_flops=22e12, gpu_flops=765e12)
    asked = EngineOptions(
        cache=CacheOptions(context=tokens + 64), scheduler=SchedulerOptions(max_running=4),
        gpus=GpuOptions(gpu_experts="none", vram=vram_gib << 30 if vram_gib < box.vram_gib else None),
    )  # fmt: skip
    prepared = planned(tmp_path, cut_to(name, layers, form), box.machine, asked, 150 * GB, isa="amx")
    found = prefill(prepared.plan, work_for(prepared), speeds_of(prepared.plan, box.rates), tokens)
    assert tokens / found.limit_tokens_per_s < measured_s
    assert 0.85 * measured_s < found.seconds < 1.15 * measured_s


# Tokens/s of all requests together by their number, on an H200 with AMX, 2026-11-27 (docs/performance.md): layers,
# format (own: the file's), experts of each layer in VRAM, and RAM in GB/s as read in the run.
DECODED = {
    ("Qwen/Qwen3-30B-A3B", 48, "bf16", 0, 154): {1: 33.5, 4: 40.8},
    ("Qwen/Qwen3-30B-A3B", 48, "fp8", 0, 157): {1: 52.7, 4: 67.6},
    ("Qwen/Qwen3-30B-A3B", 48, "int4", 0, 141): {1: 91.8, 4: 116.0},
    ("Qwen/Qwen3-Next-80B-A3B-Instruct", 48, "bf16", 358, 160): {1: 102.0, 4: 135.0},
    ("MiniMaxAI/MiniMax-M2", 12, "fp8", 64, 142): {1: 116.0, 4: 126.0},
    ("deepseek-ai/DeepSeek-V3", 6, "fp8", 64, 152): {1: 125.0, 4: 159.0},
    ("openai/gpt-oss-120b", 18, "own", 32, 140): {1: 119.0, 4: 162.0},
}


@pytest.mark.parametrize(
    ("name", "layers", "form", "resident", "ram", "requests", "measured"),
    [(*key, requests, rate) for key, of in DECODED.items() for requests, rate in of.items()],
)
def test_decode_of_an_h200(
    name: str, layers: int, form: str, resident: int, ram: int, requests: int, measured: float, tmp_path: Path
) -> None:
    box = Box(4350 * GB, ram * GB, pcie=55 * GB, cpu_flops=22e12)
    asked = EngineOptions(
        cache=CacheOptions(context=4096), scheduler=SchedulerOptions(max_running=4),
        gpus=GpuOptions(gpu_experts=str(resident) if resident else "none"),
    )  # fmt: skip
    prepared = planned(tmp_path, cut_to(name, layers, form), box.machine, asked, ram * GB, isa="amx")
    found = decode(prepared.plan, work_for(prepared), speeds_of(prepared.plan, box.rates), 256, requests)
    assert 0.85 * measured < found.tokens_per_s < 1.15 * measured
