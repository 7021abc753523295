"""csrc is formatted by clang-format, and its instruction sets cannot leak. Run: python tools/check_native.py

An object file that was compiled for AVX-512 may define nothing that the linker could use for other files: if two files
define the same inline function, one copy is kept for both, and a CPU without AVX-512 crashes in it. Nor may it run code
when the library is loaded. So every object of src/isa defines one global symbol, its table, and no
constructor; and the library exports the functions of its C interface only. Needs what `make native` built.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
BUILD = ROOT / "build" / "native"
LIBRARY_BYTES = 20_000_000
ISAS = {"scalar", "scalartiles", "avx2", "avx512", "avx512bf16", "amx"}  # those of csrc/cmake/isa.cmake


def layout_problems() -> Iterator[str]:
    clang_format = Path(sys.executable).with_name("clang-format")
    files = sorted(str(p) for p in (ROOT / "csrc").rglob("*") if p.suffix in (".h", ".cc"))
    done = subprocess.run([clang_format, "--dry-run", "-Werror", *files], capture_output=True, text=True, check=False)
    if done.returncode:
        yield f"{done.stderr}csrc is not laid out by clang-format; run `make format`"


def symbols(path: Path, *options: str) -> list[tuple[str, str]]:
    """(type letter of nm, name) of the symbols that a file defines."""
    out = subprocess.run(
        ["nm", "--defined-only", "--demangle", *options, path], capture_output=True, text=True, check=True
    )
    return [(line.split(maxsplit=2)[1], line.split(maxsplit=2)[2]) for line in out.stdout.splitlines()]


def object_problems(path: Path) -> Iterator[str]:
    name = path.name.removesuffix(".o")
    linkable = symbols(path, "--extern-only")
    tables = [symbol for letter, symbol in linkable if letter in "BDRS"]
    others = [f"{symbol} ({letter})" for letter, symbol in linkable if letter not in "BDRS"]
    if others:
        yield f"isa/{name}: the linker may link its {', '.join(others)} elsewhere; use the anonymous namespace"
    if len(tables) != 1:
        yield f"isa/{name}: defines {len(tables)} global tables instead of one: {', '.join(tables)}"
    for _, symbol in symbols(path):
        if "_GLOBAL__" in symbol or symbol.startswith("global constructors"):
            yield f"isa/{name}: runs code when the library is loaded ({symbol}); make its constants constexpr"


def library_problems(path: Path) -> Iterator[str]:
    strange = [symbol for _, symbol in symbols(path, "--dynamic") if not symbol.startswith("proa_")]
    if strange:
        yield f"{path.name}: exports more than its C interface: {', '.join(strange)}"
    if path.stat().st_size > LIBRARY_BYTES:
        yield f"{path.name}: {path.stat().st_size} bytes, at most {LIBRARY_BYTES}"


def problems() -> Iterator[str]:
    yield from layout_problems()
    if shutil.which("nm") is None:
        yield "there is no nm; install binutils"
        return
    library = BUILD / "libproa_native.so"
    if not library.exists():
        yield f"there is no {library.relative_to(ROOT)}; run `make native`"
        return
    yield from library_problems(library)
    for isa in isa_sources():
        path = BUILD / "CMakeFiles" / f"isa_{isa}.dir" / "src" / "isa" / f"{isa}.cc.o"
        if path.exists():  # not on a processor of another kind
            yield from object_problems(path)


def isa_sources() -> list[str]:
    return sorted(p.stem for p in (ROOT / "csrc" / "src" / "isa").glob("*.cc") if p.stem in ISAS)


def main() -> int:
    found = list(problems())
    print("\n".join(found) or f"native: laid out, {len(isa_sources())} instruction sets kept apart")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
