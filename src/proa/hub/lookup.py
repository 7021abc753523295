"""Resolves a model name to a local path or a hub reference, without network access.

Order: an existing local path, the demo, aliases, hub ids. A model that is complete in the cache is used without asking
the hub for a newer version. Never: HTTP libraries, so that a wrong name is refused before their slow import.
"""

from __future__ import annotations

import errno
import os
import re
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from proa.config.suggest import did_you_mean
from proa.config.value import is_http_url, is_utf8
from proa.errors import HubError, ModelNotFound, UsageError
from proa.hub.aliases import load_aliases
from proa.hub.cache import RepoCache
from proa.hub.reference import HubReference, parse_reference

DEMO_NAMES = ("demo", "demo-dense")

_WRITTEN_AS_PATH = re.compile(r"[./~].*|.*/|.*/.*/.*|.*\.gguf", re.DOTALL)


@dataclass(frozen=True)
class Wanted:
    """A resolved model name. path: its local path; None if it must be downloaded from the hub by `reference`, or, if
    `reference` is None too, built (the demo)."""

    path: Path | None
    reference: HubReference | None = None


def look_up(model: str, revision: str | None = None, *, config_only: bool = False) -> Wanted:
    """Resolve `model`: a path, "demo", "demo-dense", an alias, or org/name[@revision][:file].

    config_only: a hub model's weights need not be cached. Raises ModelNotFound, UsageError,
    HubError if HF_ENDPOINT is wrong and would be needed.
    """
    local = _local(model)
    if local is not None and not is_utf8(str(local)):
        raise UsageError(f"The path {local} is not UTF-8.", "Rename its folders and files.")
    if (local or model in DEMO_NAMES) and revision is not None:
        raise UsageError(
            f"--revision {revision} is given, but {model} is not a hub repository.", "Leave out --revision."
        )
    if local or model in DEMO_NAMES:
        return Wanted(local)
    alias = load_aliases().get(model)
    reference = alias.reference if alias else parse_reference(model)
    if reference is None:
        raise _not_found(model, is_folder=_path(model).is_dir())
    reference = reference.at(revision)
    cache = RepoCache(reference.repo)
    found = cache.find(reference, config_only)
    if found is None and constants.HF_HUB_OFFLINE and not config_only:
        found = cache.only_gguf(reference)  # the hub, which may have several to choose from, cannot be asked
    if found is None and not is_http_url(constants.ENDPOINT):  # huggingface_hub could not be imported for a download
        raise HubError(
            f"{model} is not complete in the cache, and HF_ENDPOINT is {constants.ENDPOINT!r}: no URL of a hub.",
            "Set it to an address such as https://huggingface.co, or unset it.",
        )
    return Wanted(found, reference)


def _local(model: str) -> Path | None:
    """Return the path if `model` is a local one. A bare name counts as a path only if that folder contains a model: a
    folder that happens to be called demo must not hide the demo model."""
    if not model.strip() or "\0" in model:
        raise UsageError(
            f"{model!r} is not a model name.", "Give a folder, a .gguf file, a hub id (org/name) or an alias."
        )
    path = _path(model)
    reference = parse_reference(model)
    names_part_of_repo = reference is not None and model != reference.repo  # org/name:folder/file.gguf
    written_as_path = _WRITTEN_AS_PATH.fullmatch(model) is not None and not names_part_of_repo
    try:
        is_file, is_folder = path.is_file(), path.is_dir()
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG:  # `proa chat` with the question in the model's place
            raise
        raise _not_found(model) from error
    if is_file:
        if path.suffix == ".gguf":
            return path.absolute()
        raise UsageError(
            f"{path} is a file, but not a .gguf file.", f"Give the model's folder: {path.absolute().parent}."
        )
    if is_folder and (written_as_path or "/" in model or _holds_model(path)):
        return path.absolute()
    if written_as_path:
        raise _not_found(model)
    return None


def _path(model: str) -> Path:
    """The path that `model` would be; "~name" of an unknown user stays as it is."""
    return Path(os.path.expanduser(model))


def _holds_model(folder: Path) -> bool:
    return (folder / "config.json").is_file() or any(folder.glob("*.gguf"))


def _not_found(model: str, *, is_folder: bool = False) -> ModelNotFound:
    """is_folder: there is a folder of this name, which holds no model."""
    path = _path(model).absolute()
    why = f"the folder {path} has no config.json and no .gguf file" if is_folder else "no such folder or .gguf file"
    hint = did_you_mean(path.name, [*_models_in(path.parent), *load_aliases(), *DEMO_NAMES])
    return ModelNotFound(
        f"There is no model {model}: {why}, and no such alias.",
        f"{hint} Give a path, a hub id (org/name), or one of the names that `proa models` lists.".strip(),
    )


def _models_in(folder: Path) -> list[str]:
    try:
        return [p.name for p in folder.iterdir() if p.suffix == ".gguf" or (p.is_dir() and _holds_model(p))]
    except OSError:  # only the "did you mean" hint is lost
        return []
