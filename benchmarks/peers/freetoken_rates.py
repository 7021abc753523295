"""The process `python freetoken_rates.py MODEL THREADS...`: FreeToken's own bench (`ft bench bw`) of CPU and link for
each number of workers. Leaves the profile by which its engine divides experts between them, and prints the rates.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any

from beside import main
from freetoken_calls import module


def run(argv: Sequence[str]) -> None:
    with redirect_stdout(sys.stderr):  # it prints, too
        rows = [row for threads in map(int, argv[1:]) for row in _measure(argv[0], threads)]
    sys.stdout.write(json.dumps(rows))


def _measure(model: str, threads: int) -> list[dict[str, Any]]:
    """GB/s of each kind of layer."""
    bench, device = module("freetoken.moe.benchbw"), module("freetoken.gpu_select").bind_assigned_gpu()
    found = bench.run_benchbw(device_index=device.index, checkpoints=(model,), cpu_threads=threads)
    rows = [found["layer_kinds"][key] for key in found["benched"]]
    return [
        {
            "asked_threads": threads,
            "threads": row["cpu_threads"],
            "cpu": row["cpu_moe_gbs"],
            "pcie": row["pcie_gather_gbs"],
            "cpu_beside_pcie": row["cpu_moe_overlap_gbs"],
            "pcie_beside_cpu": row["pcie_gather_overlap_gbs"],
        }
        for row in rows
    ]


if __name__ == "__main__":
    main(run)
    sys.stdout.flush()
    os._exit(0)  # its threads are no daemons
