"""`proa check` says yes on correct engines: every family, quantised formats, GGUF, and sampled layers."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import proa.cache.files
import proa.check.compare
import proa.check.run
from check_runs import FASTEST, SIM, checked, found
from proa.cache.files import FileStore
from proa.check.apart import OutOfTime
from proa.check.compare import Comparison
from proa.check.drive import CACHED, DECODE, FROM_FILES, FROM_RAM, PROMPT
from proa.check.observe import observe
from proa.check.paths import NoPath
from proa.check.paths import Path as OnePath
from proa.check.report import answer, notes, scope
from proa.check.run import Answer, Failed
from proa.check.verdict import Observed
from proa.engine.building.sim_gpu import SimBuild
from proa.errors import UsageError
from proa.hybrid.streaming import Streaming
from proa.hybrid.tables import Tables
from proa.types import Decision
from tiny import TINY, make_tiny
from tiny_gguf import SAID, make_tiny_gguf
from tiny_quantised import DECODED, SCHEMES, make_quantised

Patch = pytest.MonkeyPatch
PATHS = 8  # of a model with experts on a GPU; on the CPU there are at most 5
PHASES, TIERS = {PROMPT, DECODE, CACHED}, {FROM_RAM, FROM_FILES}


@pytest.mark.one_table
@pytest.mark.parametrize("name", sorted(TINY))
@pytest.mark.parametrize(("gpu", "only"), [("none", "CPU, a"), (SIM, "simulated GPU")])
@pytest.mark.parts("number", PATHS)
def test_every_family(
    name: str, gpu: str, only: str, number: int | None, tmp_path: Path, monkeypatch: Patch
) -> None:  # fmt: skip
    report = checked(make_tiny(name, tmp_path), monkeypatch, gpu=gpu, only=only, number=number)
    assert found(report) == []
    assert report.agrees
    phases = PHASES - {CACHED} if name == "llama-dynamic" else PHASES  # whose keys depend on the prompt's length
    assert all(path.worst.keys() - TIERS == phases for path in report.observed)
    if not number:  # the first path restores prefixes from tiers
        first = report.observed[0]
        assert first.worst.keys() | first.left_out.keys() >= TIERS


@pytest.mark.one_table
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3", "qwen3-next"])
@pytest.mark.parametrize(("gpu", "only"), [("none", FASTEST), (SIM, "VRAM and RAM")])
def test_prefixes_from_tiers(name: str, gpu: str, only: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """Out of RAM where KV is in VRAM, and out of files everywhere, in every type of KV."""
    report = checked(make_tiny(name, tmp_path), monkeypatch, gpu=gpu, only=only)
    assert report.agrees
    path = report.observed[0]
    if gpu == SIM:
        assert all(path.worst.keys() == PHASES | TIERS for path in report.observed)
    else:
        assert path.worst.keys() == PHASES | {FROM_FILES}
        assert path.left_out == {FROM_RAM: "the KV cache is in RAM already: see --kv-memory"}
        assert f"not checked: {FROM_RAM}: {'; '.join(path.name for path in report.observed)}: the KV" in "\n".join(
            notes(report)
        )


def test_a_context_that_is_too_short_for_the_prompts(tmp_path: Path, monkeypatch: Patch) -> None:
    with pytest.raises(UsageError, match="has 14 positions, and the check needs 15") as caught:
        checked(make_tiny("qwen2", tmp_path / "tiny", max_position_embeddings=14), monkeypatch, only="CPU, a")
    assert "max_position_embeddings" in caught.value.remedy
    report = checked(make_tiny("qwen2", tmp_path / "more", max_position_embeddings=15), monkeypatch, only="CPU, a")
    assert report.agrees


def test_a_folder_of_the_user_stays_as_it_is(tmp_path: Path, monkeypatch: Patch) -> None:
    folder = tmp_path / "kept"
    files = {"prefix_cache_dir": str(folder), "prefix_cache_disk": 1 << 30}
    report = checked(make_tiny("qwen3-moe", tmp_path / "m"), monkeypatch, only="FP8 KV", **files)
    assert any(FROM_FILES in path.worst for path in report.observed)
    assert not folder.exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(proa.cache.files, "_write", refuse)
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=SIM, only="VRAM and RAM")
    assert report.agrees
    assert all(path.worst.keys() == PHASES | {FROM_RAM} for path in report.observed)
    assert any("no files could be written" in line for line in notes(report))


def refuse(*args: object) -> None:
    raise OSError(28, "No space left on device")


def test_pages_that_are_not_restored(tmp_path: Path, monkeypatch: Patch) -> None:
    """A path that must restore, and does not, is no path that agrees."""
    monkeypatch.setattr(FileStore, "has", lambda self, key: False)
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=SIM, only="experts in VRAM and RAM")
    assert found(report)[0].endswith(": no page of a stored prefix from files was restored")


@pytest.mark.one_table
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3", "gpt-oss", "qwen3-next"])
def test_experts_are_streamed(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    report = checked(make_tiny(name, tmp_path), monkeypatch, gpu=SIM, only="prompts streamed")
    assert found(report) == []
    assert report.agrees
    names = ("prompts streamed and on CPU", "prompts streamed in groups and on CPU", "prompts streamed")
    assert [path.name for path in report.observed] == [f"simulated GPU, {path}" for path in names]


@pytest.mark.parametrize(
    ("method", "row", "only", "named"),
    [
        (
            "_prompts",
            Decision("prefill", "auto", "cpu", "experts in RAM are computed by the CPU: the driver refused"),
            "GPU, prompts streamed", "streamed",
        ),
        (
            "_co_fetch",
            Decision(
                "co-fetch", "auto", "off", "the GPU cannot read pinned RAM at the CPU's addresses: the driver refused"
            ),
            "experts read over PCIe", "PCIe",
        ),
    ],
    ids=["ring", "read-in-place"],
)  # fmt: skip
def test_what_the_machine_does_not_give(
    method: str, row: Decision, only: str, named: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    """A part that the start turned off: its paths are skipped, for the start-up table's reason."""

    def without(self: SimBuild, bytes_per_s: float) -> None:
        self._decisions.append(row)

    monkeypatch.setattr(SimBuild, method, without)
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=SIM, only=only)
    assert report.observed == []
    assert {skipped.why for skipped in report.skipped if named in skipped.name} == {row.why}


def test_a_path_that_streams_nothing_is_none(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Streaming, "_hottest", lambda self, layer, heat: np.zeros(0, np.int64))
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=SIM, only="GPU, prompts streamed")
    assert [failed.why for failed in report.failed] == ["no expert was copied to the ring"] * 3
    assert report.answer is Answer.NO


@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3", "gpt-oss", "qwen3-next"])
def test_experts_are_read_in_place(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    report = checked(make_tiny(name, tmp_path), monkeypatch, gpu=SIM, only="experts read over PCIe")
    assert found(report) == []
    assert [path.name for path in report.observed] == ["simulated GPU, experts read over PCIe"]


def test_a_path_that_reads_nothing_in_place_is_none(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Tables, "share", lambda self, of_misses: None)
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=SIM, only="experts read over PCIe")
    why = "the CPU computed all experts in RAM: the GPU read none of them in place"
    assert [failed.why for failed in report.failed] == [why]
    assert report.answer is Answer.NO


@pytest.mark.seldom
@pytest.mark.parametrize("name", [*SCHEMES, *DECODED])
@pytest.mark.parametrize(("gpu", "only"), [("none", "CPU, avx2"), (SIM, "GPU, prompts streamed and on CPU")])
def test_every_format(name: str, gpu: str, only: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder, _ = make_quantised((SCHEMES | DECODED)[name], "qwen3-moe", tmp_path / "m", moe_intermediate_size=96)
    report = checked(folder, monkeypatch, gpu=gpu, only=only)
    assert found(report) == []
    assert report.agrees


@pytest.mark.one_table
@pytest.mark.parametrize("name", ["gpt-oss", "ernie", "deepseek-v2", "qwen3-next", "llama2"])
@pytest.mark.parametrize("quant", ["F32", "Q8_0"])
@pytest.mark.parts("number", PATHS)
def test_gguf(name: str, quant: str, number: int | None, tmp_path: Path, monkeypatch: Patch) -> None:
    file = make_tiny_gguf(name, tmp_path / "m.gguf", quant, **SAID[name])
    report = checked(file, monkeypatch, gpu=SIM, only="simulated GPU", number=number)
    assert found(report) == []
    assert report.agrees


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_plain_torch(name: str, dtype: str, tmp_path: Path, monkeypatch: Patch) -> None:
    report = checked(make_tiny(name, tmp_path), monkeypatch, dtype=dtype)
    assert report.agrees
    plain = f"CPU, plain torch in {dtype}"
    others = {f"{plain}, BF16 KV", f"{plain}, FP8 KV"}
    checked_kv = others if name == "qwen3-moe" else set()  # latents are kept in the type of activations
    assert {path.name for path in report.observed} == {plain} | checked_kv
    assert {path.name for path in report.skipped} == {"CPU, native kernels", "GPU"} | others - checked_kv


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-next"])
def test_sampled_layers(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """Blocks of the file keep their own weights in the sampled model."""
    folder = make_tiny(name, tmp_path, num_hidden_layers=9)
    report = checked(folder, monkeypatch, only="CPU, avx2", most_bytes=1)
    assert report.agrees
    assert report.of_layers == 9
    assert {0, 8} <= set(report.layers)
    assert len(report.layers) < 9


@pytest.mark.parametrize(
    "options",
    [
        {"deterministic": True},
        {"expert_placement": "frequency", "expert_counts": "counts.json"},
        {"gpu_resident_layers": "0-2"},
        {"vram_moves": "on"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_options_of_serve_leave_paths_as_they_are(options: dict[str, Any], tmp_path: Path, monkeypatch: Patch) -> None:
    """The check samples two of the model's three layers; the file of expert counts and the layer numbers describe the
    whole model."""
    name = "experts in VRAM and RAM"
    report = checked(
        make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=SIM, only=name, number=0, most_bytes=1, **options
    )
    assert len(report.layers) == 2
    assert [path.name for path in report.observed] == [f"simulated GPU, {name}"]
    assert report.agrees


@pytest.mark.parametrize("name", ["qwen3-moe", "smollm2"])
def test_a_head_in_parts(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(proa.check.compare, "_HEAD_ROWS", 100)
    assert checked(make_tiny(name, tmp_path), monkeypatch, only="CPU, avx2").agrees


def test_no_time_for_any_path(tmp_path: Path, monkeypatch: Patch) -> None:
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, only="CPU, avx2", limit_s=1e-6)
    assert report.answer is Answer.NONE
    assert "CPU, avx2" in report.late  # and its FP8 KV, if no better instructions are there
    assert "not compared: CPU, avx2: the time limit of 0 s" in list(notes(report))
    left = f"no answer: the time limit left out {len(report.late)} paths; what was compared agrees. Give --time-limit "
    assert answer(report) == f"{left}240. The check took 0 s"


def test_a_path_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: Patch) -> None:
    """The process of the path sleeps, and is killed."""

    def slow(path: OnePath, *args: Any) -> Observed | str:
        if path.name == "CPU, avx2":
            time.sleep(600)
        return observe(path, *args)

    monkeypatch.setattr(proa.check.run, "observe", slow)
    monkeypatch.setattr(proa.check.run, "_BEGIN_SHARE", 1.0)
    start = time.perf_counter()
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, only="CPU, avx", limit_s=8.0)
    assert time.perf_counter() - start < 30
    assert "CPU, avx2" in report.late
    assert report.answer is Answer.NONE
    assert [path.name for path in report.observed if path.name == "CPU, avx2"] == []


def test_the_reference_stops_at_any_op(tmp_path: Path, monkeypatch: Patch) -> None:
    """The limit is reached before the reference, within a layer, within the head, and not at all."""
    calls, most = 0, 10**9

    class Late(Comparison):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args[:-1], self._late)

        def _late(self) -> None:
            nonlocal calls
            if calls == most:
                raise OutOfTime
            calls += 1

    monkeypatch.setattr(proa.check.run, "Comparison", Late)
    folder = make_tiny("qwen3-moe", tmp_path)
    assert checked(folder, monkeypatch, only="CPU, avx2").agrees
    found: list[list[int]] = []
    for limit in (0, calls // 2, calls - 1):
        calls, most = 0, limit
        report = checked(folder, monkeypatch, only="CPU, avx2")
        assert report.answer is Answer.NONE
        assert not report.has_logits
        assert "not compared, for lack of time" in scope(report)
        assert "the logits; what was compared agrees" in answer(report)
        found.append(report.left)
    assert found[0] == [0, 1, 2]
    assert found[1] in ([1, 2], [2])
    assert found[2] == []


def test_a_difference_is_a_no_even_if_time_ran_out(tmp_path: Path, monkeypatch: Patch) -> None:
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, only="CPU, scalar")
    report.late, report.failed = ["GPU"], [Failed("CPU, amx", "its process was ended by SIGILL.")]
    assert report.answer is Answer.NO
    assert answer(report).startswith("no: 1 of 2 paths differ")


def test_the_answer_counts_the_paths_that_were_not_checked(tmp_path: Path, monkeypatch: Patch) -> None:
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, only="CPU, scalar")
    for count, text in (
        (0, "reference, in"),
        (1, "reference; 1 was not checked"),
        (2, "reference; 2 were not checked"),
    ):
        report.skipped = [NoPath("CPU, amx", "this CPU lacks it")] * count
        assert f"yes: 1 path agrees with the {text}" in answer(report)


def test_no_mutation_moves_experts(tmp_path: Path, monkeypatch: Patch) -> None:
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=SIM, only="experts that move")
    assert [path.name for path in report.observed] == ["simulated GPU, experts that move"]
    assert report.agrees
