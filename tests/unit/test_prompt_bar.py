"""The bar of `proa chat` for long prompts."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess

import pytest
from rich.console import Console

import programs
from openai_stub import Stub, serve_stub
from proa.cli.api_client import PromptProgress
from proa.cli.prompt_bar import PromptBar


def shown(*reports: tuple[float, int]) -> str:
    """What a terminal gets for reports (seconds since the request, tokens of 1000 computed; 100 were cached)."""
    clock = iter([0.0, *(seconds for seconds, _ in reports)])
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=80, color_system=None)
    with PromptBar(console, lambda: next(clock)) as bar:
        for _, done in reports:
            bar.update(PromptProgress(1000, 100, done))
    return out.getvalue()


def test_a_long_prompt_shows_tokens_and_time_left() -> None:
    text = shown((1.0, 200), (2.0, 300))
    assert "300 of 1000 tokens" in text
    assert "7.0 s left" in text


def test_the_rate_is_that_since_the_first_report() -> None:
    """The request waited 10 s before its prompt began."""
    assert "8.0 s left" in shown((10.0, 100), (11.0, 200))


@pytest.mark.parametrize(
    "reports",
    [
        [(0.1, 300), (0.3, 700)],
        [(0.2, 300), (0.6, 950)],  # 0.03 s are left
        [(0.6, 1000)],
        [],
    ],
)
def test_a_short_prompt_shows_nothing(reports: list[tuple[float, int]]) -> None:
    assert shown(*reports) == ""


def test_before_any_token_the_time_left_is_unknown() -> None:
    text = shown((1.0, 100))
    assert "100 of 1000 tokens" in text
    assert "left" not in text


def in_terminal(stub: Stub) -> str:
    """Output of `proa chat` on a terminal."""
    controller, terminal = pty.openpty()
    command = programs.proa("chat", f"--port={stub.port}", "-p", "Hi")
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        text = b""
        while True:
            try:
                text += os.read(controller, 4096)
            except OSError:  # Linux's end of file of a terminal whose other end is closed
                break
        assert process.wait(20) == 0
    os.close(controller)
    return text.decode()


def test_chat_on_a_terminal_and_in_a_pipe() -> None:
    with serve_stub(Stub(progress=[200, 300, 400, 500], delay_s=0.4)) as stub:
        text = in_terminal(stub)
        assert re.search(r"\d00 of 1000 tokens .* s left", text)
        assert text.index("of 1000 tokens") < text.index("Hello")
        assert stub.requests[0]["return_progress"] is True
        done = subprocess.run(
            programs.proa("chat", f"--port={stub.port}", "-p", "Hi"), capture_output=True, text=True, timeout=30
        )
        assert done.stdout == "Hello wörld!\n"
        assert "of 1000" not in done.stderr
        assert "return_progress" not in stub.requests[1]
