"""What `proa models` shows: names to type, sizes, and what is already here. Belongs here: plain facts. Never: printing,
the network.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from proa.demo.made import STAMP_NAME
from proa.demo.source import GGUF_BYTES, GGUF_NAME
from proa.hub.aliases import Alias, load_aliases
from proa.hub.cache import RepoCache, cached_references, stored_bytes
from proa.hub.locate import demo_folder

_DENSE_PARAMS = 134_515_008
_MOE_PARAMS = 134_808_768  # and the routers
_MOE_ACTIVE_PARAMS = 124_855_488  # 12 of 16 experts


@dataclass(frozen=True)
class ListedModel:
    """One row. name: what to type; source: where it comes from; path: where it is, None if it would be fetched first.

    size_bytes is measured if it is here, else approximate. The numbers of parameters are 0 where unknown.
    """

    name: str
    source: str
    num_params: int
    num_active_params: int
    size_bytes: int
    notes: str
    path: Path | None


def list_models() -> list[ListedModel]:
    """The demo, the aliases, then what else the cache holds."""
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
    gguf, moe = demo_folder() / GGUF_NAME, demo_folder() / "smollm2-moe"
    source = "SmolLM2-135M-Instruct"
    return [
        ListedModel(
            "demo", source, _MOE_PARAMS, _MOE_ACTIVE_PARAMS, 2 * _MOE_PARAMS,
            "MoE made of it without training, 12 of 16 experts and a shared one",
            moe if (moe / STAMP_NAME).is_file() else None,
        ),
        ListedModel(
            "demo-dense", source, _DENSE_PARAMS, _DENSE_PARAMS, GGUF_BYTES, "dense, GGUF Q4_1",
            gguf if gguf.is_file() else None,
        ),
    ]  # fmt: skip
