"""GPU kernels, one file for what belongs together. A public function launches on the current stream over tensors that
the caller owns: it allocates nothing and waits for nothing, so a CUDA graph can hold it. Never: models, residency.
"""
