"""Makes the tiers behind the prefix cache, and the root of their keys: all that KV and recurrent states depend on but
the tokens. Never: decisions."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from proa.cache.files import LAYOUT, FileStore
from proa.cache.keys import run_pages
from proa.cache.ram import RamStore
from proa.engine.executors.page_tiers import EntryCopies, PageTiers
from proa.engine.executors.run_buffers import RunBuffers
from proa.engine.executors.state_parts import states_layout
from proa.obs.version import proa_version
from proa.ops.caches import Caches
from proa.plan.plan import Plan
from proa.weights.checkpoint import Checkpoint
from proa.weights.fingerprint import fingerprint

ROOT_BYTES = 32

# Parts of a plan that differ from start to start and change no bit of what is computed.
_WITHOUT_EFFECT = (
    "model", "path", "memory", "roof", "decisions", "num_pages", "context_tokens", "max_queued", "max_queued_tokens",
    "prefix_files", "trial", "pass_tokens",
)  # fmt: skip


def new_tiers(
    plan: Plan, checkpoint: Checkpoint, caches: Caches, cpus: Collection[int], num_run_pages: int | None = None
) -> PageTiers | None:  # fmt: skip
    """Open the planned folder, and make the planned store in RAM, empty; None if neither is planned. num_run_pages: of
    a run; None: as in service. Raises ResourceError."""
    ram_bytes, planned = plan.memory.prefix_cache_bytes, plan.prefix_files
    if planned is None and not ram_bytes:
        return None
    size = num_run_pages or run_pages(plan.page_tokens)
    new_copies = partial(EntryCopies, caches, size)
    root, files, ram = os.urandom(ROOT_BYTES), None, None
    if planned is not None:  # files outlive the process, so their root covers all that they depend on
        root = tiers_root(plan, checkpoint, states_layout(caches))
        files = FileStore(Path(planned.folder), root, planned.limit_bytes)
    if ram_bytes:
        copies = new_copies()
        ram = RamStore(ram_bytes, RunBuffers(copies.nbytes, copies.device))
    nice = 0 if plan.workers is None else plan.workers.nice
    return PageTiers(root, size, new_copies, cpus, files, ram, worker_nice=nice)


def tiers_root(plan: Plan, checkpoint: Checkpoint, states: list[list[object]]) -> bytes:
    """A hash of the versions, the model, the types of KV and states, and the size of a run. With --deterministic also
    of the plan: bits are promised only for the same plan on the same machine. states: their layout."""
    gpu = plan.gpu
    parts: dict[str, Any] = {
        "versions": [proa_version(), LAYOUT],
        "model": fingerprint(checkpoint),
        "types": [
            plan.dtype,
            plan.kv_dtype,
            gpu is not None and gpu.fp8_activations,
            0 if gpu is None else gpu.deferred,
        ],
        "states": states,
        "run": [plan.page_tokens, run_pages(plan.page_tokens)],
        "random": [plan.dummy_seed, plan.dummy_router, plan.dummy_format] if plan.load_format == "dummy" else [],
        "plan": _bits(plan) if plan.deterministic else None,
    }
    return hashlib.blake2b(msgspec.json.encode(parts, order="deterministic"), digest_size=ROOT_BYTES).digest()


def _bits(plan: Plan) -> dict[str, Any]:
    fields: dict[str, Any] = msgspec.to_builtins(plan)
    for name in _WITHOUT_EFFECT:
        del fields[name]
    for gpu in fields["gpus"]:
        del gpu["vram"]
    if plan.workers is not None:  # which CPUs and memory nodes they use does not matter
        fields["workers"] = plan.workers.trials
    return fields
