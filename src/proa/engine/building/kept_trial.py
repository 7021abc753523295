"""Keeps the result of a trial of plans for later starts, one file for each model and machine. Never: the trial."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection
from pathlib import Path

import msgspec

from proa.engine.building.kept_file import write_whole
from proa.hybrid.choices import Choices
from proa.machine.files import cpu_name, parse_key_values, read_text
from proa.models.spec import Model
from proa.obs.version import proa_version
from proa.plan.plan import Plan

log = logging.getLogger(__name__)

FORMAT = 1
# Experts in VRAM follow the VRAM that is free at a start. Within a tenth of all experts the kept result holds.
SHARE_MARGIN = 0.1
_AGAIN = "the plans are compared again"


class Kept(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The choices of a trial. why: its figures, in words; share: fraction of the experts that were in VRAM; day: of the
    trial, as 2026-11-26."""

    co_fetch: bool
    read_ahead: bool
    why: str
    share: float
    day: str

    @property
    def choices(self) -> Choices:
        return Choices(self.co_fetch, self.read_ahead)


def key_of(plan: Plan, spec: Model, formats: Collection[str]) -> str:
    """A hash of what the result depends on and that does not vary from start to start: the model and the formats of
    its experts in RAM, processor and GPU by their names, workers, requests at once, and Proa's version."""
    gpu, workers = plan.gpu, plan.workers
    if gpu is None or workers is None:
        raise ValueError("only a plan with a GPU and CPU workers has a trial")
    model = (spec, sorted(formats), plan.dtype, plan.kv_dtype)
    cpu = cpu_name(parse_key_values(read_text(Path("/proc/cpuinfo")) or ""))
    machine = (cpu, gpu.name, gpu.capability, plan.isa, workers.trials[0], workers.interleave)
    asked = (gpu.co_fetch, gpu.read_ahead, gpu.doorbell, plan.max_running, plan.deterministic)
    text = repr((FORMAT, proa_version(), model, machine, asked))
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


def share_in_vram(plan: Plan) -> float:
    """Fraction of the bytes of all routed experts that are in VRAM."""
    gpu = plan.gpu
    if gpu is None:
        return 0.0
    sizes = list(zip(gpu.expert_bytes, gpu.resident, gpu.experts, strict=True))
    total = sum(nbytes * count for nbytes, _, count in sizes)
    return sum(nbytes * len(resident) for nbytes, resident, _ in sizes) / total if total else 0.0


def read_kept(folder: Path, key: str, share: float) -> Kept | None:
    """The result that an earlier start has kept; None if there is none, or none that holds, which the log says. share:
    see share_in_vram."""
    path = _path(folder, key)
    try:
        kept = msgspec.json.decode(path.read_bytes(), type=Kept)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        log.warning("The result of the trial in %s cannot be read (%s): %s.", path, error, _AGAIN)
        return None
    if abs(kept.share - share) > SHARE_MARGIN:
        text = "The trial in %s was made with %.0f %% of the experts in VRAM, now they are %.0f %%: %s."
        log.info(text, path, 100 * kept.share, 100 * share, _AGAIN)
        return None
    return kept


def keep(folder: Path, key: str, kept: Kept) -> str:
    """Write the file. Returns why that was not possible; "" if it was."""
    try:
        write_whole(_path(folder, key), msgspec.json.format(msgspec.json.encode(kept)) + b"\n")
    except OSError as error:
        return f"{folder}: {error.strerror or error}"
    return ""


def _path(folder: Path, key: str) -> Path:
    return folder / f"plan-{key}.json"
