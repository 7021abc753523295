"""The kernels compiled ahead are those that launches need; batch sizes share them. Runs in separate processes, since
kernels are interpreted in this one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.bench.hybrid_shapes import MODEL_SHAPES
from proa.ops.sizes import SEGMENT_TOKENS, segment_rows
from tiny import make_tiny

pytest.importorskip("triton")

from proa.engine.building.rehearsal import long_pasts, merges
from proa.ops.cuda_attention import tiles_of

Once = Callable[[str, Callable[[], Any]], Any]
TESTS = Path(__file__).parents[1]
GIB = 1 << 30

# Three layers of each with 8 experts a layer in VRAM, up to 64 requests and prompts of 1024 or 2048 rows: how many
# variants the rehearsal found while kernels had the numbers of programs, scans, splits and rows as constants, and
# a step's inputs began at any address; and how many it may find now, two of them for passes of up to 4 rows whose
# experts are divided by their routing (decision 068), three for attention over segments of 2048 tokens (074),
# two for few rows behind a long past (077).
SHAPES: dict[str, tuple[dict[str, Any], int, int]] = {
    "qwen3-30b-a3b": ({}, 127, 72),
    "qwen3-next-80b-a3b": ({}, 146, 88),
    "gpt-oss-120b": ({"dummy_format": "mxfp4"}, 141, 82),
    "minimax-m2": ({"dummy_format": "fp8", "fp8_activations": True}, 137, 85),
    "glm-4.5-air": ({"dummy_format": "int4", "kv_dtype": "fp8", "max_batch_tokens": 1024}, 151, 98),
}
LAYERS, VRAM = 3, 60 * GIB  # a first layer, one between others, a last one: as many variants as of five layers
# Models whose prompts launch other kernels behind a long past: latents whose keys and values are expanded.
LONG: dict[str, dict[str, Any]] = {"deepseek-v2-lite": {"context": 90_000}}
TINY: dict[str, dict[str, Any]] = {
    "deepseek-v3": {"gpu_experts": "3"},
    "qwen3-moe": {"gpu_experts": "3", "max_itl": "none", "doorbell": "memops"},
    "qwen2": {},
    "qwen2-moe": {"gpu_experts": "3", "deterministic": True},
    "mixtral": {"gpu_experts": "none"},  # its passes count choices, since nothing else does
}
SWEPT_ROWS = 64  # how many small numbers of rows are tried: all, in a sample a quarter
# A kernel with one variant per shape of weights may have as many as shapes; all others have few.
BY_SHAPE = {"linear._one", "linear._few", "linear_packed._one", "linear_packed._many", "unpack._unpack",
            "experts_grouped._block", "experts_fp8._block", "head_linear._head_linear"}  # fmt: skip
MOST_OF_A_KERNEL = 5  # one more than without groups of experts (a part of a sum, a table that counts nothing)


PROGRAMS = 2  # at the same time: other processes of this run may wait for what they find


@pytest.fixture(scope="module")
def kernels(run_folder: Path) -> Path:
    """Triton's cache of the processes here."""
    return run_folder / "rehearsed_kernels"


@pytest.fixture(scope="module")
def cases(request: pytest.FixtureRequest, run_folder: Path, once: Once) -> dict[str, dict[str, Any]]:
    sample = request.config.option.sample
    common = {"seed": sample or "", "swept": SWEPT_ROWS if sample is None else SWEPT_ROWS // 4}

    def made() -> dict[str, dict[str, Any]]:
        cases, models = {}, run_folder / "rehearsed_models"
        for name, options in ({name: of[0] for name, of in SHAPES.items()} | LONG).items():
            (models / name).mkdir(parents=True)
            (models / name / "config.json").write_text(json.dumps(MODEL_SHAPES[name].cut(LAYERS).config()))
            asked = {"load_format": "dummy", "max_running": 64, "context": 4096, "gpu_experts": "8", **options}
            cases[name] = {"path": str(models / name), "vram": VRAM, "options": asked, **common}
        for name, options in TINY.items():
            folder = make_tiny(name, models / name)
            asked = {"dtype": "bfloat16", "context": 256, **options}
            cases[name] = {"path": str(folder), "vram": 4 * GIB, "options": asked, **common}
        return cases

    found: dict[str, dict[str, Any]] = once("rehearsed_cases", made)
    return found


def start(cases: list[dict[str, Any]], kernels: Path, hash_seed: int) -> subprocess.Popen[str]:
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environ |= {"PYTHONPATH": str(TESTS), "TRITON_CACHE_DIR": str(kernels), "PYTHONHASHSEED": str(hash_seed)}
    program = [sys.executable, str(TESTS / "rehearsed.py"), json.dumps(cases)]
    return subprocess.Popen(program, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def output_of(program: subprocess.Popen[str]) -> list[dict[str, Any]]:
    output, errors = program.communicate()
    assert program.returncode == 0, errors
    answer: list[dict[str, Any]] = json.loads(output)
    return answer


@pytest.fixture(scope="module")
def rehearsed(cases: dict[str, dict[str, Any]], kernels: Path, once: Once) -> dict[str, dict[str, Any]]:
    def made() -> dict[str, dict[str, Any]]:
        names = [list(cases)[i::PROGRAMS] for i in range(PROGRAMS)]
        programs = [start([cases[name] for name in some], kernels, 1) for some in names]
        answers = [output_of(program) for program in programs]
        return {
            name: one for some, all_ in zip(names, answers, strict=True) for name, one in zip(some, all_, strict=True)
        }

    answer: dict[str, dict[str, Any]] = once("rehearsed", made)
    return answer


def test_later_starts_read_the_list(
    rehearsed: dict[str, dict[str, Any]], cases: dict[str, dict[str, Any]], kernels: Path
) -> None:
    """Another process, whose strings have other hashes, finds the list of the first one, and it still is what launches
    need."""
    before = {path: path.stat().st_mtime_ns for path in kernels.glob("variants-*")}
    assert len(before) == len(cases)
    (again,) = output_of(start([cases["deepseek-v3"]], kernels, 2))
    assert {path: path.stat().st_mtime_ns for path in kernels.glob("variants-*")} == before
    assert again["counts"] == rehearsed["deepseek-v3"]["counts"]
    assert (again["not_launched"], again["not_compiled"], again["not_rehearsed"]) == (0, 0, 0)


@pytest.mark.parametrize("name", [*SHAPES, *LONG, *TINY])
def test_compiled_keys_are_those_of_launches(rehearsed: dict[str, dict[str, Any]], name: str) -> None:
    """The compiler's keys of the disk cache are those that Triton's own launch path computes."""
    found = rehearsed[name]
    assert found["ours"] > 20
    assert (found["not_launched"], found["not_compiled"]) == (0, 0)


@pytest.mark.parametrize("name", [*SHAPES, *LONG, *TINY])
def test_no_number_of_rows_needs_more(rehearsed: dict[str, dict[str, Any]], name: str) -> None:
    """The whole model with every small number of rows, some large ones, and every batch size with a graph."""
    found = rehearsed[name]
    assert found["swept"] > 10
    assert found["not_rehearsed"] == 0


@pytest.mark.parametrize("name", [*SHAPES, *LONG, *TINY])
def test_the_plan_has_room_for_the_rows_of_prompts(rehearsed: dict[str, dict[str, Any]], name: str) -> None:
    """Tensors that live at the same time, without what an allocator loses between them."""
    found = rehearsed[name]
    assert 0 < found["rows_bytes"] <= found["planned_bytes"]


@pytest.mark.parametrize("name", [*SHAPES, *LONG, *TINY])
def test_the_plan_has_room_for_the_rows_of_passes(rehearsed: dict[str, dict[str, Any]], name: str) -> None:
    """As above, of a step in parts whose chunks are computed block by block."""
    found = rehearsed[name]
    if "pass_bytes" not in found:
        pytest.skip("no step has several chunks")
    assert 0 < found["pass_bytes"] <= found["planned_bytes"] + found["planned_pass_bytes"]
    # Between two blocks a chunk keeps its rows alone.
    assert found["pass_bytes"] - found["rows_bytes"] <= 1.05 * found["planned_pass_bytes"]


@pytest.mark.parametrize("name", [*SHAPES, *LONG, *TINY])
def test_batch_sizes_share_variants(rehearsed: dict[str, dict[str, Any]], name: str) -> None:
    counts = {k: n for k, n in rehearsed[name]["counts"].items() if k not in BY_SHAPE}
    assert max(counts.values()) <= MOST_OF_A_KERNEL, counts


@pytest.mark.parametrize("name", SHAPES)
def test_the_number_of_variants_of_a_model(rehearsed: dict[str, dict[str, Any]], name: str) -> None:
    _, before, most = SHAPES[name]
    assert sum(rehearsed[name]["counts"].values()) <= most < 0.65 * before


def test_keys_do_not_depend_on_what_is_compiled_first() -> None:
    """Triton's hash of a kernel depends on which functions were hashed before: here in the opposite order, but for
    `settle`, and with names of constants that mean one thing, so that no address of a module matters."""
    program = """
import importlib, multiprocessing, pkgutil
import proa.ops.triton as package
from triton.runtime.jit import JITCallable
from proa.ops.ahead import settle
modules = [importlib.import_module(f"{package.__name__}.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
functions = [f for m in modules for f in vars(m).values() if isinstance(f, JITCallable) and f.__module__ == m.__name__]

def keys(first, step):
    if first:
        settle()
    found = {(f.__module__, f.__name__): f.cache_key for f in functions[::step]}
    for f in functions:
        values = {}
        for (name, _), (value, _) in f.used_global_vals.items():
            assert values.setdefault(name, value) == value, (f, name)
    return found

with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
    settled, backwards, plain, reverse = pool.starmap(keys, [(1, 1), (1, -1), (0, 1), (0, -1)], chunksize=1)
assert settled == backwards
assert plain != reverse, "Triton does it right now: settle is needed no longer"
"""
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", program], env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@given(
    st.sampled_from([512, 2048, 3000, 4096, 8192]), st.integers(1, 140_000), st.sampled_from([9, 32, 64]),
    st.booleans(), st.data(),
)  # fmt: skip
def test_every_number_of_merged_segments_is_rehearsed(
    most: int, context: int, heads: int, beside: bool, data: st.DataObject
) -> None:
    """A prompt's chunk may begin at any past."""

    def launches(past: int, rows: int) -> set[int]:
        tiles = tiles_of(rows, past, segment_rows(heads), SEGMENT_TOKENS[-1])
        return {merges(tile.covered, beside=beside) for tile in tiles} - {0}

    found = long_pasts(most, context, heads, beside=beside)
    rehearsed = set[int]().union(*(launches(*at) for at in found))
    past = data.draw(st.integers(0, context - 1))
    rows = data.draw(st.integers(1, min(most, context - past)))
    assert launches(past, rows) <= rehearsed
