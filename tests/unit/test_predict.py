"""Predictions of a plan: limits from bytes and rates, what binds, and what is left out."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import msgspec
import pytest

from families.hub_texts import CONFIGS
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, ModelOptions, SchedulerOptions
from proa.errors import ResourceError
from proa.machine.machine import Gpu, Machine, NumaNode
from proa.machine.machine_file import Kernels
from proa.machine.rates import GpuRate, Rates
from proa.models.spec import Mlp, Moe
from proa.plan.attained import CPU_SHARES, PASS_S, RAM_SHARE
from proa.plan.fixed_costs import GPU_LAYER_S, HOST_S
from proa.plan.headers import open_headers
from proa.plan.nodes import node_shares
from proa.plan.plan import Plan
from proa.plan.predict import (
    CPU,
    FIXED,
    GPU,
    PCIE,
    RAM,
    VRAM,
    Predictions,
    decode,
    predict,
    prefill,
    speeds_of,
)
from proa.plan.prepare import Prepared, prepare
from proa.plan.roof import roof_at
from proa.plan.work import Work, planned_work
from quick_plan import ram_of
from tiny import make_tiny

GB, TB = 1e9, 1e12
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
INT4_EXPERTS = {
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "config_groups": {
        "experts": {
            "targets": [r"re:.*\.experts\..*"],
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
        },
        "dense": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
    },
}


@dataclass(frozen=True)
class Box:
    """A machine with one GPU, by effective rates."""

    vram: float
    ram: float
    pcie: float = 50 * GB
    cpu_flops: float = 15e12
    gpu_flops: float = 200e12
    vram_gib: int = 140

    @property
    def machine(self) -> Machine:
        card = Gpu(
            index=0, name="Card", total_bytes=self.vram_gib << 30, free_bytes=self.vram_gib << 30, capability=(9, 0),
            memory_bytes_per_s=self.vram, pcie_bytes_per_s=self.pcie,
        )  # fmt: skip
        return msgspec.structs.replace(bare(4 << 40), gpus=(card,), torch_cuda="12.8")

    @property
    def rates(self) -> Rates:
        card = GpuRate(index=0, vram_bytes_per_s=self.vram, pcie_bytes_per_s=self.pcie, flops_per_s=self.gpu_flops)
        return Rates(ram=ram_of(self.ram), cpu_flops_per_s=self.cpu_flops, gpus=(card,))


def bare(ram_bytes: int, cores: int = 16) -> Machine:
    """A machine without a GPU."""
    cpus = tuple(range(cores))
    return Machine(
        cpu="Test", online_cpus=cores, usable_cpus=cpus, physical_cores=cores, total_bytes=ram_bytes,
        available_bytes=ram_bytes,
    )  # fmt: skip


BOXES = {
    "H200, 16 cores": Box(3600 * GB, 120 * GB, 55 * GB),
    "RTX 5090, 2 EPYC 9684X": Box(1253 * GB, 920 * GB, 52.7 * GB),
    "RTX Pro 6000, 2 EPYC 9555": Box(1253 * GB, 950 * GB, 51.5 * GB),
}
BOX = Box(3 * TB, 40 * GB)
# Published sizes, in billions of parameters: routed ones that a token reads; all others, without the embedding.
MODELS = {
    "Qwen/Qwen3-30B-A3B": (1.81, 1.22),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (1.51, 2.00),
    "MiniMaxAI/MiniMax-M2": (7.02, 3.35),
    "zai-org/GLM-4.7": (16.80, 15.98),
    "deepseek-ai/DeepSeek-V3": (20.43, 16.08),
    "moonshotai/Kimi-K2-Instruct": (21.14, 10.37),
}
# Bytes per routed weight and per other weight. Int4: groups of 32 with bfloat16 scales.
FORMATS: dict[str, tuple[dict[str, Any] | None, float, float]] = {
    "bf16": (None, 2, 2), "fp8": (FP8, 1, 1), "int4": (INT4_EXPERTS, 0.5625, 1),
}  # fmt: skip


def planned(
    folder: Path, config: dict[str, Any], machine: Machine, asked: EngineOptions, ram: float = 40 * GB,
    isa: str = "avx512",
) -> Prepared:  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    opened = open_headers(str(folder), asked.model)
    return prepare(
        str(folder), asked, measure=lambda *_: ram_of(ram), opened=opened, machine=machine, kernels=Kernels(isa)
    )


def work_for(prepared: Prepared) -> Work:
    return planned_work(prepared.plan, ModelOptions(), prepared.declared, prepared.checkpoint)


def published(name: str, quantised: dict[str, Any] | None) -> dict[str, Any]:
    config = {key: value for key, value in CONFIGS[name].items() if key != "quantization_config"}
    config["torch_dtype"] = "bfloat16"
    return config if quantised is None else config | {"quantization_config": quantised}


def experts_in_ram() -> EngineOptions:
    return EngineOptions(gpus=GpuOptions(gpu_experts="none"), cache=CacheOptions(context=4096))


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", MODELS)
def test_limits_of_published_machines(name: str, form: str, tmp_path: Path) -> None:
    """With all routed experts on the CPU a token takes D / VRAM + A / RAM, or the longer if both overlap. D counts the
    head, routers, and what latent attention keeps by head, with two bytes, as files and Proa do, and recurrent states.
    """
    quantised, routed_bytes, dense_bytes = FORMATS[form]
    routed, dense = (1e9 * size for size in MODELS[name])
    prepared = planned(tmp_path, published(name, quantised), BOX.machine, experts_in_ram())
    spec, plan, work = prepared.declared.spec, prepared.plan, work_for(prepared)
    assert plan.gpu is not None
    assert plan.roof.bytes_per_token == pytest.approx(routed_bytes * routed, rel=0.01)
    plain = sum(
        prod(shape) for of, shape in spec.params(routed=False) if of.endswith((".kv_b.weight", "router.weight"))
    )
    more_bytes = (2 - dense_bytes) * (spec.vocab * spec.hidden + plain) + 2 * spec.state_bytes_per_sequence(2)
    for box, read_ahead in product(BOXES.values(), (False, True)):
        placed = msgspec.structs.replace(plan, gpus=(msgspec.structs.replace(plan.gpu, read_ahead=read_ahead),))
        vram_s = (dense_bytes * dense + more_bytes) / box.vram
        ram_s = routed_bytes * routed / box.ram
        expected = 1 / (max(vram_s, ram_s) if read_ahead else vram_s + ram_s)
        found = decode(placed, work, speeds_of(placed, box.rates), 512)
        assert found.limit_tokens_per_s == pytest.approx(expected, rel=0.05), box
        if abs(ram_s - vram_s) > 0.1 * ram_s:
            limits = {what: seconds for what, seconds in found.terms.items() if what != FIXED}
            assert max(limits, key=limits.__getitem__) == (RAM if ram_s > vram_s else VRAM)


SIZES = {"hidden_size": 256, "max_position_embeddings": 40960}


def tiny_plan(
    folder: Path, machine: Machine, asked: EngineOptions | None = None, family: str = "qwen3-moe"
) -> Prepared:
    made = make_tiny(family, folder / family, **SIZES)
    asked = asked or EngineOptions()
    asked = replace(asked, model=replace(asked.model, dtype="bfloat16"))
    return prepare(
        str(made), asked, measure=lambda *_: ram_of(), opened=open_headers(str(made), asked.model), machine=machine,
        kernels=Kernels("avx512"),
    )  # fmt: skip


def predicted(prepared: Prepared, rates: Rates) -> Predictions:
    return predict(prepared.plan, work_for(prepared), rates)


CPU_RATES = Rates(ram=ram_of(), cpu_flops_per_s=1e12)


@pytest.mark.parametrize(
    ("machine", "rates", "asked"),
    [
        (bare(64 << 30), CPU_RATES, EngineOptions()),
        (bare(64 << 30), CPU_RATES, EngineOptions(gpus=GpuOptions(gpu="sim:1GiB", gpu_experts="4"))),
        (BOX.machine, BOX.rates, EngineOptions()),
        (BOX.machine, BOX.rates, EngineOptions(gpus=GpuOptions(gpu_experts="none"))),
        (BOX.machine, BOX.rates, EngineOptions(gpus=GpuOptions(gpu_experts="4"))),
        (BOX.machine, BOX.rates, EngineOptions(gpus=GpuOptions(gpu_experts="4", read_ahead="off"))),
    ],
    ids=["CPU", "simulated", "all in VRAM", "none in VRAM", "some in VRAM", "no read-ahead"],
)
def test_the_limit_of_decode_is_the_roof(machine: Machine, rates: Rates, asked: EngineOptions, tmp_path: Path) -> None:
    prepared = tiny_plan(tmp_path, machine, asked)
    plan, found = prepared.plan, predicted(prepared, rates)
    for of in (of for of in found.decode if of.requests == 1):
        assert of.limit_tokens_per_s == pytest.approx(roof_at(plan, of.tokens).tokens_per_s, rel=1e-3)
    for of in (*found.decode, *found.prefill):
        assert of.seconds == pytest.approx(sum(of.terms.values()))
        made = of.requests if of in found.decode else of.tokens
        assert of.tokens_per_s == pytest.approx(made / of.seconds)
        assert of.tokens_per_s < of.limit_tokens_per_s
        assert of.bound_by == max(of.terms, key=of.terms.__getitem__)
        assert of.terms[FIXED] > 0
    rates_by_context = [of.tokens_per_s for of in found.decode if of.requests == 1]
    assert rates_by_context == sorted(rates_by_context, reverse=True)
    assert [of.tokens for of in found.decode if of.requests == 1] == [512, 8192, 32768]
    assert [of.tokens for of in found.prefill] == [512, 8192, 32768]


def test_fixed_costs(tmp_path: Path) -> None:
    on_cpu = tiny_plan(tmp_path, bare(64 << 30))
    assert predicted(on_cpu, CPU_RATES).decode[0].terms[FIXED] == HOST_S
    on_gpu = tiny_plan(tmp_path, BOX.machine)
    layers = len(on_gpu.declared.spec.blocks)
    assert predicted(on_gpu, BOX.rates).decode[0].terms[FIXED] == pytest.approx(layers * GPU_LAYER_S)


IN_RAM, STREAMED = (GpuOptions(gpu_experts="none", prefill=mode) for mode in ("cpu", "stream"))


@pytest.mark.parametrize(
    ("box", "asked", "bound"),
    [
        (Box(3 * TB, 40 * GB, cpu_flops=1e10), IN_RAM, CPU),
        (Box(3 * TB, 1e6, cpu_flops=1e18), IN_RAM, RAM),
        (Box(3 * TB, 40 * GB, gpu_flops=1e9), GpuOptions(), GPU),
        (Box(3 * TB, 40 * GB, pcie=1e8, cpu_flops=1e5), STREAMED, PCIE),
        (Box(3 * TB, 40 * GB, cpu_flops=1e10, pcie=1e3), GpuOptions(gpu_experts="none"), CPU),
        (Box(1e6, 40 * GB, gpu_flops=1e18), GpuOptions(), VRAM),
        (Box(3 * TB, 40 * TB, pcie=1e6, cpu_flops=1e18), IN_RAM, PCIE),
        (Box(3 * TB, 40 * TB, cpu_flops=1e18, gpu_flops=1e18), IN_RAM, FIXED),
    ],
    ids=[CPU, RAM, GPU, "streamed", "no use in streaming", VRAM, PCIE, FIXED],
)
def test_what_binds_a_prompt(box: Box, asked: GpuOptions, bound: str, tmp_path: Path) -> None:
    prepared = tiny_plan(tmp_path, box.machine, EngineOptions(gpus=asked))
    assert predicted(prepared, box.rates).prefill[0].bound_by == bound


def test_the_limit_of_a_streamed_prompt_has_no_fixed_costs(tmp_path: Path) -> None:
    """Of a machine without limits nothing is left of it, and of the prediction its fixed costs."""
    box = Box(3 * TB, 40 * TB, pcie=1e18, cpu_flops=1e18, gpu_flops=1e18)
    config = published("Qwen/Qwen3-30B-A3B", None) | {"num_hidden_layers": 2}
    asked = EngineOptions(cache=CacheOptions(context=1024), gpus=GpuOptions(gpu_experts="none", prefill="stream"))
    prepared = planned(tmp_path, config, box.machine, asked, 1e18, isa="amx")
    found = prefill(prepared.plan, work_for(prepared), speeds_of(prepared.plan, box.rates), 512)
    assert 512 / found.limit_tokens_per_s < 1e-3
    assert found.terms[FIXED] > PASS_S


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
    config = published("Qwen/Qwen3-30B-A3B", None) | {"num_hidden_layers": 24, "max_position_embeddings": 131072}
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
    config = published("Qwen/Qwen3-30B-A3B", FORMATS[form][0])
    config |= {"num_hidden_layers": 24, "max_position_embeddings": 131072}
    asked = EngineOptions(
        cache=CacheOptions(context=tokens + 64), scheduler=SchedulerOptions(max_running=4),
        gpus=GpuOptions(gpu_experts="none"),
    )  # fmt: skip
    prepared = planned(tmp_path, config, box.machine, asked, 150 * GB, isa="amx")
    found = prefill(prepared.plan, work_for(prepared), speeds_of(prepared.plan, box.rates), tokens)
    assert tokens / found.limit_tokens_per_s < measured_s
    least = {("int4", 64): 0.75, ("bf16", 2048): 0.8}.get((form, tokens), 0.85)
    assert least * measured_s < found.seconds < 1.15 * measured_s


@pytest.mark.parametrize(
    ("tokens", "mode", "most"),
    [(512, "cpu", 1.001), (1023, "cpu", 1.001), (1024, "stream", 1.001), (4096, "stream", 1.1), (16384, "auto", 1.25)],
)
def test_deterministic_prompts_of_an_h200(tokens: int, mode: str, most: float, tmp_path: Path) -> None:
    """Short prompts take as long as if the CPU computes their experts, long ones as long as if all are copied, and very
    long ones hardly longer than with both."""
    box = Box(4350 * GB, 170 * GB, pcie=55.3 * GB, cpu_flops=22e12, gpu_flops=757e12)
    config = published("Qwen/Qwen3-30B-A3B", None) | {"num_hidden_layers": 24, "max_position_embeddings": 131072}

    def seconds(deterministic: bool, prefill_mode: str) -> float:
        asked = EngineOptions(
            cache=CacheOptions(context=tokens + 64),
            scheduler=SchedulerOptions(max_running=4, deterministic=deterministic),
            gpus=GpuOptions(gpu_experts="none", prefill=prefill_mode),
        )
        prepared = planned(tmp_path, config, box.machine, asked, 170 * GB, isa="amx")
        return prefill(prepared.plan, work_for(prepared), speeds_of(prepared.plan, box.rates), tokens).seconds

    assert seconds(True, "auto") <= most * seconds(False, mode)


def test_flops_of_a_prompt_on_the_cpu(tmp_path: Path) -> None:
    """Two operations per matrix weight and row, four per query, key and value element, at what kernels reach."""
    prepared = tiny_plan(tmp_path, bare(64 << 30))
    plan, spec = prepared.plan, prepared.declared.spec
    rates = Rates(ram=ram_of(1e18), cpu_flops_per_s=1e9)
    found = prefill(plan, work_for(prepared), speeds_of(plan, rates), 512)
    moe, block = spec.blocks[0].ffn, spec.blocks[0]
    assert isinstance(moe, Moe)
    assert block.mixer is not None
    expert = sum(shape[0] * shape[1] for _, shape in Mlp(moe.hidden, moe.width).params())
    matrices = sum(shape[0] * shape[1] for name, shape in block.params(routed=False) if len(shape) == 2)
    q = next(shape for name, shape in block.mixer.params() if name == "q.weight")[0]
    each = 2 * (matrices + moe.top_k * expert) + 4 * q * 256  # on average a query sees half of the prompt
    limit_s = 512 * len(spec.blocks) * each / 1e9
    assert found.terms[CPU] == pytest.approx(limit_s / CPU_SHARES["avx512"], rel=1e-6)
    assert 512 / found.limit_tokens_per_s == pytest.approx(limit_s, rel=1e-6)


def test_windows_bound_the_past_that_is_read(tmp_path: Path) -> None:
    windowed = tiny_plan(tmp_path, bare(64 << 30), family="gpt-oss")
    mixers = windowed.declared.spec.mixers
    assert {mixer.seen(30000) for mixer in mixers} > {30000}
    found = predicted(windowed, CPU_RATES).decode
    read = {of.tokens: of.terms[RAM] * RAM_SHARE * 40 * GB for of in found if of.requests == 1}
    kv = sum(2 * 2 * c.kv_heads * c.head_dim for m in mixers for c in m.caches if m.seen(30000) == 30000)
    assert read[32768] - read[8192] == pytest.approx((32768 - 8192) * kv, rel=0.01)


def test_several_requests_share_experts(tmp_path: Path) -> None:
    prepared = tiny_plan(tmp_path, bare(64 << 30), EngineOptions(scheduler=SchedulerOptions(max_running=8)))
    found = predicted(prepared, CPU_RATES).decode
    one, eight = (next(of for of in found if (of.tokens, of.requests) == (512, n)) for n in (1, 8))
    assert one.tokens_per_s < eight.tokens_per_s < 8 * one.tokens_per_s
    (layer,) = work_for(prepared).moe
    assert layer.distinct(1) == pytest.approx(3)
    assert layer.distinct(10**6) == pytest.approx(8)


def test_what_is_not_predicted_is_said(tmp_path: Path) -> None:
    short = tiny_plan(tmp_path, bare(64 << 30), EngineOptions(cache=CacheOptions(context=1000)))
    found = predicted(short, CPU_RATES)
    assert {of.tokens for of in (*found.decode, *found.prefill)} == {512}
    assert found.notes == ("nothing is predicted at 8192, 32768 tokens: the context has 1000",)
    unmeasured = msgspec.structs.replace(BOX.rates, gpus=())
    found = predicted(tiny_plan(tmp_path, BOX.machine), unmeasured)
    assert (found.prefill, found.speeds.gpu.per_s if found.speeds.gpu else 0) == ((), None)
    assert any("prompts are not predicted, as the GPU's FLOPs are unknown" in note for note in found.notes)
    assert found.speeds.vram is not None
    assert found.speeds.vram.source == "by its data sheet"
    found = predicted(tiny_plan(tmp_path, BOX.machine, EngineOptions(gpus=GpuOptions(gpu_experts="2"))), unmeasured)
    assert found.prefill
    assert any("the GPU's FLOPs are not counted" in note for note in found.notes)
    assert any("equally likely" in note for note in found.notes)
    found = predicted(tiny_plan(tmp_path, bare(8 << 30), EngineOptions(gpus=GpuOptions(gpu="sim:1GiB"))), CPU_RATES)
    assert any("a simulated GPU computes in plain torch" in note for note in found.notes)


def two_nodes(free_bytes: tuple[int, int]) -> Machine:
    nodes = tuple(NumaNode(i, tuple(range(8 * i, 8 * i + 8)), 32 << 30, free_bytes[i], (10, 20)) for i in range(2))
    return msgspec.structs.replace(bare(64 << 30), numa=nodes)


def test_weights_by_memory_node(tmp_path: Path) -> None:
    prepared = tiny_plan(tmp_path, two_nodes((30 << 30, 1 << 10)))
    plan: Plan = prepared.plan
    first, second = node_shares(plan, prepared.machine)
    assert (first.node, second.node, first.workers, second.workers) == (0, 1, 8, 8)
    assert first.weights_bytes + second.weights_bytes == plan.memory.weights_bytes
    assert abs(first.weights_bytes - second.weights_bytes) <= 1
    assert (first.missing_bytes, second.missing_bytes) == (0, second.weights_bytes - (1 << 10))
    (whole,) = node_shares(tiny_plan(tmp_path, bare(8 << 30)).plan, bare(8 << 30))
    assert (whole.node, whole.free_bytes, whole.missing_bytes) == (None, 8 << 30, 0)


def test_a_model_that_does_not_fit_is_refused_with_numbers(tmp_path: Path) -> None:
    config = published("deepseek-ai/DeepSeek-V3", FP8)
    with pytest.raises(ResourceError, match=r"it needs \d+ GiB \(weights as stored 6\d\d GiB") as raised:
        planned(tmp_path, config, bare(256 << 30), EngineOptions())
    assert "use a machine with" in raised.value.remedy.lower()
    assert "GiB of free memory" in raised.value.remedy


@pytest.mark.alone
def test_a_model_of_a_trillion_parameters_is_planned_in_seconds(tmp_path: Path) -> None:
    box = BOXES["H200, 16 cores"]
    begin_s = time.perf_counter()
    prepared = planned(tmp_path, CONFIGS["moonshotai/Kimi-K2-Instruct"], box.machine, EngineOptions())
    found = predicted(prepared, box.rates)
    assert time.perf_counter() - begin_s < 5
    assert prepared.declared.spec.num_params > 1e12
    assert len(found.decode) >= 3
