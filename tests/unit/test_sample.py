"""The sample of the tables of cases, and pytest with this folder's conftest: its seed, its counts, its warnings."""

from __future__ import annotations

import os
import re
import subprocess
from itertools import product
from pathlib import Path

import pytest

import programs
from sample import covering

AXES = (7, 3, 4)
PROBE = """
import warnings
import pytest

@pytest.fixture(params=["x", "y"])
def side(request):
    return request.param

@pytest.mark.parametrize("third", [False, True])
@pytest.mark.parametrize(("first", "second"), [(i, -i) for i in range(5)])
def test_table(first, second, third, side):
    pass

@pytest.mark.parametrize("third", [0, 1])
@pytest.mark.parametrize("first", [0, 1, 2, pytest.param(3, marks=pytest.mark.gpu)])
def test_partly(first, third):
    pass

@pytest.mark.one_table
@pytest.mark.parametrize(("family", "of"), [pytest.param(f"f{i}", i, id=f"f{i}") for i in range(6)])
def test_whole(family, of):
    pass

@pytest.mark.one_table
@pytest.mark.parametrize("chunk", ["c0", "c1"])
@pytest.mark.parametrize("family", [f"f{i}" for i in range(6)])
def test_chunks(family, chunk):
    pass

@pytest.mark.parts("number", 3)
@pytest.mark.parametrize("kind", ["k0", "k1"])
def test_in_parts(kind, number):
    pass

@pytest.mark.seldom
@pytest.mark.parametrize("one", range(5))
def test_seldom(one):
    pass

def test_alone():
    pass

def test_that_warns():
    warnings.warn("of this project")
"""
PLUGIN = """
import warnings

def pytest_configure(config):
    warnings.warn("of a plugin, when it starts")
"""


def run(folder: Path, *argv: str) -> tuple[list[str], str]:
    """Names of the probe's tests that ran, and all that pytest printed."""
    environment = {**os.environ, "PYTHONPATH": f"{Path(programs.__file__).parent}{os.pathsep}{folder}"}
    command = ["-m", "pytest", "-v", "-p", "conftest", "-p", "noisy", "-p", "no:cacheprovider", *argv, "test_probe.py"]
    done = subprocess.run(
        programs.python(*command), cwd=folder, env=environment, capture_output=True, text=True, timeout=120
    )
    said = done.stdout + done.stderr
    assert done.returncode == 1, said  # by the test that warns
    return sorted(set(re.findall(r"test_probe.py::(\S+)", said))), said


@pytest.mark.parametrize("seed", range(20))
def test_every_row_of_every_axis_is_covered(seed: int) -> None:
    cases = [dict(enumerate(map(str, case))) for case in product(*map(range, AXES)) if sum(case) % 5]
    taken = covering(cases, str(seed))
    assert taken == sorted(set(taken))
    for axis, rows in enumerate(AXES):
        assert {cases[i][axis] for i in taken} == set(map(str, range(rows)))
    assert max(AXES) <= len(taken) <= 10
    assert covering(cases, str(seed)) == taken
    assert covering(cases, str(seed + 1)) != taken


def test_one_axis_and_no_cases() -> None:
    assert covering([{0: "a"}, {0: "b"}, {0: "c"}], "1") == [0, 1, 2]
    assert covering([], "1") == []


@pytest.mark.seldom
def test_a_run_draws_from_tables_and_says_how_to_repeat_it(tmp_path: Path) -> None:
    markers = ("gpu", "alone", "one_table", "seldom", "parts")
    (tmp_path / "pytest.ini").write_text("\n    ".join(["[pytest]\nmarkers =", *markers]))
    (tmp_path / "test_probe.py").write_text(PROBE)
    (tmp_path / "noisy.py").write_text(PLUGIN)
    ran, said = run(tmp_path, "--sample=any", "-n1")
    seed, drawn, of = re.search(r"^sample (\d+): (\d+) of (\d+) cases", said, re.M).groups()  # type: ignore[union-attr]
    assert (int(drawn), int(of)) == (len(ran), 5 * 2 * 2 + 4 * 2 + 6 + 6 * 2 + 3 * 2 + 5 + 2)
    table, partly = ([name for name in ran if name.startswith(f"{test}[")] for test in ("test_table", "test_partly"))
    assert 5 <= len(table) <= 7
    assert {word for name in table for word in re.split(r"[\[\]-]", name)} >= {"x", "y", "False", "True", *"01234"}
    assert {name[-4] for name in partly} == set("0123")
    assert {"test_alone", "test_that_warns"} < set(ran)
    whole, chunks, in_parts, seldom = (
        [name for name in ran if name.startswith(f"{test}[")]
        for test in ("test_whole", "test_chunks", "test_in_parts", "test_seldom")
    )
    assert whole
    assert {name[-3:-1] for name in chunks} == {"c0", "c1"}
    assert 6 <= len(whole) + len(chunks) <= 7
    assert {re.search(r"f\d", name)[0] for name in whole + chunks} == {f"f{i}" for i in range(6)}  # type: ignore[index]
    assert {re.search(r"\[(\d)", name)[1] for name in in_parts} == set("012")  # type: ignore[index]
    assert len(in_parts) == 3
    assert len(seldom) == 2
    again, said = run(tmp_path, f"--sample={seed}")
    assert again == ran
    assert f"the same again: make test SEED={seed}" in said
    assert "UserWarning: of a plugin, when it starts" in said
    assert "FAILED test_probe.py::test_that_warns - UserWarning: of this project" in said
    whole_run, _ = run(tmp_path)
    assert {name for name in whole_run if "test_in_parts" in name} == {f"test_in_parts[all-k{i}]" for i in (0, 1)}
    assert len(whole_run) == 5 * 2 * 2 + 4 * 2 + 6 + 6 * 2 + 2 + 5 + 2
