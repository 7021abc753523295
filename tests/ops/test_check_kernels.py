"""tools/check_kernels.py reports a kernel that fails on all architectures, or on some."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ALL = (75, 80, 86, 89, 90, 100, 120)
TOOL = Path(__file__).parents[2] / "tools" / "check_kernels.py"
KERNELS = """
import triton
import triton.language as tl
from proa.ops.triton.variant import Variant

@triton.jit
def product(a, b, out, N: tl.constexpr, WRONG: tl.constexpr):
    i = tl.arange(0, N)
    at = i[:, None] * N + i[None, :]
    if WRONG:
        at = at + tl.arange(0, 2 * N)
    tl.store(out + at, tl.dot(tl.load(a + at), tl.load(b + at)))

@triton.jit
def waits(out, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out + i, tl.inline_asm_elementwise("griddepcontrol.wait; mov.u32 $0, $1;", "=r,r", [i], tl.int32, True, 1))

def variants():
    types = {"a": "*fp16", "b": "*fp16", "out": "*fp32"}
    wide = {"a": "*fp32", "b": "*fp32", "out": "*fp32"}
    yield Variant(product, types, {"N": 16, "WRONG": False}, least=80, newest=88)
    yield Variant(product, wide, {"N": 128, "WRONG": False}, warps=8, least=86, newest=88)
    yield Variant(product, types, {"N": 32, "WRONG": True}, least=90)
    yield Variant(product, types, {"N": 64}, least=90)
    yield Variant(waits, {"out": "*i32"}, {"N": 512})
"""


def test_the_failing_kernel_is_named(tmp_path: Path) -> None:
    (tmp_path / "some_kernels.py").write_text(KERNELS)
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, TOOL, "some_kernels"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    lines = done.stdout.splitlines()
    assert any("N=16 " in line and "from sm_80 to sm_88, at most" in line for line in lines)
    problems = [line for line in lines if "from sm_" not in line]
    assert not any("N=16 " in line for line in problems)
    assert any("N=128 " in line and "sm_86 has 99 KiB" in line for line in problems)
    assert any("N=32 " in line and "does not compile for sm_90, sm_100, sm_120: " in line for line in problems)
    assert any("N=64 " in line and "differ in WRONG" in line for line in problems)
    # LLVM's code is the same for all of them. The assembler is not asked again where it agreed, only there.
    refused = {c for c in ALL if any("N=512 " in line and f"for sm_{c}: " in line for line in problems)}
    assert refused == {75, 80, 86, 89}


def marks(folder: Path, texts: dict[str, str]) -> dict[str, list[str]]:
    """Fingerprints of the five variants of each module, by its name; in one process of their own, where Triton
    compiles."""
    for name, text in texts.items():
        (folder / f"{name}.py").write_text(text)
    paths = os.pathsep.join((str(TOOL.parent), str(folder)))
    environment = os.environ | {"PYTHONPATH": paths, "TRITON_CACHE_DIR": str(folder / "cache")}
    environment.pop("TRITON_INTERPRET", None)
    each = "print(*(c.fingerprint_of(module, i) or '-' for i in range(5)))"
    code = f"import check_kernels as c, sys\nfor module in sys.argv[1:]: {each}"
    done = subprocess.run(
        [sys.executable, "-c", code, *texts], env=environment, capture_output=True, text=True, check=True
    )
    return dict(zip(texts, map(str.split, done.stdout.splitlines()), strict=True))


def test_a_fingerprint_follows_the_kernel_and_its_options(tmp_path: Path) -> None:
    """It depends on what is compiled, not on where the function stands in its file."""
    changed = KERNELS.replace("a + at", "a + at + 1").replace("warps=8", "warps=4")
    texts = {
        "first_kernels": KERNELS,
        "moved_kernels": KERNELS.replace("@triton.jit", "# a comment\n\n@triton.jit"),
        "other_kernels": changed,
        "warps_kernels": KERNELS.replace("warps=8", "warps=4"),
    }
    first, moved, other, warps = marks(tmp_path, texts).values()
    assert [mark == "-" for mark in first] == [False, False, True, True, False], "two cannot be lowered"
    assert moved == first
    assert [a == b for a, b in zip(first, other, strict=True)] == [False, False, True, True, True]
    assert warps[1] not in (first[1], other[1])


def test_what_passed_before_is_listed() -> None:
    listed = (TOOL.parent / "kernels_passed.txt").read_text().split()
    assert listed == sorted(set(listed))
    assert all(len(mark) == 24 and int(mark, 16) >= 0 for mark in listed)
