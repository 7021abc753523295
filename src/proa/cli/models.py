"""`proa models`: prints the list of hub/listing.py as a table or JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from proa.config.field import option
from proa.config.parse import parse
from proa.obs.console import console_out, write_out
from proa.obs.units import format_bytes, format_count

if TYPE_CHECKING:
    from proa.hub.listing import ListedModel

SUMMARY = "list models by short name, with sizes"
EPILOG = "MODEL may also be any folder, GGUF file or hub id (such as Qwen/Qwen3-8B) of a supported architecture."


@dataclass(frozen=True)
class ModelsOptions:
    """options"""

    json: bool = option(False, help="print JSON: a list of models; path is null if not downloaded", common=True)


def run(argv: Sequence[str]) -> int:
    options = parse(ModelsOptions, argv, prog="proa models", summary=SUMMARY, epilog=EPILOG).options
    from proa.hub.listing import list_models  # imports numpy and gguf, which --help does not need

    models = list_models()
    if options.json:
        rows = [{**asdict(model), "path": str(model.path) if model.path else None} for model in models]
        write_out(json.dumps(rows, indent=2) + "\n")
    else:
        _print(models)
    return 0


def _print(models: Sequence[ListedModel]) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in ("name", "parameters", "size", "here", "what"):
        table.add_column(title, overflow="fold")
    for model in models:
        here = "yes" if model.path else ""
        row = (model.name, _parameters(model), format_bytes(model.size_bytes), here, _what(model))
        table.add_row(*map(Text, row))
    console_out().print(table)


def _parameters(model: ListedModel) -> str:
    if model.num_params == 0:
        return ""
    if model.num_active_params == model.num_params:
        return format_count(model.num_params)
    return f"{format_count(model.num_params)}, {format_count(model.num_active_params)} active"


def _what(model: ListedModel) -> str:
    return "; ".join(filter(None, (model.notes, model.source)))
