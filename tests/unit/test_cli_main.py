"""The `proa` program, run in child processes: help, errors and exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence

import pytest

from proa.cli import main as cli
from proa.cli.main import COMMANDS, overview
from proa.config.parse import HelpShown
from proa.errors import EngineDead, ModelNotFound, ProaError, ResourceError

NO_ACCESS = (
    "proa: /root/model cannot be used: permission denied. Give this user access to it, or use another folder: "
    "PROA_CACHE and HF_HOME move the caches.\n"
)
FULL_DISK = "proa: No space is left on the disk. Free some, or choose another disk.\n"
HEAVY = ("torch", "transformers", "fastapi", "numpy", "httpx", "rich", "yaml", "huggingface_hub", "asyncio")


def proa(*argv: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "proa.cli.main", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env={**os.environ, **environ})


def imported_by(code: str) -> set[str]:
    program = f"import sys; sys.argv = ['proa', '--help']\n{code}\nsys.stderr.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    return {module.split(".")[0] for module in done.stderr.split()}


def test_overview_fits_a_screen() -> None:
    lines = overview().splitlines()
    assert len(lines) <= 24
    assert max(map(len, lines)) <= 80
    for name, command in COMMANDS.items():
        assert f"{name:<8} {command.summary}" in overview()


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    times = []
    for _ in range(3):
        start = time.perf_counter()
        done = proa("--help")
        times.append(time.perf_counter() - start)
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout == overview()
    assert min(times) < 1.0
    loaded = imported_by("from proa.cli.main import main; main()")
    assert not loaded & set(HEAVY)
    assert "proa" in loaded


def test_starting_a_server_imports_no_heavy_packages() -> None:
    """The demo builder and the hub client, which take half a second to import, are only for models not present."""
    loaded = imported_by("import proa.cli.start")
    assert not loaded & {"torch", "transformers", "numpy", "gguf", "httpx"}


@pytest.mark.parametrize("words", [[], *([name] for name in COMMANDS)], ids=" ".join)
def test_help_loads_no_torch(words: list[str]) -> None:
    asked = [*words, "--help" if words else "--help-all"]
    loaded = imported_by(f"from proa.cli.main import run\ntry: run({asked})\nexcept BaseException: pass")
    assert not loaded & {"torch", "transformers", "fastapi"}


@pytest.mark.parametrize("name", COMMANDS)
def test_each_command_has_short_and_full_help(name: str) -> None:
    short, full = proa(name, "--help"), proa(name, "--help-all")
    assert (short.returncode, short.stderr) == (full.returncode, full.stderr) == (0, "")
    assert short.stdout.startswith(f"usage: proa {name}")
    assert full.stdout.startswith(f"usage: proa {name}")
    assert len(short.stdout) <= len(full.stdout)


def test_help_all_covers_every_command() -> None:
    done = proa("--help-all")
    assert (done.returncode, done.stderr) == (0, "")
    for name in COMMANDS:
        assert f"usage: proa {name}" in done.stdout


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["sreve"], ["proa has no command sreve", "Did you mean serve?"]),
        (["--hepl"], ["proa has no option --hepl", "Did you mean --help?"]),
        (["serve", "demo", "--prot", "1"], ["no option --prot", "Did you mean --port?"]),
        (["serve", "--port", "x", "demo"], ["--port is 'x'", "an integer from 0 to 65535"]),
        (["serve"], ["MODEL is missing"]),
        (["serve", "demo", "--config", "nowhere.yaml"], ["nowhere.yaml cannot be read"]),
        (["chat", "--set", "temprature=1"], ["temprature", "Did you mean temperature?"]),
        (["chat", "--set", "temperature"], ["KEY=VALUE"]),
        (["bench"], ["latency", "serve"]),
        (["bench", "latncy"], ["Did you mean latency?"]),
        (["doctor", "now"], ["unexpected argument 'now'"]),
    ],
)
def test_usage_errors(argv: list[str], parts: list[str]) -> None:
    done = proa(*argv)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("proa: ")
    assert done.stderr.count("\n") == 1  # one paragraph
    for part in parts:
        assert part in done.stderr


def test_a_misspelt_switch_stops_before_work() -> None:
    done = proa("doctor", PROA_LGO="debug")
    assert done.returncode == 2
    assert "PROA_LGO" in done.stderr
    assert "Did you mean PROA_LOG?" in done.stderr


def test_debug_shows_the_traceback() -> None:
    assert "Traceback" not in proa("serve").stderr
    done = proa("serve", PROA_LOG="debug")
    assert "Traceback" in done.stderr
    assert done.returncode == 2


def test_version() -> None:
    assert proa("--version").stdout.startswith("proa ")


def test_no_argument_shows_the_help() -> None:
    assert proa().stdout == overview()


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (ModelNotFound("No such model.", "Try another."), 3, "proa: No such model. Try another.\n"),
        (ResourceError("Too large."), 4, "proa: Too large.\n"),
        (EngineDead("It died."), 6, "proa: It died.\n"),
        (ProaError("Odd."), 1, "proa: Odd.\n"),
        (PermissionError(13, "Permission denied", "/root/model"), 2, NO_ACCESS),
        (OSError(28, "No space left on device"), 4, FULL_DISK),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_codes(
    raised: BaseException, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: Sequence[str]) -> int:
        raise raised

    monkeypatch.setattr(cli, "run", run)
    assert cli.main() == code
    assert capsys.readouterr().err == said


def test_a_closed_output_pipe_is_not_an_error() -> None:
    command = f"{sys.executable} -m proa.cli.main --help-all | head -n 1; echo ${{PIPESTATUS[0]}}"
    for _ in range(3):  # head may be slow to leave: then everything fits into the pipe
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
        assert done.stderr == ""
        assert done.stdout.splitlines()[1] in ("0", "141")


@pytest.mark.parametrize("argv", [["--version"], ["serve", "--help-all"], ["models"]], ids=" ".join)
def test_a_reader_that_is_gone_is_not_an_error(argv: list[str]) -> None:
    """Neither for text, nor for a help page, nor for a table."""
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "proa.cli.main", *argv]
    try:
        done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=60)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.parametrize(
    ("closed", "argv", "code", "said"),
    [
        (">&-", "--version", 0, ""),
        (">&-", "models", 0, ""),
        ("2>&-", "nope", 2, ""),
        ("<&-", "chat", 2, "proa: There is no prompt: standard input is empty. Give a prompt with -p TEXT.\n"),
    ],
)
def test_a_closed_stream_is_empty(closed: str, argv: str, code: int, said: str) -> None:
    command = f"{sys.executable} -m proa.cli.main {argv} {closed}"
    done = subprocess.run(["bash", "-c", command], stderr=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (code, said)


def test_help_is_not_an_error_inside() -> None:
    with pytest.raises(HelpShown):
        cli.run(["chat", "--help"])


@pytest.mark.parametrize("log", ["info", "debug"])
@pytest.mark.parametrize(
    ("bug", "named"),
    [
        (ZeroDivisionError("by\n  zero."), "ZeroDivisionError: by zero"),
        (IndexError(), "IndexError"),
    ],
)
def test_a_bug_is_one_line_unless_debugging(
    bug: Exception, named: str, log: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(argv: Sequence[str]) -> int:
        raise bug

    monkeypatch.setattr(cli, "run", run)
    monkeypatch.setenv("PROA_LOG", log)
    assert cli.main() == 1
    said = capsys.readouterr().err
    line = f"proa: unexpected error: {named}. Set PROA_LOG=debug for the traceback, and report it.\n"
    assert said.endswith(line)
    assert ("Traceback" in said) == (log == "debug")
    assert log == "debug" or said == line
