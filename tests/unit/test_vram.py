"""The split of a model over VRAM and RAM: goldens, options, refusals, and invariants on any machine."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from examples import examples
from proa.config.options import CacheOptions
from proa.errors import ProaError, ResourceError, UsageError
from proa.machine.machine import Machine
from proa.models.spec import (
    Block,
    GatedDeltaNet,
    LatentAttention,
    Model,
    Rope,
)
from proa.plan import kernels
from proa.plan.placement import moe_layers
from proa.plan.plan import Plan
from proa.plan.prefix_ram import copies_bytes
from proa.plan.roof import FASTEST_VRAM_BYTES_PER_S, ROOF_CONTEXT_TOKENS, roof_at
from proa.plan.vram import (
    CONTEXT_BYTES,
    dense_read_bytes,
    host_workspace_bytes,
    loading_bytes,
    process_bytes,
    vram_demand,
)
from unit.vram_cases import (
    DEMO,
    DENSE,
    GIB,
    GPT_OSS,
    MIXED,
    MIXTRAL,
    QWEN3_30B,
    RAM_RATE,
    VRAM_RATE,
    attention,
    check,
    counts,
    gpu,
    machine,
    model,
    moe,
    plan,
    row,
)

GATED = replace(attention(2048, 16, 2, 256), qk_norm="head", gated=True)
DELTA = GatedDeltaNet(2048, 16, 32, 128, 128, 4)
NEXT_BLOCKS = tuple(Block(GATED if i % 4 == 3 else DELTA, moe(2048, 512, 10, 512, 512)) for i in range(48))
NEXT = Model(2048, 151936, NEXT_BLOCKS, 1e-6, 262144, norm_offset=1.0)
LATENT = LatentAttention(2048, 16, None, 512, 128, 128, Rope(64))
LITE = model(102400, 27, Block(LATENT, moe(2048, 64, 6, 1408, 2816)), 163840)  # but for its first layer
EXPERTS_BYTES = 48 * 128 * 3 * 2048 * 768 * 2  # of Qwen3-30B: 54 GiB


# ---- goldens ----


def test_latent_kv_in_vram() -> None:
    got = plan(LITE, machine(64, gpu(40)))
    on = check(got, LITE)
    assert on.vram.kv_bytes == got.num_pages * got.page_tokens * 27 * 576 * 2
    assert on.gpu_only
    with pytest.raises(UsageError, match=r"latent attention needs .* 8\.0"):
        plan(LITE, machine(64, gpu(40, capability=(7, 5))), gpu="0")
    assert plan(QWEN3_30B, machine(124, gpu(80, capability=(7, 5))), gpu="0").gpu is not None


@pytest.mark.parametrize("rows", [512, 1024, 4096, 8192])
def test_long_prompts_of_latents_have_buffers(rows: int) -> None:
    """For 16 heads of 16384 tokens at most, or for the rows that attend over latents at once, whichever is more."""
    (kernel,) = LATENT.kernels
    segment = 16 * 16384 * 2 * (128 + 128 + 2 * (128 + 64)) + 16384 * 2 * 576
    merged = min(rows, 4096) * 16 * (2 * 192 + 5 * (2 * 192 + 4) + 4 * 192 + 4)
    expected = segment + merged if rows > 512 else rows * 16 * 2 * (512 + 576)
    assert kernels.long_bytes(LITE, rows) == expected
    assert kernels.FACTS[type(kernel)].long_bytes(kernel, rows) == expected


@pytest.mark.parametrize(("rows", "past", "share"), [(512, 8192, 1.0), (2048, 0, None), (2048, 30_000, None)])
def test_prompts_of_latents_need_fewer_products(rows: int, past: int, share: float | None) -> None:
    """Per pair 4 x 192 instead of 2 x 1088, and 2 x 512 x 256 for each key."""
    pairs = rows * past + rows * (rows + 1) // 2
    expected = (768 * pairs + 262144 * past) / (2176 * pairs) if share is None else share
    assert kernels.prompt_share(LATENT, rows, past) == pytest.approx(expected)
    assert kernels.prompt_share(GATED, rows, past) == 1.0


def test_all_experts_fit_vram() -> None:
    got = plan(QWEN3_30B, machine(124, gpu(140)))
    on = check(got, QWEN3_30B)
    assert on.gpu_only
    assert counts(got) == [128] * 48
    assert on.vram.experts_bytes == EXPERTS_BYTES
    assert got.memory.weights_bytes == 0
    assert got.context_tokens == 40960
    assert row(got, "experts in VRAM")[1:] == (
        "6144 of 6144: 54.0 GiB", "all fit: the GPU runs everything, and RAM keeps no copies"
    )  # fmt: skip
    assert row(got, "GPU")[:2] == ("auto", "cuda:0: Test GPU")
    assert row(got, "computing")[1] == "cuda:0"
    assert (on.device, on.uuid, on.numa_node, on.capability) == ("cuda:0", "GPU-1", 0, (9, 0))


def test_all_experts_fit_vram_with_little_ram() -> None:
    check(plan(QWEN3_30B, machine(8, gpu(140))), QWEN3_30B)


def test_inclusive_placement() -> None:
    got = plan(QWEN3_30B, machine(124, gpu(24)))
    on = check(got, QWEN3_30B)
    assert on.inclusive
    assert not on.gpu_only
    assert max(counts(got)) - min(counts(got)) <= 1
    assert sorted(counts(got), reverse=True) == counts(got)
    assert on.vram.usable_bytes - on.vram.used_bytes < on.expert_bytes[0]
    assert got.context_tokens == 40960
    assert "RAM keeps a copy of each; the CPU runs the others" in row(got, "experts in VRAM")[2]
    assert row(got, "computing")[1] == "cuda:0, native avx512-bf16 for experts in RAM"


def test_exclusive_placement_with_little_ram() -> None:
    got = plan(QWEN3_30B, machine(52, gpu(24)))
    on = check(got, QWEN3_30B)
    assert not on.inclusive
    assert got.context_tokens == 40960
    assert "RAM holds only the others" in row(got, "experts in VRAM")[2]


def test_context_is_shortened_if_vram_and_ram_are_short() -> None:
    """32 + 32 GiB hold 57 GiB of weights only with a shorter context: experts that RAM cannot hold take priority."""
    got = plan(QWEN3_30B, machine(32, gpu(32)))
    check(got, QWEN3_30B)
    assert 1024 <= got.context_tokens < 40960
    assert "fits VRAM beside the experts' share" in row(got, "context")[2]


def test_model_larger_than_vram_and_than_ram() -> None:
    """Qwen3-Next-80B: 148 GiB of weights; states of four sequences, copies and KV in VRAM."""
    got = plan(NEXT, machine(112, gpu(80)))
    on = check(got, NEXT)
    assert on.vram.states_bytes == got.state_slots * NEXT.state_bytes_per_sequence(2) == got.state_slots * 77266944
    assert got.memory.states_bytes == 0
    assert not on.inclusive


def test_experts_get_half_of_the_vram_beside_dense_weights() -> None:
    """5 GiB beside Qwen3's dense weights: half of what is left is less than a full context."""
    got = plan(QWEN3_30B, machine(124, gpu(6)), prefix_cache_ram=0)
    on = check(got, QWEN3_30B)
    need = vram_demand(QWEN3_30B, 16, 4, 512, False, {})
    rest = on.vram.usable_bytes - need.total_bytes(0, 0)
    growing = on.vram.kv_bytes + on.vram.workspace_bytes - need.workspace_base_bytes
    assert rest // 2 - need.page_bytes <= growing <= rest // 2
    assert on.vram.experts_bytes + on.vram.spare_bytes + on.vram.ring_bytes > rest // 2 - on.expert_bytes[0]
    # A requested length takes what it needs.
    asked = plan(QWEN3_30B, machine(124, gpu(6)), context=2 * got.context_tokens - 1024)
    assert check(asked, QWEN3_30B).vram.experts_bytes < on.vram.experts_bytes


def test_no_expert_fits_beside_dense_weights() -> None:
    dense = vram_demand(MIXTRAL, 16, 1, 512, False, {}).total_bytes(1024, 64)
    vram = dense + moe_layers(MIXTRAL, {})[0].expert_bytes - 1
    asked = {"context": 1024, "max_running": 1, "prefix_cache_ram": 0, "max_batch_tokens": 512}
    got = plan(MIXTRAL, machine(124, gpu(24)), vram=vram, **asked)
    assert not any(counts(got))
    assert check(got, MIXTRAL).inclusive
    assert row(got, "experts in VRAM")[1:] == ("none", "none fits beside dense weights and KV")
    one = plan(MIXTRAL, machine(124, gpu(24)), vram=vram + 1, **asked)
    assert counts(one) == [1] + [0] * 31


def test_gpu_too_small_for_dense_weights() -> None:
    box = machine(124, gpu(3))
    got = plan(QWEN3_30B, box)
    assert got.gpu is None
    asked, shown, why = row(got, "GPU")
    assert (asked, shown) == ("auto", "none")
    assert "Test GPU cannot hold some/model even without its routed experts: that takes" in why
    assert got == replaced_gpu_row(plan(QWEN3_30B, machine(124)), got)
    with pytest.raises(ResourceError, match=r"cannot hold some/model .* Use --gpu none"):
        plan(QWEN3_30B, box, gpu="0")


def replaced_gpu_row(of: Plan, by: Plan) -> Plan:
    rows = tuple(next(d for d in by.decisions if d.name == "GPU") if d.name == "GPU" else d for d in of.decisions)
    return msgspec.structs.replace(of, decisions=rows)


def test_refusal_names_ram_and_vram() -> None:
    with pytest.raises(ResourceError, match=r"does not fit into memory.*with the GPU either.*VRAM and RAM together"):
        plan(QWEN3_30B, machine(20, gpu(24)))
    with pytest.raises(ResourceError, match=r"^some/model does not fit into VRAM and RAM together"):
        plan(QWEN3_30B, machine(20, gpu(24)), gpu="0")


def test_a_refusal_names_the_limit_that_bounds_ram() -> None:
    with pytest.raises(ResourceError, match=r"30\.0 GiB free of 64\.0 GiB, bound by the memory limit of .* /box\)"):
        plan(QWEN3_30B, IN_A_BOX, gpu="0")


SHORT_OF_RAM = msgspec.structs.replace(machine(64, gpu(24)), available_bytes=30 * GIB)
IN_A_BOX = msgspec.structs.replace(SHORT_OF_RAM, memory_bound_by="the memory limit of control group /box")


@pytest.mark.parametrize(
    ("box", "asked", "remedy"),
    [
        (machine(124, gpu(24)), {"ram": 20 * GIB}, r"^Use --ram (?P<ram>\d+)M, or a smaller model"),
        (machine(50, gpu(24)), {"ram_reserve": 20 * GIB}, r"^Use --ram-reserve (?P<ram_reserve>\d+)M, or a smaller"),
        (machine(50, gpu(24)), {"ram_reserve": 20 * GIB, "ram": 20 * GIB},
         r"^Use --ram (?P<ram>\d+)M --ram-reserve (?P<ram_reserve>\d+)M, or a smaller"),
        (machine(20, gpu(24)), {"context": 32768}, r"^Use a machine with 4\d\.\d GiB of .*, a shorter --context"),
        (SHORT_OF_RAM, {}, r"^Free 8\.\d\d GiB of memory, or a smaller model"),
        (IN_A_BOX, {}, r"^Extend the memory limit of control group /box by 8\.\d\d GiB, or a smaller model"),
    ],
)  # fmt: skip
def test_what_helps_experts_that_ram_cannot_hold(box: Machine, asked: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ResourceError, match="VRAM and RAM together") as refused:
        plan(QWEN3_30B, box, gpu="0", **asked)
    found = re.search(remedy, refused.value.remedy)
    assert found, refused.value.remedy
    if flags := found.groupdict():
        assert plan(QWEN3_30B, box, gpu="0", **asked | {name: int(mib) << 20 for name, mib in flags.items()}).gpu


@pytest.mark.parametrize(("ram_gib", "helps"), [(50, True), (30, False)])
def test_a_smaller_kv_memory_leaves_vram_to_experts(ram_gib: int, helps: bool) -> None:
    box = machine(ram_gib, gpu(24))
    with pytest.raises(ResourceError, match="VRAM and RAM together") as refused:
        plan(QWEN3_30B, box, gpu="0", kv_memory=18 * GIB)
    assert ("a smaller --kv-memory, or" in refused.value.remedy) == helps
    assert isinstance(plan_or_refusal(QWEN3_30B, box, {"gpu": "0", "kv_memory": GIB}), Plan) == helps


def test_ram_that_is_short_without_experts() -> None:
    with pytest.raises(ResourceError, match=r"0 B remain, and RAM lacks 4\.\d+ GiB for the rest"):
        plan(MIXED, machine(64), ram=300 << 20, gpu="sim:4GiB")


@pytest.mark.parametrize(
    ("spec", "asked", "remedy"),
    [
        (QWEN3_30B, {"kv_memory": 40 * GIB}, "Use a smaller --kv-memory, or --gpu none."),
        (QWEN3_30B, {"kv_memory": 40 * GIB, "vram": 3 * GIB}, "Use --gpu none."),
        (NEXT, {"state_memory": 30 * GIB}, "Use a smaller --state-memory, or --gpu none."),
    ],
)
def test_sizes_that_vram_cannot_hold(spec: Model, asked: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ResourceError, match="cannot hold some/model") as refused:
        plan(spec, machine(200, gpu(24)), gpu="0", **asked)
    assert refused.value.remedy == remedy


def test_vram_that_the_gpu_lacks_is_not_asked_for() -> None:
    with pytest.raises(ResourceError, match="cannot hold some/model") as refused:
        plan(QWEN3_30B, machine(124, gpu(3)), gpu="0", vram=GIB)
    assert refused.value.remedy == "Use --gpu none."


def test_dense_model_is_in_vram() -> None:
    got = plan(DENSE, machine(8, gpu(24)))
    assert check(got, DENSE).gpu_only
    assert (got.memory.weights_bytes, counts(got)) == (0, [])
    with pytest.raises(UsageError, match="no routed experts"):
        plan(DENSE, machine(8, gpu(24)), gpu_experts="4")


def test_layers_without_experts_are_counted_by_block() -> None:
    got = plan(MIXED, machine(8, gpu(24)), gpu_experts="none", gpu_resident_layers="0-2")
    assert check(got, MIXED).blocks == tuple(range(1, 30))
    assert counts(got) == [16, 16] + [0] * 27


# ---- what was asked ----


def test_experts_by_number() -> None:
    got = plan(QWEN3_30B, machine(124, gpu(24)), gpu_experts="20")
    check(got, QWEN3_30B)
    assert counts(got) == [20] * 48
    assert row(got, "experts in VRAM")[0] == "20"
    assert counts(plan(QWEN3_30B, machine(124, gpu(24)), gpu_experts="none")) == [0] * 48
    whole = plan(QWEN3_30B, machine(124, gpu(24)), gpu_experts="20", gpu_resident_layers="1,47")
    assert counts(whole) == [20, 128] + [20] * 45 + [128]
    assert row(whole, "experts in VRAM")[0] == "20, layers 1,47 whole"


def test_asked_experts_shorten_an_automatic_context() -> None:
    got = plan(QWEN3_30B, machine(124, gpu(24)), gpu_experts="44")
    check(got, QWEN3_30B)
    assert counts(got) == [44] * 48
    assert got.context_tokens < 40960


def test_front_loading_fills_the_first_layers() -> None:
    got = counts(plan(QWEN3_30B, machine(124, gpu(24)), expert_placement="front-loading"))
    full = got.count(128)
    assert got[:full] == [128] * full
    assert not any(got[full + 1 :])
    assert full > 5


@pytest.mark.parametrize(
    ("asked", "error", "match"),
    [
        ({"gpu_experts": "64"}, ResourceError, r"requested experts take 27\.0 GiB of VRAM"),
        ({"gpu_experts": "all"}, ResourceError, r"take 54\.0 GiB"),
        ({"gpu_resident_layers": "0-40"}, ResourceError, "requested experts take"),
        ({"gpu_experts": "129"}, UsageError, "more than the 128 experts"),
        ({"gpu_resident_layers": "48"}, UsageError, "layers from 0 to 47"),
        ({"gpu": "1"}, UsageError, r"There are 0 \(Test GPU\)"),
        ({"gpu": "gpu0"}, UsageError, "--gpu is 'gpu0'"),
        ({"gpu": "none", "gpu_experts": "8"}, UsageError, "no GPU is used: as asked"),
        ({"gpu": "0", "dtype": "float32"}, UsageError, "computes in bfloat16, not float32.*Use --dtype bfloat16"),
        ({"gpu_experts": "8", "dtype": "float32"}, UsageError, "bfloat16"),
        ({"gpu": "0", "vram": GIB}, ResourceError, r"Use --vram \d+M or more, or --gpu none"),
        ({"gpu": "sim:1G"}, ResourceError, "simulated, 1.00 GiB cannot hold"),
    ],
)
def test_impossible_options_are_refused(asked: dict[str, Any], error: type[ProaError], match: str) -> None:
    with pytest.raises(error, match=match) as refused:
        plan(QWEN3_30B, machine(124, gpu(24)), **asked)
    assert refused.value.remedy


def test_experts_without_a_gpu_are_refused() -> None:
    with pytest.raises(UsageError, match="no GPU is used: no GPU was found"):
        plan(QWEN3_30B, machine(124), gpu_experts="8")
    assert plan(QWEN3_30B, machine(124), gpu_experts="none").gpu is None


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"gpu": "none"}, "as asked"),
        ({"dtype": "float16"}, "CPU only: the GPU computes in bfloat16, not float16"),
    ],
)
def test_reasons_for_using_no_gpu(asked: dict[str, Any], why: str) -> None:
    got = plan(DEMO, machine(8, gpu(24)), **asked)
    assert got.gpu is None
    assert row(got, "GPU")[1:] == ("none", why)
    assert not got.roof.vram


def test_vram_option_is_a_limit() -> None:
    got = check(plan(QWEN3_30B, machine(124, gpu(140)), vram=20 * GIB), QWEN3_30B)
    assert got.vram.usable_bytes == 20 * GIB
    assert check(plan(QWEN3_30B, machine(124, gpu(24)), vram=900 * GIB), QWEN3_30B).vram.reserve_bytes == 256 << 20
    assert check(plan(QWEN3_30B, machine(124, gpu(140))), QWEN3_30B).vram.reserve_bytes == 140 * GIB // 100


def test_kv_memory_option_counts_in_vram() -> None:
    got = plan(QWEN3_30B, machine(124, gpu(24)), kv_memory=GIB)
    assert check(got, QWEN3_30B).vram.kv_bytes == GIB // got.page_tokens // 98304 * got.page_tokens * 98304


def test_simulated_vram_counts_in_ram() -> None:
    got = plan(DEMO, machine(6), gpu="sim:384MiB,pcie=8GB/s", context=512, gpu_experts="5")
    on = check(got, DEMO)
    assert (on.device, on.simulated, on.pcie_bytes_per_s) == ("sim", True, 8e9)
    assert on.inclusive
    assert counts(got) == [5] * 30
    assert on.vram.context_bytes == on.vram.graphs_bytes == on.vram.reserve_bytes == 0
    assert [of.bandwidth_bytes_per_s for stage in got.roof.vram for of in stage] == [RAM_RATE]
    with pytest.raises(ResourceError):
        plan(DEMO, machine(6), gpu="sim:6GiB", context=512)


def test_plan_json_round_trip() -> None:
    for asked in ({}, {"gpu": "sim:1GiB"}):
        got = plan(DEMO, machine(6, gpu(24)), **asked)
        assert msgspec.json.decode(msgspec.json.encode(got), type=Plan) == got


def test_every_decision_has_a_reason() -> None:
    for decision in plan(QWEN3_30B, machine(124, gpu(24))).decisions:
        assert decision.got and decision.why, decision.name  # noqa: PT018


# ---- formulas ----


def test_demand_grows_with_its_inputs() -> None:
    base = vram_demand(QWEN3_30B, 16, 4, 512, False, {})
    assert vram_demand(QWEN3_30B, 16, 4, 1024, False, {}).workspace_base_bytes > base.workspace_base_bytes
    assert vram_demand(QWEN3_30B, 16, 64, 512, False, {}).fixed_bytes > base.fixed_bytes > CONTEXT_BYTES
    assert vram_demand(QWEN3_30B, 16, 4, 512, True, {}).fixed_bytes == 0
    assert base.page_bytes == 16 * 98304


def test_roof_is_bound_by_the_slower_memory() -> None:
    all_in = plan(QWEN3_30B, machine(124, gpu(140))).roof
    assert (all_in.bytes_per_token, all_in.bound_by) == (0, "VRAM")
    ((vram,),) = all_in.vram
    active = 48 * 8 * 3 * 2048 * 768 * 2
    dense = dense_read_bytes(QWEN3_30B, {}) + ROOF_CONTEXT_TOKENS * 98304
    assert (vram.dense_bytes_per_token, vram.expert_bytes_per_token) == (dense, active)
    assert all_in.tokens_per_s == pytest.approx(VRAM_RATE / (dense + active))
    half = plan(QWEN3_30B, machine(124, gpu(140)), gpu_experts="64").roof
    assert (half.bytes_per_token, half.bound_by) == (active // 2, "RAM")
    assert half.tokens_per_s == pytest.approx(RAM_RATE / (active / 2)), "with read ahead RAM is never idle"
    waiting = plan(QWEN3_30B, machine(124, gpu(140)), gpu_experts="64", read_ahead="off").roof
    assert waiting.tokens_per_s == pytest.approx(1 / (dense / VRAM_RATE + active / 2 / RAM_RATE))
    unknown = plan(QWEN3_30B, machine(124, gpu(140, memory_bytes_per_s=None))).roof
    assert unknown.tokens_per_s == pytest.approx(FASTEST_VRAM_BYTES_PER_S / (dense + active))


def test_roof_counts_kv_of_the_context() -> None:
    got = plan(QWEN3_30B, machine(124, gpu(24)))
    ((longer,),), ((base,),) = roof_at(got, ROOF_CONTEXT_TOKENS + 1000).vram, got.roof.vram
    assert longer.dense_bytes_per_token == base.dense_bytes_per_token + 1000 * 98304
    assert roof_at(got, ROOF_CONTEXT_TOKENS) == got.roof


# ---- any machine ----


@settings(max_examples=examples(150), deadline=None)
@given(
    spec=st.sampled_from([QWEN3_30B, QWEN3_30B, MIXTRAL, DEMO, MIXED, DENSE, GPT_OSS]),
    ram_gib=st.floats(2, 150),
    vram_gib=st.floats(0.5, 100),
    asked=st.fixed_dictionaries(
        {},
        optional={
            "gpu": st.sampled_from(["auto", "0", "0", "none", "sim:512MiB", "sim:8GiB,pcie=1GB/s"]),
            "context": st.integers(1, 5000),
            "kv_memory": st.integers(GIB // 4, 4 * GIB),
            "page_tokens": st.integers(1, 256),
            "max_running": st.integers(1, 100),
            "max_batch_tokens": st.integers(1, 5000),
            "vram": st.integers(GIB, 100 * GIB),
            "ram": st.integers(GIB, 200 * GIB),
            "gpu_experts": st.sampled_from(["auto", "auto", "all", "none", "1", "8"]),
            "gpu_resident_layers": st.sampled_from(["0", "2,9"]),
            "expert_placement": st.sampled_from(["auto", "dynamic", "uniform", "front-loading"]),
        },
    ),
)
def test_any_plan_fits_or_is_refused(spec: Model, ram_gib: float, vram_gib: float, asked: dict[str, Any]) -> None:
    got = plan_or_refusal(spec, machine(ram_gib, gpu(vram_gib)), asked)
    if not isinstance(got, Plan):
        assert got.remedy
        return
    if got.gpu is None:
        assert asked.get("gpu", "auto") in ("auto", "none")
        assert "gpu_resident_layers" not in asked
        assert asked.get("gpu_experts", "auto") in ("auto", "none")
        return
    on = check(got, spec)
    assert on.vram.usable_bytes <= asked.get("vram", on.vram.usable_bytes)
    assert got.context_tokens == asked.get("context", got.context_tokens)
    assert on.vram.kv_bytes <= asked.get("kv_memory", on.vram.kv_bytes)
    if (number := asked.get("gpu_experts", "auto")).isdigit() and "gpu_resident_layers" not in asked:
        assert set(counts(got)) <= {min(int(number), count) for count in on.experts}
    if on.vram.used_bytes + max(on.expert_bytes, default=0) <= on.vram.usable_bytes and number == "auto":
        assert on.gpu_only  # no room is left unused


@settings(max_examples=examples(100), deadline=None)
@example(ram_gib=9.0, vram_gib=53.0625, strategy="uniform")
@given(
    ram_gib=st.floats(4, 70),
    vram_gib=st.floats(6, 70),
    strategy=st.sampled_from(["dynamic", "uniform", "front-loading"]),
)
def test_refused_only_if_ram_and_vram_together_are_too_small(ram_gib: float, vram_gib: float, strategy: str) -> None:
    """Qwen3-30B is refused only if RAM and the VRAM beside the least context cannot hold it together."""
    box, layer = machine(ram_gib, gpu(vram_gib)), moe_layers(QWEN3_30B, {})[0]
    got = plan_or_refusal(QWEN3_30B, box, {"gpu": "0", "expert_placement": strategy})
    if isinstance(got, Plan):
        check(got, QWEN3_30B)
        return
    reserves = max(256 << 20, box.gpus[0].total_bytes // 100) + min(GIB, box.total_bytes // 20)
    need = vram_demand(QWEN3_30B, 16, 4, 512, False, {})
    vram = need.total_bytes(1024, 64) + copies_bytes(CacheOptions(), need)
    host = process_bytes(False) + host_workspace_bytes(QWEN3_30B, 4, 512) + loading_bytes([layer], False)
    room = box.gpus[0].free_bytes + box.available_bytes - reserves - vram - host
    assert room < EXPERTS_BYTES + 2 * layer.expert_bytes


def plan_or_refusal(spec: Model, box: Machine, asked: dict[str, Any]) -> Plan | ProaError:
    try:
        return plan(spec, box, **asked)
    except (ResourceError, UsageError) as refused:
        return refused
