"""Which Proa this is. Never: anything else."""

from __future__ import annotations


def proa_version() -> str:
    """The installed version; "0 (not installed)" where Proa runs from a source folder alone."""
    from importlib import metadata  # slow to import, seldom needed: `proa --help` does without

    try:
        return metadata.version("proa")
    except metadata.PackageNotFoundError:
        return "0 (not installed)"
