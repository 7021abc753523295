"""Clients that hold connections without sending, or send bytes slowly; limits of connections; repeated log lines."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Iterator

import httpx
import pytest

from fakes import Reply
from proa.obs.log import REPEAT_S, Repeats
from proa.server import connections, run
from proa.server.connections import OpenConnections
from proa.text.tokenizer import Tokenizer
from served import MODEL, Served

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 100000\r\n"
BODY = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines of fractions of a second."""
    monkeypatch.setattr(connections, "HEAD_S", 0.4)
    monkeypatch.setattr(connections, "BODY_GRACE_S", 0.4)
    monkeypatch.setattr(connections, "BODY_WINDOW_S", 0.2)


@pytest.fixture
def served(tokenizer: Tokenizer, quick: None) -> Iterator[Served]:
    with Served(tokenizer, Reply(tokenizer.encode("Hello world"), delay_s=0.4)) as running:
        while httpx.get(f"{running.url}/health").status_code != 200:
            time.sleep(0.01)
        yield running


def connect(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def drip(client: socket.socket, piece: bytes, seconds: float = 5.0) -> float:
    """Send `piece` every 50 ms until the server closes the connection; return the seconds that took."""
    began = time.monotonic()
    client.settimeout(0.05)
    while time.monotonic() - began < seconds:
        try:
            if not client.recv(4096):
                break
        except TimeoutError:
            pass
        except ConnectionError:
            break
        try:
            client.sendall(piece)
        except (BrokenPipeError, ConnectionResetError):
            break
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("first", "piece"),
    [
        (b"", b""),
        (b"POST /v1/cha", b""),
        (b"GET /health HTTP/1.1\r\n", b"x-more: 1\r\n"),
        (HEAD + b"\r\n", b""),
        (HEAD + b"\r\n", b"{"),
        (HEAD + b"\r\n" + b" " * 90_000, b""),
        (b"POST /no/such/path HTTP/1.1\r\nhost: x\r\ncontent-length: 100000\r\n\r\n", b"{"),
        (b"GET /health HTTP/1.1\r\nhost: x\r\n\r\nGET", b"x"),
    ],
    ids=["silent", "half a head", "a line now and then", "no body", "dripping body", "stalled body", "after the answer",
         "second request"],
)  # fmt: skip
def test_slow_requests_are_closed(served: Served, first: bytes, piece: bytes) -> None:
    with connect(served) as client:
        client.sendall(first)
        assert 0.3 < drip(client, piece) < 3
    assert httpx.get(f"{served.url}/health").status_code == 200


def test_late_requests_are_told_why(served: Served) -> None:
    with connect(served) as client:
        client.sendall(HEAD)
        assert client.makefile("rb").read().startswith(b"HTTP/1.1 408 ")


def test_deadlines_spare_others(served: Served) -> None:
    """A slow answer, a kept connection, and a body that advances."""
    with httpx.Client(base_url=served.url) as kept:
        assert kept.post("/v1/chat/completions", json=BODY).status_code == 200
        upload = connect(served)
        content = b'{"messages": [{"role": "user", "content": "Hi"}]' + b" " * 40_000 + b"}"
        upload.sendall(HEAD.replace(b"100000", str(len(content)).encode()) + b"\r\n")
        for i in range(0, len(content), 2000):
            upload.sendall(content[i : i + 2000])
            time.sleep(0.08)
        assert upload.recv(100).startswith(b"HTTP/1.1 200")
        upload.close()
        socket_before = kept.get("/health").extensions["network_stream"].get_extra_info("socket").getsockname()
        time.sleep(1)
        socket_after = kept.get("/health").extensions["network_stream"].get_extra_info("socket").getsockname()
        assert socket_before == socket_after


def test_at_the_limit_idle_connections_make_room(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "raise_descriptor_limit", lambda: connections.RESERVED_DESCRIPTORS + 10)
    with Served(tokenizer, Reply(tokenizer.encode("word " * 400), delay_s=0.05)) as served:
        idle = [connect(served) for _ in range(50)]
        assert httpx.get(f"{served.url}/health", timeout=5).status_code in (200, 503)
        while httpx.get(f"{served.url}/health", timeout=5).status_code != 200:
            time.sleep(0.01)
        busy = [served.client.chat.completions.create(model=MODEL, stream=True, **BODY) for _ in range(10)]
        refused = httpx.get(f"{served.url}/health", timeout=5)
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        for stream in busy:
            assert next(iter(stream))
            stream.close()
        for client in idle:
            client.close()


def test_descriptor_limit() -> None:
    assert OpenConnections(10**9).most == connections.MAX_CONNECTIONS
    assert OpenConnections(1024).most == 1024 - connections.RESERVED_DESCRIPTORS
    assert OpenConnections(20).most == 8


def test_repeated_lines_are_counted() -> None:
    repeats = Repeats()

    def shown(text: str, at_s: float) -> str | None:
        record = logging.LogRecord("x", logging.ERROR, __file__, 1, text, (), None)
        record.created = at_s
        return record.getMessage() if repeats.filter(record) else None

    assert shown("a", 0) == "a"
    assert shown("b", 1) == "b"
    assert [shown("a", 1 + i / 1000) for i in range(100)] == [None] * 100
    assert shown("a", REPEAT_S) == "a (100 more like this since)"
    assert shown("a", 2 * REPEAT_S) == "a"
    for i in range(5000):
        assert shown(str(i), 2 * REPEAT_S) == str(i)
