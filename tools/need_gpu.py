"""Ends with an error where torch has no GPU to run tests on. Run: python tools/need_gpu.py"""

from __future__ import annotations

import sys

import torch


def main() -> int:
    if torch.cuda.is_available():
        print(f"GPU: {torch.cuda.get_device_name()}, torch {torch.__version__}")
        return 0
    found = "torch is built without CUDA" if torch.version.cuda is None else "torch finds none"
    print(f"These tests need a GPU, and {found}. `proa doctor` says more; `make test` runs on any machine.")
    return 1


if __name__ == "__main__":
    sys.exit(main())
