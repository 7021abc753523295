"""Writes files that later starts read, whole or not at all. Never: what they contain."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def write_whole(path: Path, content: bytes) -> None:
    """Write the file, and its folder if there is none; a reader sees all of it or the former one. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as new:
        try:
            new.write(content)
            new.flush()
            os.replace(new.name, path)
        except BaseException:
            os.unlink(new.name)
            raise
