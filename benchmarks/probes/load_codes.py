"""How fast numbers and codes of a checkpoint become what stays in memory: CPU time of one thread, GB/s of what is stored, 32
matrices of 768 x 2048 from the page cache.

Run: python benchmarks/probes/load_codes.py [part of a name...]
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from dataclasses import dataclass

import numpy as np

from proa.native.fill import Fill, Scales, StoredRows, fill
from proa.native.formats import Code, Format, Layout, Order, Stored, layout
from proa.native.pool import Pool

ROWS, COLUMNS, MATRICES, RUNS = 768, 2048, 32, 7
SCALE_BYTES = {Stored.F16: 2, Stored.F32: 4, Code.E4M3: 1}


@dataclass(frozen=True)
class Case:
    """group: columns that share a scale, in the file and in what is kept. block_bytes: of 256 values, of GGUF."""

    stored: Stored | Code
    form: Format
    order: Order = Order.ROWS
    group: int = 128
    scale: Stored | Code = Stored.F16
    mins: bool = False
    block_bytes: int = 0

    @property
    def row_bytes(self) -> int:
        if self.block_bytes:
            return COLUMNS // 256 * self.block_bytes
        if self.stored is Stored.BF16:
            return COLUMNS * 2
        return COLUMNS // (2 if self.stored in (Code.INT4, Code.UINT4, Code.E2M1) else 1)

    @property
    def to(self) -> Layout:
        return layout(self.form, ROWS, COLUMNS, 0 if self.form is Format.BF16 else self.group)


CASES = {
    "int4 to bf16": Case(Code.INT4, Format.BF16),
    "gptq to bf16": Case(Code.UINT4, Format.BF16, Order.WORDS, mins=True),
    "awq to bf16": Case(Code.UINT4, Format.BF16, Order.AWQ, mins=True),
    "int4 in groups of 32 to bf16": Case(Code.INT4, Format.BF16, group=32),
    "nvfp4 to bf16": Case(Code.E2M1, Format.BF16, group=16, scale=Code.E4M3),
    "fp8 to bf16": Case(Code.E4M3, Format.BF16, scale=Stored.F32),
    "int8 to bf16": Case(Code.INT8, Format.BF16, group=2048, scale=Stored.F32),
    "bf16 kept": Case(Stored.BF16, Format.BF16),
    "fp8 kept": Case(Code.E4M3, Format.FP8_ROW, scale=Stored.F32),
    "int4 kept": Case(Code.INT4, Format.INT4_F16),
    "gptq kept": Case(Code.UINT4, Format.UINT4_F16, Order.WORDS, mins=True),
    "awq kept": Case(Code.UINT4, Format.UINT4_F16, Order.AWQ, mins=True),
    "q8_0 kept": Case(Stored.Q8_0, Format.INT8_F16, group=32, block_bytes=272),
    "q4_k kept": Case(Stored.Q4_K, Format.Q4_K, group=32, block_bytes=144),
    "q5_k kept": Case(Stored.Q5_K, Format.Q5_K, group=32, block_bytes=176),
    "q6_k kept": Case(Stored.Q6_K, Format.Q6_K, group=16, block_bytes=210),
}


def rates(case: Case, pool: Pool) -> list[float]:
    """GB/s of what is stored, one for each run."""
    rng = np.random.default_rng(0)
    nbytes = ROWS * case.row_bytes
    # No NaN as e4m3; as bfloat16 below 2, as weights are.
    stored = rng.integers(0, 64 if case.stored is Stored.BF16 else 120, nbytes * MATRICES, np.uint8)
    numbers = rng.integers(28, 40, (ROWS, COLUMNS // case.group * SCALE_BYTES[case.scale]), np.uint8)
    address, stride = numbers.ctypes.data, numbers.shape[1]
    scales = Scales(
        case.scale, address, stride, 1, 0, case.group, numbers, numbers.nbytes, address if case.mins else 0
    )  # fmt: skip
    strides = {Order.ROWS: case.row_bytes, Order.WORDS: ROWS * 4, Order.AWQ: ROWS // 2}
    to = case.to
    out = np.zeros(4 * to.matrix_bytes + 64, np.uint8)
    begin = out.ctypes.data + -out.ctypes.data % 64
    with tempfile.TemporaryFile() as file:
        file.write(stored.tobytes())
        file.flush()
        jobs = [
            Fill(
                StoredRows(
                    case.stored, i * nbytes, strides[case.order], file.fileno(), case.order,
                    None if case.block_bytes or case.stored is Stored.BF16 else scales,
                ),
                to, begin + i % 4 * to.matrix_bytes, to.matrix_bytes,
            )
            for i in range(MATRICES)
        ]  # fmt: skip
        found = []
        for _ in range(RUNS + 1):
            start = time.thread_time()
            fill(pool, jobs)
            found.append(nbytes * MATRICES / (time.thread_time() - start) / 1e9)
    return found[1:]


def main() -> None:
    with Pool([[]]) as pool:
        for name, case in CASES.items():
            if len(sys.argv) == 1 or any(part in name for part in sys.argv[1:]):
                found = rates(case, pool)
                print(f"{name:30} best {max(found):5.2f}, median {statistics.median(found):5.2f} GB/s")


if __name__ == "__main__":
    main()
