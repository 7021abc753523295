"""Where quantised checkpoints have scales of an fp8 KV cache: from their headers, without torch. Never: values.

Writers disagree about the name: a scale stands beside attention, beside the projection of its keys or values, or is one
for both. A value is stored as value / scale.
"""

from __future__ import annotations

from collections.abc import Iterator

from proa.models.names import Declared
from proa.weights.checkpoint import Checkpoint


def has_kv_scales(checkpoint: Checkpoint, declared: Declared) -> bool:
    """Whether some layer has a scale."""
    return any(names != (None, None) for names in kv_scale_names(checkpoint, declared))


def kv_scale_names(checkpoint: Checkpoint, declared: Declared) -> Iterator[tuple[str | None, str | None]]:
    """The tensors of each block's two scales."""
    for block in range(len(declared.spec.blocks)):
        yield (
            _name(checkpoint, declared, f"blocks.{block}.mixer.k.weight", "k"),
            _name(checkpoint, declared, f"blocks.{block}.mixer.v.weight", "v"),
        )


def _name(checkpoint: Checkpoint, declared: Declared, parameter: str, side: str) -> str | None:
    for weight in declared.names.candidates(parameter):
        projection = weight.removesuffix(".weight")
        attention = projection.rpartition(".")[0]
        for name in (
            f"{attention}.{side}_scale", f"{projection}.{side}_scale", f"{projection}.output_scale",
            f"{attention}.attn.{side}_scale", f"{attention}.kv_scale",
        ):  # fmt: skip
            if name in checkpoint.tensors:
                return name
    return None
