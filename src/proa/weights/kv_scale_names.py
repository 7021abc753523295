"""Names of the tensors that hold scales of an FP8 KV cache in quantised checkpoints, without torch. Never: values.

Writers disagree about the name: the scale is a tensor of the attention module, of its k or v projection, or one for
both. K and V are stored as value / scale.
"""

from __future__ import annotations

from collections.abc import Iterator

from proa.models.names import Declared
from proa.weights.checkpoint import Checkpoint


def has_kv_scales(checkpoint: Checkpoint, declared: Declared) -> bool:
    """True if some layer has a scale."""
    return any(names != (None, None) for names in kv_scale_names(checkpoint, declared))


def kv_scale_names(checkpoint: Checkpoint, declared: Declared) -> Iterator[tuple[str | None, str | None]]:
    """Yield the names of each layer's scale tensors (K, V); None: the checkpoint has none."""
    for block in range(len(declared.spec.blocks)):
        yield _name(checkpoint, declared, block, "k"), _name(checkpoint, declared, block, "v")


def _name(checkpoint: Checkpoint, declared: Declared, block: int, side: str) -> str | None:
    for weight in declared.names.candidates(f"blocks.{block}.mixer.{side}.weight"):
        projection = weight.removesuffix(".weight")
        attention = projection.rpartition(".")[0]
        for name in (
            f"{attention}.{side}_scale", f"{projection}.{side}_scale", f"{projection}.output_scale",
            f"{attention}.attn.{side}_scale", f"{attention}.kv_scale",
        ):  # fmt: skip
            if name in checkpoint.tensors:
                return name
    return None
