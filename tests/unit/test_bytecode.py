"""Bytecode of packages that bring none is kept in the cache folder, if Python keeps it nowhere."""

from __future__ import annotations

import os
import py_compile
import subprocess
import sys
from importlib import invalidate_caches
from pathlib import Path

import pytest

from proa.config.bytecode import bytecode_environ, is_compiled_anew, keep_bytecode
from proa.config.env import child_environ

NAME = "package_of_test_bytecode"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An installed package without bytecode, while Python may write none."""
    folder = tmp_path / "site" / NAME
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(folder.parent)
    invalidate_caches()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    return folder


def test_a_package_without_bytecode(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_compiled_anew(NAME)
    with monkeypatch.context() as patched:
        patched.setattr(sys, "dont_write_bytecode", False)
        assert not is_compiled_anew(NAME), "Python writes it beside the package"
        patched.setattr(os, "access", lambda path, mode: path != package)
        assert is_compiled_anew(NAME), "the folder is read-only"
    with monkeypatch.context() as patched:
        patched.setattr(sys, "pycache_prefix", "/elsewhere")
        assert not is_compiled_anew(NAME), "the user has chosen a folder"
    py_compile.compile(str(package / "__init__.py"))
    assert not is_compiled_anew(NAME), "the installer has compiled it"
    assert not is_compiled_anew("no_such_package")


@pytest.mark.parametrize("anew", [True, False])
def test_a_child_and_this_process_keep_it(anew: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proa.config.bytecode.is_compiled_anew", lambda: anew)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.setenv("PROA_CACHE", str(tmp_path))
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.delenv("PYTHONPYCACHEPREFIX", raising=False)
    found = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}
    assert bytecode_environ(tmp_path) == (found if anew else {})
    assert (found.items() <= child_environ().items()) == anew
    keep_bytecode(tmp_path)
    assert os.environ["PYTHONDONTWRITEBYTECODE"] == "1", "an agent that `proa launch` starts has the user's own"
    assert bytecode_environ(tmp_path) == (found if anew else {})
    assert (sys.pycache_prefix, sys.dont_write_bytecode) == (
        (str(tmp_path / "bytecode"), False) if anew else (None, True)
    )


def test_a_command_keeps_it(tmp_path: Path) -> None:
    """In an environment whose torch has no bytecode, with Python told to write none."""
    torch = tmp_path / "site" / "torch"
    torch.mkdir(parents=True)
    (torch / "__init__.py").write_text("")
    cache = tmp_path / "cache"
    path = os.pathsep.join([str(torch.parent), *filter(None, sys.path)])
    environ = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "PROA_CACHE": str(cache)}
    environ.pop("PYTHONPYCACHEPREFIX", None)
    command = [sys.executable, "-m", "proa.cli.main", "models"]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    kept = {file.name.split(".")[0] for file in (cache / "bytecode").rglob("*.pyc")}
    assert "models" in kept
    assert not list(torch.rglob("*.pyc"))
