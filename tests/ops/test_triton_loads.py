"""Weights are loaded 16 bytes per thread. If the compiler cannot prove alignment, it uses 4: correct, but slow."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from proa.ops.triton import experts_few, experts_grouped, linear, linear_packed
from proa.ops.triton.variant import Variant

ROOT = Path(__file__).parents[2]
COMPILE = """
import importlib, json, re, sys
sys.path[:0] = ["src", "tools"]
import check_kernels
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

found = {}
for name, number in json.loads(sys.argv[1]):
    v = list(importlib.import_module(name).variants())[number]
    names = v.kernel.arg_names
    signature = {n: "constexpr" if n in v.constants else v.types[n] for n in names}
    source = ASTSource(v.kernel, signature, dict(v.constants), check_kernels.attributes(v))
    options = {"num_warps": v.warps, "num_stages": v.stages}
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    copies = [int(n, 16) for n in re.findall(r"cp\\.async\\.\\w+\\.shared\\.global[^;]*?, 0x([0-9a-f]+)", ptx)]
    loads = [16] * len(re.findall(r"ld\\.global\\S*\\.v4\\.b32", ptx))
    found[f"{name}.{v.kernel.__name__} {dict(v.constants)}"] = copies + loads
print(json.dumps(found))
"""
AXES = ("CODE", "SCALE", "GROUP", "BLOCK", "QUADS", "CODED")


def copies_weights(module: object, v: Variant) -> bool:
    if v.kernel.__name__ in ("_count", "_place") or {2880, 1408} & set(v.constants.values()):
        return False
    return not (module is linear and "bias" in v.types)


def test_weights_are_copied_16_bytes_at_a_time(drawn: Callable[..., list[int]]) -> None:
    table = [
        (module.__name__, number, v)
        for module in (linear, linear_packed, experts_few, experts_grouped)
        for number, v in enumerate(module.variants())
        if copies_weights(module, v)
    ]
    assert len(table) >= 15
    rows = [{"kernel": str(v.kernel), **{key: str(v.constants.get(key)) for key in AXES}} for _, _, v in table]
    chosen = [table[i][:2] for i in drawn(rows)]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE, json.dumps(chosen)], cwd=ROOT, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == len(chosen)
    for name, sizes in found.items():
        assert sizes.count(16) >= 4, name
        # A linear map of one row copies x as well, a part of a kilobyte for each of several rows of weights.
        # Of packed formats, scales are copied as well, in smaller parts; pair by pair x too, a word or two at a time,
        # and with codes as they are x of few rows, scales and minimums, 8 bytes of each for 32 of codes.
        if "QUADS" in name or ("'SCALE'" in name and "'SCALE': 'none'" not in name):
            least = 0.4 if "QUADS" in name else 32 / 56 if "'CODED': True" in name else 2 / 3
            assert sizes.count(16) * 16 >= sum(sizes) * least, name
        else:
            assert len(sizes) - sizes.count(16) <= (sizes.count(16) // 4 if "linear._one" in name else 0), name
