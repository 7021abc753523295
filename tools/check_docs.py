"""The pages are in step: both READMEs say the same, lines fit, links lead somewhere. Run: python tools/check_docs.py

README.md and README.zh-CN.md must have the same headings (by level), code blocks, tables (by their figures) and links.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
WIDTH = 120
MOST_LINES = {"docs/performance.md": 120}
# Each row of these tables is one item with its explanation; options.md is generated.
WIDE_TABLES = ("docs/options.md", "docs/formats.md")
README, CHINESE = "README.md", "README.zh-CN.md"

_FIGURE = re.compile(r"\d+(?:\.\d+)*")
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Page:
    """What both languages share."""

    headings: tuple[int, ...]  # levels
    blocks: tuple[str, ...]  # of code
    tables: tuple[tuple[tuple[tuple[str, ...], ...], ...], ...]  # the figures of each cell of each row
    links: tuple[str, ...]  # targets, sorted, without those between the languages


def page(text: str) -> Page:
    prose = _FENCE.sub("", text)
    lines = prose.splitlines()
    return Page(
        headings=tuple(len(line) - len(line.lstrip("#")) for line in lines if line.startswith("#")),
        blocks=tuple(_FENCE.findall(text)),
        tables=tuple(_tables(lines)),
        links=tuple(sorted(link for link in _LINK.findall(prose) if link not in (README, CHINESE))),
    )


def _tables(lines: list[str]) -> Iterator[tuple[tuple[tuple[str, ...], ...], ...]]:
    rows: list[tuple[tuple[str, ...], ...]] = []
    for line in [*lines, ""]:
        if line.startswith("|"):
            rows.append(tuple(tuple(_FIGURE.findall(cell)) for cell in line.strip("|").split("|")))
        elif rows:
            yield tuple(rows)
            rows = []


def differences(one: str, other: str) -> Iterator[str]:
    """How two languages of a page differ."""
    first, second = page(one), page(other)
    if first.headings != second.headings:
        yield f"headings have levels {list(first.headings)} and {list(second.headings)}"
    for i, (a, b) in enumerate(zip(first.blocks, second.blocks, strict=False), 1):
        if a != b:
            yield f"code block {i} differs"
    if len(first.blocks) != len(second.blocks):
        yield f"{len(first.blocks)} and {len(second.blocks)} code blocks"
    if len(first.tables) != len(second.tables):
        yield f"{len(first.tables)} and {len(second.tables)} tables"
    for i, (left, right) in enumerate(zip(first.tables, second.tables, strict=False), 1):
        if len(left) != len(right):
            yield f"table {i} has {len(left)} and {len(right)} lines"
        rows = zip(left, right, strict=False)
        yield from (f"table {i}, line {j}: {a} and {b}" for j, (a, b) in enumerate(rows, 1) if a != b)
    for link in sorted({*first.links} ^ {*second.links}):
        yield f"only one of them links to {link}"


def line_problems(name: str, text: str) -> Iterator[str]:
    """Lines that are too long, or too many."""
    for number, line in enumerate(text.splitlines(), 1):
        if len(line) > WIDTH and not (name in WIDE_TABLES and line.startswith("|")):
            yield f"{name}:{number}: {len(line)} characters, at most {WIDTH}"
    most = MOST_LINES.get(name)
    if most is not None and text.count("\n") > most:
        yield f"{name}: {text.count(chr(10))} lines, at most {most}"


def link_problems(path: Path, text: str) -> Iterator[str]:
    """Links to files that are not there."""
    for link in _LINK.findall(_FENCE.sub("", text)):
        target = link.partition("#")[0]
        if target and ":" not in target and not (path.parent / target).exists():
            yield f"{path.relative_to(ROOT).as_posix()}: no file {target}"


def pages() -> list[Path]:
    return sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])


def problems() -> Iterator[str]:
    for path in pages():
        text = path.read_text("utf-8")
        yield from line_problems(path.relative_to(ROOT).as_posix(), text)
        yield from link_problems(path, text)
    both = differences((ROOT / README).read_text("utf-8"), (ROOT / CHINESE).read_text("utf-8"))
    yield from (f"{README} and {CHINESE}: {difference}" for difference in both)
    decisions = ROOT / "docs" / "decisions"
    listed = (decisions / "README.md").read_text("utf-8")
    for path in sorted(decisions.glob("[0-9]*.md")):
        if f"({path.name})" not in listed:
            yield f"docs/decisions/README.md does not list {path.name}"


def main() -> int:
    found = list(problems())
    for problem in found:
        print(problem)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
