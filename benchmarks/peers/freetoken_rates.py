"""The process `python freetoken_rates.py OUT MODEL THREADS...`: FreeToken's own bench (`ft bench bw`) of CPU and link
for each number of workers. Leaves the profile by which its engine divides experts between them, and the rates in the
file OUT, for what it compiles prints too.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from beside import main
from freetoken_calls import module


def run(argv: Sequence[str]) -> None:
    out, model, *threads = argv
    rows = [row for number in map(int, threads) for row in _measure(model, number)]
    Path(out).write_text(json.dumps(rows))


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
