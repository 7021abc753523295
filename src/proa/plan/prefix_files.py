"""Decides whether the prefix cache is kept in files (--prefix-cache-dir, --prefix-cache-disk). Never: opening them."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from proa.config.options import EngineOptions
from proa.errors import UsageError
from proa.obs.units import format_bytes
from proa.plan.budget import Demand
from proa.plan.entries import entries
from proa.plan.plan import PrefixFiles
from proa.types import Decision

BUFFERS = 3  # of an entry each, in RAM: of the threads that write and read (engine/executors/page_tiers.py)
HEADER_BYTES = 4096  # more than the header of a file

NO_COPIES = "there are no copies of states, so the prefix cache is off"

ROW = "prefix cache files"  # of the start-up table


@dataclass(frozen=True)
class FilesAsked:
    """files: None if none are asked for, or none are possible. buffer_bytes: RAM for the buffers of their threads."""

    files: PrefixFiles | None
    decisions: tuple[Decision, ...] = ()
    buffer_bytes: int = 0


def check_folder(folder: Path) -> None:
    """Raise UsageError if the folder, which the engine creates, can be neither read nor created."""
    here = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # Path.exists may raise
    if here.is_dir() and os.access(here, os.X_OK | (os.R_OK if here == folder else os.W_OK)):
        return
    fault = "cannot be read" if here == folder else f"cannot be created in {here}"
    raise UsageError(
        f"The folder of --prefix-cache-dir, {folder}, {fault}.",
        "Give a folder that this user can read or create.",
        param="prefix_cache_dir",
    )


def prefix_files(options: EngineOptions, model: str, need: Demand) -> FilesAsked:
    """Decide on the files. Raises UsageError if only one of both options is given, or one run of pages, with a copy of
    states if the model has them, does not fit."""
    folder, limit = options.cache.prefix_cache_dir, options.cache.prefix_cache_disk
    if folder is None and limit is None:
        return FilesAsked(None)
    if folder is None or limit is None:
        missing = "--prefix-cache-dir PATH" if folder is None else "--prefix-cache-disk SIZE"
        raise UsageError(
            f"{missing} is missing: files of the prefix cache need a folder and a size.",
            f"Add {missing}, or leave both out.",
            param="prefix_cache_dir" if folder is None else "prefix_cache_disk",
        )
    word = format_bytes(limit)
    if not options.cache.prefix_cache:
        return _none(word, "the prefix cache is off")
    if not need.page_bytes:
        return _none(word, "the model has no KV pages")
    size = entries(need)
    least = (1 + size.state_runs) * (size.run_bytes + HEADER_BYTES)
    if limit < least:
        raise UsageError(
            f"--prefix-cache-disk {word} is too small: {size.words(1)} of {model} take {format_bytes(least)}.",
            f"Use at least {format_bytes(2 * least)}.",
            param="prefix_cache_disk",
        )
    buffers = BUFFERS * size.run_bytes
    why = f"in {folder}; written behind the steps, {format_bytes(buffers)} of RAM for buffers{size.note}"
    return FilesAsked(PrefixFiles(folder, limit), (Decision(ROW, word, word, why),), buffers)


def without_copies(asked: FilesAsked, copies: int, need: Demand) -> FilesAsked:
    """Drop the files if the model has recurrent states, but the plan no copy of them to resume prompts from."""
    if asked.files is None or copies or not need.copy_bytes:
        return asked
    return _none(format_bytes(asked.files.limit_bytes), NO_COPIES)


def _none(word: str, why: str) -> FilesAsked:
    return FilesAsked(None, (Decision(ROW, word, "none", why),))
