"""resolve(): goldens for known models on known machines, refusals with numbers, and what must hold for any."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from proa.config.options import CacheOptions, EngineOptions, MachineOptions, ModelOptions, SchedulerOptions
from proa.config.value import parse_size
from proa.errors import ProaError, ResourceError, UsageError
from proa.machine.machine import Machine
from proa.models.names import Declared, NameTable
from proa.models.spec import Block, Mlp, Model, RopeScaling
from proa.plan.packed_size import packed_size
from proa.plan.plan import Plan
from proa.plan.resolve import Host, resolve
from proa.plan.roof import ROOF_CONTEXT_TOKENS
from quick_plan import ram_of
from unit.plan_cases import DEMO, GIB, NEXT, QWEN3_30B, FakeCheckpoint, attention, model, moe, row

BANDWIDTH = 100e9


MIXTRAL = model(32000, 32, Block(attention(4096, 32, 8, 128), moe(4096, 8, 2, 14336)), 32768)
TINY = model(256, 2, Block(attention(64, 4, 2, 16), Mlp(64, 112)), 512)


def machine(free_gib: float, total_gib: float | None = None, cores: int = 8, **facts: Any) -> Machine:
    return Machine(
        cpu="Test CPU",
        online_cpus=cores,
        usable_cpus=tuple(range(cores)),
        total_bytes=int((total_gib or free_gib) * GIB),
        available_bytes=int(free_gib * GIB),
        **facts,
    )


def host(box: Machine, isa: str = "avx512-bf16") -> Host:
    return Host(box, ram_of(BANDWIDTH), isa, "")


def options(**asked: Any) -> EngineOptions:
    """EngineOptions from flat names."""
    groups = {"model": ModelOptions, "cache": CacheOptions, "scheduler": SchedulerOptions, "machine": MachineOptions}
    return EngineOptions(
        **{
            name: group(**{key: asked.pop(key) for key in list(asked) if key in group.__dataclass_fields__})
            for name, group in groups.items()
        },
        **asked,
    )


def plan(spec: Model, box: Machine, checkpoint: FakeCheckpoint | None = None, **asked: Any) -> Plan:
    stored = checkpoint or FakeCheckpoint()
    isa = "" if stored.load_format == "gguf" else "avx512-bf16"  # packed sizes need a checkpoint's headers
    return resolve(options(**asked), "some/model", stored, Declared(spec, NameTable()), host(box, isa))


# spec, free GiB, total GiB -> context, pages, weights bytes. Weights are parameters x 2: known from the model cards.
@pytest.mark.parametrize(
    ("spec", "free", "total", "context", "pages", "params_millions"),
    [
        pytest.param(DEMO, 6, 8, 8192, 4 * 512, 134, id="the demo on a laptop gets all it wants"),
        pytest.param(QWEN3_30B, 124, 128, 40960, 2560 + 3 * 512, 30_532, id="Qwen3-30B-A3B on 128 GiB"),
        pytest.param(MIXTRAL, 124, 128, 32768, 2048 + 3 * 512, 46_702, id="Mixtral 8x7B on 128 GiB"),
        pytest.param(NEXT, 190, 192, 262144, 16384 + 3 * 512, 79_674, id="Qwen3-Next-80B on 192 GiB"),
    ],
)
def test_goldens(spec: Model, free: int, total: int, context: int, pages: int, params_millions: int) -> None:
    got = plan(spec, machine(free, total))
    assert (got.context_tokens, got.num_pages) == (context, pages)
    assert got.memory.weights_bytes == packed_size(spec, {}).total_bytes >= 2 * spec.num_params
    assert spec.num_params // 1_000_000 == params_millions
    assert got.memory.kv_bytes == pages * 16 * spec.kv_bytes_per_token(2)
    assert row(got, "context") == ("auto", str(context), "the longest that the model supports")
    assert (got.path, got.load_format, got.dtype, got.max_running) == ("/models/m", "safetensors", "bfloat16", 4)


def test_the_plan_is_json_and_back() -> None:
    got = plan(DEMO, machine(6), override_config=("rope_theta=1e6",))
    assert got.override_config == {"rope_theta": 1e6}
    assert msgspec.json.decode(msgspec.json.encode(got), type=Plan) == got


def test_memory_shortens_the_context_and_says_so() -> None:
    """Qwen3-30B: 56.9 GiB of weights; a full context needs 3.75 GiB more."""
    got = plan(QWEN3_30B, machine(60.5, 64))
    assert 8192 < got.context_tokens < 40960
    asked, shown, why = row(got, "context")
    assert (asked, shown) == ("auto", str(got.context_tokens))
    assert "the longest that fits memory; the model supports 40960" in why
    one_more = got.context_tokens + 1
    with pytest.raises(ResourceError):
        plan(QWEN3_30B, machine(60.5, 64), context=one_more)
    assert plan(QWEN3_30B, machine(60.5, 64), context=got.context_tokens).context_tokens == got.context_tokens


def test_a_model_that_does_not_fit_is_refused_with_numbers() -> None:
    with pytest.raises(ResourceError) as refused:
        plan(QWEN3_30B, machine(56, 64))
    assert str(refused.value) == (
        "some/model does not fit into memory: it needs 57.8 GiB (weights as bfloat16 56.9 GiB, processes and loading "
        "640 MiB, workspace 215 MiB, KV cache for a context of 1024 96.0 MiB), but 55.0 GiB may be used (56.0 GiB "
        "free of 64.0 GiB). Free 2.80 GiB of memory."
    )


@pytest.mark.parametrize(
    ("spec", "box", "asked", "remedy"),
    [
        (QWEN3_30B, machine(100, 128), {"dtype": "float32"}, r"[Uu]se --dtype bfloat16, which saves 56.9 GiB"),
        (QWEN3_30B, machine(100, 128), {"ram": 40 * GIB}, r"[Uu]se --ram 59\d\d\dM"),
        (QWEN3_30B, machine(59, 128), {"ram_reserve": 2 * GIB}, r"[Uu]se --ram-reserve 1\d\d\dM"),
        (QWEN3_30B, machine(60, 64), {"context": 40960}, r"[Uu]se --context \d+"),
        (DEMO, machine(4), {"kv_memory": 8 * GIB}, r"[Ll]ower --kv-memory"),
        (DEMO, machine(4), {"kv_memory": 8 * GIB, "context": 128}, r"[Ll]ower --kv-memory"),
        (MIXTRAL, machine(30, 32), {"kv_memory": GIB}, r"used \([^)]*\)\. Use a machine with"),
        (NEXT, machine(190, 192), {"state_memory": 64 * GIB}, r"[Ll]ower --state-memory"),
        (NEXT, machine(100, 128), {"state_memory": GIB}, r"used \([^)]*\)\. Use a machine with"),
        (MIXTRAL, machine(30, 32), {}, r"[Uu]se a machine with 8\d\.\d GiB of free memory, or a smaller model"),
        (DEMO, machine(0.5, 16), {}, r"[Ff]ree 1\.27 GiB of memory"),
        (DEMO, machine(0.5, 16, memory_bound_by="the limit of /box"), {},
         r"bound by the limit of /box\).*[Ee]xtend the limit of /box by 1\.27 GiB\."),
    ],
)  # fmt: skip
def test_a_refusal_names_what_helps(spec: Model, box: Machine, asked: dict[str, Any], remedy: str) -> None:
    with pytest.raises(ResourceError, match=remedy):
        plan(spec, box, **asked)


@pytest.mark.parametrize(
    ("box", "asked", "flag", "worse"),
    [
        (machine(60, 64), {"context": 40960}, "context", 1),
        (machine(100, 128), {"ram": 40 * GIB}, "ram", -(1 << 20)),
        (machine(59, 128), {"ram_reserve": 2 * GIB}, "ram_reserve", 1 << 20),
        (machine(124, 128), {"context": 4096, "kv_memory": GIB // 4}, "kv_memory", -(1 << 20)),
    ],
)
def test_a_remedy_works_and_is_the_least(box: Machine, asked: dict[str, int], flag: str, worse: int) -> None:
    refused = plan_or_refusal(QWEN3_30B, box, asked)
    assert not isinstance(refused, Plan)
    option = "--" + flag.replace("_", "-")
    advised = parse_size(re.search(rf"se {option} (\d+M?)", refused.remedy).group(1))
    assert isinstance(plan_or_refusal(QWEN3_30B, box, asked | {flag: advised}), Plan)
    assert not isinstance(plan_or_refusal(QWEN3_30B, box, asked | {flag: advised + worse}), Plan)


def test_fewer_requests_at_once_need_fewer_states() -> None:
    box, asked = machine(152, 160), {"max_running": 64, "max_batch_tokens": 512}
    refused = plan_or_refusal(NEXT, box, asked)
    assert not isinstance(refused, Plan)
    assert "recurrent states 4.61 GiB" in refused.message
    advised = int(re.search(r"se --max-running (\d+)", refused.remedy).group(1))
    assert 1 < advised < 64
    assert isinstance(plan_or_refusal(NEXT, box, asked | {"max_running": advised}), Plan)
    assert "--max-running" not in plan_or_refusal(QWEN3_30B, machine(50, 64), asked).remedy


def test_a_context_beyond_the_model_is_refused() -> None:
    with pytest.raises(UsageError, match=r"--context 8193 is longer than the 8192 tokens.*rope_scaling"):
        plan(DEMO, machine(6), context=8193)


@pytest.mark.parametrize(
    ("scaling", "reach"),
    [
        (RopeScaling("yarn", 4.0, 512), 2048),
        (RopeScaling("linear", 2.0, 512), 1024),
        (RopeScaling("dynamic", 3.0, 512), 1536),
        (RopeScaling("llama3", 8.0, 128), 512),  # Llama 3.2: 32 x 8192 is more than its 131072 positions
        (RopeScaling("yarn", 2.0, 128), 512),  # the config's own, larger figure stands
    ],
)
def test_rope_scaling_stretches_the_context(scaling: RopeScaling, reach: int) -> None:
    spec = model(256, 2, Block(attention(64, 4, 2, 16, scaling), Mlp(64, 112)), 512)
    assert plan(spec, machine(4)).context_tokens == reach
    with pytest.raises(UsageError):
        plan(spec, machine(4), context=reach + 1)


@pytest.mark.parametrize(
    ("asked", "box", "threads", "why"),
    [
        (None, machine(6, cores=8), 8, "8 cores usable"),
        (None, machine(6, cores=16, physical_cores=8), 8, "one per core: 16 usable CPUs are 8 cores"),
        (None, machine(6, cores=64, quota_cores=3.0), 3, "the CPU quota is 3 of 64 cores"),
        (None, machine(6, cores=64, quota_cores=0.5), 1, "the CPU quota is 0.5 of 64 cores"),
        (None, machine(6, cores=16, physical_cores=8, quota_cores=12.0), 8, "one per core"),
        (2, machine(6, cores=8), 2, "as asked"),
        (8, machine(6, cores=64, quota_cores=3.0), 8, "as asked, but the CPU quota is 3 cores"),
    ],
)
def test_threads(asked: int | None, box: Machine, threads: int, why: str) -> None:
    got = plan(DEMO, box, threads=asked)
    assert got.threads == threads
    assert why in row(got, "threads")[2]


def test_more_threads_than_cpus_are_refused() -> None:
    with pytest.raises(UsageError, match="--threads 9 is more than the 8 CPUs"):
        plan(DEMO, machine(6, cores=8), threads=9)


@pytest.mark.parametrize(
    ("asked", "usable_gib"),
    [
        ({}, 124 - 1),  # 5 % of 128 GiB is more than 1 GiB
        ({"ram_reserve": 10 * GIB}, 114),
        ({"ram_reserve": 0}, 124),
        ({"ram": 80 * GIB}, 80),
        ({"ram": 800 * GIB}, 123),
    ],
)
def test_ram(asked: dict[str, int], usable_gib: int) -> None:
    got = plan(DEMO, machine(124, 128), **asked)
    assert got.memory.usable_bytes == usable_gib * GIB
    assert row(got, "RAM")[1].startswith(f"{usable_gib}")


def test_a_small_machine_keeps_five_percent() -> None:
    assert plan(DEMO, machine(3, 4)).memory.reserve_bytes == 4 * GIB // 20


@pytest.mark.parametrize(
    ("stored", "load_format", "asked", "dtype", "why"),
    [
        ("bfloat16", "safetensors", "auto", "bfloat16", "the checkpoint's own"),
        ("float32", "safetensors", "auto", "float32", "the checkpoint's own"),
        ("float16", "gguf", "auto", "bfloat16", "of activations"),
        ("float32", "safetensors", "bfloat16", "bfloat16", "float32 is rounded once"),
        ("bfloat16", "safetensors", "float32", "float32", "as asked"),
    ],
)
def test_dtype(stored: str, load_format: str, asked: str, dtype: str, why: str) -> None:
    got = plan(DEMO, machine(6), FakeCheckpoint(load_format=load_format, dtype=stored), dtype=asked)
    assert got.dtype == dtype
    assert why in row(got, "dtype")[2]
    plain = DEMO.num_params * (4 if dtype == "float32" else 2)
    assert got.memory.weights_bytes == (packed_size(DEMO, {}).total_bytes if got.isa else plain)


def test_kv_memory_buys_pages_and_cuts_the_context() -> None:
    per_token = DEMO.kv_bytes_per_token(2)
    got = plan(DEMO, machine(6), kv_memory=per_token * 1000)
    assert got.num_pages == 62  # 1000 // 16
    assert got.context_tokens == 62 * 16
    assert "--kv-memory" in row(got, "context")[2]
    with pytest.raises(UsageError, match="a context of 1000 needs"):
        plan(DEMO, machine(6), kv_memory=per_token * 999, context=1000)
    with pytest.raises(UsageError, match="holds 0 tokens"):
        plan(DEMO, machine(6), kv_memory=per_token)
    assert plan(DEMO, machine(6), kv_memory=2 * per_token, page_tokens=1).context_tokens == 2
    with pytest.raises(UsageError, match="holds 1 tokens of some/model; a context of 2 needs"):
        plan(DEMO, machine(6), kv_memory=per_token, page_tokens=1)


def test_pages_for_further_requests_are_what_memory_leaves() -> None:
    rich, poor = plan(DEMO, machine(6), context=8192), plan(DEMO, machine(1.75, 8), context=8192)
    assert rich.num_pages == 4 * 512
    assert 512 <= poor.num_pages < rich.num_pages
    assert plan(DEMO, machine(6), max_running=1).num_pages == 512


def test_a_step_holds_every_running_request() -> None:
    got = plan(DEMO, machine(6), max_running=64, max_batch_tokens=16)
    assert got.max_batch_tokens == 64
    assert row(got, "tokens per step")[:2] == ("16", "64")
    assert plan(DEMO, machine(6), max_batch_tokens=16).max_batch_tokens == 16


def test_roof_reads_active_weights_and_a_short_context() -> None:
    got = plan(QWEN3_30B, machine(124, 128))
    assert got.roof.bandwidth_bytes_per_s == BANDWIDTH
    assert got.roof.bytes_per_token == 2 * QWEN3_30B.num_active_params + ROOF_CONTEXT_TOKENS * 98304
    assert QWEN3_30B.num_active_params // 10_000_000 == 304  # 3.35 B with the embedding's 0.31 B
    assert 16 < got.roof.tokens_per_s < 17


def test_recurrent_states_are_planned() -> None:
    got = plan(NEXT, machine(190, 192), max_running=3, prefix_cache=False)
    state_bytes = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2)
    assert got.memory.states_bytes == 3 * state_bytes
    moved = ROOF_CONTEXT_TOKENS * 24576 + 2 * state_bytes
    assert got.roof.bytes_per_token == 2 * NEXT.num_active_params + moved
    assert plan(DEMO, machine(6)).memory.states_bytes == 0


def test_every_decision_is_explained() -> None:
    for decision in plan(DEMO, machine(6)).decisions:
        assert decision.got
        assert decision.why, decision.name


@settings(max_examples=examples(300), deadline=None)
@given(
    spec=st.sampled_from([DEMO, QWEN3_30B, MIXTRAL, TINY]),
    free_gib=st.floats(0, 200),
    used_gib=st.floats(0, 100),
    cores=st.integers(1, 64),
    quota=st.none() | st.floats(0.1, 64),
    asked=st.fixed_dictionaries(
        {},
        optional={
            "context": st.integers(1, 50_000),
            "kv_memory": st.integers(1, 20 * GIB),
            "page_tokens": st.integers(1, 256),
            "max_running": st.integers(1, 300),
            "max_batch_tokens": st.integers(1, 5000),
            "ram": st.integers(1, 200 * GIB),
            "ram_reserve": st.integers(0, 50 * GIB),
            "dtype": st.sampled_from(["auto", "float32", "bfloat16"]),
        },
    ),
)
def test_any_plan_fits_or_is_refused(
    spec: Model, free_gib: float, used_gib: float, cores: int, quota: float | None, asked: dict[str, Any]
) -> None:
    box = msgspec.structs.replace(machine(free_gib, free_gib + used_gib, cores), quota_cores=quota)
    got = plan_or_refusal(spec, box, asked)
    if not isinstance(got, Plan):
        assert got.remedy
        return
    memory = got.memory
    parts = (memory.process_bytes, memory.weights_bytes, memory.loading_bytes, memory.kv_bytes, memory.workspace_bytes)
    assert min(parts) > 0
    assert sum(parts) + memory.states_bytes <= memory.usable_bytes
    assert 0 < got.context_tokens <= min(spec.max_positions, got.num_pages * got.page_tokens)
    assert got.context_tokens == asked.get("context", got.context_tokens)
    assert memory.kv_bytes <= asked.get("kv_memory", memory.kv_bytes)
    assert memory.usable_bytes <= asked.get("ram", memory.usable_bytes)
    assert got.max_batch_tokens >= got.max_running
    assert 1 <= got.threads <= cores


def plan_or_refusal(spec: Model, box: Machine, asked: dict[str, Any]) -> Plan | ProaError:
    try:
        return plan(spec, box, **asked)
    except (ResourceError, UsageError) as refused:
        return refused


def test_options_are_not_changed() -> None:
    asked = options(max_running=64, max_batch_tokens=16)
    before = replace(asked)
    resolve(asked, "m", FakeCheckpoint(), Declared(DEMO, NameTable()), host(machine(6)))
    assert asked == before


@pytest.mark.parametrize(("others", "told"), [(0.0, "read by 2 threads from huge pages"), (1.7, "the machine is busy")])
def test_the_table_says_how_ram_was_measured(others: float, told: str) -> None:
    ram = ram_of(18e9, others)
    host_ = Host(machine(6, 8), ram, "avx512-bf16", "")
    got = resolve(EngineOptions(), "some/model", FakeCheckpoint(), Declared(DEMO, NameTable()), host_)
    asked, speed, why = row(got, "RAM speed")
    assert (asked, speed) == ("auto", "18.0 GB/s")
    assert why.startswith(told)
