"""Maps that read the same input, as one: their parts by name. Never: storage, products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor


def named_parts(outs: Mapping[str, int], kind: str, whole: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """("<out>.<kind>", its rows of `whole`, as a view) of each out, in their order; nothing where there is no whole."""
    if whole is not None:
        for name, part in zip(outs, torch.split(whole, list(outs.values())), strict=True):
            yield f"{name}.{kind}", part
