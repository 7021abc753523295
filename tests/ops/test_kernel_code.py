"""tools/kernel_code.py reports code that lacks a property which kernels must have."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "kernel_code.py"

WIDE, NARROW = "cp.async.cg.shared.global [%r1], [%rd1], 0x10;", "cp.async.ca.shared.global [%r1], [%rd1], 0x4;"
PRODUCTS = ["wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {}, %rd1;"] * 4
LOADS = ["ld.shared.b32 %r1, [%r2];"] * 16
CLAIM = ["tt.func {", "  scf.if %real {", "    scf.if %bad {", "      %1 = tt.atomic_cas", "    }", "  }", "}"]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("kernel_code", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def variant(name: str, **constants: object) -> SimpleNamespace:
    return SimpleNamespace(kernel=SimpleNamespace(__name__=name, arg_names=["partial"]), constants=constants, types={})


@pytest.mark.parametrize(
    ("check", "of", "lines", "problem"),
    [
        ("small_loads", variant("_many"), [WIDE] * 4, ""),
        ("small_loads", variant("_many"), [WIDE] * 3, "only 3"),
        ("small_loads", variant("_many"), [WIDE] * 8 + [NARROW], "1 loads of less"),
        ("small_loads", variant("_one"), [WIDE] * 8 + [NARROW] * 2, ""),
        ("small_loads", variant("_many", SCALE="f16"), [WIDE] * 4 + [NARROW] * 8, ""),
        ("small_loads", variant("_many", SCALE="f16"), [WIDE] * 4 + [NARROW] * 9, "64% of bytes"),
        ("changed_codes", variant("_block"), LOADS + PRODUCTS, ""),
        ("changed_codes", variant("_block"), LOADS + PRODUCTS[1:], "3 products"),
        ("changed_codes", variant("_block"), [*LOADS[1:], *PRODUCTS], "15 loads"),
        ("changed_codes", variant("_block"), [*LOADS, "prmt.b32 %r1, %r2;", *PRODUCTS], "converted: prmt"),
        ("changed_codes", variant("_block"), [*LOADS, *PRODUCTS, "$L__BB0_2:", "prmt.b32 %r1, %r2;"], ""),
        ("changed_codes", variant("_block"), [*LOADS, *PRODUCTS, "$L__BB0_2:", *LOADS, *PRODUCTS[1:]], "3 products"),
        ("unguarded_claims", variant("_sum"), CLAIM, ""),
        ("unguarded_claims", variant("_sum"), [*CLAIM[:1], *CLAIM[2:]], "within 1 conditions"),
    ],
)
def test_problems_are_named(tool: ModuleType, check: str, of: SimpleNamespace, lines: list[str], problem: str) -> None:
    text = "\n".join(lines)
    found = getattr(tool, check)(of, {"ptx": text, "ttir": text})
    assert problem in found
    assert bool(problem) == bool(found)
