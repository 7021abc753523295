"""What the compiled code of some kernels must look like: properties that no result shows. check_kernels.py reads the
code of each variant for sm_90, Hopper, and reports what differs.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

Code = Mapping[str, str]  # "ttir", "ptx"
LEAST_COPIES = 4  # of 16 bytes: fewer mean that the compiler did not see the alignment
MOST_STACK = 128  # bytes
LINES_AROUND = 60  # of PTX before the first product, which fetch its operands


def small_loads(variant: Any, code: Code) -> str:
    """Weights are loaded 16 bytes per thread. If the compiler cannot prove alignment, it uses 4: correct, but slow."""
    copies = re.findall(r"cp\.async\.\w+\.shared\.global[^;]*?, 0x([0-9a-f]+)", code["ptx"])
    sizes = [int(n, 16) for n in copies] + [16] * len(re.findall(r"ld\.global\S*\.v4\.b32", code["ptx"]))
    whole, constants = sizes.count(16), variant.constants
    if whole < LEAST_COPIES:
        return f"only {whole} loads of 16 bytes"
    # A linear map of one row copies x as well, a part of a kilobyte for each of several rows of weights. Of packed
    # formats, scales are copied as well, in smaller parts; pair by pair x too, a word or two at a time, and with codes
    # as they are x of few rows, scales and minimums, 8 bytes of each for 32 of codes. Products of half a block copy
    # half of x, but the same scales.
    if "QUADS" in constants or constants.get("SCALE", "none") != "none":
        few = constants.get("CODED") is True or constants.get("LEAST") != constants.get("BLOCK")
        least = 0.4 if "QUADS" in constants else 32 / 56 if few else 2 / 3
        share = 16 * whole / sum(sizes)
        return "" if share >= least else f"{share:.0%} of bytes are loaded 16 at a time, at least {least:.0%} expected"
    spare = whole // 4 if variant.kernel.__name__ == "_one" else 0
    small = len(sizes) - whole
    return "" if small <= spare else f"{small} loads of less than 16 bytes, at most {spare} expected"


def changed_codes(variant: Any, code: Code) -> str:
    """FP8 weights go from shared memory to the tensor cores unchanged."""
    parts = re.split(r"^\$L\w+:$", code["ptx"], flags=re.MULTILINE)  # a loop's body has no label inside
    found = [_changed_codes(part) for part in parts if "wgmma.mma_async" in part] or [_changed_codes("")]
    return next(filter(None, found), "")


def _changed_codes(body: str) -> str:
    lines = [line.strip() for line in body.splitlines()]
    products = [i for i, line in enumerate(lines) if line.startswith("wgmma.mma_async")]
    if len(products) < 4 or not all(".f32.e4m3.e4m3" in lines[i] for i in products):
        return f"{len(products)} products on the tensor cores, at least 4 of e4m3 with e4m3 expected"
    around = lines[max(0, products[0] - LINES_AROUND) : products[-1]]
    if (loads := sum(line.startswith("ld.shared") for line in around)) < 16:
        return f"{loads} loads of operands from shared memory, at least 16 expected"
    touched = [line for line in around if line.startswith(("st.shared", "prmt", "cvt.rn", "cvt.u16", "bfi"))]
    return f"operands are converted: {touched[0]}" if touched else ""


def unguarded_claims(variant: Any, code: Code) -> str:
    """A fault record is claimed in two nested conditions (the row is real; it is non-finite): `and`, of which Triton's
    interpreter evaluates one side only, once let padding rows be claimed."""
    lines = code["ttir"].splitlines()
    claims = [i for i, line in enumerate(lines) if "atomic_cas" in line]
    if len(claims) != 1:
        return f"{len(claims)} claims of a fault record, one expected"
    inner, conditions = _indent(lines[claims[0]]), 0
    for line in reversed(lines[: claims[0]]):  # outwards, block by block
        if line.strip() and _indent(line) < inner and not line.lstrip().startswith(("}", "^")):
            inner = _indent(line)
            conditions += "scf.if" in line
    return "" if conditions == 2 else f"a fault record is claimed within {conditions} conditions, 2 expected"


def large_stack(variant: Any, code: Code) -> str:
    """A thread's stack, which holds spilled registers, is small: the driver takes it for all threads that a GPU can
    hold, so that 1 KB of it takes 264 MiB of an H200's VRAM as soon as the kernel is loaded."""
    from triton.knobs import nvidia

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as ptx:
        ptx.write(code["ptx"])
        ptx.flush()
        command = [nvidia.ptxas.path, "--verbose", "--gpu-name=sm_90a", "--output-file=/dev/null", ptx.name]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    nbytes = max(map(int, re.findall(r"(\d+) bytes stack frame", found)))
    return "" if nbytes <= MOST_STACK else f"{nbytes} bytes of stack a thread, at most {MOST_STACK} expected"


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _copies_weights(variant: Any) -> bool:
    """Some sizes are no multiples of 16 bytes, and a linear map with a bias has more loads."""
    odd = {2880, 1408} & {value for value in variant.constants.values() if isinstance(value, int)}
    return variant.kernel.__name__ not in ("_count", "_place") and not odd


# Module of kernels -> check, and the variants that it applies to.
CHECKS: dict[str, tuple[Callable[[Any, Code], str], Callable[[Any], bool]]] = {
    "linear": (small_loads, lambda v: _copies_weights(v) and "bias" not in v.types),
    "linear_packed": (small_loads, _copies_weights),
    "choose": (large_stack, lambda v: True),
    "look_ahead": (large_stack, lambda v: True),
    "experts_few": (small_loads, _copies_weights),
    "experts_grouped": (small_loads, _copies_weights),
    "experts_fp8": (changed_codes, lambda v: v.constants["SCALE"] == "f32_panel" and "bias" not in v.types),
    "expert_sum": (unguarded_claims, lambda v: v.kernel.arg_names[0] == "partial" and "records" in v.types),
}


def check_of(module: str, variant: Any) -> Callable[[Any, Code], str] | None:
    """The check of a variant's code, which returns what is wrong with it; None if there is none."""
    check, applies = CHECKS.get(module.rpartition(".")[2], (None, None))
    return check if applies is not None and applies(variant) else None
