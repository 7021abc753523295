"""huggingface_hub's cache on disk, in its layout: other programs share it.

models--org--name/blobs/<etag>                   file content; <etag>.incomplete during the download
models--org--name/snapshots/<commit>/<path>      symbolic link to a blob, made when the blob is complete
models--org--name/refs/<revision>                a commit
models--org--name/trees/<commit>.json            the commit's files: if it is a GGUF model, or another program wrote it
.locks/models--org--name/<etag>.lock             held during the download
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import constants

from proa.hub.files import GgufGroup, gguf_groups, has_all_parts, is_small, named_group, shard_names, sole_gguf
from proa.hub.reference import HubReference
from proa.hub.repository import HubFile, Repository


@dataclass(frozen=True)
class RepoCache:
    """One repository's folder in the cache; the folder may not exist yet."""

    repo: str

    @property
    def folder(self) -> Path:
        return cache_root() / self._folder_name

    @property
    def _folder_name(self) -> str:
        return f"models--{self.repo.replace('/', '--')}"

    def lock(self, etag: str) -> Path:
        return cache_root() / ".locks" / self._folder_name / f"{etag}.lock"

    def blob(self, etag: str) -> Path:
        return self.folder / "blobs" / etag

    def snapshot(self, commit: str) -> Path:
        return self.folder / "snapshots" / commit

    def commit(self, reference: HubReference) -> str | None:
        """Return the commit that the revision had at its last download; None if it was never downloaded."""
        if reference.is_commit:
            return reference.revision
        ref = self.folder / "refs" / reference.revision
        return ref.read_text().strip() if ref.is_file() else None

    def set_ref(self, reference: HubReference, commit: str) -> None:
        if not reference.is_commit:
            ref = self.folder / "refs" / reference.revision
            ref.parent.mkdir(parents=True, exist_ok=True)
            ref.write_text(commit)

    def set_files(self, repository: Repository) -> None:
        """Keep the list of a commit's files, which shows whether its GGUF model is the only one."""
        path = self._tree(repository.commit)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        files = {file.path: _tree_entry(file) for file in repository.files}
        part = path.with_suffix(f".{os.getpid()}.tmp")
        part.write_text(json.dumps({"format_version": 1, "files": files}, indent=1))
        part.replace(path)

    def _tree(self, commit: str) -> Path:
        return self.folder / "trees" / f"{commit}.json"

    def link(self, commit: str, path: str, etag: str) -> None:
        """Link a complete blob into the snapshot under its file name."""
        link = self.snapshot(commit) / path
        link.parent.mkdir(parents=True, exist_ok=True)
        if not link.exists():
            link.unlink(missing_ok=True)  # a dangling link: its blob was deleted
            link.symlink_to(os.path.relpath(self.blob(etag), link.parent))

    def find(self, reference: HubReference, config_only: bool = False) -> Path | None:
        """Return the model's folder or GGUF file if all its weights are cached, else None. Does not ask the hub for a
        newer version.

        config_only: weights are not required, only config.json.
        """
        commit = self.commit(reference)
        snapshot = self.snapshot(commit) if commit else None
        if commit is None or snapshot is None or not snapshot.is_dir():
            return None
        if reference.file:
            return _complete_gguf(snapshot, reference.file)
        if not config_only and (group := sole_gguf(self._listed(commit))):
            return snapshot / group.first if all((snapshot / path).is_file() for path in group.paths) else None
        complete = (snapshot / "config.json").is_file() if config_only else _complete_folder(snapshot)
        return snapshot if complete and not self._lacks_small_files(commit) else None

    def only_gguf(self, reference: HubReference) -> Path | None:
        """Return the only GGUF model that is cached, unless safetensors, which come first, are cached in part. The
        repository may have others."""
        commit = self.commit(reference)
        if commit is None or reference.file or any(self.snapshot(commit).glob("*.safetensors*")):
            return None
        groups = [group for group in _groups(self.snapshot(commit)) if group.is_complete]
        return self.snapshot(commit) / groups[0].first if len(groups) == 1 else None

    def _lacks_small_files(self, commit: str) -> bool:
        """True if the list of the commit's files has a config or tokenizer file that the snapshot has not: other
        programs download all files at once, and weights may be complete before them."""
        listed = self._listed(commit)
        if any(path.endswith(".safetensors") for path in listed):
            listed.discard("pytorch_model.bin.index.json")
        return not all((self.snapshot(commit) / path).is_file() for path in filter(is_small, listed))

    def _listed(self, commit: str) -> set[str]:
        """Return the paths of the commit's files; empty if there is no list, or one in another form."""
        try:
            return set(json.loads(self._tree(commit).read_bytes())["files"])
        except (OSError, ValueError, KeyError, TypeError):
            return set()


def cache_root() -> Path:
    return Path(constants.HF_HUB_CACHE)


def cached_references() -> Iterator[HubReference]:
    """Yield every model that is complete in the cache."""
    for folder in sorted(cache_root().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        for ref in sorted(p for p in (folder / "refs").glob("**/*") if p.is_file()):
            reference = HubReference(repo, ref.relative_to(folder / "refs").as_posix())
            if (found := RepoCache(repo).find(reference)) and found.is_dir():  # GGUF models are named with their file
                yield reference
            snapshot = folder / "snapshots" / ref.read_text().strip()
            for group in _groups(snapshot):
                if group.is_complete:
                    yield HubReference(repo, reference.revision, group.label or group.first)


def _tree_entry(file: HubFile) -> dict[str, Any]:
    large = {} if file.sha256 is None else {"lfs_sha256": file.sha256, "lfs_size": file.size_bytes}
    xet = {} if file.xet_hash is None else {"xet_hash": file.xet_hash}
    return {"size": file.size_bytes, "blob_id": file.blob_id, **large, **xet}


def stored_bytes(path: Path) -> int:
    """Return the size in bytes of a cached folder or (split) GGUF file, following links."""
    if path.is_file():
        group = next((g for g in _groups(path.parent) if path.name in g.paths), None)
        return sum((path.parent / p).stat().st_size for p in group.paths) if group else path.stat().st_size
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def _groups(folder: Path) -> list[GgufGroup]:
    return gguf_groups(p.relative_to(folder).as_posix() for p in folder.rglob("*.gguf") if p.is_file())


def _complete_gguf(snapshot: Path, wanted: str) -> Path | None:
    group = named_group(_groups(snapshot), wanted)
    return snapshot / group.first if group and group.is_complete else None


def _complete_folder(snapshot: Path) -> bool:
    """Return True if config.json and all weight files are there. Proa downloads weights last, so that the other files
    are then complete too."""
    if not (snapshot / "config.json").is_file():
        return False
    for single in ("model.safetensors", "pytorch_model.bin"):
        index = snapshot / f"{single}.index.json"
        if index.is_file():
            return all((snapshot / name).is_file() for name in shard_names(index.read_bytes(), index.name))
        if (snapshot / single).is_file():
            return True
    return has_all_parts([path.name for path in snapshot.iterdir() if path.is_file()])
