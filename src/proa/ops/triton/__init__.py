"""GPU kernels and their launchers. A launcher runs on the current stream over tensors that the caller owns; it neither
allocates nor synchronises, so that a CUDA graph can capture it. Never: models, residency.
"""
