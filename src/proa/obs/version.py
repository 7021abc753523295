"""The installed version of Proa."""

from __future__ import annotations


def proa_version() -> str:
    """Return the installed version; "0 (not installed)" if Proa runs from a source folder without installation."""
    from importlib import metadata  # slow to import, and not needed by `proa --help`

    try:
        return metadata.version("proa")
    except metadata.PackageNotFoundError:
        return "0 (not installed)"
