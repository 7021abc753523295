"""`proa bench kernels`: names, plans, random weights, the roof, and the command on small shapes."""

from __future__ import annotations

import ctypes
import json
import os

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from isas import ISAS
from proa.bench.asked import parse_numbers
from proa.bench.kernel_cases import SHAPES, TOKENS, parse_formats, parse_shapes, weight_formats
from proa.bench.kernel_ceilings import CeilingRates
from proa.bench.kernel_plan import MOST_TOKENS, KernelOptions, plan_kernels
from proa.bench.kernel_weights import ExpertLayers, expert_bytes, team_shares
from proa.bench.kernels import Cell, RoutedBatch, open_bench, predicted_us, roof
from proa.cli.main import run as proa
from proa.errors import NativeError, ResourceError, UsageError
from proa.machine.machine import Machine
from proa.machine.probe import probe
from proa.machine.topology import UNBOUND, Team
from proa.native.ceilings import MemoryRange, dispatch_seconds, peak_rate, read_rate
from proa.native.formats import layout
from proa.native.pool import Pool
from proa.native.weights import Matrix, Piece, Rows, linear

FORMATS = weight_formats()
SMALL = KernelOptions(formats="int4-g32", shapes="tiny", tokens="1,5", seconds=0.001)
ONE_TEAM = (Team(UNBOUND, (0,), None),)


def machine(**changes: object) -> Machine:
    return msgspec.structs.replace(
        Machine(cpu="test", online_cpus=4, usable_cpus=(0, 1, 2, 3), total_bytes=64 << 30, available_bytes=40 << 30),
        **changes,
    )


# ---- names


def test_all_names_of_the_lists() -> None:
    assert parse_formats("all") == tuple(FORMATS.values())
    assert parse_formats("q6_k, BF16,bf16") == (FORMATS["q6_k"], FORMATS["bf16"])
    assert "tiny" not in {shape.name for shape in parse_shapes("all")}
    custom = parse_shapes("2048x768/128/8")[0]
    assert (custom.hidden, custom.width, custom.experts, custom.top_k) == (2048, 768, 128, 8)
    assert parse_numbers(KernelOptions().tokens, "tokens", 1, MOST_TOKENS) == TOKENS
    assert parse_numbers("1, 4k,1,4096", "tokens", 1, MOST_TOKENS) == (1, 4096)


@pytest.mark.parametrize(
    ("arguments", "texts"),
    [
        (["--formats", "int4-g23"], ["no weight format int4-g23", "Did you mean int4-g32?", "nvfp4"]),
        (["--formats", "bf16,,q6_k"], ["empty entry"]),
        (["--shapes", "qwen3-nxt"], ["Did you mean qwen3-next?", "HIDDENxWIDTH/EXPERTS/TOP_K"]),
        (["--shapes", "64x64/2/3"], ["TOP_K at most EXPERTS"]),
        (["--shapes", "0x64/2/1"], ["at least 1"]),
        (["--tokens", "0"], ["--tokens is '0'", "1 to 65536"]),
        (["--tokens", "two"], ["--tokens is 'two'"]),
        (["--isa", "mmx"], ["no kernels named mmx", "avx2"]),
        (["--threads", "4000"], ["--threads 4000", "Use at most"]),
        (["--seconds", "0"], ["--seconds"]),
    ],
)
def test_wrong_names_raise_errors_with_the_choices(arguments: list[str], texts: list[str]) -> None:
    with pytest.raises(UsageError) as raised:
        proa(["bench", "kernels", *arguments])
    for text in texts:
        assert text in str(raised.value)


# ---- what is measured


def test_experts_are_reduced_equally_for_all_formats_until_a_layer_fits() -> None:
    plan = plan_kernels(KernelOptions(shapes="deepseek-v3,qwen3-next", ram=6 << 30), machine())
    cut, whole = plan.shapes
    assert cut.shape.experts == 64  # of 88 MB each in bf16
    assert "64 of its 256 experts" in cut.notes[0]
    assert whole.shape == SHAPES["qwen3-next"]
    assert whole.notes == ()


def test_a_shape_that_cannot_be_cut_enough_is_refused() -> None:
    with pytest.raises(ResourceError, match=r"8 experts of deepseek-v3 take 672 MiB, but only 100 MiB"):
        plan_kernels(KernelOptions(shapes="deepseek-v3", ram=100 << 20), machine())


def test_memory_is_a_quarter_of_what_is_free_at_most() -> None:
    assert plan_kernels(KernelOptions(), machine(available_bytes=20 << 30)).weights_bytes == 5 << 30
    assert plan_kernels(KernelOptions(), machine(available_bytes=1 << 40)).weights_bytes == 8 << 30


@pytest.mark.parametrize("name", FORMATS)
def test_layers_exceed_the_caches_four_times(name: str) -> None:
    plan = plan_kernels(KernelOptions(), machine(l3_bytes=384 << 20))
    of, shape = FORMATS[name], SHAPES["qwen3-30b-a3b"]
    layers = plan.layers(of, shape)
    nbytes = layers * shape.experts * expert_bytes(of, shape)
    assert layers >= 2
    assert nbytes >= 4 * (384 << 20)
    assert plan.cache_notes(nbytes) == ()
    assert "caches hold some" in plan.cache_notes(100 << 20)[0]


def test_threads_are_those_that_may_run() -> None:
    assert plan_kernels(KernelOptions(), machine(quota_cores=2.5)).threads == 2
    assert plan_kernels(KernelOptions(threads=4), machine(quota_cores=2.5)).threads == 4


def test_the_option_beats_the_debug_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROA_ISA", "scalar")
    assert plan_kernels(KernelOptions(), machine()).isa == "scalar"
    monkeypatch.setenv("PROA_ISA", "mmx")
    with pytest.raises(UsageError, match="PROA_ISA mmx"):
        plan_kernels(KernelOptions(), machine())
    assert plan_kernels(KernelOptions(isa="scalar"), machine()).isa == "scalar"


# ---- weights


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool([[], []], pin=False)


def product_with_ones(pool: Pool, matrix: Matrix) -> NDArray[np.float32]:
    """Multiply the rows of weights by a vector of alternating +1 and -1; the products' standard deviation is that of
    the weights times sqrt(columns)."""
    rows, columns = matrix.layout.rows, matrix.layout.columns
    x = np.where(np.arange(columns) % 2, 0xBF80, 0x3F80).astype(np.uint16)
    y = np.empty(rows, np.float32)
    linear(pool, matrix, Rows(x.ctypes.data, columns), Rows(y.ctypes.data, rows, True), 1, outputs=rows)
    return y


@pytest.mark.parametrize("name", FORMATS)
def test_random_weights_are_finite_and_have_variance_one_over_columns(pool: Pool, name: str) -> None:
    shape = parse_shapes("512x300/3/2")[0]
    layers = ExpertLayers(FORMATS[name], shape, 1, ONE_TEAM)
    experts = layers.layers[0]
    for matrix, rows in ((experts.gate_up, 608), (experts.down, 512)):
        of = matrix.layout
        one = Matrix(layout(of.format, of.rows, of.columns, of.group), [_first_matrix(layers, matrix)], 1)
        sums = product_with_ones(pool, one)
        assert sums.shape == (rows,)
        assert np.isfinite(sums).all()
        assert 0.5 < sums.std() < 1.5  # scales of mxfp4 and mxfp8 are powers of two
        assert len(np.unique(sums)) > rows / 2
    layers.close()


def _first_matrix(layers: ExpertLayers, matrix: Matrix) -> Piece:
    address = layers.arenas[0].data
    if matrix is layers.layers[0].down:
        address += matrix.count * layers.layers[0].gate_up.layout.matrix_bytes
    return Piece(0, address, matrix.layout.matrix_bytes, matrix.layout.matrix_bytes)


def test_teams_get_panels_in_proportion_to_their_cpus() -> None:
    of_teams = [Team(0, (0, 1, 2), None), Team(1, (3,), None)]
    assert team_shares(96, of_teams, unit=2) == [0, 72, 96]
    assert team_shares(7, of_teams, unit=1) == [0, 5, 7]
    assert team_shares(2, of_teams, unit=2) == [0, 0, 2]  # nothing for the first


def test_results_do_not_depend_on_how_teams_share_the_weights(pool: Pool) -> None:
    shape, batch = SHAPES["tiny"], RoutedBatch(SHAPES["tiny"], 3)
    results = []
    for of_teams in (ONE_TEAM, (Team(UNBOUND, (0,), None), Team(UNBOUND, (0, 1), None))):
        layers = ExpertLayers(FORMATS["nvfp4"], shape, 2, of_teams)
        results.append(batch.result(batch.trial(pool, layers)))
        layers.close()
    assert results[0] == results[1]


# ---- ceilings


def test_the_roof_is_the_nearer_limit() -> None:
    before, after = CeilingRates(40.0, 1000.0), CeilingRates(60.0, 1000.0)  # means: 50 GB/s, 1000 GFLOP/s
    bound, us = roof(5e6, 1e6, before, after)
    assert (bound, round(us, 6)) == ("memory", 100.0)
    bound, us = roof(5e6, 1e9, before, after)
    assert (bound, round(us, 6)) == ("compute", 1000.0)


@pytest.mark.parametrize(
    ("isa", "weight_bytes", "nbytes", "flops", "us"),
    [
        ("avx512-bf16", 2.0, 4.5e6, 1e6, 100.0),  # 90 % of reading
        ("avx512-bf16", 1.0, 4.5e6, 1e6, 100 / 0.87),  # 87 % of that
        ("avx512-bf16", 0.5625, 4.5e6, 1e6, 100 / 0.9),
        ("avx512-bf16", 2.0, 4.5e6, 8e8, 1000.0),  # 80 % of the products
        ("avx2", 2.0, 4.5e6, 7e8, 1000.0),  # 70 %
        ("amx", 2.0, 4.5e6, 4e8, 1100.0),  # 40 %, and reading adds to it
    ],
)
def test_a_prediction_takes_the_shares_that_kernels_reach(
    isa: str, weight_bytes: float, nbytes: float, flops: float, us: float
) -> None:
    before, after = CeilingRates(40.0, 1000.0), CeilingRates(60.0, 1000.0)
    assert predicted_us(nbytes, flops, before, after, isa, weight_bytes) == pytest.approx(us)


@pytest.mark.parametrize("isa", ISAS)
def test_ceilings_of_every_instruction_set(isa: str) -> None:
    memory = np.zeros(8 << 20, np.uint8)
    with Pool([[0]], isa=isa, pin=False) as own:
        rate = read_rate(own, [MemoryRange(memory.ctypes.data, memory.nbytes)], 2, 0.005)
        assert 1e8 < rate < 1e13
        assert 1e8 < peak_rate(own, 2, 0.005) < 1e14
        assert 0 < dispatch_seconds(own, 100, meet=False) < 0.1
        assert 0 < dispatch_seconds(own, 100, meet=True) < 0.1


def test_a_team_without_memory_to_read_reads_nothing() -> None:
    memory = np.zeros(2 << 20, np.uint8)
    with Pool([[], [0]], pin=False) as own:
        assert read_rate(own, [MemoryRange(memory.ctypes.data, memory.nbytes)], 2, 0.002) > 0


@pytest.mark.parametrize(
    ("spans", "workers", "text"),
    [
        ([(1 << 20, 0)], 3, "number of threads must be"),
        ([(1 << 20, 0)], 0, "number of threads must be"),
        ([(1000, 0)], 1, "at least 1 MiB"),
        ([(1 << 20, 0), (1 << 20, 0)], 1, "one range per team"),
        ([], 1, "one range per team"),
    ],
)
def test_wrong_measurements_are_refused(spans: list[tuple[int, int]], workers: int, text: str) -> None:
    memory = (ctypes.c_char * (1 << 20))()
    with Pool([[0]], pin=False) as own, pytest.raises(ValueError, match=text):
        read_rate(own, [MemoryRange(ctypes.addressof(memory), nbytes) for nbytes, _ in spans], workers, 0.001)


# ---- the bench


def test_routing_is_the_same_in_every_run_and_experts_are_distinct() -> None:
    one, other = RoutedBatch(SHAPES["tiny"], 5), RoutedBatch(SHAPES["tiny"], 5)
    assert (one.ids == other.ids).all()
    assert (np.sort(one.ids, -1)[..., 1:] != np.sort(one.ids, -1)[..., :-1]).all()
    assert one.touched.tolist() == [len(set(ids.ravel().tolist())) for ids in one.ids]
    np.testing.assert_allclose(one.weights.sum(-1), 1, rtol=1e-6)


def test_figures_of_a_cell_are_consistent() -> None:
    affinity = os.sched_getaffinity(0)
    with open_bench(SMALL) as bench:
        cells = list(bench.cells())
    assert os.sched_getaffinity(0) == affinity
    assert [cell.tokens for cell in cells] == [1, 5]
    for cell in cells:
        flops = 2 * cell.tokens * 2 * 3 * 256 * 96
        nbytes = cell.touched_experts * expert_bytes(FORMATS["int4-g32"], SHAPES["tiny"])
        assert cell.gflops == pytest.approx(flops / cell.us / 1e3)
        assert cell.gbytes_per_s == pytest.approx(nbytes / cell.us / 1e3)
        assert cell.us_p10 <= cell.us <= cell.us_p90
        bound, roof_us = roof(nbytes, flops, cell.before, cell.after)
        assert cell.bound == bound
        assert cell.roof_us == pytest.approx(roof_us)
        assert cell.roof_share == pytest.approx(roof_us / cell.us)
        assert cell.predicted_us > roof_us
        assert cell.calls >= 5
        assert cell.ceilings.threads == cell.run.threads == probe().usable_cores
    assert cells[0].touched_experts == 2
    assert 2 < cells[1].touched_experts <= 8


def test_a_call_that_gives_another_result_the_second_time_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    results = iter([b"one", b"other"])
    monkeypatch.setattr(RoutedBatch, "result", lambda self, trial: next(results))
    with open_bench(SMALL) as bench, pytest.raises(NativeError, match="two different results"):
        next(bench.cells())


def test_a_result_that_is_not_finite_is_an_error() -> None:
    batch = RoutedBatch(SHAPES["tiny"], 2)

    class Nothing:
        def run(self, first: int, calls: int) -> list[float]:
            return []

    with pytest.raises(NativeError, match="non-finite"):
        batch.result(Nothing())  # type: ignore[arg-type]  # leaves the rows unwritten


def test_json_is_one_object_a_cell(capsys: pytest.CaptureFixture[str]) -> None:
    what = ["--formats", "bf16,mxfp4", "--shapes", "64x48/4/2", "--tokens", "1,2", "--seconds", "0.001"]
    assert proa(["bench", "kernels", *what, "--threads", "1", "--isa", "scalar", "--json"]) == 0
    cells = [msgspec.json.decode(line, type=Cell) for line in capsys.readouterr().out.splitlines()]
    assert [(cell.format, cell.tokens) for cell in cells] == [("bf16", 1), ("bf16", 2), ("mxfp4", 1), ("mxfp4", 2)]
    assert {(cell.isa, cell.run.threads, cell.shape) for cell in cells} == {("scalar", 1, "64x48/4/2")}
    named = {"format", "shape", "tokens", "us", "gbytes_per_s", "gflops", "bound", "roof_share", "isa", "ceilings"}
    assert named <= json.loads(cells[0].json()).keys()


def test_the_table_shows_limits_and_cells(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--formats", "q4_k", "--shapes", "tiny", "--tokens", "3", "--seconds", "0.001"]
    assert proa(["bench", "kernels", *arguments]) == 0
    shown = capsys.readouterr().out
    for text in ("predicted us", "RAM reads", "GFLOP/s on registers only", "empty dispatch", "q4_k, tiny: 8 experts",
                 "of the roof", "caches hold some of them"):  # fmt: skip
        assert text in shown
