"""Fixed costs of decode steps, beside reading and arithmetic. Never: what kernels reach of a rate (attained.py)."""

from __future__ import annotations

# The host's part of a decode step on the CPU: 168 to 209 us on three machines (docs/lab/decode-step.md, cpu-amx.md).
# With a GPU it overlaps with the step before.
HOST_S = 180e-6
# What a layer on a GPU takes beside reading its bytes: a step of 48 layers took 2.8 ms, its bytes 1.5 ms
# (docs/lab/gpu-kernels-h200.md).
GPU_LAYER_S = 27e-6
# Push and pull of an empty job between GPU and CPU (docs/lab/hybrid-h200.md).
CROSSING_S = 6e-6
