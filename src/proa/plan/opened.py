"""Opening a model: its headers and config are read and compared, and refused if wrong, without torch, the machine or
the network. Never: decisions.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from proa.config.options import ModelOptions
from proa.hub.locate import locate_here
from proa.models.names import Declared
from proa.plan.overrides import config_overrides
from proa.weights import sources
from proa.weights.checkpoint import Checkpoint, needs_torch, open_checkpoint


@dataclass(frozen=True)
class Opened:
    """A checkpoint whose config is supported and whose tensors match the config."""

    checkpoint: Checkpoint
    declared: Declared


def open_model(path: Path, load_format: str, asked: ModelOptions) -> Opened:
    """Open the checkpoint at `path` and check it. Raises ModelNotFound, ConfigError and WeightsError."""
    checkpoint = open_checkpoint(path, load_format, config_overrides(asked.override_config))
    declared = checkpoint.declare(asked.ignore_config_key)
    if checkpoint.tensors:
        sources.resolve(declared, checkpoint.tensors)
    return Opened(checkpoint, declared)


def open_if_here(model: str, asked: ModelOptions) -> Opened | None:
    """Open the model that the user named; None if it must first be fetched or built, or if only torch can read its
    headers. Raises what `locate_here` and `open_model` raise."""
    path = locate_here(model, asked.revision, config_only=asked.load_format == "dummy")
    if path is None or needs_torch(path, asked.load_format):
        return None
    return open_model(path, asked.load_format, asked)
