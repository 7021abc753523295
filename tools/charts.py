"""Draw docs/images/*.svg from benchmarks/results/*.json: horizontal bars, in light and dark.

Run: python tools/charts.py; with --check it only says whether the images are current. A result file has: title, unit,
better, machine, date, command, origin (the page with the notes), series (names of bars), groups (label, one value or
null for each series); optional: reference (a value with a line), note.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS, IMAGES = ROOT / "benchmarks" / "results", ROOT / "docs" / "images"

WIDTH, LABELS, RIGHT = 760, 210, 60  # pixels: of the image, of labels left of the bars, of values right of them
BAR, GAP, TOP, BOTTOM = 15, 9, 76, 26

STYLE = """\
  <style>
    .back { fill: #ffffff } .text { fill: #1f2328 } .soft { fill: #59636e } .line { stroke: #818b98 }
    .bar0 { fill: #0969da } .bar1 { fill: #9aa4b0 } .bar2 { fill: #d4a72c } .bar3 { fill: #8250df }
    text { font: 13px system-ui, -apple-system, "Segoe UI", sans-serif } .title { font-size: 15px; font-weight: 600 }
    @media (prefers-color-scheme: dark) {
      .back { fill: #0d1117 } .text { fill: #f0f6fc } .soft { fill: #9198a1 } .line { stroke: #656c76 }
      .bar0 { fill: #4493f8 } .bar1 { fill: #656c76 } .bar2 { fill: #bb8009 } .bar3 { fill: #a371f7 }
    }
  </style>"""


def chart(result: dict[str, Any]) -> str:
    """The SVG of one result. Proa's bars are blue."""
    groups, series = result["groups"], result["series"]
    shown = [[(i, v) for i, v in enumerate(group["values"]) if v is not None] for group in groups]
    most = max(v for bars in shown for _, v in bars)
    colours = [0 if name == "Proa" else i + ("Proa" not in series) for i, name in enumerate(series)]
    scale = (WIDTH - LABELS - RIGHT) / most
    height = TOP + sum(len(bars) * BAR + GAP for bars in shown) + BOTTOM
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">',
        f"  <title>{escape(result['title'])}</title>",
        STYLE,
        f'  <rect class="back" width="{WIDTH}" height="{height}" rx="6"/>',
        f'  <text class="text title" x="16" y="26">{escape(result["title"])}</text>',
        f'  <text class="soft" x="16" y="46">{escape(result["unit"])} ({escape(result["better"])})</text>',
        *_legend(series, colours),
        *_bars(groups, shown, scale, colours),
    ]
    if "reference" in result:
        x = LABELS + result["reference"] * scale
        out.append(
            f'  <line class="line" stroke-dasharray="4 3" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP - 6}" y2="{height - 30}"/>'
        )
    note = f"; {result['note']}" if "note" in result else ""
    foot = f"{result['machine']}, {result['date']}{note}"
    out += [f'  <text class="soft" x="16" y="{height - 10}">{escape(foot)}</text>', "</svg>", ""]
    return "\n".join(out)


def _legend(series: list[str], colours: list[int]) -> Iterator[str]:
    x = LABELS
    for colour, name in zip(colours, series, strict=True):
        yield f'  <rect class="bar{colour}" x="{x}" y="56" width="11" height="11" rx="2"/>'
        yield f'  <text class="soft" x="{x + 17}" y="66">{escape(name)}</text>'
        x += 40 + 8 * len(name)


def _bars(
    groups: list[dict[str, Any]], shown: list[list[tuple[int, float]]], scale: float, colours: list[int]
) -> Iterator[str]:
    y, digits = TOP, max(len(str(v).partition(".")[2].rstrip("0")) for bars in shown for _, v in bars)
    for group, bars in zip(groups, shown, strict=True):
        middle = y + len(bars) * BAR / 2 + 4.5
        label = escape(group["label"])
        yield f'  <text class="text" x="{LABELS - 10}" y="{middle:.1f}" text-anchor="end">{label}</text>'
        for series, value in bars:
            end = LABELS + value * scale
            yield (
                f'  <rect class="bar{colours[series]}" x="{LABELS}" y="{y}" width="{value * scale:.1f}"'
                f' height="{BAR - 2}" rx="2"/>'
            )
            yield f'  <text class="soft" x="{end + 6:.1f}" y="{y + 11}">{value:.{digits}f}</text>'
            y += BAR
        y += GAP


def images() -> dict[Path, str]:
    """Each image's path and text."""
    return {
        IMAGES / f"{path.stem}.svg": chart(json.loads(path.read_text("utf-8")))
        for path in sorted(RESULTS.glob("*.json"))
    }


def main() -> int:
    stale = [path for path, text in images().items() if not path.exists() or path.read_text("utf-8") != text]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path.relative_to(ROOT)} is not what benchmarks/results says: run python tools/charts.py")
        return 1 if stale else 0
    for path in stale:
        path.write_text(images()[path], "utf-8")
        print(f"wrote {path.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
