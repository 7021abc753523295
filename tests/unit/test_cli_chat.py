"""`proa chat` against a scripted server on loopback, and with a server that it starts."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import programs
from openai_stub import Stub, serve_stub
from proa.cli import server_process as process_module
from proa.cli.api_client import ApiClient, Piece, Served, Usage
from proa.cli.chat import _line_reader
from proa.cli.chat_session import SETTINGS, Session, parse_setting
from proa.cli.server_process import server_process
from proa.errors import ProaError, RequestError, UsageError
from proa.obs.console import console_err


@pytest.fixture
def stub() -> Iterator[Stub]:
    with serve_stub(Stub()) as served:
        yield served


def chat(stub: Stub, *argv: str, text: str = "") -> subprocess.CompletedProcess[str]:
    command = programs.proa("chat", f"--port={stub.port}", *argv)
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=60)


# ---- one shot ----


def test_one_shot_prints_only_the_answer(stub: Stub) -> None:
    done = chat(stub, "-p", "Hi there", "--system", "Be brief", "--set", "temperature=0", "--set=stop=a,b")
    assert (done.returncode, done.stdout) == (0, "Hello wörld!\n")
    assert "4 tokens" in done.stderr
    assert "prompt 12 tokens, 8 of them cached" in done.stderr
    (asked,) = stub.requests
    assert asked["model"] == "stub-model"
    assert asked["messages"] == [{"role": "system", "content": "Be brief"}, {"role": "user", "content": "Hi there"}]
    assert (asked["temperature"], asked["stop"], asked["stream"]) == (0.0, ["a", "b"], True)
    assert asked["stream_options"] == {"include_usage": True}


def test_reasoning_is_shown_beside_the_answer(stub: Stub) -> None:
    stub.reasoning = ["Let me ", "think."]
    done = chat(stub, "-p", "Hi there")
    assert (done.returncode, done.stdout) == (0, "Hello wörld!\n")
    assert "Let me think.\n" in done.stderr
    stub.reply = []
    only = chat(stub, "-p", "Hi there")
    assert (only.returncode, only.stdout) == (0, "")
    assert "Let me think.\n" in only.stderr


@pytest.mark.parametrize("argv", [["-p", "-"], []])
def test_piped_text_is_the_prompt(stub: Stub, argv: list[str]) -> None:
    assert chat(stub, *argv, text="one\ntwo\n").returncode == 0
    assert stub.requests[0]["messages"] == [{"role": "user", "content": "one\ntwo"}]


@pytest.mark.parametrize("argv", [["-p", b"caf\xe9"], ["-p", "Hi", "--system", b"\xff"], []])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # of standard input, which depends on the locale
def test_bytes_that_are_not_utf_8(stub: Stub, argv: list[str | bytes], errors: str) -> None:
    command = [*programs.proa("chat", f"--port={stub.port}"), *argv]
    environ = {**os.environ, "PYTHONIOENCODING": f"utf-8:{errors}"}
    done = subprocess.run(command, input=b"caf\xe9", capture_output=True, env=environ, timeout=60)
    assert done.returncode == 2, done.stderr
    assert b"UTF-8" in done.stderr
    assert not stub.requests


def test_speed_stands_beside_the_roof(stub: Stub) -> None:
    stub.delay_s = 0.1
    words = chat(stub, "-p", "Hi").stderr.split("; ")[1]
    rate = float(words.split()[0])
    assert 5 < rate < 15  # 10 pieces a second, give or take what this machine is late
    assert words == f"{rate} tokens/s of at most 50 ({2 * rate:.0f} %)"


@pytest.mark.parametrize("model", ["stub-model", "stub-root"])
def test_a_running_server_is_used_if_its_model_fits(stub: Stub, model: str) -> None:
    assert chat(stub, model, "-p", "Hi").stdout == "Hello wörld!\n"


def test_an_api_key_is_sent(stub: Stub) -> None:
    chat(stub, "-p", "Hi", "--api-key", "s3cret")
    assert set(stub.keys) == {"Bearer s3cret"}


def test_a_loading_server_is_waited_for(stub: Stub) -> None:
    stub.health = [(503, {"status": "loading", "phase": "weights", "percent": 40.0, "eta_s": 1.0})] * 2
    assert chat(stub, "-p", "Hi").stdout == "Hello wörld!\n"
    assert stub.health == []


@pytest.mark.parametrize(
    ("change", "code", "part"),
    [
        ({"refusal": (401, {"error": {"message": "A key is needed."}})}, 2, "A key is needed. Give the server's key"),
        ({"refusal": (200, {"hello": "world"})}, 1, "is not OpenAI-compatible"),
        ({"refusal": (500, {})}, 1, "answered 500"),
        ({"health": [(503, {"status": "failed", "reason": "No memory."})]}, 1, "cannot answer: No memory."),
        ({"error_after": 2}, 1, "The engine died."),
        ({"breaks_after": 2}, 1, "no longer answers"),
    ],
)
def test_errors_are_one_paragraph(stub: Stub, change: dict[str, Any], code: int, part: str) -> None:
    for name, value in change.items():
        setattr(stub, name, value)
    done = chat(stub, "-p", "Hi")
    assert done.returncode == code
    assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.count("\n") == 1


def test_an_empty_prompt_is_refused(stub: Stub) -> None:
    done = chat(stub, "-p", "-", text=" \n")
    assert done.returncode == 2
    assert "standard input is empty" in done.stderr


def test_no_server_gives_no_models() -> None:
    with ApiClient("127.0.0.1", 1) as client:
        assert client.models() is None


# ---- the dialogue ----


class Terminal:
    """Scripted input lines, then end of input."""

    def __init__(self, *lines: str) -> None:
        self.lines = list(lines)

    def __call__(self) -> str:
        if not self.lines:
            raise EOFError
        return self.lines.pop(0)


def talk(stub: Stub, *lines: str, system: str | None = None) -> None:
    with ApiClient("127.0.0.1", stub.port) as client:
        Session(client, Served("stub-model", "stub-root"), system, {}, console_err()).repl(Terminal(*lines))


def said(stub: Stub, request: int = -1) -> list[tuple[str, str]]:
    return [(m["role"], m["content"]) for m in stub.requests[request]["messages"]]


ANSWER = ("assistant", "Hello wörld!")


def test_a_conversation_grows(stub: Stub) -> None:
    talk(stub, "one", "", "  two ")
    assert said(stub) == [("user", "one"), ANSWER, ("user", "two")]


def test_the_end_of_input_ends_the_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt: Terminal()())
    read = _line_reader()
    with pytest.raises(EOFError):
        read()
    assert capsys.readouterr().out == "\n"


def test_clear_system_retry_exit(stub: Stub) -> None:
    talk(stub, "one", "/system Be kind", "/retry", "/clear", "two", "/system", "three", "/exit", "never")
    assert said(stub, 1) == [("system", "Be kind"), ("user", "one")]
    assert said(stub, 2) == [("system", "Be kind"), ("user", "two")]
    assert said(stub, 3) == [("user", "two"), ANSWER, ("user", "three")]
    assert len(stub.requests) == 4


def test_a_retry_that_fails_loses_nothing(stub: Stub) -> None:
    with ApiClient("127.0.0.1", stub.port) as client:
        session = Session(client, Served("stub-model", "stub-root"), None, {}, console_err())
        session.repl(Terminal("one"))
        stub.refusal = (429, {"error": {"message": "Too many requests wait."}})
        session.repl(Terminal("/retry"))
        stub.refusal = None
        session.repl(Terminal("two"))
    assert said(stub) == [("user", "one"), ANSWER, ("user", "two")]


def test_a_retry_that_is_stopped_before_its_answer_loses_nothing(
    stub: Stub, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    def stopped(*_: object, **__: object) -> Iterator[Piece]:
        yield Piece()
        raise KeyboardInterrupt

    with ApiClient("127.0.0.1", stub.port) as client:
        session = Session(client, Served("stub-model", "stub-root"), None, {}, console_err())
        session.repl(Terminal("one"))
        with monkeypatch.context() as patch:
            patch.setattr(client, "stream_chat", stopped)
            session.repl(Terminal("/retry"))
        session.repl(Terminal("two"))
    assert said(stub) == [("user", "one"), ANSWER, ("user", "two")]


def test_set_and_reset(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    talk(stub, "/set temperature 0.5", "/set seed=7", "/set", "one", "/set temperature default", "two")
    assert (stub.requests[0]["temperature"], stub.requests[0]["seed"]) == (0.5, 7)
    assert "temperature" not in stub.requests[1]
    assert "Settings: temperature 0.5, seed 7." in capsys.readouterr().err


def test_save(stub: Stub, tmp_path: Path) -> None:
    talk(stub, "one", f"/save {tmp_path}/chat.json", system="Be kind")
    saved = json.loads((tmp_path / "chat.json").read_text())
    assert saved["model"] == "stub-model"
    assert [m["role"] for m in saved["messages"]] == ["system", "user", "assistant"]


@pytest.mark.parametrize(
    ("line", "part"),
    [
        ("/hepl", "Did you mean /help?"),
        ("/retry", "no answer to retry"),
        ("/save", "/save FILE"),
        ("/save /nowhere/at/all", "cannot be written"),
        ("/set temprature 1", "Did you mean temperature?"),
        ("/set temperature", "/set temperature has no value"),
        ("/set temperature hot", "temperature is 'hot'"),
        ("/set temperature 1000", "temperature is 1000"),
        ("/help", "/retry"),
    ],
)
def test_commands_answer_on_stderr(stub: Stub, capsys: pytest.CaptureFixture[str], line: str, part: str) -> None:
    talk(stub, line)
    shown = capsys.readouterr()
    assert part in shown.err
    assert shown.out == ""
    assert stub.requests == []


def test_an_error_does_not_end_the_dialogue(stub: Stub, capsys: pytest.CaptureFixture[str]) -> None:
    stub.reply, stub.error_after = [], None
    stub.refusal = (400, {"error": {"message": "The prompt is too long."}})
    with ApiClient("127.0.0.1", stub.port) as client:
        session = Session(client, Served("stub-model", "stub-root"), None, {}, console_err())
        session.repl(Terminal("much"))
        assert "The prompt is too long." in capsys.readouterr().err
        stub.refusal, stub.reply = None, ["Yes."]
        session.repl(Terminal("less"))
    assert said(stub) == [("user", "less")]  # what was refused is not part of the conversation


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("temperature", "0", 0.0), ("max_tokens", "20", 20), ("ignore_eos", "true", True), ("stop", "a,b", ("a", "b")),
        ("stop_token_ids", "1,2", (1, 2)), ("top_k", "40", 40), ("seed", "-3", -3),
    ],
)  # fmt: skip
def test_settings(key: str, text: str, value: object) -> None:
    assert parse_setting(key, text) == value


@pytest.mark.parametrize(
    ("key", "text"), [("max_tokens", "-1"), ("top_p", "0"), ("seed", "x"), ("n", "2"), ("stop", "")]
)
def test_wrong_settings(key: str, text: str) -> None:
    with pytest.raises((UsageError, RequestError)):
        parse_setting(key, text)
    assert {"logit_bias", "constraint", "thinking", "use_beam_search"}.isdisjoint(SETTINGS)


def test_pieces_of_a_stream(stub: Stub) -> None:
    with ApiClient("127.0.0.1", stub.port) as client:
        pieces = list(client.stream_chat("stub-model", [], {}))
    assert "".join(p.text for p in pieces) == "Hello wörld!"
    assert pieces[-1] == Piece(usage=Usage(12, 8, 4))
    assert [p.finish for p in pieces if p.finish] == ["stop"]


def test_characters_that_end_lines_of_text_end_no_event(stub: Stub) -> None:
    stub.reply = ["a\u2028b", "\x85", "\u2029c"]
    with ApiClient("127.0.0.1", stub.port) as client:
        assert "".join(p.text for p in client.stream_chat("stub-model", [], {})) == "".join(stub.reply)


def test_closing_a_stream_hangs_up(stub: Stub) -> None:
    stub.reply, stub.delay_s = ["x"] * 2000, 0.005
    with ApiClient("127.0.0.1", stub.port) as client, closing(client.stream_chat("stub-model", [], {})) as pieces:
        assert next(pieces) == Piece()
        assert next(pieces).text == "x"
    assert stub.hung_up.wait(5)


def test_ctrl_c_stops_the_answer_not_the_program(stub: Stub) -> None:
    stub.reply, stub.delay_s = ["word "] * 2000, 0.02
    controller, terminal = pty.openpty()
    command = programs.proa("chat", f"--port={stub.port}")
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal, start_new_session=True) as process:
        os.close(terminal)
        read_until(controller, "> ")
        os.write(controller, b"talk\n")
        read_until(controller, "word word")
        process.send_signal(signal.SIGINT)
        read_until(controller, "(stopped")
        assert stub.hung_up.wait(5)
        stub.reply = ["short"]
        os.write(controller, b"again\n")
        read_until(controller, "short")
        os.write(controller, b"/exit\n")
        assert process.wait(10) == 0
    os.close(controller)
    roles = [m["role"] for m in stub.requests[1]["messages"]]
    assert roles == ["user", "assistant", "user"]  # the half answer stays in the conversation


def read_until(fd: int, text: str, limit_s: float = 20.0) -> str:
    seen, deadline = "", time.monotonic() + limit_s
    while text not in seen:
        assert time.monotonic() < deadline, seen
        seen += os.read(fd, 4096).decode(errors="replace")
    return seen


# ---- a server of its own ----

FAKE_SERVE = """\
import json, pathlib, sys
here = pathlib.Path(__file__).parent
here.joinpath("argv.json").write_text(json.dumps(sys.argv[1:]))
if "broken" in sys.argv:
    sys.stderr.write("proa: Too little memory.\\n")
    sys.exit(4)
for ready in (None, {"load_seconds": 1}):
    print(json.dumps({"port": 4711, "ready": ready}), flush=True)
sys.stdin.read()
here.joinpath("ended").write_text("cleanly")
"""


@pytest.fixture
def fake_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace `python -m proa.cli.main serve ...` by a script that only reports its arguments."""
    script = tmp_path / "serve.py"
    script.write_text(FAKE_SERVE)
    launcher = tmp_path / "python"
    launcher.write_text(f'#!/bin/sh\nexec {sys.executable} {script} "$@"\n')
    launcher.chmod(0o755)
    monkeypatch.setattr(process_module.sys, "executable", str(launcher))
    return tmp_path


def test_a_started_server_ends_with_its_parent(fake_serve: Path) -> None:
    with server_process(["demo", "--port=0"]) as report:
        assert report["port"] == 4711
        assert not (fake_serve / "ended").exists()
    assert (fake_serve / "ended").read_text() == "cleanly"
    argv = json.loads((fake_serve / "argv.json").read_text())
    assert argv == ["-m", "proa.cli.main", "serve", "demo", "--port=0", "--json", "--until-stdin-closes"]


def test_a_server_that_cannot_start_passes_its_exit_code_on(fake_serve: Path) -> None:
    with pytest.raises(ProaError) as caught, server_process(["broken"]):
        pass
    assert caught.value.exit_code == 4


def test_the_exception_of_the_block_still_ends_the_server(fake_serve: Path) -> None:
    with pytest.raises(KeyboardInterrupt), server_process(["demo"]):
        raise KeyboardInterrupt
    assert (fake_serve / "ended").read_text() == "cleanly"
