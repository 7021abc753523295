"""HAVE_GPU: True if the machine has a GPU. A separate module, since there are several files named conftest.py."""

from __future__ import annotations

import torch

HAVE_GPU = torch.cuda.is_available()
