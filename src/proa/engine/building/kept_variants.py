"""Keeps the list of kernels that a planned model launches, so that later starts need no rehearsal. Never: rehearsing,
compiling."""

from __future__ import annotations

import hashlib
import logging
import pickle
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

import msgspec
import torch
import triton

import proa
from proa.engine.building.kept_file import write_whole
from proa.models.spec import Model
from proa.ops.ahead import Variant
from proa.plan.plan import Plan

log = logging.getLogger(__name__)

# Parts of a plan that no launch depends on, and that differ from start to start.
_MEASURED = ("decisions", "roof", "memory", "workers", "threads", "prefix_files", "trial")
_MEASURED_OF_GPU = ("vram", "name", "uuid", "index", "numa_node", "pcie_bytes_per_s", "save_counts", "trace")


def key_of(plan: Plan, spec: Model, stored: Mapping[str, str], capability: int) -> str:
    """A hash of all that decides which kernels are launched: the plan without what is measured anew at each start, the
    model, the stored types, and the versions and sources of the code."""
    values = msgspec.to_builtins(plan)
    for name in _MEASURED:
        values.pop(name)
    for gpu in values["gpus"]:
        for name in _MEASURED_OF_GPU:
            gpu.pop(name)
    code = (torch.__version__, triton.__version__, _sources(Path(proa.__file__).parent))
    text = repr((values, spec, sorted(stored.items()), capability, code))
    return hashlib.blake2b(text.encode(), digest_size=20).hexdigest()


@cache
def _sources(package: Path) -> str:
    found = hashlib.blake2b(digest_size=20)
    for path in sorted(package.rglob("*.py")):
        found.update(str(path.relative_to(package)).encode() + b"\0" + path.read_bytes())
    return found.hexdigest()


def read_kept(folder: Path, key: str) -> Sequence[Variant] | None:
    """The list that an earlier start has kept under `key`; None if there is none that can be read.

    The folder is Triton's cache, whose files are code that the process runs: the list is trusted like those.
    """
    path = _path(folder, key)
    try:
        kept: Sequence[Variant] = pickle.loads(path.read_bytes())
        return kept
    except FileNotFoundError:
        return None
    except Exception as error:  # noqa: BLE001 - a damaged pickle may raise anything
        log.warning("The list of kernels in %s cannot be read (%s): it is made again.", path, error)
        return None


def keep(folder: Path, key: str, variants: Sequence[Variant]) -> None:
    """Keep the list; if the folder cannot be written to, later starts rehearse again."""
    try:
        write_whole(_path(folder, key), pickle.dumps(variants))
    except OSError as error:
        log.warning("The list of kernels cannot be kept in %s: %s", folder, error)


def _path(folder: Path, key: str) -> Path:
    return folder / f"variants-{key}.pickle"
