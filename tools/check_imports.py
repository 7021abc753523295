"""Packages of proa form a DAG: each imports only from those before it in ORDER. Run: python tools/check_imports.py

Also checked: the API process stays without torch, only ops imports Triton kernels, no import of proa hides inside a
function, tests import no test file, and every name of proa that tests, tools and benchmarks import exists (mypy reads
only src).
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parent.parent / "src" / "proa"
TESTS = Path(__file__).parent.parent / "tests"
CALLERS = ("tests", "tools", "benchmarks")

ORDER = (
    "errors", "types", "obs", "config", "models", "machine", "native", "ops", "weights", "hybrid", "demo", "hub",
    "layers", "cache", "grammar", "sampling", "plan", "engine", "check", "text", "parsers", "beam", "llm", "blocking",
    "server", "bench", "cli",
)  # fmt: skip

# The same within proa.engine. Values that the parts exchange stand at its top, without imports of the others.
ENGINE_ORDER = ("scheduling", "executors", "engine", "building", "processes")
ENGINE_LOOP, ENGINE_VALUES = ("engine", "turns", "gaps", "runner", "count_saver"), ("ipc", "stats")

# Modules that run in the API process; importing torch there costs seconds of start-up.
NO_TORCH = (
    "errors", "types", "obs", "config", "models", "machine", "native", "weights/checkpoint", "weights/index",
    "weights/quantised", "demo",
    "hub", "plan", "grammar", "text", "parsers", "beam", "llm", "blocking", "server", "bench", "cli", "cache/files",
    "cache/keys", "cache/pages",
    "cache/radix", "engine/scheduling/request", "engine/scheduling/scheduler", "engine/processes/handle", "engine/ipc",
    "engine/processes/client", "engine/processes/early", "engine/processes/process", "engine/processes/worker",
)  # fmt: skip

# Started as separate processes, so they may import torch, and no module may import them.
TORCH_PROCESSES = ("bench/gpu_ceilings",)


def imports(tree: ast.AST) -> Iterator[tuple[str, int, bool]]:
    """(module, line, is at module level) of every import, those under TYPE_CHECKING left out."""
    skipped = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.If) and "TYPE_CHECKING" in ast.dump(block.test)
        for node in ast.walk(block)
    }
    nested = {
        id(node)
        for block in ast.walk(tree)
        if isinstance(block, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(block)
    }
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, node.lineno, id(node) not in nested
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module, node.lineno, id(node) not in nested


def engine_part(module: str) -> int | None:
    """Place in ENGINE_ORDER of "engine/executors/graphs" or "engine/turns"; None for values and other packages."""
    parts = module.split("/")
    if parts[0] != "engine" or len(parts) == 1 or parts[1] in ENGINE_VALUES:
        return None
    return ENGINE_ORDER.index("engine" if parts[1] in ENGINE_LOOP else parts[1])


def problems(path: Path) -> Iterator[str]:
    own = path.relative_to(SOURCE).with_suffix("").as_posix()
    package = own.split("/")[0]
    if package == "__init__":  # the public face hands out names of everything, lazily
        return
    if package not in ORDER:
        yield f"{own}: package {package!r} is not in ORDER"
        return
    for module, line, at_top in imports(ast.parse(path.read_text())):
        parts = module.split(".")
        if parts[0] == "torch" and at_top and own.startswith(NO_TORCH) and own not in TORCH_PROCESSES:
            yield f"{own}.py:{line}: torch must not be imported here"
        if parts[0] != "proa" or len(parts) == 1:
            continue
        if "/".join(parts[1:3]) in TORCH_PROCESSES:
            yield f"{own}.py:{line}: {module} is run as a process; no module may import it"
        if parts[1:3] == ["ops", "triton"] and package != "ops":
            yield f"{own}.py:{line}: only proa.ops imports kernels; call them by a table of ops"
        target = parts[1]
        if target not in ORDER or ORDER.index(target) > ORDER.index(package):
            yield f"{own}.py:{line}: {package} may not import proa.{target}, which comes later"
        mine, theirs = engine_part(own), engine_part("/".join(parts[1:]))
        if mine is not None and theirs is not None and theirs > mine:
            yield f"{own}.py:{line}: {module} comes later in proa.engine"
        if not at_top and package not in ("cli", "llm"):
            yield f"{own}.py:{line}: an import of proa.{target} hides in a function"


def test_problems(path: Path) -> Iterator[str]:
    """Tests share code through modules that are no tests."""
    for module, line, _ in imports(ast.parse(path.read_text())):
        if module.split(".")[-1].startswith("test_"):
            yield f"{path.relative_to(TESTS)}:{line}: imports {module}, which is a test file"


@cache
def names_of(module: str) -> frozenset[str] | None:
    """What `from MODULE import` can name: top-level names, and modules of a package. None: there is no such module."""
    folder = SOURCE.parent.joinpath(*module.split("."))
    file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    if not file.exists():
        return None
    names = {path.stem for path in folder.iterdir()} if folder.is_dir() else set[str]()
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        match node := waiting.pop():
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
                continue  # what is inside cannot be imported
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
            case ast.Import(names=aliases) | ast.ImportFrom(names=aliases):
                names.update(alias.asname or alias.name for alias in aliases)
        waiting += ast.iter_child_nodes(node)
    return frozenset(names)


def missing_names(path: Path) -> Iterator[str]:
    """Imports of modules and names that proa does not have."""
    where = path.relative_to(SOURCE.parent.parent)
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for module in (a.name for a in node.names if a.name.split(".")[0] == "proa"):
                if names_of(module) is None:
                    yield f"{where}:{node.lineno}: there is no module {module}"
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "proa":
            names = names_of(node.module)
            if names is None:
                yield f"{where}:{node.lineno}: there is no module {node.module}"
            elif node.module != "proa":  # whose names are made when asked for
                absent = ", ".join(sorted({a.name for a in node.names} - names))
                if absent:
                    yield f"{where}:{node.lineno}: {node.module} has no {absent}"


def main() -> int:
    found = [p for path in sorted(SOURCE.rglob("*.py")) for p in problems(path)]
    callers = [path for name in CALLERS for path in sorted((SOURCE.parent.parent / name).rglob("*.py"))]
    found += [p for path in callers for p in missing_names(path)]
    found += [p for path in sorted(TESTS.rglob("*.py")) for p in test_problems(path)]
    print("\n".join(found) or f"imports: {len(ORDER)} packages, no cycle")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
