"""Downloads a hub model into the cache, after checking that it can be loaded.

Steps: list the repository, choose one weight format, check disk space, fetch the small files, fetch and check the
weights' headers, fetch the weights.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

from proa.errors import ModelError, ModelNotFound, ResourceError
from proa.hub.api import Hub
from proa.hub.cache import RepoCache, cache_root
from proa.hub.files import HEADER_FILES, SMALL_FILES, Format, choose_format, choose_gguf, choose_weights
from proa.hub.preview import preview_gguf, preview_safetensors
from proa.hub.reference import HubReference
from proa.hub.repository import HubFile, Repository
from proa.hub.transfer import fetch_files, missing_bytes
from proa.obs.units import format_bytes
from proa.weights.checkpoint import open_checkpoint
from proa.weights.sources import resolve

Progress = Callable[[str, int, int], None]
# Checks a model before its weights are fetched: (path of the preview, load_format to open it with); raises ProaError.
Check = Callable[[Path, str], object]

_ELEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


def check_loadable(preview: Path, load_format: str, ram_bytes: int | None = None) -> None:
    """Check architecture, config, the name, shape and type of every tensor, and, with `ram_bytes`, that the weights fit
    into RAM. The default check of `download`. Raises ConfigError, WeightsError, ResourceError.
    """
    checkpoint = open_checkpoint(preview, load_format)
    declared = checkpoint.declare()
    if checkpoint.tensors:
        resolve(declared, checkpoint.tensors)
    need = declared.spec.num_params * _ELEM_BYTES[checkpoint.dtype]
    if ram_bytes is not None and need > ram_bytes:
        raise ResourceError(
            f"{preview}: the weights need {format_bytes(need)} of RAM, but only {format_bytes(ram_bytes)} are usable. "
            "No weights were downloaded.",
            "Choose a smaller model (`proa models` lists sizes), or free memory.",
        )


def download(
    reference: HubReference, progress: Progress | None = None, check: Check = check_loadable, hub: Hub | None = None
) -> Path:
    """Download the missing files; return the model's folder in the cache, or its (first) GGUF file.

    Raises ModelNotFound, HubError, UsageError (several GGUF models to choose from), ResourceError (disk space), and
    what `check` raises. All but HubError and disk errors are raised before any weights are downloaded.
    """
    with closing(hub or Hub()) as hub:
        repository = hub.repository(reference)
        cache = RepoCache(reference.repo)
        snapshot = cache.snapshot(repository.commit)
        format_ = choose_format(repository)
        small = () if format_ == "gguf" else [f for f in repository.files if f.path in SMALL_FILES]
        weights = _choose(hub, repository, format_)
        _check_disk(repository, [*small, *weights])
        fetch_files(hub, repository, small, lambda _: None)
        _check_in_folder(hub, repository, format_, small, weights, check)
        fetch_files(hub, repository, weights, _counter(reference, weights, progress))
        cache.set_ref(reference, repository.commit)
    return snapshot / weights[0].path if format_ == "gguf" else snapshot


def check_headers(reference: HubReference, check: Check, hub: Hub | None = None) -> None:
    """Run `check` on a hub model's config and the headers of its weight files; fetch nothing else.

    Raises ModelNotFound, HubError, UsageError (several GGUF models to choose from), and what `check` raises.
    """
    with closing(hub or Hub()) as hub:
        repository = hub.repository(reference)
        format_ = choose_format(repository)
        small = () if format_ == "gguf" else [f for f in repository.files if f.path in HEADER_FILES]
        weights = _choose(hub, repository, format_)
        fetch_files(hub, repository, small, lambda _: None)
        _check_in_folder(hub, repository, format_, small, weights, check)


def download_config(reference: HubReference, hub: Hub | None = None) -> Path:
    """Download config and tokenizer only, for dummy weights; return the folder in the cache.

    Raises ModelNotFound, HubError.
    """
    with closing(hub or Hub()) as hub:
        repository = hub.repository(reference)
        small = [f for f in repository.files if f.path in SMALL_FILES]
        if reference.file or all(f.path != "config.json" for f in small):
            raise ModelNotFound(
                f"{reference} has no config.json, from which dummy weights are made.",
                "Give a repository with safetensors weights.",
            )
        fetch_files(hub, repository, small, lambda _: None)
        RepoCache(reference.repo).set_ref(reference, repository.commit)
    return RepoCache(reference.repo).snapshot(repository.commit)


def _choose(hub: Hub, repository: Repository, format_: Format) -> tuple[HubFile, ...]:
    if format_ == "gguf":
        return choose_gguf(repository)
    return choose_weights(repository, format_, lambda file: hub.read_range(repository, file, file.size_bytes))


def _check_in_folder(
    hub: Hub, repository: Repository, format_: Format, small: Sequence[HubFile], weights: Sequence[HubFile],
    check: Check,
) -> None:  # fmt: skip
    """Run `check` on a temporary folder with the small files, which are cached, and the weights' headers."""
    snapshot = RepoCache(repository.reference.repo).snapshot(repository.commit).absolute()
    cache_root().mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="proa-preview-", dir=cache_root()) as folder:
        for file in small:
            Path(folder, file.path).symlink_to(snapshot / file.path)
        _check_preview(hub, repository, format_, weights, Path(folder), check)


def _check_preview(
    hub: Hub, repository: Repository, format_: Format, weights: Sequence[HubFile], folder: Path, check: Check
) -> None:
    """Complete the preview in `folder` and run `check` on it; in its errors, replace the folder by the repository."""
    try:
        if format_ == "gguf":
            check(preview_gguf(hub, repository, weights, folder), "auto")
        elif format_ == "safetensors":
            preview_safetensors(hub, repository, weights, folder)
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


def _counter(reference: HubReference, files: Sequence[HubFile], progress: Progress | None) -> Callable[[int], None]:
    """Return a function that adds received bytes and reports progress; not thread-safe, callers hold a lock."""
    done, total = 0, sum(file.size_bytes for file in files)

    def arrived(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress:
            progress(f"fetching {reference}", done, total)

    return arrived
