"""The choice of the KV cache's type. Never: its memory, the values of scales."""

from __future__ import annotations

from dataclasses import dataclass

from proa.errors import UsageError
from proa.models.names import Declared
from proa.plan.budget import KV_ELEM_BYTES
from proa.types import Decision
from proa.weights.checkpoint import Checkpoint
from proa.weights.kv_scale_names import has_kv_scales


@dataclass(frozen=True)
class KvType:
    """dtype: the type's name in torch. row: for the start-up table."""

    dtype: str
    row: Decision

    @property
    def elem_bytes(self) -> int:
        return KV_ELEM_BYTES[self.dtype]


def kv_type(asked: str, dtype: str, checkpoint: Checkpoint, declared: Declared) -> KvType:
    """Choose the type. asked: auto, bf16 or fp8. dtype: of activations; recurrent states have it in any case. Raises
    UsageError for another type than `dtype` if a layer caches anything but K and V or states.
    """
    if asked == "auto":
        return KvType(dtype, _row(asked, dtype, "the type of activations: nothing is rounded"))
    others = {type(c).__name__ for c in declared.spec.caches if c.elems_per_token and not c.has_kv_dtype}
    if others and (asked, dtype) != ("bf16", "bfloat16"):
        raise UsageError(
            f"--kv-dtype {asked} is for keys and values; this model has {others.pop()} pages, in {dtype}.",
            "Use --kv-dtype auto.", param="kv_dtype",
        )  # fmt: skip
    if asked == "bf16":
        why = "as asked" if dtype == "bfloat16" else f"as asked; K and V are rounded from {dtype}"
        return KvType("bfloat16", _row(asked, "bfloat16", why))
    scales = "with the checkpoint's scales" if has_kv_scales(checkpoint, declared) else "the checkpoint has no scales"
    why = f"as asked; K and V are rounded to 4 significant bits and saturate at 448; {scales}"
    return KvType("float8_e4m3fn", _row(asked, "fp8 (E4M3)", why))


def _row(asked: str, got: str, why: str) -> Decision:
    return Decision("KV type", asked, got, why)
