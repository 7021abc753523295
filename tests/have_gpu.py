"""Whether a GPU is here; a module of its own, since there are several files named conftest.py."""

from __future__ import annotations

import torch

HAVE_GPU = torch.cuda.is_available()
