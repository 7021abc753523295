"""Files that later starts read are whole, and failures leave nothing behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from proa.engine.building.kept_file import write_whole


def test_a_file_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "new folder" / "kept"
    for content in (b"first", b"second"):
        write_whole(path, content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_a_failure_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.mkdir()  # so that it cannot be replaced
    with pytest.raises(OSError, match="kept"):
        write_whole(path, b"content")
    assert list(tmp_path.iterdir()) == [path]
