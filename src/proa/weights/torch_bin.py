"""PyTorch's .bin files, memory-mapped. Never: unpickling of anything but tensors."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from proa.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor


def open_bin(file: Path) -> dict[str, Tensor]:
    """Tensors by name, their data still on disk. Raises WeightsError for damaged files and foreign objects."""
    import torch  # heavy, and planning a model of another format must not pay for it

    if not zipfile.is_zipfile(file):
        raise WeightsError(
            f"{file}: not a PyTorch file of version 1.6 or later, or damaged.",
            "Fetch it again, or use the model's safetensors files.",
        )
    try:
        found = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{file}: contains more than tensors, which Proa does not unpickle, since that could run code.",
            "Use the model's safetensors files.",
        ) from error
    except (RuntimeError, EOFError) as error:
        raise WeightsError(
            f"{file}: cannot be read ({error}).", "Fetch it again, or use the model's safetensors files."
        ) from error
    if not isinstance(found, dict) or not all(isinstance(t, torch.Tensor) for t in found.values()):
        raise WeightsError(f"{file}: not a dictionary of tensors.", "Use the model's safetensors files.")
    return found
