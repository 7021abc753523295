"""Short names for models, from models.toml. Belongs here: reading the table. Never: the network, the disk's state."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files

from proa.hub.reference import HubReference

_BYTES_PER_PARAM = 2  # most are published in bfloat16


@dataclass(frozen=True)
class Alias:
    """A name, what it stands for, and about how large that is. num_active_params: read per token; dense: all."""

    name: str
    reference: HubReference
    num_params: int
    num_active_params: int
    notes: str
    download_bytes: int  # approximate


def load_aliases() -> dict[str, Alias]:
    """All aliases by name, in the table's order."""
    table = tomllib.loads(files("proa.hub").joinpath("models.toml").read_text(encoding="utf-8"))
    return {
        name: Alias(
            name,
            HubReference(row["repo"], row.get("revision", "main")),
            int(row["params"]),
            int(row.get("active_params", row["params"])),
            row["notes"],
            int(row.get("download_bytes", row["params"] * _BYTES_PER_PARAM)),
        )
        for name, row in table.items()
    }
