"""Whether the prefix cache keeps KV pages in files (--prefix-cache-dir, --prefix-cache-disk). Never: opening them."""

from __future__ import annotations

from dataclasses import dataclass

from proa.cache.keys import run_pages
from proa.config.options import EngineOptions
from proa.errors import UsageError
from proa.obs.units import format_bytes
from proa.plan.budget import Demand
from proa.plan.plan import PrefixFiles
from proa.types import Decision

BUFFERS = 3  # of a run each, in RAM: of the threads that write and read (engine/executors/page_tiers.py)
HEADER_BYTES = 4096  # more than the header of a file


@dataclass(frozen=True)
class FilesAsked:
    """files: None if there are none, or none are possible. buffer_bytes: RAM that their threads need."""

    files: PrefixFiles | None
    decisions: tuple[Decision, ...] = ()
    buffer_bytes: int = 0


def prefix_files(options: EngineOptions, model: str, need: Demand) -> FilesAsked:
    """Raises UsageError if only one of both options is given, or one run of pages does not fit."""
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
    run_bytes = run_pages(need.page_tokens) * need.page_bytes
    word, row = format_bytes(limit), "prefix cache files"
    if not options.cache.prefix_cache:
        return FilesAsked(None, (Decision(row, word, "none", "the prefix cache is off"),))
    if need.copy_bytes:
        why = "recurrent states are not kept in files, and prompts cannot continue without them"
        return FilesAsked(None, (Decision(row, word, "none", why),))
    if limit < run_bytes + HEADER_BYTES:
        tokens = run_pages(need.page_tokens) * need.page_tokens
        raise UsageError(
            f"--prefix-cache-disk {word} is too small: {tokens} tokens of {model} take {format_bytes(run_bytes)}.",
            f"Use at least {format_bytes(2 * run_bytes + HEADER_BYTES)}.",
            param="prefix_cache_disk",
        )
    buffers = BUFFERS * run_bytes
    why = f"in {folder}; written behind the steps, {format_bytes(buffers)} of RAM for buffers"
    return FilesAsked(PrefixFiles(folder, limit), (Decision(row, word, word, why),), buffers)
