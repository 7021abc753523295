"""Downloads a hub model into the cache, after checking that it can be loaded.

Steps: list the repository, choose one weight format, check disk space, fetch the small files, fetch and check the
weights' headers, fetch the weights.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from proa.errors import ModelError, ModelNotFound, ResourceError
from proa.hub.api import Hub
from proa.hub.cache import RepoCache, cache_root
from proa.hub.files import HEADER_FILES, Format, choose_format, choose_gguf, choose_weights, is_small
from proa.hub.locate import Check
from proa.hub.preview import preview_gguf, preview_safetensors
from proa.hub.reference import HubReference
from proa.hub.repository import HubFile, Repository
from proa.hub.transfer import fetch_files, missing_bytes
from proa.obs.units import format_bytes
from proa.types import ProgressCallback
from proa.weights.checkpoint import open_checkpoint
from proa.weights.sources import resolve


def check_loadable(preview: Path, load_format: str) -> None:
    """Check architecture, config, and the name, shape and type of every tensor. The default check of `download`.
    Raises ConfigError, WeightsError.
    """
    checkpoint = open_checkpoint(preview, load_format)
    declared = checkpoint.declare()
    if checkpoint.tensors:
        resolve(declared, checkpoint.tensors)


def download(reference: HubReference, progress: ProgressCallback | None = None, check: Check | None = None) -> Path:
    """Download the missing files; return the model's folder in the cache, or its (first) GGUF file.

    check: runs on the headers before the weights are fetched; None: check_loadable. Raises ModelNotFound, HubError,
    UsageError (several GGUF models to choose from), ResourceError (disk space), and what `check` raises. All but
    HubError and disk errors are raised before any weights are downloaded.
    """
    with closing(Hub()) as hub:
        repository = hub.repository(reference)
        files = _choose(hub, repository, is_small)
        _check_disk(repository, [*files.small, *files.weights])
        _check_headers(hub, repository, files, check or check_loadable)
        fetch_files(hub, repository, files.weights, _counter(reference, files.weights, progress))
        cache = RepoCache(reference.repo)
        if files.format == "gguf":
            cache.set_files(repository)
        cache.set_ref(reference, repository.commit)
    snapshot = cache.snapshot(repository.commit)
    return snapshot / files.weights[0].path if files.format == "gguf" else snapshot


def check_headers(reference: HubReference, check: Check) -> None:
    """Run `check` on a hub model's config and the headers of its weight files; fetch nothing else.

    Raises ModelNotFound, HubError, UsageError (several GGUF models to choose from), and what `check` raises.
    """
    with closing(Hub()) as hub:
        repository = hub.repository(reference)
        _check_headers(hub, repository, _choose(hub, repository, HEADER_FILES.__contains__), check)


def download_config(reference: HubReference) -> Path:
    """Download config and tokenizer only, for dummy weights; return the folder in the cache.

    Raises ModelNotFound, HubError.
    """
    with closing(Hub()) as hub:
        repository = hub.repository(reference)
        small = [f for f in repository.files if is_small(f.path)]
        if reference.file or all(f.path != "config.json" for f in small):
            raise ModelNotFound(
                f"{reference} has no config.json, from which dummy weights are made.",
                "Give a repository with safetensors weights.",
            )
        fetch_files(hub, repository, small, lambda _: None)
        RepoCache(reference.repo).set_ref(reference, repository.commit)
    return RepoCache(reference.repo).snapshot(repository.commit)


@dataclass(frozen=True)
class _Files:
    """The files of one model. small: config, tokenizer and index; weights: those of one weight format."""

    format: Format
    small: Sequence[HubFile]
    weights: Sequence[HubFile]


def _choose(hub: Hub, repository: Repository, small: Callable[[str], bool]) -> _Files:
    """Choose the weight format and its files; `small`: which other files to take, by name; a GGUF model needs none."""
    chosen = choose_format(repository)
    if chosen == "gguf":
        return _Files(chosen, (), choose_gguf(repository))
    weights = choose_weights(repository, chosen, lambda file: hub.read_range(repository, file, file.size_bytes))
    return _Files(chosen, [f for f in repository.files if small(f.path)], weights)


def _check_headers(hub: Hub, repository: Repository, files: _Files, check: Check) -> None:
    """Fetch the small files into the cache, and run `check` on a temporary folder with them and the weights' headers.
    In its errors, the repository replaces the folder."""
    fetch_files(hub, repository, files.small, lambda _: None)
    snapshot = RepoCache(repository.reference.repo).snapshot(repository.commit).absolute()
    cache_root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="proa-preview-", dir=cache_root()) as name:
        folder = Path(name)
        for file in files.small:
            (folder / file.path).parent.mkdir(exist_ok=True)
            (folder / file.path).symlink_to(snapshot / file.path)
        try:
            if files.format == "gguf":
                check(preview_gguf(hub, repository, files.weights, folder), "auto")
            elif files.format == "safetensors":
                preview_safetensors(hub, repository, files.weights, folder)
                check(folder, "auto")
            else:
                check(folder, "dummy")  # only the config: a .bin file has no header that lists its tensors
        except (ModelError, ResourceError) as error:
            message = error.message.replace(f"{folder}/", f"{repository.reference}/")
            raise type(error)(message.replace(str(folder), str(repository.reference)), error.remedy) from error


def _check_disk(repository: Repository, files: Sequence[HubFile]) -> None:
    try:
        cache_root().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ResourceError(
            f"Cannot create the folder {cache_root()}: {error.strerror}.", "Set HF_HUB_CACHE to a writable folder."
        ) from error
    need, free = missing_bytes(repository, files), shutil.disk_usage(cache_root()).free
    if need > free:
        raise ResourceError(
            f"{repository.reference} needs {format_bytes(need)} more in {cache_root()}, "
            f"where {format_bytes(free)} are free. Nothing was downloaded.",
            "Free some space, or set HF_HUB_CACHE to a folder on a larger disk.",
        )


def _counter(
    reference: HubReference, files: Sequence[HubFile], progress: ProgressCallback | None
) -> Callable[[int], None]:
    """Return a function that adds received bytes and reports progress; not thread-safe, callers hold a lock."""
    done, total = 0, sum(file.size_bytes for file in files)

    def arrived(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress:
            progress(f"fetching {reference}", done, total)

    return arrived
