"""How fast a GPU's memory and its link are, as a process of their own finds: CUDA's memory is free again when it ends.
Never: torch (gpu_ceilings.py).
"""

from __future__ import annotations

import subprocess
import sys

import msgspec

from proa.config.env import child_environ
from proa.errors import ResourceError

_TIMEOUT_S = 180.0


class GpuRates(msgspec.Struct, frozen=True, kw_only=True):
    """Bytes per second, the best of several rounds."""

    copy: float  # within VRAM, read and written bytes together
    read: float  # of VRAM, summing it up
    upload: float  # from pinned RAM to VRAM

    @property
    def memory(self) -> float:
        """Nothing was seen to go faster."""
        return max(self.copy, self.read)


def measure_gpu(index: int) -> GpuRates:
    """Of cuda:`index`, whose memory should be free. Raises ResourceError."""
    command = [sys.executable, "-m", "proa.bench.gpu_ceilings", str(index)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, env=child_environ()
        )
    except subprocess.TimeoutExpired:
        raise ResourceError(f"Measuring the memory of GPU {index} took more than {_TIMEOUT_S:.0f} s.") from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise ResourceError(f"The memory of GPU {index} cannot be measured: {last}.", "See `proa doctor`.")
    return msgspec.json.decode(done.stdout, type=GpuRates)
