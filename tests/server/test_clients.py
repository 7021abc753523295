"""Tests that need OpenAI's or Anthropic's client are skipped if it is not installed."""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).parents[1]
CLIENTS = {"openai", "anthropic"}


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    named = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    named += [node.module for node in nodes if isinstance(node, ast.ImportFrom) and node.module and not node.level]
    return {name.split(".")[0] for name in named}


def test_no_file_of_tests_imports_a_client() -> None:
    """Tests must use pytest.importorskip: an import statement would fail the collection."""
    tests = [path for path in TESTS.rglob("*.py") if path.parent.name != "clients"]  # programs with their own packages
    files = {str(path.relative_to(TESTS)): imported(path) & CLIENTS for path in tests}
    assert len(files) > 200
    assert not {name: clients for name, clients in files.items() if clients}
