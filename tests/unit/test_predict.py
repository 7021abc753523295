"""Predictions of a plan: limits from bytes and rates, what binds, and what is left out."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path

import msgspec
import pytest

from families.hub_texts import CONFIGS
from planned_boxes import FORMATS, FP8, GB, TB, Box, bare, planned, published, work_for
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, SchedulerOptions
from proa.errors import ResourceError
from proa.machine.machine import Machine, NumaNode
from proa.machine.machine_file import Kernels
from proa.machine.rates import Rates
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
from quick_plan import ram_of
from tiny import make_tiny

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
