"""tools/native.sh builds the library once for each content of csrc, compiler and flags, and never gives a stale one."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="there is no C++ compiler")

CMAKE = """
cmake_minimum_required(VERSION 3.20)
project(small LANGUAGES CXX)
add_library(proa_native SHARED number.cc)
"""


@dataclass
class Checkout:
    """A copy of tools/native.sh beside a csrc of one function; `calls` counts what the compiler compiled."""

    folder: Path
    compiler: Path
    cache: Path

    def __post_init__(self) -> None:
        (self.folder / "tools").mkdir(parents=True)
        (self.folder / "src" / "proa" / "native").mkdir(parents=True)
        (self.folder / "csrc").mkdir()
        shutil.copy(ROOT / "tools" / "native.sh", self.folder / "tools")
        self.write("CMakeLists.txt", CMAKE)
        self.write("number.cc", '#include "number.h"\nextern "C" int number() { return NUMBER; }\n')
        self.write("number.h", "#define NUMBER 1\n")

    def write(self, name: str, text: str) -> None:
        (self.folder / "csrc" / name).write_text(text)

    def build(self, command: str = "build", **environment: str) -> tuple[int, int]:
        """Builds; returns the number that the library has, and how often the compiler compiled."""
        bin_ = Path(sys.executable).parent
        given = {"BIN": str(bin_), "CXX": str(self.compiler), "PROA_CACHE": str(self.cache)} | environment
        kept = {k: v for k, v in os.environ.items() if not k.startswith("CMAKE_")}
        before = self.calls()
        subprocess.run(["sh", "tools/native.sh", command], cwd=self.folder, env=kept | given, check=True)
        library = self.folder / "src" / "proa" / "native" / "libproa_native.so"
        copy = shutil.copy(library, self.folder / f"copy{len(list(self.folder.glob('copy*')))}.so")  # loaded once each
        return ctypes.CDLL(str(copy)).number(), self.calls() - before

    def calls(self) -> int:
        log = self.compiler.with_suffix(".log")
        return (
            sum("number.cc" in line and " -c " in line for line in log.read_text().splitlines()) if log.exists() else 0
        )


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    path = tmp_path / "compiler"
    path.write_text(f'#!/bin/sh\nprintf "%s\\n" "$*" >>{path.with_suffix(".log")}\nexec c++ "$@"\n')
    path.chmod(0o755)
    return path


@pytest.mark.seldom
def test_a_second_checkout_compiles_nothing(tmp_path: Path, compiler: Path) -> None:
    first, second = (Checkout(tmp_path / name, compiler, tmp_path / "cache") for name in ("first", "second"))
    assert first.build() == (1, 1)
    assert second.build() == (1, 0)
    assert not (second.folder / "build" / "native").exists()
    assert second.build(CXXFLAGS="-O1") == (1, 1), "other flags are another library"
    first.write("number.h", "#define NUMBER 2\n")
    assert first.build() == (2, 1)
    second.write("number.h", "#define NUMBER 2\n")
    assert second.build() == (2, 0)
    library = max((tmp_path / "cache").rglob("*.so"), key=lambda path: path.stat().st_mtime)  # the one with a 2
    library.write_bytes(library.read_bytes()[:1000])
    (tmp_path / "second" / "src" / "proa" / "native" / "libproa_native.so").unlink()
    assert second.build() == (2, 1), "a damaged library is not used"


@pytest.mark.seldom
def test_files_with_old_times_are_compiled(tmp_path: Path, compiler: Path) -> None:
    """A source that is restored with its old time, as by `cp -p`, with a cache or without."""
    checkout = Checkout(tmp_path / "first", compiler, tmp_path / "cache")
    header = checkout.folder / "csrc" / "number.h"
    os.utime(header, (1e9, 1e9))
    assert checkout.build() == (1, 1)
    checkout.write("number.h", "#define NUMBER 2\n")
    assert checkout.build() == (2, 1)
    shutil.rmtree(tmp_path / "cache")
    checkout.write("number.h", "#define NUMBER 1\n")
    os.utime(header, (1e9, 1e9))
    assert checkout.build("compile") == (1, 1)
    assert checkout.build() == (1, 0)


@pytest.mark.seldom
def test_without_a_cache_folder_it_builds(tmp_path: Path, compiler: Path) -> None:
    checkout = Checkout(tmp_path / "first", compiler, tmp_path / "file" / "cache")
    (tmp_path / "file").write_text("no folder")
    assert checkout.build() == (1, 1)
    assert checkout.build() == (1, 0)  # by ninja, which finds nothing to do
