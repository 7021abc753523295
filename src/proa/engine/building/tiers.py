"""Makes the tiers behind the prefix cache, and the root of their keys: all that KV depends on but the tokens. Never:
decisions."""

from __future__ import annotations

import hashlib
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from proa.cache.files import LAYOUT, FileStore
from proa.cache.keys import run_pages
from proa.engine.executors.page_copies import PageCopies
from proa.engine.executors.page_tiers import PageTiers
from proa.obs.version import proa_version
from proa.ops.caches import Caches
from proa.plan.plan import Plan
from proa.weights.checkpoint import Checkpoint
from proa.weights.fingerprint import fingerprint

# Parts of a plan that differ from start to start and change no bit of what is computed.
_ELSEWHERE = (
    "model", "path", "memory", "roof", "decisions", "num_pages", "context_tokens", "max_queued", "max_queued_tokens",
    "prefix_files",
)  # fmt: skip


def new_tiers(plan: Plan, checkpoint: Checkpoint, caches: Caches, cpus: Collection[int]) -> PageTiers | None:
    """Open the planned folder; None if none is planned. Raises ResourceError."""
    if plan.prefix_files is None:
        return None
    root, size = tiers_root(plan, checkpoint), run_pages(plan.page_tokens)
    files = FileStore(Path(plan.prefix_files.folder), root, plan.prefix_files.limit_bytes)
    return PageTiers(files, root, size, partial(PageCopies, caches, size), cpus)


def tiers_root(plan: Plan, checkpoint: Checkpoint) -> bytes:
    """A hash of the versions, the model, the KV type and the size of a run. With --deterministic also of the plan: bits
    are promised only for the same plan on the same machine."""
    gpu = plan.gpu
    parts: dict[str, Any] = {
        "versions": [proa_version(), LAYOUT],
        "model": fingerprint(checkpoint),
        "types": [plan.dtype, plan.kv_dtype, gpu is not None and gpu.fp8_activations],
        "run": [plan.page_tokens, run_pages(plan.page_tokens)],
        "random": [plan.dummy_seed, plan.dummy_router, plan.dummy_format] if plan.load_format == "dummy" else [],
        "plan": _bits(plan) if plan.deterministic else None,
    }
    return hashlib.blake2b(msgspec.json.encode(parts, order="deterministic"), digest_size=32).digest()


def _bits(plan: Plan) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(plan)
    for name in _ELSEWHERE:
        del fields[name]
    for gpu in fields["gpus"]:
        del gpu["vram"]
    if plan.workers is not None:  # their CPUs and the memory of these do not matter
        fields["workers"] = plan.workers.trials
    return fields
