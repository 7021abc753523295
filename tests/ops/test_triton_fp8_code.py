"""The compiled code of FP8 products on Hopper: weights go from shared memory to the tensor cores unchanged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COMPILE = """
import json, sys
sys.path[:0] = ["src", "tools"]
import check_kernels
from proa.ops.triton import experts_fp8

found = []
for v in list(experts_fp8.variants())[:8]:
    ptx = check_kernels.compiled(v, 90, check_kernels.Passed().skip).asm["ptx"]
    lines = [line.strip() for line in ptx.splitlines()]
    products = [i for i, line in enumerate(lines) if line.startswith("wgmma.mma_async")]
    found.append(([lines[i] for i in products], lines[products[0] - 60 : products[-1]]))
print(json.dumps(found))
"""


def test_weights_go_to_the_tensor_cores_unchanged() -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found) == 8
    for products, around in found:
        assert len(products) >= 4
        assert all(".f32.e4m3.e4m3" in line for line in products)
        assert sum(line.startswith("ld.shared") for line in around) >= 16
        touched = [line for line in around if line.startswith(("st.shared", "prmt", "cvt.rn", "cvt.u16", "bfi"))]
        assert not touched, touched[:3]
