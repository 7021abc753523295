"""Benchmarks over HTTP, against a small server of server-sent events on loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from proa.bench import latency, serve
from proa.bench.endpoint import is_loopback
from proa.bench.latency import LatencyOptions
from proa.bench.predicted import planned
from proa.bench.serve import ServeBenchOptions
from proa.config.options import EngineOptions, GpuOptions, ModelOptions
from proa.errors import ProaError, UsageError
from quick_plan import prepare
from tiny import make_tiny

STEP_S = 0.005


@dataclass
class Script:
    """The scripted behaviour of the server, and the requests that it received."""

    models: tuple[str, ...] = ("fake",)
    fail_every: int = 0  # answer every n-th completion with 503
    short_by: int = 0
    error_in_stream: bool = False
    bodies: list[dict[str, Any]] = field(default_factory=list)
    authorization: set[str | None] = field(default_factory=set)
    running: int = 0
    most_running: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    script: Script

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self.script.authorization.add(self.headers.get("Authorization"))
        self._reply(200, {"data": [{"id": name} for name in self.script.models]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path == "/tokenize":
            return self._reply(200, {"tokens": [ord(c) for c in body["prompt"]]})
        with self.script.lock:
            self.script.bodies.append(body)
            number = len(self.script.bodies)
            self.script.running += 1
            self.script.most_running = max(self.script.most_running, self.script.running)
        try:
            if self.script.fail_every and number % self.script.fail_every == 0:
                return self._reply(503, {"error": {"message": "too busy"}})
            self._stream(body)
        finally:
            with self.script.lock:
                self.script.running -= 1

    def _reply(self, status: int, content: Any) -> None:
        data = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, body: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        made = body["max_tokens"] - self.script.short_by
        self._event({"choices": [{"text": ""}]})  # some servers open with an empty piece: it is no token
        for i in range(made):
            time.sleep(STEP_S)
            if self.script.error_in_stream and i == 1:
                return self._event({"error": {"message": "engine died"}})
            self._event({"choices": [{"text": "x", "finish_reason": "length" if i == made - 1 else None}]})
        usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": made}
        self._event({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 1}}})
        self.wfile.write(b": a comment\n\ndata: [DONE]\n\n")

    def _event(self, content: Any) -> None:
        self.wfile.write(b"data: " + json.dumps(content).encode() + b"\n\n")
        self.wfile.flush()


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def url(script: Script) -> Iterator[str]:
    handler = type("ScriptedHandler", (Handler,), {"script": script})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def test_load_is_bounded_exact_and_counted(script: Script, url: str) -> None:
    options = ServeBenchOptions(requests=8, concurrency=3, input_tokens=30, output_tokens=5, warmup=2)
    made = serve.run(options, url)
    assert made.errors == {}
    assert made.model == "fake"
    assert len(script.bodies) == 10
    assert 2 <= script.most_running <= 3
    assert {len(body["prompt"]) for body in script.bodies} == {30}
    assert len({tuple(body["prompt"]) for body in script.bodies}) == 10
    asked = script.bodies[0]
    assert (asked["max_tokens"], asked["ignore_eos"], asked["temperature"]) == (5, True, 0.0)
    figures = {name: value for name, value in made.figures.items() if value is not None}
    assert (figures["completed_requests"], figures["failed_requests"], figures["cached_prompt_tokens"]) == (8, 0, 8)
    assert figures["ttft_ms_p10"] >= 1000 * STEP_S
    assert figures["itl_ms_median"] >= 900 * STEP_S
    assert figures["e2e_ms_median"] >= 5000 * STEP_S
    # 8 answers of 5 steps, at most 3 together
    assert figures["duration_s"] >= 8 * 5 * STEP_S / 3
    assert figures["output_tokens_per_s"] == pytest.approx(40 / figures["duration_s"])
    assert not any(name.startswith("predicted") for name in figures)
    assert any("without --url" in note for note in made.notes)


@pytest.mark.parametrize(("rate", "is_predicted"), [(None, True), (50.0, False)])
def test_a_planned_server_is_predicted_unless_arrivals_decide(
    script: Script, url: str, tmp_path: Path, rate: float | None, is_predicted: bool
) -> None:
    engine = EngineOptions(model=ModelOptions(dtype="bfloat16"), gpus=GpuOptions(gpu="none"))
    beside = planned(prepare(str(make_tiny("qwen3-moe", tmp_path)), engine), engine)
    options = ServeBenchOptions(requests=4, rate=rate, input_tokens=16, output_tokens=4, warmup=0, engine=engine)
    made = serve.run(options, url, beside)
    names = [name for name in made.figures if name.startswith("predicted")]
    wanted = [f"predicted_{of}_tokens_per_s" for of in ("output", "decode", "prefill")]
    assert names == (wanted if is_predicted else [])
    assert all((made.figures[name] or 0) > 0 for name in names)
    assert any("--rate" in note for note in made.notes) is not is_predicted


def test_failures_are_counted_by_message(script: Script, url: str) -> None:
    script.fail_every = 3
    made = serve.run(ServeBenchOptions(requests=6, output_tokens=3, input_tokens=8, warmup=0), url)
    assert made.errors == {"/v1/completions answered 503: too busy": 2}
    assert (made.figures["completed_requests"], made.figures["failed_requests"]) == (4, 2)


def test_a_rate_paces_the_requests(script: Script, url: str) -> None:
    options = ServeBenchOptions(requests=6, rate=50.0, concurrency=6, input_tokens=8, output_tokens=2, warmup=0)
    made = serve.run(options, url)
    due = serve.arrival_times(6, 50.0)[-1]
    assert made.figures["duration_s"] == pytest.approx(due + 2 * STEP_S, abs=0.5)
    assert (made.figures["duration_s"] or 0) >= due


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"fail_every": 1}, "answered 503: too busy"),
        ({"short_by": 1}, "generated 3 tokens instead of 4"),
        ({"error_in_stream": True}, "engine died"),
    ],
)
def test_if_every_request_fails_so_does_the_bench(
    script: Script, url: str, change: dict[str, Any], message: str
) -> None:
    for name, value in change.items():
        setattr(script, name, value)
    with pytest.raises(ProaError, match=message):
        serve.run(ServeBenchOptions(requests=2, input_tokens=8, output_tokens=4, warmup=0), url)


def test_latency_over_http(script: Script, url: str) -> None:
    options = LatencyOptions(url=url, prompt_tokens=40, output_tokens=4, runs=3, warmup=1, api_key="sk-1")
    made = latency.run(options)
    assert len(script.bodies) == 4
    assert script.authorization == {"Bearer sk-1"}
    assert script.most_running == 1
    assert made.roof is None
    assert any("roof" in note for note in made.notes)
    assert (made.figures["ttft_ms_median"] or 0) >= 1000 * STEP_S
    assert made.figures["prefill_tokens_per_s"] == pytest.approx(
        40_000 / (made.figures["ttft_ms_median"] or 0), rel=0.5
    )


@pytest.mark.parametrize(("models", "asked", "used"), [(("a",), "demo", "a"), (("a", "b"), "b", "b")])
def test_the_model_is_found_by_name_or_because_it_is_the_only_one(
    script: Script, url: str, models: tuple[str, ...], asked: str, used: str
) -> None:
    script.models = models
    made = serve.run(ServeBenchOptions(model=asked, requests=1, input_tokens=8, output_tokens=2), url + "/v1/")
    assert (made.model, script.bodies[0]["model"]) == (used, used)


def test_several_models_need_a_name(script: Script, url: str) -> None:
    script.models = ("a", "b")
    with pytest.raises(UsageError, match=r"serves a, b.*--model"):
        serve.run(ServeBenchOptions(requests=1), url)


def test_remote_servers_need_allow_remote() -> None:
    with pytest.raises(UsageError, match="--allow-remote"):
        serve.run(ServeBenchOptions(), "http://192.0.2.1:8000")


@pytest.mark.parametrize(
    "address",
    ["localhost:8000", "127.0.0.1:8000", "ftp://localhost", "http:///v1", "http://[::1", "http://localhost:99999",
     "http://localhost:x"],
)  # fmt: skip
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UsageError, match=r"--url is .*such as http://127\.0\.0\.1:8000"):
        serve.run(ServeBenchOptions(), address)


def test_a_missing_key_names_the_option(script: Script, url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    refusal = {"error": {"message": "The API key is missing or wrong."}}
    monkeypatch.setattr(Handler, "do_GET", lambda self: self._reply(401, refusal))
    with pytest.raises(ProaError, match=r"answered 401: The API key is missing or wrong.*--api-key"):
        serve.run(ServeBenchOptions(), url)


def test_no_server_is_one_clear_error() -> None:
    with pytest.raises(ProaError, match="does not answer"):
        serve.run(ServeBenchOptions(), "http://127.0.0.1:1")


@pytest.mark.parametrize(
    ("address", "expected"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://127.8.9.1", True),
        ("http://localhost:1/v1", True),
        ("http://[::1]:8000", True),
        ("http://10.0.0.1", False),
        ("http://localhost.example.com", False),
        ("http://0.0.0.0:8000", False),
        ("nonsense", False),
    ],
)
def test_is_loopback(address: str, expected: bool) -> None:
    assert is_loopback(address) is expected
