"""What a copy of recurrent states costs: shapes of Qwen3-Next-80B, 36 layers, 77 MB. On a GPU if there is one, and in
RAM by one thread, as engines do it.

host: until the copy is launched. device: until it is done.
Run: python benchmarks/probes/state_copies.py
"""

from __future__ import annotations

import statistics
import time

import torch

from proa.cache.pool import allocate_pool, copy_states
from proa.models.spec import Block, GatedDeltaNet, Mlp, Model
from proa.ops.caches import Caches

DELTA = GatedDeltaNet(2048, 16, 32, 128, 128, 4)
MODEL = Model(2048, 64, (Block(DELTA, Mlp(2048, 64)),) * 36, 1e-6, 1024)
SLOTS, TIMES = 6, 30


def measure(caches: Caches, device: torch.device) -> tuple[float, float]:
    """Seconds of the host, and until all is copied; medians."""
    host, whole = [], []
    for i in range(TIMES):
        begin = time.perf_counter()
        copy_states(caches, [(i % SLOTS, (i + 1) % SLOTS)])
        host.append(time.perf_counter() - begin)
        if device.type == "cuda":
            torch.cuda.synchronize()
        whole.append(time.perf_counter() - begin)
    return statistics.median(host[SLOTS:]), statistics.median(whole[SLOTS:])


def main() -> None:
    torch.set_num_threads(1)
    nbytes = MODEL.state_bytes_per_sequence(2)
    for name in ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        device = torch.device(name)
        caches = allocate_pool(MODEL, 1, 16, torch.bfloat16, device, sequences=SLOTS)
        host, whole = measure(caches, device)
        print(
            f"{name}: {nbytes / 1e6:.1f} MB, host {host * 1e6:.0f} us, done in {whole * 1e6:.0f} us, "
            f"{2 * nbytes / whole / 1e9:.0f} GB/s read and written"
        )


if __name__ == "__main__":
    main()
