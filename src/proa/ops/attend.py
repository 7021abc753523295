"""What attention does to a step's rows, one op after another. Never: in one kernel (triton/attention.py)."""

from __future__ import annotations

from torch import Tensor

from proa.ops.table import Angles, Attend, AttentionBatch, KvPages, PagedAttention, QkNorm, RotateStore


def attend_in_steps(rotate_store: RotateStore, attention: PagedAttention) -> Attend:
    def attend(
        q: Tensor, kv: Tensor, norm: QkNorm | None, angles: Angles, cache: KvPages, batch: AttentionBatch,
        scale: float, window: int | None,
    ) -> Tensor:  # fmt: skip
        q = rotate_store(q, kv, norm, angles, cache, batch.slots)
        return attention(q, cache, batch, scale, window)

    return attend
