"""What K and V are stored as. Never: their memory, scales' values."""

from __future__ import annotations

from dataclasses import dataclass

from proa.errors import UsageError
from proa.models.names import Declared
from proa.models.spec import PagedKv, Recurrent
from proa.plan.budget import KV_ELEM_BYTES
from proa.types import Decision
from proa.weights.checkpoint import Checkpoint
from proa.weights.kv_scale_names import has_kv_scales


@dataclass(frozen=True)
class KvType:
    """dtype: its name in torch. row: of the start-up table."""

    dtype: str
    row: Decision

    @property
    def elem_bytes(self) -> int:
        return KV_ELEM_BYTES[self.dtype]


def kv_type(asked: str, dtype: str, checkpoint: Checkpoint, declared: Declared) -> KvType:
    """asked: auto, bf16 or fp8. dtype: of activations. Raises UsageError where not all that layers remember is K and V
    or a state, which stays as it is.
    """
    if asked == "auto":
        return KvType(dtype, _row(asked, dtype, "that of activations: nothing is rounded"))
    others = {type(block.mixer.cache) for block in declared.spec.blocks} - {PagedKv, Recurrent}
    if others and (asked, dtype) != ("bf16", "bfloat16"):
        raise UsageError(
            f"--kv-dtype {asked} is for keys and values; this model keeps {others.pop().__name__} pages, in {dtype}.",
            "Use --kv-dtype auto.", param="kv_dtype",
        )  # fmt: skip
    if asked == "bf16":
        why = "as asked" if dtype == "bfloat16" else f"as asked; K and V are rounded from {dtype}"
        return KvType("bfloat16", _row(asked, "bfloat16", why))
    scales = "scaled as the checkpoint says" if has_kv_scales(checkpoint, declared) else "the checkpoint has no scales"
    why = f"as asked; K and V are rounded to four significant bits, sizes beyond 448 held there; {scales}"
    return KvType("float8_e4m3fn", _row(asked, "fp8 (E4M3)", why))


def _row(asked: str, got: str, why: str) -> Decision:
    return Decision("KV type", asked, got, why)
