"""Files, functions and parameter lists stay small. Run: python tools/check_sizes.py"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE_LINES = 500
FUNCTION_LINES = 60
PARAMETERS = 8
FAMILY_LINES = 150


def problems(path: Path) -> Iterator[str]:
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text()
    lines = text.count("\n")
    limit = FAMILY_LINES if "/families/" in name and name.startswith("src") else FILE_LINES
    if lines > limit:
        yield f"{name}: {lines} lines, at most {limit}"
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > FUNCTION_LINES:
            yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"
        count = len(node.args.args) + len(node.args.posonlyargs) + len(node.args.kwonlyargs)
        if count > PARAMETERS + 1 and name.startswith("src"):  # one more for self
            yield f"{name}:{node.lineno}: {node.name} takes {count} parameters, at most {PARAMETERS}"


def main() -> int:
    paths = sorted(p for folder in ("src", "tests", "tools") for p in (ROOT / folder).rglob("*.py"))
    found = [p for path in paths for p in problems(path)]
    print("\n".join(found) or f"sizes: {len(paths)} files within limits")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
