"""Names of the parts of fused linear layers. Never: storage, products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


def named_parts(outs: Mapping[str, int], kind: str, whole: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """Yield ("<out>.<kind>", view of its rows of `whole`) for each out, in order; nothing if `whole` is None."""
    if whole is not None:
        for name, part in zip(outs, torch.split(whole, list(outs.values())), strict=True):
            yield f"{name}.{kind}", part
