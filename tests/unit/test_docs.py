"""The checks of the pages find what they are for; the README's table of models and the charts are current."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def docs() -> ModuleType:
    return tool("check_docs")


NUMBER = re.compile(r"\d+(?:\.\d+)?")

ENGLISH = """\
# Proa

[中文](README.zh-CN.md), [more](docs/api.md)

| what | tokens/s |
|---|---|
| decode | 1.31 x, 40 |

```sh
make demo
```
"""
SAME = (
    ENGLISH.replace("[中文](README.zh-CN.md)", "[English](README.md)")
    .replace("more", "更多")
    .replace("decode | 1.31 x, 40", "解码 | 1.31 倍，40")
)


def test_the_same_page_in_another_language(docs: ModuleType) -> None:
    assert list(docs.differences(ENGLISH, SAME)) == []


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("1.31", "1.32", "table 1, line 3"),
        ("make demo", "make test", "code block 1"),
        ("docs/api.md", "docs/gpu.md", "docs/gpu.md"),
        ("# Proa", "## Proa", "headings"),
        ("| 解码 | 1.31 倍，40 |\n", "", "table 1 has 3 and 2 lines"),
        ("```sh\nmake demo\n```\n", "", "1 and 0 code blocks"),
    ],
)
def test_a_difference_is_named(docs: ModuleType, old: str, new: str, said: str) -> None:
    assert old in SAME
    assert any(said in found for found in docs.differences(ENGLISH, SAME.replace(old, new)))


def test_long_lines(docs: ModuleType) -> None:
    assert list(docs.line_problems("docs/api.md", "x" * 120)) == []
    assert list(docs.line_problems("docs/api.md", "\n" + "x" * 121)) == ["docs/api.md:2: 121 characters, at most 120"]
    assert list(docs.line_problems("docs/options.md", "| " + "x" * 121)) == []
    assert list(docs.line_problems("docs/options.md", "x" * 121)) != []
    assert list(docs.line_problems("docs/performance.md", "x\n" * 121)) == [
        "docs/performance.md: 121 lines, at most 120"
    ]


def test_links_that_lead_nowhere(docs: ModuleType) -> None:
    text = "[a](README.md#x) [b](https://example.org) [c](#here) [d](docs/nowhere.md)"
    assert list(docs.link_problems(ROOT / "CHANGELOG.md", text)) == ["CHANGELOG.md: no file docs/nowhere.md"]


def test_the_pages_as_they_are(docs: ModuleType) -> None:
    assert list(docs.problems()) == []


def test_the_table_of_models_is_current() -> None:
    rows = list(tool("model_table").lines())
    readme = (ROOT / "README.md").read_text("utf-8")
    assert [row for row in rows if row not in readme] == [], "run python tools/model_table.py"
    assert len(rows) == len([line for line in readme.splitlines() if line.endswith(("| measured |", "| predicted |"))])


def test_the_readmes_comparisons_are_in_the_notes() -> None:
    """Each rate and ratio of the first table rounds one of the notes' figures."""
    readme = (ROOT / "README.md").read_text("utf-8")
    table = readme.partition("## Beside other programs")[2].partition("\nA:")[0]
    notes = (ROOT / "docs" / "lab" / "beside-others.md").read_text("utf-8")
    measured = {float(number) for number in re.findall(r"(?<![\w.])\d+(?:\.\d+)?", notes)}
    figures = [
        figure for row in table.splitlines()[4:] for cell in row.split("|")[4:] for figure in NUMBER.findall(cell)
    ]
    assert len(figures) > 20
    for figure in figures:
        half = 0.5 * 10.0 ** -len(figure.partition(".")[2])
        assert any(abs(one - float(figure)) <= half for one in measured), f"{figure} is in no note"


def test_charts_are_current() -> None:
    for path, text in tool("charts").images().items():
        assert path.read_text("utf-8") == text, "run python tools/charts.py"


def test_a_chart_shows_its_figures_machine_and_date() -> None:
    charts = tool("charts")
    for path in charts.RESULTS.glob("*.json"):
        result = json.loads(path.read_text("utf-8"))
        svg = charts.chart(result)
        shown = [value for group in result["groups"] for value in group["values"] if value is not None]
        assert svg.count('class="bar') == len(shown) + len(result["series"])
        notes = (ROOT / result["origin"]).read_text("utf-8")
        for value in shown:
            written = {f"{value:.2f}", f"{value:.1f}", f"{value:g}"}
            assert any(f">{text}</text>" in svg for text in written)
            assert any(f" {text} " in notes for text in written)
        assert result["date"] in svg
        assert result["command"]
