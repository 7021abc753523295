"""The program `python -m proa.bench.gpu_ceilings INDEX`: measures a GPU's memory bandwidth, PCIe upload rate and matrix
products with torch's kernels, and prints a GpuRate as JSON. No module imports it (see gpu_rates.py).
"""

from __future__ import annotations

import sys

import msgspec
import torch

from proa.machine.rates import GpuRate
from proa.ops.gpu_time import fastest_s

MOST_BYTES = 4 << 30  # far larger than any GPU's cache
UPLOAD_BYTES = 256 << 20
MATRIX = 8192  # rows and columns of the product's matrices, 128 MiB each
ROUNDS = 10
SETTLING_S = 0.5


def rates(device: torch.device) -> GpuRate:
    """Measure the maximum rates of several rounds; allocates twice up to an eighth of the device's free memory. The
    VRAM rate is the faster one of copying, by bytes read and written, and of summing up."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    nbytes = min(MOST_BYTES, free_bytes // 8) // 4096 * 4096
    here, there = (torch.zeros(nbytes // 4, dtype=torch.float32, device=device) for _ in range(2))
    total = torch.zeros((), dtype=torch.float32, device=device)
    found_copy = 2 * nbytes / fastest_s(lambda: there.copy_(here), ROUNDS)
    found_read = nbytes / fastest_s(lambda: torch.sum(here, dim=0, out=total), ROUNDS)
    upload_bytes = min(UPLOAD_BYTES, nbytes)
    pinned = torch.zeros(upload_bytes // 4, dtype=torch.float32, pin_memory=True)
    place = there[: len(pinned)]
    found_upload = upload_bytes / fastest_s(lambda: place.copy_(pinned, non_blocking=True), ROUNDS)
    burst, sustained = _products(device)
    return GpuRate(
        index=device.index, vram_bytes_per_s=max(found_copy, found_read), pcie_bytes_per_s=found_upload,
        flops_per_s=burst, sustained_flops_per_s=min(burst, sustained),
    )  # fmt: skip


def _products(device: torch.device) -> tuple[float, float]:
    """Operations per second of a product of bfloat16 matrices, accumulated in float32: of the fastest of some, and
    after SETTLING_S of such products."""
    a, b, out = (torch.zeros(MATRIX, MATRIX, dtype=torch.bfloat16, device=device) for _ in range(3))
    a.normal_()  # zeros draw less power, and clocks would be higher than in use
    b.normal_()
    one_s = fastest_s(lambda: torch.matmul(a, b, out=out), ROUNDS)
    several = max(1, round(SETTLING_S / one_s))

    def products() -> None:
        for _ in range(several):
            torch.matmul(a, b, out=out)

    return 2.0 * MATRIX**3 / one_s, 2.0 * MATRIX**3 * several / fastest_s(products, 1)


def main() -> None:
    device = torch.device("cuda", int(sys.argv[1]))
    torch.cuda.set_device(device)
    sys.stdout.write(msgspec.json.encode(rates(device)).decode())


if __name__ == "__main__":
    main()
