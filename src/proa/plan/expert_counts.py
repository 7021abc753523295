"""The expert counts file, JSON: how often each expert was chosen. Never: counting, placing experts by counts."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import msgspec

from proa.errors import UsageError
from proa.models.spec import Model

FORMAT = "proa expert counts 1"
Counts = tuple[tuple[int, ...], ...]  # [MoE layers in the model's order][experts]


class CountsFile(msgspec.Struct, frozen=True, kw_only=True):
    format: str
    model: str  # as asked; only for messages
    layers: dict[str, list[int]]  # block number -> count of each expert


def read_counts(file: Path, spec: Model) -> Counts:
    """Read counts for a model. Raises UsageError for another kind of file, and for counts of another model."""
    routed = {str(i): ffn.experts for i, ffn in spec.routed.items()}
    try:
        found = msgspec.json.decode(file.read_bytes(), type=CountsFile)
    except OSError as error:
        raise _wrong(f"cannot be read: {error.strerror}") from error
    except msgspec.DecodeError as error:
        raise _wrong(f"is not a file of expert counts: {error}") from error
    if found.format != FORMAT:
        raise _wrong(f"has the format {found.format!r}, not {FORMAT!r}")
    sizes = {block: len(counts) for block, counts in found.layers.items()}
    if sizes != routed:
        other = next(block for block in {**routed, **sizes} if sizes.get(block) != routed.get(block))
        counted, here = (f"{of[other]} experts" if other in of else "none" for of in (sizes, routed))
        raise _wrong(f"is of another model, {found.model}: layer {other} has {counted} in the file, {here} here")
    if any(count < 0 for counts in found.layers.values() for count in counts):
        raise _wrong("has negative counts")
    return tuple(tuple(found.layers[block]) for block in routed)


def write_counts(file: Path, model: str, blocks: Sequence[int], counts: Sequence[Sequence[int]]) -> None:
    """Write atomically: a reader sees the former file or the new one. Raises OSError."""
    layers = {str(block): list(of) for block, of in zip(blocks, counts, strict=True)}
    new = file.with_name(file.name + ".new")
    new.write_bytes(msgspec.json.encode(CountsFile(format=FORMAT, model=model, layers=layers)))
    os.replace(new, file)


def check_writable(file: Path) -> None:
    """Raise UsageError if `write_counts` would fail."""
    if not file.parent.is_dir() or not os.access(file.parent, os.W_OK) or file.is_dir():
        raise UsageError(
            f"--save-expert-counts {file} cannot be written.", "Give a file in a writable folder.",
            param="save_expert_counts",
        )  # fmt: skip


def _wrong(what: str) -> UsageError:
    remedy = "Write one by running this model with --save-expert-counts."
    return UsageError(f"The file of --expert-counts {what}.", remedy, param="expert_counts")
