"""The rows of `proa models`: names, sizes, and which models are on this machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from proa.demo.made import STAMP_NAME
from proa.demo.source import GGUF_BYTES, GGUF_NAME
from proa.hub.aliases import Alias, load_aliases
from proa.hub.cache import RepoCache, cached_references, stored_bytes
from proa.hub.locate import MOE_FOLDER, demo_folder

_DENSE_PARAMS = 134_515_008
_MOE_PARAMS = 134_808_768  # the dense model's, plus the routers
_MOE_ACTIVE_PARAMS = 124_855_488  # with 12 of 16 experts per token


@dataclass(frozen=True)
class ListedModel:
    """One row of `proa models`. name: MODEL for the command line; source: origin; path: local path, None if it must be
    downloaded first.

    size_bytes is exact for a local model, else approximate. The parameter counts are 0 if unknown.
    """

    name: str
    source: str
    num_params: int
    num_active_params: int
    size_bytes: int
    notes: str
    path: Path | None


def list_models() -> list[ListedModel]:
    """List the demo, the aliases, then the other models in the cache."""
    aliases = load_aliases().values()
    named = {alias.reference for alias in aliases}
    others = [r for r in cached_references() if r not in named]
    rows = [*_demo_rows(), *map(_alias_row, aliases)]
    for reference in others:
        path = RepoCache(reference.repo).find(reference)
        if path:
            rows.append(ListedModel(str(reference), "in the cache", 0, 0, stored_bytes(path), "", path))
    return rows


def _alias_row(alias: Alias) -> ListedModel:
    path = RepoCache(alias.reference.repo).find(alias.reference)
    size = stored_bytes(path) if path else alias.download_bytes
    return ListedModel(
        alias.name, str(alias.reference), alias.num_params, alias.num_active_params, size, alias.notes, path
    )


def _demo_rows() -> list[ListedModel]:
    gguf, moe = demo_folder() / GGUF_NAME, demo_folder() / MOE_FOLDER
    source = "SmolLM2-135M-Instruct"
    return [
        ListedModel(
            "demo", source, _MOE_PARAMS, _MOE_ACTIVE_PARAMS, 2 * _MOE_PARAMS,
            "split into an MoE without training: 12 of 16 experts per token and a shared one",
            moe if (moe / STAMP_NAME).is_file() else None,
        ),
        ListedModel(
            "demo-dense", source, _DENSE_PARAMS, _DENSE_PARAMS, GGUF_BYTES, "dense, GGUF Q4_1",
            gguf if gguf.is_file() else None,
        ),
    ]  # fmt: skip
