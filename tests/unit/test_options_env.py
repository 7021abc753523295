"""The debug switches in the environment."""

from __future__ import annotations

from pathlib import Path

import pytest

from proa.config.env import SWITCHES, child_environ, read_env
from proa.errors import UsageError
from proa.obs.version import proa_version


def test_nothing_set() -> None:
    environment = read_env({"PATH": "/bin"})
    assert environment.cache == Path.home() / ".cache" / "proa"
    assert (environment.log, environment.debug, environment.ram_probe_bytes) == ("info", False, None)


def test_a_size() -> None:
    assert read_env({"PROA_RAM_PROBE": "64MiB"}).ram_probe_bytes == 64 << 20


@pytest.mark.parametrize(
    ("environ", "cache"),
    [
        ({"PROA_CACHE": "/data/proa"}, Path("/data/proa")),
        ({"PROA_CACHE": "here"}, Path.cwd() / "here"),
        ({"PROA_CACHE": "~/there"}, Path.home() / "there"),
        ({"XDG_CACHE_HOME": "/xdg"}, Path("/xdg/proa")),
        ({"XDG_CACHE_HOME": "/xdg", "PROA_CACHE": "/data"}, Path("/data")),
    ],
)
def test_cache_folder(environ: dict[str, str], cache: Path) -> None:
    assert read_env(environ).cache == cache


@pytest.mark.parametrize(
    ("environ", "parts"),
    [
        ({"PROA_CASHE": "/x"}, ["PROA_CASHE", "Did you mean PROA_CACHE?"]),
        ({"PROA_THREADS": "4"}, ["PROA_THREADS", "the switches are PROA_CACHE, PROA_ISA, PROA_LOG, PROA_RAM_PROBE"]),
        ({"PROA_LOG": "verbose"}, ["PROA_LOG is 'verbose'", "debug, info, warning or error"]),
        ({"PROA_RAM_PROBE": "1KiB"}, ["PROA_RAM_PROBE is 1.00 KiB", "at least 4194304 B"]),
        ({"PROA_LOG": ""}, ["PROA_LOG is empty"]),
        ({"PROA_CACHE": ""}, ["PROA_CACHE is empty"]),
    ],
)
def test_wrong_switches(environ: dict[str, str], parts: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        read_env(environ)
    for part in parts:
        assert part in str(caught.value)


def test_at_most_ten_switches() -> None:
    assert len(SWITCHES) <= 10


def test_child_environment_replaces_a_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROA_LOG", "debug")
    environ = child_environ(log="warning")
    assert environ["PROA_LOG"] == "warning"
    assert environ["PATH"]


def test_a_missing_home_matters_only_if_the_cache_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container may run with a uid that has no passwd entry."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("pwd.getpwuid", lambda uid: {}[uid])
    assert read_env({"PROA_LOG": "debug"}).debug
    assert read_env({"PROA_CACHE": "/data"}).cache == Path("/data")
    for environ in ({}, {"PROA_CACHE": "~/there"}):
        environment = read_env(environ)
        with pytest.raises(UsageError, match="Set PROA_CACHE"):
            _ = environment.cache


def test_compiled_kernels_lie_in_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROA_CACHE", "/data")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    assert child_environ()["TRITON_CACHE_DIR"] == f"/data/triton/{proa_version()}"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/mine")
    assert child_environ()["TRITON_CACHE_DIR"] == "/mine"
