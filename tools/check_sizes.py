"""Files, functions and parameter lists stay small. Run: python tools/check_sizes.py"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FILE_LINES = 500
FUNCTION_LINES = 60
PARAMETERS = 8
FAMILY_LINES = 150


# What clutters C++: comments, strings, characters; preprocessor lines with those they continue.
CLUTTER = re.compile(
    r"""//[^\n]* | /\*.*?\*/ | "(?:\\.|[^"\\\n])*" | (?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])' | ^[ \t]*\#(?:\\\n|[^\n])*""",
    re.MULTILINE | re.DOTALL | re.VERBOSE,
)
NO_FUNCTION = re.compile(
    r"(template\s*<.*>\s*)?(inline\s+)?(namespace|extern|class|struct|union|enum|concept)\b", re.DOTALL
)


def cpp_functions(text: str) -> Iterator[tuple[int, int]]:
    """(first line, lines) of each function body of C++ that is not inside another one."""
    code = CLUTTER.sub(lambda found: "\n" * found[0].count("\n"), text)
    inside: list[int | None] = []  # of each open brace: the line where a function starts, if it opens one
    head = 0  # where the text before the next brace begins
    for found in re.finditer(r"[{};]", code):
        before, line = code[head : found.start()].strip(), code.count("\n", 0, found.start()) + 1
        head = found.end()
        if found[0] == "{":
            nested = any(start is not None for start in inside)
            function = not nested and "(" in before and not before.endswith("=") and not NO_FUNCTION.match(before)
            inside.append(line - before.count("\n") if function else None)
        elif found[0] == "}" and inside:
            start = inside.pop()
            if start is not None:
                yield start, line - start + 1


def cpp_problems(path: Path) -> Iterator[str]:
    name, text = path.relative_to(ROOT).as_posix(), path.read_text()
    yield from file_problems(name, text, FILE_LINES)
    for line, length in cpp_functions(text):
        if length > FUNCTION_LINES:
            yield f"{name}:{line}: this function has {length} lines, at most {FUNCTION_LINES}"


def file_problems(name: str, text: str, limit: int) -> Iterator[str]:
    lines = text.count("\n")
    if lines > limit:
        yield f"{name}: {lines} lines, at most {limit}"


def python_problems(path: Path) -> Iterator[str]:
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text()
    limit = FAMILY_LINES if "/families/" in name and name.startswith("src") else FILE_LINES
    yield from file_problems(name, text, limit)
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        length = (node.end_lineno or node.lineno) - node.lineno + 1
        if length > FUNCTION_LINES:
            yield f"{name}:{node.lineno}: {node.name} has {length} lines, at most {FUNCTION_LINES}"
        count = len(node.args.args) + len(node.args.posonlyargs) + len(node.args.kwonlyargs)
        if count > PARAMETERS + 1 and name.startswith("src") and not kernel(node):  # one more for self
            yield f"{name}:{node.lineno}: {node.name} takes {count} parameters, at most {PARAMETERS}"


def kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True for a Triton kernel: it takes addresses, strides and sizes one by one."""
    return any(ast.unparse(decorator).split("(")[0] == "triton.jit" for decorator in node.decorator_list)


def main() -> int:
    python = sorted(p for folder in ("src", "tests", "tools") for p in (ROOT / folder).rglob("*.py"))
    cpp = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cc"))
    paths = [*python, *cpp]
    found = [p for path in python for p in python_problems(path)] + [p for path in cpp for p in cpp_problems(path)]
    print("\n".join(found) or f"sizes: {len(paths)} files within limits")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
