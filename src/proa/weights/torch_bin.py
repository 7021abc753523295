"""PyTorch's .bin files, memory-mapped. Never: unpickling of anything but tensors."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from proa.errors import WeightsError
from proa.weights.placeholder import refuse_placeholder

if TYPE_CHECKING:
    from torch import Tensor


def open_bin(file: Path) -> dict[str, Tensor]:
    """Open a .bin file: name -> memory-mapped tensor. Raises WeightsError for damaged files and other objects."""
    import torch  # takes seconds, which planning a model of another format must not pay

    refuse_placeholder(file)
    if not zipfile.is_zipfile(file):
        raise _no_archive(file)
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


def _no_archive(file: Path) -> WeightsError:
    """Make the error for a file that is not a complete zip archive, PyTorch's format."""
    with file.open("rb") as stream:
        head = stream.read(8)
    if head.startswith(b"PK"):
        return WeightsError(
            f"{file}: a PyTorch archive that is cut off: its table of contents, at the end, is missing.",
            "Fetch it again, or use the model's safetensors files.",
        )
    if head.startswith(b"\x80"):  # a pickle's first byte
        return WeightsError(
            f"{file}: the file format of PyTorch before 1.6 is not implemented.",
            "Use the model's safetensors files, or save it again with a current PyTorch.",
        )
    return WeightsError(
        f"{file}: not a PyTorch file: it begins with {head!r}, not with the b'PK' of an archive.",
        "Fetch it again, or use the model's safetensors files.",
    )
