"""Measures a GPU's memory bandwidth, PCIe upload rate and products in a child process (gpu_ceilings.py), so that all
its CUDA memory is freed when the process ends; and the VRAM that an engine has taken. Never: importing torch.
"""

from __future__ import annotations

import os
import subprocess
import sys

import msgspec

from proa.config.env import child_environ
from proa.errors import ResourceError
from proa.machine.gpus import find_gpus
from proa.machine.rates import GpuRate
from proa.plan.plan import GpuPlan

_TIMEOUT_S = 180.0


def measure_gpu(index: int) -> GpuRate:
    """Measure the rates of GPU cuda:`index`, whose memory should be free. Raises ResourceError."""
    command = [sys.executable, "-m", "proa.bench.gpu_ceilings", str(index)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=child_environ()
        )
    except subprocess.TimeoutExpired:
        raise ResourceError(
            f"Measuring the memory of GPU {index} took more than {_TIMEOUT_S:.0f} s.", "See `proa doctor`."
        ) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ResourceError(f"The memory of GPU {index} cannot be measured: {last}.", "See `proa doctor`.")
    return msgspec.json.decode(done.stdout, type=GpuRate)


def vram_taken(gpu: GpuPlan) -> int | None:
    """VRAM that was free when the plan was made and is not now, in bytes, as the driver reports it; None if the GPU is
    simulated or not found. Once an engine has run, this is its peak: torch keeps what it has reserved. What other
    processes take counts too."""
    now = next((found for found in find_gpus(os.environ).gpus if found.uuid == gpu.uuid != ""), None)
    return None if gpu.index is None or now is None else gpu.vram.free_bytes - now.free_bytes
