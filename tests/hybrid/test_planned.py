"""A planned engine on a simulated GPU: hot experts move to it, and the CPU computes fewer pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from engines import finish_all, request, tokens_of
from hybrid_engines import hybrid_of
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, MachineOptions, ModelOptions
from proa.engine.building.load import load_engine
from proa.engine.engine import Engine
from proa.hybrid.model import HybridModel
from proa.plan.expert_counts import read_counts
from quick_plan import prepare
from tiny import make_tiny

TOKENS = 60


def load(folder: Path, experts: str = "3", **asked: str) -> tuple[Engine, HybridModel]:
    """Load dummy weights with skewed routing, three of eight experts in VRAM."""
    options = EngineOptions(
        ModelOptions(load_format="dummy", dummy_router="zipf", dtype="bfloat16"),
        CacheOptions(context=512),
        machine=MachineOptions(threads=2, cpu_binding="none"),
        gpus=GpuOptions(gpu="sim:64MiB,pcie=1GB/s", gpu_experts=experts, **asked),
    )
    engine, _ = load_engine(prepare(str(folder), options).plan, lambda loading: None)
    return engine, hybrid_of(engine)


def pairs_of(engine: Engine, hybrid: HybridModel) -> int:
    """Pairs that the CPU computes for TOKENS tokens after placement has settled."""
    assert hybrid.transport is not None
    prompt = list(range(20, 40))
    engine.submit(request("first", prompt, 60))
    finish_all(engine)
    before = hybrid.transport.counters().pairs
    engine.submit(request("second", prompt, TOKENS))
    assert len(tokens_of(finish_all(engine)["second"])) == TOKENS
    return hybrid.transport.counters().pairs - before


@pytest.mark.parametrize("name", ["qwen3-moe", "mixtral"])
def test_moving_experts_relieve_the_cpu(name: str, tmp_path: Path) -> None:
    folder = make_tiny(name, tmp_path)
    static, moving = (load(folder, expert_placement=p, co_fetch="off") for p in ("uniform", "auto"))
    few, many = pairs_of(*moving), pairs_of(*static)
    moves = moving[1].moves
    assert static[1].moves is None
    assert moves is not None
    assert moves.moved.experts > 0
    streaming = moving[1].streaming
    assert streaming is not None
    copied = moves.moved.experts - streaming.totals.promoted  # those that prompts promoted came from the ring
    assert moves.moved.nbytes >= copied * moves.layers[0].shape.up.matrix_bytes
    assert few < many


def test_counts_are_saved_and_place_experts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The experts that one run chose most are in VRAM at the start of the next, with any placement."""
    folder, file = make_tiny("qwen3-moe", tmp_path), tmp_path / "counts.json"
    engine, hybrid = load(folder, save_expert_counts=str(file), expert_placement="uniform", co_fetch="off")
    engine.submit(request("first", list(range(20, 40)), TOKENS))
    finish_all(engine)
    engine.settle()
    assert hybrid.counting is not None
    counts = read_counts(file, engine.runner.executor.spec)
    assert [list(of) for of in counts] == [row[: len(of)] for row, of in zip(hybrid.counting.totals.tolist(), counts,
                                                                            strict=True)]  # fmt: skip
    top_k = 3
    assert {sum(of) for of in counts} == {(20 + TOKENS - 1) * top_k}, "the last token is chosen, not computed"
    again, there = load(folder, expert_counts=str(file), expert_placement="frequency", co_fetch="off")
    assert there.moves is None
    assert there.counting is None, "no option asks for counts"
    resident = [set(layer.memory.slots.slot_of) for layer in there.layers]
    for ids, of in zip(resident, counts, strict=True):
        assert ids == set(sorted(range(len(of)), key=lambda e: -of[e])[:3])
    assert pairs_of(again, there) < pairs_of(*load(folder, expert_placement="uniform", co_fetch="off"))
    whole, _ = load(folder, "all", save_expert_counts=str(file))
    whole.submit(request("first", list(range(20, 40)), TOKENS))
    finish_all(whole)
    whole.settle()
    assert read_counts(file, engine.runner.executor.spec) == counts, "counts do not depend on placement"
    file.unlink()
    file.mkdir()
    engine.settle()
    engine.settle()
    assert caplog.text.count("cannot be written") == 1


@pytest.mark.parametrize("prefill", ["stream", "cpu"])
def test_a_request_knows_where_its_experts_were_computed(prefill: str, tmp_path: Path) -> None:
    """Two prompts of one step share its division; tokens from the prefix cache do not count."""
    engine, _ = load(make_tiny("qwen3-moe", tmp_path), expert_placement="uniform", prefill=prefill)
    prompts = {"a": list(range(20, 180)), "b": list(range(120, 220)), "again": [*range(20, 180), 7, 8, 9]}
    first = {}
    for names in (["a", "b"], ["again"]):
        for name in names:
            engine.submit(request(name, prompts[name], 3, return_progress=True))
        for name, events in finish_all(engine).items():
            first[name] = next(event for event in events if event.tokens)
            assert all(event.prompt_experts is None for event in events if event is not first[name])
    done = engine.stats().prefill
    for name, event in first.items():
        experts, cached = event.prompt_experts, event.cached_tokens
        assert experts is not None
        assert cached is not None
        assert (cached > 0) == (name == "again")
        assert experts.streamed + experts.cpu == len(prompts[name]) - cached
        share = done.streamed / max(1, done.streamed + done.left_to_cpu)
        assert experts.streamed == pytest.approx((len(prompts[name]) - cached) * share, abs=1)
    assert (done.streamed > 0) == (prefill == "stream")
