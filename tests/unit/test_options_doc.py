"""docs/options.md is up to date with the declared options."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from proa.cli.bench import BENCHMARKS

ROOT = Path(__file__).resolve().parents[2]


def test_the_options_page_is_current() -> None:
    spec = importlib.util.spec_from_file_location("make_options_doc", ROOT / "tools" / "make_options_doc.py")
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    assert (ROOT / "docs" / "options.md").read_text() == tool.document(), "run python tools/make_options_doc.py"


def test_the_pages_have_every_bench() -> None:
    options, page = ((ROOT / "docs" / name).read_text() for name in ("options.md", "benchmarks.md"))
    for name in BENCHMARKS:
        assert f"## proa bench {name}\n" in options
        assert f"| `proa bench {name}` |" in page
        assert f"## `proa bench {name}`\n" in page
