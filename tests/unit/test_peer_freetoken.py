"""benchmarks/peers: FreeToken's scripts without FreeToken and without a GPU; a stand-in has its interface."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from fake_freetoken import PEERS, STAND_IN, run_script, write_wheel
from proa.bench.hybrid_shapes import MODEL_SHAPES
from proa.cli.bench_hybrid import HybridCommand
from proa.config.parse import parse
from proa.errors import ProaError, UsageError
from quick_plan import ram_of

TINY = MODEL_SHAPES["tiny"]


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(PEERS))


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """A folder with the stand-in as a wheel."""
    return write_wheel(tmp_path / "wheels", "freetoken", "0.2.1", STAND_IN)


@pytest.fixture
def import_state(peers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Undo the changes of `provide` to this process."""
    monkeypatch.setattr(os, "environ", dict(os.environ))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))


@pytest.mark.seldom
def test_freetoken_that_is_not_installed_is_named() -> None:
    done = run_script("--shape=tiny")
    assert (done.returncode, done.stdout) == (1, "")
    assert "FreeToken is not installed here. See FreeToken in benchmarks/peers/README.md" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.usefixtures("import_state")
@pytest.mark.parametrize(
    ("version", "tags", "files", "what"),
    [
        ("0.2.1", "cp39-cp39-manylinux_2_17_x86_64", {}, "freetoken-0.2.1-cp39-.* is not for this Python"),
        ("0.2.1", "py3-none-any", {"freetoken/llm.py": "import msgpaque"}, "cannot be used here .*'msgpaque'"),
        ("0.3", "py3-none-any", {}, "This is FreeToken 0.3. Install 0.2.1"),
    ],
)
def test_wheels_that_do_not_fit_are_named(
    tmp_path: Path, version: str, tags: str, files: dict[str, str], what: str
) -> None:  # fmt: skip
    from run_freetoken import run

    folder = write_wheel(tmp_path / "wheels", "freetoken", version, {"freetoken/__init__.py": "", **files}, tags)
    with pytest.raises(UsageError, match=what):
        run(["--shape=tiny", f"--wheels={folder}"])


@pytest.mark.usefixtures("peers")
def test_a_folder_without_its_wheel_is_named(tmp_path: Path) -> None:
    from freetoken_files import unpack_all

    write_wheel(tmp_path, "other", "1.0", {})
    with pytest.raises(UsageError, match=f"no wheel of FreeToken in {tmp_path}.*README"):
        unpack_all(tmp_path, tmp_path / "site")


@pytest.mark.seldom
def test_hybrid_rows(tmp_path: Path, wheels: Path) -> None:
    write_wheel(wheels, "rich", "1.0", {"rich/broken.py": ""})  # is installed, and stays as it is
    argv = ["--shape=tiny", "--wheels", wheels, "--keep", tmp_path / "keep", "--requests=1,3", "--prompt-tokens=5"]
    argv += ["--output-tokens=20", "--cache-share=70", "--runs=2", "--misses", "--json"]
    done = run_script(*argv)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["requests"] for row in rows] == [1, 3]
    cpus = len(os.sched_getaffinity(0))
    more = [{"asked_threads": cpus - 2, "threads": cpus - 2, "cpu": 20.0, "pcie": 10.0,
             "cpu_beside_pcie": 13.0 + cpus, "pcie_beside_cpu": 9.0}] if cpus > 4 else []  # fmt: skip
    for row in rows:
        wanted = {
            "peer": "FreeToken 0.2.1", "shape": "tiny", "layers": 2, "format": "bf16", "mode": "hybrid",
            "prompt_tokens": 5, "output_tokens": 20, "hit_share": 0.25, "resident_share": 12 / 16, "fetch_share": 0.375,
            "cpu_threads": cpus - 2 if cpus > 4 else 7, "cpu_isa": "avx512bf16", "attention": "triton",
        }  # fmt: skip
        assert wanted.items() <= row.items()
        assert row["rates"][1:] == more
        assert (row["rates"][0]["asked_threads"], row["rates"][0]["threads"]) == (0, 7)
        # sleeping takes at least as long as asked; how much longer is the machine's affair
        assert 0 < row["tokens_per_s"] <= 500 * row["requests"] * 1.01
        assert row["step_ms"] == pytest.approx(1e3 * row["requests"] / row["tokens_per_s"])
        assert len(row["tokens_per_s_runs"]) == 2
        assert any("rich" in note for note in row["notes"])
    assert not (tmp_path / "keep" / "site" / "rich").exists()
    again = run_script(*argv)
    assert again.returncode == 0, again.stderr
    profile = (tmp_path / "keep" / "cache" / "profile").read_text().split()
    once = ["0", *([str(cpus - 2)] if cpus > 4 else []), "engine"]
    assert profile == once * 2, "the profile is taken anew, right before the engine reads it"


@pytest.mark.seldom
def test_no_rates_are_measured_with_all_experts_in_vram(tmp_path: Path, wheels: Path) -> None:
    done = run_script("--shape=tiny", "--wheels", wheels, "--mode=vram", "--requests=2", "--output-tokens=4", "--json")
    assert done.returncode == 0, done.stderr
    (row,) = [json.loads(line) for line in done.stdout.splitlines()]
    assert (row["mode"], row["resident_share"], row["hit_share"], row["cpu_threads"]) == ("vram", 1.0, None, None)
    assert row["rates"] == []


def test_first_tokens_of_prompts(tmp_path: Path, wheels: Path) -> None:
    argv = ["--shape=tiny", "--wheels", wheels, "--mode=vram", "--prefill=5,9", "--runs=3", "--json"]
    done = run_script(*argv)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["tokens"] for row in rows] == [5, 9]
    for row in rows:
        assert len(row["ttft_s_runs"]) == 3
        assert row["ttft_s"] == sorted(row["ttft_s_runs"])[1] >= 0.002
        assert (row["mode"], row["resident_share"]) == ("vram", 1.0)


@pytest.mark.usefixtures("peers")
def test_a_long_prompt_is_one_chunk(tmp_path: Path) -> None:
    """FreeToken reads each expert once a chunk: shorter chunks would make it slower than it is."""
    from freetoken_calls import Case, engine_options

    options = engine_options(Case(tmp_path, TINY, "vram", 1.0, 0, (1,), 100, 50, (512, 65536)))
    assert options["max_extend_tokens"] == 65536
    assert options["max_seq_len_override"] > 65536


@pytest.mark.usefixtures("peers")
def test_a_cache_smaller_than_a_layer_is_refused(tmp_path: Path) -> None:
    from freetoken_calls import Case, engine_options

    def case(share: float, mode: str = "hybrid") -> Case:
        return Case(tmp_path, TINY, mode, share, 3, (1, 4), 100, 50)

    with pytest.raises(UsageError, match="A cache of 4 experts is less than a layer's 8"):
        engine_options(case(0.25))
    one_layer, both = engine_options(case(0.5)), engine_options(case(1.0))
    assert (one_layer["moe_cache_size"], one_layer["moe_prefill_overlap"]) == (8, False)
    assert (both["moe_cache_size"], both["moe_prefill_overlap"]) == (16, True)
    assert (both["moe_strategy"], both["moe_cpu_threads"], both["cuda_graph_max_bs"]) == ("hybrid", 3, 4)
    resident = engine_options(case(0.25, "vram"))
    assert resident["moe_strategy"] == "fused"
    assert "moe_cache_size" not in resident


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("name", ["tiny", "qwen3-30b-a3b"])
def test_model_folder(tmp_path: Path, name: str) -> None:
    """transformers, with which FreeToken reads configs and tokenizers, finds all sizes."""
    from freetoken_files import write_model
    from transformers import AutoConfig, AutoTokenizer

    shape = MODEL_SHAPES[name].cut(2)
    for weights in ("bf16", "fp8"):
        folder = write_model(tmp_path / weights, shape, weights)
        config = AutoConfig.from_pretrained(folder)
        sizes = (config.hidden_size, config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads)
        assert sizes == (shape.hidden, 2, shape.heads, shape.kv_heads)
        experts = (config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, config.vocab_size)
        assert experts == (shape.experts, shape.top_k, shape.width, shape.vocab)
        assert config.max_position_embeddings == 1 << 17
        quantised = getattr(config, "quantization_config", None)
        assert (quantised is None) == (weights == "bf16")
        if quantised is not None:
            assert (quantised["quant_method"], quantised["weight_block_size"]) == ("fp8", [128, 128])
        assert AutoTokenizer.from_pretrained(folder).eos_token_id == 1


@pytest.mark.usefixtures("peers")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_random_experts(dtype: torch.dtype) -> None:
    from freetoken_calls import RandomWeights

    weights = RandomWeights()
    sizes = {}
    for role in ("gate_up", "down"):
        bank = torch.full((3, 256, 128), float("nan")).to(dtype)
        scale = torch.full((3, 2, 1), float("nan"), dtype=torch.bfloat16)
        weights.expert(role, bank)
        weights.expert(f"{role}_scale", scale)
        values = bank.float()
        assert values.isfinite().all()
        assert (values == values[:1]).all()
        sizes[role] = values.std().item() * (scale[0, 0].item() if dtype == torch.float8_e4m3fn else 1)
    # standard deviations of 3 x 2**15 equal thirds: within 1 %, and the rounding of values and scales
    assert sizes["gate_up"] == pytest.approx(128**-0.5, rel=0.03)
    assert sizes["down"] == pytest.approx(0.2 * 128**-0.5, rel=0.03)


@pytest.mark.usefixtures("peers")
def test_random_dense_weights() -> None:
    from freetoken_calls import RandomWeights

    layer = "model.layers.0.self_attn"
    state = {
        "model.embed_tokens.weight": torch.empty(512, 64, dtype=torch.bfloat16),
        "model.norm.weight": torch.empty(64, dtype=torch.bfloat16),
        f"{layer}.qkv_proj.weight": torch.empty(256, 128, dtype=torch.float8_e4m3fn),
        f"{layer}.qkv_proj.weight_scale_inv": torch.empty(2, 1, dtype=torch.bfloat16),
        f"{layer}.o_proj.weight": torch.empty(256, 64, dtype=torch.bfloat16),
        "steps": torch.empty(3, dtype=torch.int32),
    }
    made = RandomWeights().dense(state, device=torch.device("cpu"))
    assert {name: (v.shape, v.dtype) for name, v in made.items()} == {n: (v.shape, v.dtype) for n, v in state.items()}
    spread = {name: value.float().std().item() for name, value in made.items() if value.dim() > 1}
    assert spread["model.embed_tokens.weight"] == pytest.approx(1, rel=0.03)
    assert spread[f"{layer}.qkv_proj.weight"] == pytest.approx(1, rel=0.03)
    assert spread[f"{layer}.o_proj.weight"] == pytest.approx(0.2 / 8, rel=0.03)
    assert made[f"{layer}.qkv_proj.weight_scale_inv"].float() == pytest.approx(128**-0.5, rel=2**-8)
    assert (made["model.norm.weight"] == 1).all()
    assert (made["steps"] == 0).all()
    with pytest.raises(UsageError, match="should lie in RAM"):
        RandomWeights().dense(state, device=torch.device("cpu"), host_keys=frozenset({"model.embed_tokens.weight"}))


@pytest.mark.usefixtures("peers")
def test_only_steps_of_all_requests_count() -> None:
    from freetoken_calls import SETTLE_TOKENS, decoded

    first = [float(i) for i in range(SETTLE_TOKENS + 4)]  # a token a second
    later = [moment + 2 for moment in first]
    found = decoded([first, later], SETTLE_TOKENS + 4)
    # from the later one's last settling token, two seconds after the first one's, to the first one's end
    assert (found.requests, found.tokens_per_s) == (2, 2.0)
    with pytest.raises(ProaError, match=f"made {SETTLE_TOKENS + 4}, 1 tokens instead of {SETTLE_TOKENS + 4}"):
        decoded([first, [1.0]], SETTLE_TOKENS + 4)
    with pytest.raises(ProaError, match="never decoded together"):
        decoded([first, [moment + 4 for moment in first]], SETTLE_TOKENS + 4)


@pytest.mark.usefixtures("peers")
def test_threads_by_measured_rates() -> None:
    from run_freetoken import pick_threads, thread_candidates

    def row(asked: int, cpu: float, beside: float) -> dict[str, Any]:
        return {"asked_threads": asked, "cpu": cpu, "cpu_beside_pcie": beside, "pcie_beside_cpu": 50.0}

    assert (thread_candidates(2), thread_candidates(16)) == ([0], [0, 14])
    assert pick_threads([row(0, 100, 70), row(14, 101, 80)], "hybrid") == 14
    assert pick_threads([row(0, 100, 70), row(14, 101, 80)], "cpu") == 0  # 1 % is nothing
    assert pick_threads([], "vram") == 0


@pytest.fixture
def beside(peers: None) -> ModuleType:
    import beside_freetoken

    return beside_freetoken


@pytest.mark.parametrize(("mode", "resident"), [("hybrid", 12.5), ("cpu", 0.0), ("vram", 100.0)])
def test_both_engines_get_the_same_options(beside: ModuleType, tmp_path: Path, mode: str, resident: float) -> None:
    from run_freetoken import Options

    asked = beside.Options(
        shape="tiny", layers=1, requests="2,3", prompt_tokens=7, output_tokens=9, cache_share=12.5, runs=4, wheels="w"
    )
    made = beside.commands(asked, mode, tmp_path, first=True)
    ours = parse(HybridCommand, made["proa"][5:], prog="proa", summary="s").options
    theirs = parse(Options, made["freetoken"][2:], prog="f", summary="s").options
    assert made["proa"][1:5] == ["-m", "proa.cli.main", "bench", "hybrid"]
    same = ("shape", "layers", "format", "requests", "output_tokens", "runs")
    for name in same:
        assert getattr(ours.bench, name) == getattr(theirs, name), name
    assert (theirs.shape, theirs.layers, theirs.requests, theirs.output_tokens, theirs.runs) == ("tiny", 1, "2,3", 9, 4)
    assert (ours.bench.context, theirs.prompt_tokens) == (7, 7)
    assert (ours.bench.resident, theirs.cache_share, theirs.mode) == (resident, 12.5, mode)
    assert (ours.json, theirs.json, theirs.wheels, theirs.misses) == (True, True, "w", mode == "hybrid")
    assert "--misses" not in beside.commands(asked, mode, tmp_path, first=False)["freetoken"]


def test_prompts_are_compared_at_equal_lengths(beside: ModuleType, tmp_path: Path) -> None:
    from run_freetoken import Options

    from proa.cli.bench_prefill import PrefillCommand

    asked = beside.Options(shape="tiny", layers=1, prefill="64,512", cache_share=12.5, runs=4)
    made = beside.commands(asked, "hybrid", tmp_path, first=True)
    ours = parse(PrefillCommand, made["proa"][5:], prog="proa", summary="s").options
    theirs = parse(Options, made["freetoken"][2:], prog="f", summary="s").options
    assert made["proa"][1:5] == ["-m", "proa.cli.main", "bench", "prefill"]
    assert ours.bench.tokens == theirs.prefill == "64,512"
    assert (ours.bench.shape, ours.bench.layers, ours.bench.runs) == (theirs.shape, theirs.layers, theirs.runs)
    assert (ours.bench.resident, theirs.cache_share, theirs.misses) == (12.5, 12.5, False)


def printing(*rows: dict[str, Any]) -> list[str]:
    return [sys.executable, "-c", f"import sys; sys.stdout.write({''.join(json.dumps(r) + chr(10) for r in rows)!r})"]


def proa_row(rate: float) -> dict[str, Any]:
    return {"figures": {"requests": 1, "tokens_per_s": rate, "roof_tokens_per_s": 200.0, "resident_share": 0.1,
                        "pcie_bytes_per_s": 5e10, "hbm_bytes_per_s": 4e12}}  # fmt: skip


def freetoken_row(rate: float) -> dict[str, Any]:
    """FreeToken's default number of workers was faster than the second one."""
    rates = [
        {"threads": threads, "cpu": 100.0, "cpu_beside_pcie": 80.0 - i, "pcie_beside_cpu": 40.0}
        for i, threads in enumerate((7, 14))
    ]
    return {"requests": 1, "tokens_per_s": rate, "resident_share": 0.125, "hit_share": 0.09, "peer": "FreeToken 0",
            "cpu_threads": 7, "rates": rates}  # fmt: skip


def run_beside(
    beside: ModuleType, monkeypatch: pytest.MonkeyPatch, made: list[dict[str, list[str]]], *argv: str
) -> list[str]:
    """Run the comparison with the given runs of each round and mode; RAM reads 1 GB/s. Return the modes in order."""
    asked: list[str] = []

    def commands(options: object, mode: str, kept: Path, *, first: bool) -> dict[str, list[str]]:
        asked.append(mode)
        return made[(len(asked) - 1) % len(made)]

    monkeypatch.setattr(beside, "commands", commands)
    monkeypatch.setattr(beside, "ram_meter", lambda asked: lambda: ram_of(1e9))
    monkeypatch.setattr(beside, "busy_notes", tuple)
    beside.run(["--requests=1", "--json", *argv])
    return asked


def test_medians_and_ratios(
    beside: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def pair(ours: float, theirs: float) -> dict[str, list[str]]:
        return {"proa": printing(proa_row(ours)), "freetoken": printing(freetoken_row(theirs))}

    made = [pair(90, 60), pair(400, 500), pair(110, 100), pair(500, 500), pair(120, 100), pair(450, 500)]
    assert run_beside(beside, monkeypatch, made, f"--keep={tmp_path}") == ["hybrid", "vram"] * 3
    hybrid, vram = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (hybrid["mode"], hybrid["proa_tokens_per_s"], hybrid["freetoken_tokens_per_s"]) == ("hybrid", 110, 100)
    assert hybrid["ratios"] == [1.5, 1.1, 1.2]
    assert (hybrid["ratio"], hybrid["ratio_spread"]) == (pytest.approx(1.2), [1.1, 1.5])
    assert (hybrid["proa_spread"], hybrid["freetoken_spread"]) == ([90, 120], [60, 100])
    assert hybrid["freetoken_profiles"] == [{"cpu_beside_pcie": 80.0, "pcie_beside_cpu": 40.0}] * 3
    assert (hybrid["freetoken_hit_share"], hybrid["freetoken_resident_share"]) == (0.09, 0.125)
    assert (vram["mode"], vram["ratio"]) == ("vram", pytest.approx(0.9))
    assert hybrid["peer"] == "FreeToken 0"
    assert hybrid["machine"] == {"ram": [1e9] * 13, "pcie": [5e10] * 6, "hbm": [4e12] * 6}
    assert hybrid["notes"] == []


def test_times_to_the_first_token(
    beside: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def pair(ours_s: float, theirs_s: float) -> dict[str, list[str]]:
        figures = {"tokens": 64.0, "ttft_s_median": ours_s, "streamed_share": 0.25, "upload_bytes_per_s": 5e10}
        row = freetoken_row(1.0) | {"tokens": 64, "ttft_s": theirs_s}
        return {"proa": printing({"figures": figures}), "freetoken": printing(row)}

    made = [pair(0.2, 0.5), pair(0.25, 0.25), pair(0.1, 0.2)]
    argv = (f"--keep={tmp_path}", "--prefill=64", "--modes=hybrid")
    run_beside(beside, monkeypatch, made, *argv)
    (cell,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (cell["mode"], cell["tokens"], cell["proa_ttft_s"], cell["freetoken_ttft_s"]) == ("hybrid", 64, 0.2, 0.25)
    assert (cell["ratios"], cell["ratio"]) == ([2.5, 1.0, 2.0], 2.0)
    assert (cell["proa_streamed_share"], cell["machine"]["pcie"]) == (0.25, [5e10] * 3)
    beside.run(["--requests=1", *argv])
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("│ 64 │ 200 │ 250 │ 2.00 │ 2.50 1.00 2.00 │ 25% │", "before hybrid, 64, GB/s"):
        assert text in shown, text


def test_fewer_than_three_rounds_are_refused(beside: ModuleType) -> None:
    """One slow minute can decide a round, and two rounds have no median."""
    with pytest.raises(UsageError, match=r"--rounds is 2\..*from 3"):
        beside.run(["--rounds=2"])


def test_the_table_has_medians_and_spread(
    beside: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rates = [(90, 60), (110, 100), (120, 100)]
    made = [{"proa": printing(proa_row(a)), "freetoken": printing(freetoken_row(b))} for a, b in rates]
    monkeypatch.setattr(beside, "commands", lambda options, mode, kept, *, first: made.pop(0))
    monkeypatch.setattr(beside, "ram_meter", lambda asked: lambda: ram_of(1e9))
    beside.run(["--requests=1", "--modes=hybrid"])
    shown = " ".join(capsys.readouterr().out.split())
    for text in ("110.0", "90-120", "60-100", "1.20", "1.50 1.10 1.20", "80 and 40"):
        assert text in shown, text


def test_a_failed_run_drops_only_its_mode(
    beside: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = [sys.executable, "-c", "import sys; sys.exit('the reason')"]
    good = {"proa": printing(proa_row(50)), "freetoken": printing(freetoken_row(25))}
    made = [{"proa": printing(proa_row(70)), "freetoken": broken}, good, good, good]
    with pytest.raises(
        ProaError, match=r"no result for hybrid\..*round 1 of hybrid: .*exit code 1.*the reason"
    ) as error:
        run_beside(beside, monkeypatch, made)
    assert "Proa alone, 1: 70.0 tokens/s" in str(error.value)
    (vram,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert (vram["mode"], vram["ratios"]) == ("vram", [2.0, 2.0, 2.0])


def test_rounds_beyond_the_time_limit_are_left_out(
    beside: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now_s, limits_s = 0.0, []

    def run_logged(command: list[str], log: Path, limit_s: float) -> list[dict[str, Any]]:
        nonlocal now_s
        now_s += 40
        limits_s.append(limit_s)
        return [freetoken_row(25) if command == ["theirs"] else proa_row(50)]

    monkeypatch.setattr(beside, "time", SimpleNamespace(monotonic=lambda: now_s))
    monkeypatch.setattr(beside, "run_logged", run_logged)
    made = [{"proa": ["ours"], "freetoken": ["theirs"]}] * 2
    assert run_beside(beside, monkeypatch, made, "--modes=cpu", "--minutes=2") == ["cpu"]
    assert limits_s == [120, 80]
    (cell,) = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert cell["ratios"] == [2.0]
    assert any("round 2 of cpu was left out" in note for note in cell["notes"])
    assert any("cpu has 1 round: fewer than 3 tell little" in note for note in cell["notes"])


def test_a_run_that_hangs_is_ended(beside: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(ProaError, match="1-cpu-proa did not end within"):
        beside.run_logged([sys.executable, "-c", "import time; time.sleep(60)"], tmp_path / "1-cpu-proa.log", 1.0)


def test_modes_are_checked(beside: ModuleType) -> None:
    assert beside.parse_modes("vram, cpu,vram") == ["vram", "cpu"]
    with pytest.raises(UsageError, match="'gpu'"):
        beside.parse_modes("gpu")
