"""Keeps the bytecode of imported packages in the cache folder if Python keeps it nowhere. Some installers write none
(uv), and Python writes none if PYTHONDONTWRITEBYTECODE is set, as in many containers, or if the user may not write to
the installation: every start then compiles torch's modules anew (docs/decisions/073-bytecode.md).
"""

from __future__ import annotations

import os
import sys
from importlib.util import cache_from_source, find_spec
from pathlib import Path

FORBIDDEN, FOLDER = "PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"
LARGEST = "torch"  # the package whose modules take longest to compile


def is_compiled_anew(package: str = LARGEST) -> bool:
    """True if the package has no bytecode, and Python will not write any. False if it is not installed."""
    spec = find_spec(package)
    if spec is None or spec.origin is None or sys.pycache_prefix is not None:
        return False
    written = not sys.dont_write_bytecode and os.access(Path(spec.origin).parent, os.W_OK)
    return not written and not os.path.exists(cache_from_source(spec.origin))


def bytecode_environ(cache: Path) -> dict[str, str]:
    """Environment variables with which a child process keeps its bytecode in a folder of `cache`; empty if it needs
    none."""
    folder = str(cache / "bytecode")
    return {FORBIDDEN: "", FOLDER: folder} if sys.pycache_prefix == folder or is_compiled_anew() else {}


def keep_bytecode(cache: Path) -> None:
    """Let this process keep its bytecode in a folder of `cache`, if it needs one. Its environment stays as it is, for
    the user's own programs that inherit it."""
    if found := bytecode_environ(cache):
        sys.pycache_prefix, sys.dont_write_bytecode = found[FOLDER], False
