"""Short names for hub models, read from models.toml."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files

from proa.hub.reference import HubReference

_BYTES_PER_PARAM = 2  # most models are published in bfloat16


@dataclass(frozen=True)
class Alias:
    """A short name for a hub model, with its approximate size. num_active_params: parameters read per token; in dense
    models, all."""

    name: str
    reference: HubReference
    num_params: int
    num_active_params: int
    notes: str
    download_bytes: int  # approximate


def load_aliases() -> dict[str, Alias]:
    """Load all aliases by name, in the order of the table."""
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
