"""huggingface_hub's cache on disk, in its layout: other programs share it.

models--org--name/blobs/<etag>                   file content; <etag>.incomplete during the download
models--org--name/snapshots/<commit>/<path>      symbolic link to a blob, made when the blob is complete
models--org--name/refs/<revision>                a commit
models--org--name/trees/<commit>.json            the commit's files, if another program has written the list
.locks/models--org--name/<etag>.lock             held during the download
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import constants

from proa.hub.files import GgufGroup, gguf_groups, has_all_parts, is_small, named_group, shard_names
from proa.hub.reference import HubReference


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
        try:
            listed = set(json.loads((self.folder / "trees" / f"{commit}.json").read_bytes())["files"])
        except (OSError, ValueError, KeyError, TypeError):  # no list, or one in another form
            return False
        if any(path.endswith(".safetensors") for path in listed):
            listed.discard("pytorch_model.bin.index.json")
        return not all((self.snapshot(commit) / path).is_file() for path in filter(is_small, listed))


def cache_root() -> Path:
    return Path(constants.HF_HUB_CACHE)


def cached_references() -> Iterator[HubReference]:
    """Yield every model that is complete in the cache."""
    for folder in sorted(cache_root().glob("models--*--*")):
        repo = folder.name.removeprefix("models--").replace("--", "/", 1)
        for ref in sorted(p for p in (folder / "refs").glob("**/*") if p.is_file()):
            reference = HubReference(repo, ref.relative_to(folder / "refs").as_posix())
            if RepoCache(repo).find(reference):
                yield reference
            snapshot = folder / "snapshots" / ref.read_text().strip()
            for group in _groups(snapshot):
                if group.is_complete:
                    yield HubReference(repo, reference.revision, group.label or group.first)


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
