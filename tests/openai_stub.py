"""A scripted OpenAI-compatible server on loopback, for testing clients."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Stub:
    """The server's script, and the requests that it received. `reasoning` and `reply` are streamed piece by piece."""

    model: str = "stub-model"
    root: str = "stub-root"
    reply: list[str] = field(default_factory=lambda: ["Hello", " ", "wörld", "!"])
    reasoning: list[str] = field(default_factory=list)
    delay_s: float = 0.0
    progress: list[int] = field(default_factory=list)  # tokens of 1000 computed, reported every delay_s on request
    refusal: tuple[int, dict[str, Any]] | None = None
    error_after: int | None = None  # pieces, then an error event
    breaks_after: int | None = None  # pieces, then the connection is cut
    health: list[tuple[int, dict[str, Any]]] = field(default_factory=list)  # responses in turn; after them 200
    metrics: str = 'proa_ready 1.0\nproa_roof_tokens_per_second{model="x"} 50.0\n'
    requests: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str | None] = field(default_factory=list)
    hung_up: threading.Event = field(default_factory=threading.Event)
    port: int = 0


@contextmanager
def serve_stub(stub: Stub) -> Iterator[Stub]:
    """Serve on a free loopback port, which is set as stub.port."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # no Nagle delay: small pieces are sent immediately, as by a real server

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the inherited name
            pass

        def do_GET(self) -> None:
            stub.keys.append(self.headers["Authorization"])
            if self.path == "/v1/models":
                status, body = stub.refusal or (200, {"data": [{"id": stub.model, "root": stub.root}]})
                _send(self, status, json.dumps(body))
            elif self.path == "/health":
                status, body = stub.health.pop(0) if stub.health else (200, {"status": "ready"})
                _send(self, status, json.dumps(body))
            else:
                _send(self, 200, stub.metrics)

        def do_POST(self) -> None:
            stub.requests.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if stub.refusal:
                _send(self, stub.refusal[0], json.dumps(stub.refusal[1]))
                return
            try:
                _stream(self, stub)
            except (BrokenPipeError, ConnectionResetError):
                stub.hung_up.set()
            self.close_connection = True

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    stub.port = server.server_address[1]
    try:
        yield stub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _send(handler: BaseHTTPRequestHandler, status: int, text: str) -> None:
    body = text.encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(body)))
    handler.end_headers()
    handler.wfile.write(body)


def _stream(handler: BaseHTTPRequestHandler, stub: Stub) -> None:
    handler.send_response(200)
    handler.send_header("Content-Type", "text/event-stream")
    handler.send_header("Connection", "close")
    handler.end_headers()

    def event(content: object) -> None:
        handler.wfile.write(b"data: " + json.dumps(content, ensure_ascii=False).encode() + b"\n\n")
        handler.wfile.flush()

    event({"choices": [{"index": 0, "delta": {"role": "assistant"}}]})
    for done in stub.progress if stub.requests[-1].get("return_progress") else ():
        time.sleep(stub.delay_s)
        event({"choices": [], "prompt_progress": {"total": 1000, "cache": 100, "processed": done, "time_ms": 1}})
    for piece in stub.reasoning:
        event({"choices": [{"index": 0, "delta": {"reasoning_content": piece}}]})
    for i, piece in enumerate(stub.reply):
        if i == stub.error_after:
            event({"error": {"message": "The engine died.", "type": "engine_dead"}})
            return
        if i == stub.breaks_after:
            handler.wfile.write(b"data: {")
            handler.connection.close()
            return
        handler.wfile.write(b": still working\n\n")
        event({"choices": [{"index": 0, "delta": {"content": piece}}]})
        time.sleep(stub.delay_s)
    event({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    usage = {"prompt_tokens": 12, "completion_tokens": len(stub.reply), "prompt_tokens_details": {"cached_tokens": 8}}
    event({"choices": [], "usage": usage})
    handler.wfile.write(b"data: [DONE]\n\n")
