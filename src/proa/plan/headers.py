"""Opening a model for a plan alone, from headers or from its config. Never: tensor data, decisions."""

from __future__ import annotations

import importlib
from dataclasses import replace
from pathlib import Path

from proa.config.options import ModelOptions
from proa.hub.locate import locate
from proa.hub.lookup import look_up
from proa.hub.reference import HubReference
from proa.plan.opened import Opened, open_model
from proa.types import ProgressCallback
from proa.weights.checkpoint import has_weights


def open_headers(model: str, asked: ModelOptions, progress: ProgressCallback | None = None) -> Opened:
    """Open a model for a plan alone: of a hub model only the config and the headers are fetched, and a folder may have
    a config.json without weight files. The demo is made if it is not here.

    Raises what `look_up`, `open_model`, `locate` and hub/download.py's check_headers raise.
    """
    wanted = look_up(model, asked.revision, config_only=asked.load_format == "dummy")
    if wanted.path is None and wanted.reference is not None and asked.load_format != "dummy":
        return _open_on_hub(wanted.reference, asked)
    path = wanted.path or locate(model, asked.revision, progress, config_only=asked.load_format == "dummy")
    chosen = "config" if asked.load_format == "auto" and not has_weights(path) else asked.load_format
    return open_model(path, chosen, asked)


def _open_on_hub(reference: HubReference, asked: ModelOptions) -> Opened:
    """Open a hub model from its headers. For .bin files, which have none, from its config and index."""
    found: list[Opened] = []

    def judge(preview: Path, load_format: str) -> None:
        opened = open_model(preview, "config" if load_format == "dummy" else load_format, asked)
        # The folder of headers is temporary, and the plan reads no tensors.
        found.append(replace(opened, checkpoint=replace(opened.checkpoint, path=Path(str(reference)))))

    from_hub = importlib.import_module("proa.hub.download")  # HTTP clients take half a second to import
    from_hub.check_headers(reference, judge)
    return found[0]
