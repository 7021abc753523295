"""A server's life: port, loading, draining, signals, exit code."""

from __future__ import annotations

import asyncio
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from starlette.types import Message

import programs
from fakes import FakeEngine, Reply
from proa.cli.serve import EPILOG
from proa.config.env import read_env
from proa.config.options import ServerOptions
from proa.engine.stats import SchedulerStats, Stats
from proa.errors import EngineDead, ResourceError, UsageError, WeightsError
from proa.server import sse, status
from proa.server.listen import bind, url_of
from proa.server.welcome import welcome
from proa.text.tokenizer import Tokenizer
from served import MODEL, Served, make_service

openai = pytest.importorskip("openai")

USER = [{"role": "user", "content": "Hi"}]
BODY = {"messages": USER}


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    return condition()


def test_loading_then_ready(tokenizer: Tokenizer) -> None:
    gate, engine = threading.Event(), FakeEngine(Reply(tokenizer.encode("Hello")), state="loading")
    with Served(tokenizer, engine=engine, launch_gate=gate) as served:
        assert served.announced == [] or served.announced == [f"listening on {served.url}"]

        def health() -> httpx.Response:
            return httpx.get(f"{served.url}/health")

        assert wait_for(lambda: health().json().get("phase") == "downloading")
        assert health().status_code == 503
        assert health().json()["percent"] == 25.0
        refused = httpx.post(f"{served.url}/v1/chat/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
        assert int(refused.headers["retry-after"]) > 0
        assert httpx.post(f"{served.url}/tokenize", json={"prompt": "a"}).status_code == 503
        assert httpx.get(f"{served.url}/health/generate").status_code == 503
        assert "proa_ready 0.0" in httpx.get(f"{served.url}/metrics").text
        gate.set()
        assert wait_for(lambda: health().json().get("phase") == "reading weights")
        assert health().json() == {"status": "loading", "phase": "reading weights", "percent": 25.0, "eta_s": 7.5}
        assert httpx.post(f"{served.url}/tokenize", json={"prompt": "a"}).status_code == 200
        refused = httpx.post(f"{served.url}/v1/chat/completions", json=BODY)
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "8")
        served.call(engine.become_ready)
        assert wait_for(lambda: health().status_code == 200)
        assert health().json() == {"status": "ready", "model": MODEL}
        assert httpx.get(f"{served.url}/health/generate").json() == {"status": "ready"}
        assert httpx.post(f"{served.url}/v1/chat/completions", json=BODY).status_code == 200
        assert wait_for(lambda: len(served.announced) == 2)
        assert served.announced[0] == f"listening on {served.url}"
        assert f"curl {served.url}/v1/chat/completions" in served.announced[1]
    assert served.exit.result() == 0
    assert engine.closed


def test_metrics_after_load(tokenizer: Tokenizer) -> None:
    with Served(tokenizer, Reply(tokenizer.encode("Hello world"))) as served:
        served.client.chat.completions.create(model=MODEL, messages=USER)
        httpx.get(f"{served.url}/no/such/path")
        text = httpx.get(f"{served.url}/metrics").text
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert lines["proa_kv_pages"] == lines["proa_kv_pages_free"] == "64.0"
    assert lines['proa_requests_total{endpoint="/v1/chat/completions",outcome="ok"}'] == "1.0"
    assert lines['proa_requests_total{endpoint="other",outcome="refused"}'] == "1.0"
    assert lines["proa_time_to_first_token_seconds_count"] == "1.0"
    assert lines["proa_roof_tokens_per_second"] == "10000.0"
    assert lines["proa_ready"] == "1.0"


def test_loading_that_fails_ends_the_server(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(state="loading")
    with Served(tokenizer, engine=engine) as served:
        served.call(lambda: engine.die(WeightsError("model.safetensors is truncated.", "Fetch it again.")))
        with pytest.raises(WeightsError, match="truncated"):
            served.exit.result(10)
    assert engine.closed


def test_engine_death_fails_running_requests_and_ends_the_server(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(Reply(tokenizer.encode("word " * 400), delay_s=0.01))
    with Served(tokenizer, engine=engine) as served, ThreadPoolExecutor(1) as pool:
        stream = served.client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        plain = pool.submit(served.client.chat.completions.create, model=MODEL, messages=USER)
        next(stream)
        assert wait_for(lambda: len(engine.in_flight) == 2)
        served.call(engine.die)
        with pytest.raises(openai.APIError, match="engine process died"):
            list(stream)
        with pytest.raises(openai.InternalServerError) as caught:
            plain.result(10)
        assert caught.value.status_code == 503
        assert caught.value.code == "engine_dead"
        with pytest.raises(EngineDead):
            served.exit.result(10)


def test_health_reports_engine_death(tokenizer: Tokenizer) -> None:
    service = make_service(tokenizer, FakeEngine(state="failed", failure=EngineDead("It was killed.", "Restart.")))
    response = status.health(service)
    assert response.status_code == 503
    assert b'"failed"' in response.body
    assert b"It was killed." in response.body


def test_drain_lets_running_requests_finish(tokenizer: Tokenizer) -> None:
    reply = Reply(tokenizer.encode("word " * 20), delay_s=0.02)
    with Served(tokenizer, reply) as served:
        stream = served.client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        first = next(stream)
        served.loop.call_soon_threadsafe(served.shutdown.request)
        assert wait_for(lambda: httpx.get(f"{served.url}/health").json()["status"] == "draining")
        refused = httpx.post(f"{served.url}/v1/chat/completions", json=BODY)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
        assert int(refused.headers["retry-after"]) > 0
        rest = list(stream)
        assert "".join(c.choices[0].delta.content or "" for c in (first, *rest)) == "word " * 20
        assert served.exit.result(10) == 0


@pytest.mark.parametrize("stream", [False, True])
def test_drain_aborts_requests_after_the_timeout(tokenizer: Tokenizer, stream: bool) -> None:
    reply = Reply(tokenizer.encode("word " * 2000), delay_s=0.02)
    with Served(tokenizer, reply, drain_seconds=0.2) as served, ThreadPoolExecutor(1) as pool:

        def ask() -> None:
            answer = served.client.chat.completions.create(model=MODEL, messages=USER, stream=stream)
            for _ in answer if stream else ():
                pass

        asked = pool.submit(ask)
        assert wait_for(lambda: len(served.engine.in_flight) == 1)
        served.loop.call_soon_threadsafe(served.shutdown.request)
        with pytest.raises(openai.APIError, match="before this answer was complete") as caught:
            asked.result(10)
        assert caught.value.code == "shutting_down"
        assert served.exit.result(10) == 0
        assert served.engine.closed


def test_second_signal_exits_at_once(tokenizer: Tokenizer) -> None:
    with Served(tokenizer, Reply(tokenizer.encode("word " * 2000), delay_s=0.05)) as served:
        stream = served.client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        next(stream)
        began = time.monotonic()
        served.loop.call_soon_threadsafe(served.shutdown.request)
        served.loop.call_soon_threadsafe(served.shutdown.request)
        assert served.exit.result(10) == 1
        assert time.monotonic() - began < 3
        stream.close()


def test_stop_while_loading(tokenizer: Tokenizer) -> None:
    engine = FakeEngine(state="loading")
    with Served(tokenizer, engine=engine) as served:
        assert wait_for(lambda: httpx.get(f"{served.url}/health").json().get("phase") == "reading weights")
        served.loop.call_soon_threadsafe(served.shutdown.request)
        assert served.exit.result(10) == 0
    assert engine.closed


def test_port_in_use() -> None:
    with bind("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(ResourceError) as caught:
            bind("127.0.0.1", port)
    assert str(port) in caught.value.message
    assert "--port" in caught.value.remedy


@pytest.mark.parametrize("host", ["no.such.host.invalid", "192.0.2.1"])
def test_bind_refuses_a_foreign_address(host: str) -> None:
    with pytest.raises(UsageError, match="--host"):
        bind(host, 0)


@pytest.mark.parametrize(("host", "start"), [("0.0.0.0", "http://127.0.0.1:"), ("localhost", "http://127.0.0.1:")])
def test_url(host: str, start: str) -> None:
    with bind(host, 0) as listener:
        if listener.family == socket.AF_INET:
            assert url_of(listener).startswith(start)
        else:
            assert url_of(listener).startswith("http://[::1]:")


def test_welcome_never_shows_the_key() -> None:
    text = welcome("http://127.0.0.1:8000", "demo", ServerOptions(api_key=("hunter2",)))
    assert "hunter2" not in text
    assert "Bearer $API_KEY" in text
    assert "OPENAI_BASE_URL=http://127.0.0.1:8000/v1" in text
    assert "ANTHROPIC_BASE_URL=http://127.0.0.1:8000 ANTHROPIC_API_KEY=$API_KEY" in text
    assert "proa launch claude demo --api-key $API_KEY " in text
    assert "--api-key" in welcome("http://127.0.0.1:8000", "demo", ServerOptions(host="0.0.0.0"))
    read_env(dict.fromkeys(re.findall(r"\$(\w+)", text), "x"))  # Proa refuses unknown PROA_ variables


@pytest.mark.parametrize(
    ("url", "flags"),
    [
        ("http://127.0.0.1:8000", ""),
        ("http://10.0.0.5:8000", " --host 10.0.0.5"),
        ("http://[::1]:9000", " --host ::1 --port 9000"),
    ],
)
def test_the_welcome_s_launch_command_finds_this_server(url: str, flags: str) -> None:
    assert f"proa launch claude demo{flags}    (" in welcome(url, "demo", ServerOptions())
    assert f"proa launch claude 'my model'{flags}    (" in welcome(url, "my model", ServerOptions())


def test_the_welcome_offers_no_agent_over_tls() -> None:
    text = welcome("https://127.0.0.1:8000", "demo", ServerOptions(ssl_certfile="cert.pem", ssl_keyfile="key.pem"))
    assert "OPENAI_BASE_URL=https://127.0.0.1:8000/v1" in text
    assert "proa launch" not in text


def test_welcome_names_the_protocols_and_agents() -> None:
    text = welcome("http://127.0.0.1:9000", "demo", ServerOptions())
    for line in (
        "export OPENAI_BASE_URL=http://127.0.0.1:9000/v1 OPENAI_API_KEY=none",
        "export ANTHROPIC_BASE_URL=http://127.0.0.1:9000 ANTHROPIC_API_KEY=none",
        "export OLLAMA_HOST=http://127.0.0.1:9000",
        "proa launch claude demo --port 9000    (or codex, opencode)",
    ):
        assert line in text
    for word in ("/v1/messages", "/v1/responses", "Ollama", "tool calls", "proa launch"):
        assert word in EPILOG


@pytest.mark.parametrize("others_advance", [False, True])
def test_health_generate_times_out(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch, others_advance: bool) -> None:
    monkeypatch.setattr(status, "GENERATE_TIMEOUT_S", 0.2)
    engine = FakeEngine(Reply(tokenizer.encode("x"), delay_s=5))
    with Served(tokenizer, engine=engine) as served:
        if others_advance:
            served.loop.call_soon_threadsafe(_keep_advancing, served.loop, engine)
        response = httpx.get(f"{served.url}/health/generate")
        assert response.status_code == (200 if others_advance else 503)
        assert response.json()["status"] == ("busy" if others_advance else "failed")
        assert len(engine.aborted) == 1


def _keep_advancing(loop: asyncio.AbstractEventLoop, engine: FakeEngine) -> None:
    """Increase the engine's token counter every 20 ms, so that it advances during the probe."""
    engine.stats = Stats(SchedulerStats(generated_tokens=engine.stats.scheduler.generated_tokens + 1))
    loop.call_later(0.02, _keep_advancing, loop, engine)


def test_keep_alive_comments(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.1)
    monkeypatch.setattr(sse, "FIRST_OBJECT_S", 0.05)
    with Served(tokenizer, Reply(tokenizer.encode("x"), delay_s=0.5)) as served:
        text = httpx.post(f"{served.url}/v1/chat/completions", json={**BODY, "stream": True}).text
        assert 2 <= text.split('"role"')[0].count(": working\n\n") <= 5
        stream = served.client.chat.completions.create(model=MODEL, messages=USER, stream=True)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == "x"


@pytest.mark.parametrize(("stalls_at", "sent"), [("http.response.start", 1), ("http.response.body", 2)])
def test_a_reader_that_stalls_gets_one_keep_alive_at_a_time(
    monkeypatch: pytest.MonkeyPatch, stalls_at: str, sent: int
) -> None:
    monkeypatch.setattr(sse, "KEEP_ALIVE_S", 0.01)
    monkeypatch.setattr(sse, "FIRST_OBJECT_S", 0.01)
    begun = 0

    async def send(message: Message) -> None:
        nonlocal begun
        begun += 1
        if message["type"] == stalls_at:
            await asyncio.Event().wait()

    async def run() -> None:
        body = sse._Body(send, {"type": "http.response.start"}, b": working\n\n")
        await asyncio.sleep(0.2)
        await body.end()
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
    assert begun == sent


def test_a_head_that_is_being_sent_comes_before_the_body_and_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow reader delays the head that a timer sends, and the only object comes meanwhile."""
    monkeypatch.setattr(sse, "FIRST_OBJECT_S", 0.01)
    arrived = list[str]()

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            await asyncio.sleep(0.1)
        arrived.append(message["type"])

    async def objects() -> AsyncGenerator[str, None]:
        await asyncio.sleep(0.05)
        yield "only"

    asyncio.run(sse.send_events(objects(), sse.PLAIN_FRAMES, str, {}, send))
    assert arrived == ["http.response.start", "http.response.body", "http.response.body"]


SCRIPT = """
import asyncio, sys
from pathlib import Path
from fakes import FakeEngine, Reply, make_plan
from proa.config.options import ServerOptions
from proa.llm import AsyncLLM
from proa.server.listen import bind
from proa.server.run import Shutdown, serve_on
from proa.text.tokenizer import Tokenizer

tokenizer = Tokenizer.load(Path(sys.argv[1]))

async def launch(progress):
    return AsyncLLM(make_plan(), FakeEngine(Reply([5] * 4000, delay_s=0.05)), tokenizer)

def announce(text):
    sys.stderr.write(text + "\\n")
    sys.stderr.flush()

options = ServerOptions(drain_seconds=float(sys.argv[2]))
sys.exit(asyncio.run(serve_on(bind("127.0.0.1", 0), launch, "fake", options, announce, Shutdown())))
"""


@pytest.mark.parametrize(("signals", "code"), [((signal.SIGTERM,), 0), ((signal.SIGINT, signal.SIGTERM), 1)])
def test_signals(tmp_path: Path, signals: tuple[signal.Signals, ...], code: int) -> None:
    from fakes import make_tokenizer

    folder = make_tokenizer(tmp_path / "t")
    drain_s = "0.3" if len(signals) == 1 else "60"
    command = programs.python("-c", SCRIPT, str(folder), drain_s)
    environment = {"PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            url = process.stderr.readline().removeprefix("listening on ").strip()
            assert wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
            with httpx.stream("POST", f"{url}/v1/chat/completions", json={**BODY, "stream": True}) as stream:
                lines = stream.iter_lines()
                next(lines)
                for number in signals:
                    process.send_signal(number)
                    time.sleep(0.1)
                if len(signals) == 1:
                    rest = "\n".join(lines)
                    assert '"code":"shutting_down"' in rest
            assert process.wait(10) == code
            errors = process.stderr.read()
            assert "Traceback" not in errors, errors
        finally:
            process.kill()


CLOSES_SLOWLY = """
class Slow(FakeEngine):
    async def close(self):
        sys.stderr.write("closing\\n")
        sys.stderr.flush()
        await asyncio.sleep(60)

FakeEngine = Slow
"""


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_second_signal_while_the_engine_stops(tmp_path: Path, second: signal.Signals) -> None:
    from fakes import make_tokenizer

    script = SCRIPT.replace("tokenizer = ", CLOSES_SLOWLY + "tokenizer = ", 1)
    command = programs.python("-c", script, str(make_tokenizer(tmp_path / "t")), "60")
    environment = {"PYTHONPATH": ":".join(sys.path)}
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stderr is not None
            url = process.stderr.readline().removeprefix("listening on ").strip()
            assert wait_for(lambda: httpx.get(f"{url}/health").status_code == 200)
            process.send_signal(signal.SIGTERM)
            while process.stderr.readline().strip() != "closing":
                pass
            process.send_signal(second)
            assert process.wait(5) == 1
            assert "Traceback" not in process.stderr.read()
        finally:
            process.kill()


def test_drain_does_not_wait_for_stalled_uploads(tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture) -> None:
    head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    head += b"content-length: 1000\r\n\r\n{"
    with Served(tokenizer, drain_seconds=60) as served:
        assert wait_for(lambda: httpx.get(f"{served.url}/health").status_code == 200)
        host, port = served.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=10) as upload:
            upload.sendall(head)
            time.sleep(0.2)
            began = time.monotonic()
            served.loop.call_soon_threadsafe(served.shutdown.request)
            answer = upload.makefile("rb").read()
            assert served.exit.result(10) == 0
        assert time.monotonic() - began < 5
    assert answer.startswith(b"HTTP/1.1 503")
    assert b'"shutting_down"' in answer
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_server_leaves_no_task_behind(tokenizer: Tokenizer) -> None:
    left: list[int] = []
    with Served(tokenizer, Reply(tokenizer.encode("Hello"))) as served:
        served.client.chat.completions.create(model=MODEL, messages=USER, n=3)
        before = served.call(lambda: len(asyncio.all_tasks()))
        for _ in range(20):
            stream = served.client.chat.completions.create(model=MODEL, messages=USER, n=3, stream=True)
            next(stream)
            stream.close()
        assert wait_for(lambda: not served.engine.in_flight)
        assert wait_for(lambda: served.call(lambda: len(asyncio.all_tasks())) <= before + 1)
        left.append(served.call(lambda: len(asyncio.all_tasks())))
    assert left
