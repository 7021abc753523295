"""OpenAI's and Anthropic's clients against `proa serve demo`: a real model, real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pydantic
import pytest

import programs

anthropic = pytest.importorskip("anthropic")
openai = pytest.importorskip("openai")

pytestmark = pytest.mark.demo

MODEL = "demo"
START_S = 120.0
MALFORMED = (
    b"",
    b"{",
    b"[1]",
    b'{"messages": [{"role": "user", "content": "\xff"}]}',
    b'{"messages": []}',
    b'{"messages": [{"role": "user", "content": "a"}], "max_tokens": -1}',
    b'{"messages": [{"role": "robot", "content": "a"}]}',
    b'{"messages": [{"role": "user", "content": "a"}], "response_format": {"type": "yaml"}}',
    b'{"messages": [{"role": "user", "content": "a"}], "temperature": "hot"}',
    b'{"messages": ' + b"[" * 50_000,
)


@dataclass
class Server:
    """A running `proa serve`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def client(self) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=300)

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def is_idle(self) -> bool:
        """True if no request runs or waits, and every KV page is free or evictable."""
        now = self.metrics()
        is_quiet = now["proa_running_requests"] == now["proa_waiting_requests"] == 0
        return is_quiet and now["proa_kv_pages_free"] + now["proa_kv_pages_cached"] == now["proa_kv_pages"]

    def rss_bytes(self) -> int:
        """Return the resident memory of the server and its child processes, in bytes."""
        page = os.sysconf("SC_PAGE_SIZE")
        return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * page for pid in family_of(self.process.pid))


def family_of(pid: int) -> list[int]:
    """Return `pid` and the ids of its descendants."""
    parents = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parents[int(entry.parent.name)] = int(entry.read_text().rsplit(")", 1)[1].split()[1])
        except (FileNotFoundError, ProcessLookupError):
            continue  # it ended meanwhile
    family = [pid]
    for member in family:
        family.extend(child for child, parent in parents.items() if parent == member)
    return family


@contextmanager
def serve(folder: Path, *options: str) -> Iterator[Server]:
    log = folder / "serve.log"
    command = programs.proa("serve", MODEL, "--port", "0", *options)
    with log.open("wb") as sink, subprocess.Popen(command, stdout=sink, stderr=sink) as process:
        try:
            found = wait_for(lambda: re.search(r"listening on (http://\S+)", log.read_text()), START_S, process)
            server = Server(found[1], process, log)
            wait_for(lambda: httpx.get(f"{server.url}/health").status_code == 200, START_S, process)
            yield server
        finally:
            if process.poll() is None:
                process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()


def wait_for(condition: Callable[[], Any], seconds: float, process: subprocess.Popen[bytes] | None = None) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > end or (process is not None and process.poll() is not None):
            raise AssertionError("it did not happen")
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, sampled: bool) -> Iterator[Server]:
    """A server with a small KV cache, so that one wave of requests fills it and memory stops growing. In a sample it
    has one worker: the tests that share it took 30 s of CPU time so, 40 with two."""
    flags = ("--context", "2048", "--kv-memory", "64MiB", *(["--threads=1"] if sampled else []))
    with serve(tmp_path_factory.mktemp("serve"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with server.client as shared:
        yield shared


def chat(text: str) -> Any:
    return [{"role": "user", "content": text}]


def test_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=chat("What is the capital of France?"), max_tokens=12, temperature=0
    )
    assert "Paris" in (answer.choices[0].message.content or "")
    assert answer.usage is not None
    assert 0 < answer.usage.completion_tokens <= 12


def test_beam_search(server: Server, client: openai.OpenAI) -> None:
    """The answers' scores, computed again from their tokens' logprobs, descend; the first is higher than greedy's."""

    def scores(extra: dict[str, object], n: int) -> list[float]:
        answer = client.completions.create(
            model=MODEL, prompt="The capital of France is", n=n, max_tokens=8, temperature=0, logprobs=0,
            extra_body={"ignore_eos": True, **extra},
        )  # fmt: skip
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8 * n
        assert len({choice.text for choice in answer.choices}) == n
        return [sum(c.logprobs.token_logprobs or []) / 8 for c in answer.choices if c.logprobs is not None]

    found = scores({"use_beam_search": True, "best_of": 8}, 3)
    assert found == sorted(found, reverse=True)
    assert (
        found[0] > scores({}, 1)[0] + 0.1
    )  # a narrower search may lose greedy's answer on the way; with 8 it finds more
    wait_for(server.is_idle, 10)


def wave(client: openai.OpenAI, salt: str) -> None:
    """Run 64 concurrent streams of mixed lengths; assert that each generates exactly the requested number of tokens."""

    def ask(i: int) -> tuple[int, str | None, str]:
        stream = client.chat.completions.create(
            model=MODEL,
            messages=chat(f"{salt} {i}. " + "A boat. " * (i % 3)),
            max_tokens=2 + i % 7,
            temperature=1.0,
            seed=i,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        chunks = list(stream)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        finish = next(c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason)
        assert chunks[-1].usage is not None
        return chunks[-1].usage.completion_tokens, finish, text

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(ask, range(64)))
    assert [(count, finish) for count, finish, _ in answers] == [(2 + i % 7, "length") for i in range(64)]
    assert all(text for _, _, text in answers)


@pytest.mark.seldom
def test_64_streams_lose_nothing_and_memory_stays_flat(server: Server, client: openai.OpenAI) -> None:
    wave(client, "first")
    wait_for(server.is_idle, 10)
    before = server.rss_bytes()
    wave(client, "second")
    wait_for(server.is_idle, 10)
    grown = server.rss_bytes() - before
    assert grown < 64 << 20, f"{grown} bytes more after the second wave"


def test_cancelled_streams_free_their_pages(server: Server, client: openai.OpenAI) -> None:
    generated = server.metrics()["proa_generated_tokens_total"]
    streams = [
        client.chat.completions.create(
            model=MODEL,
            messages=chat(f"Count to a thousand, {i}."),
            max_tokens=1000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for i in range(8)
    ]
    for stream in streams[:4]:
        next(stream)
    for stream in streams:
        stream.close()
    wait_for(server.is_idle, 20)
    assert server.metrics()["proa_generated_tokens_total"] - generated < 8 * 900


def test_n_choices(server: Server, client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=chat("Invent a name for a boat."), n=4, temperature=1.0, seed=1, max_tokens=16
    )
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert len({choice.message.content for choice in answer.choices}) > 1
    wait_for(server.is_idle, 10)


def test_seed_repeats(client: openai.OpenAI) -> None:
    def ask() -> str | None:
        answer = client.chat.completions.create(
            model=MODEL, messages=chat("Invent a word."), temperature=1.0, seed=42, max_tokens=8
        )
        return answer.choices[0].message.content

    ask()  # from here on the prompt comes from the prefix cache
    assert ask() == ask()


def test_prefix_cache_is_reported(client: openai.OpenAI) -> None:
    messages = chat("The history of the proa, at length. " * 8)
    for _ in range(2):
        answer = client.chat.completions.create(model=MODEL, messages=messages, max_tokens=1)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    cached = answer.usage.prompt_tokens_details.cached_tokens
    assert cached is not None
    assert answer.usage.prompt_tokens / 2 < cached < answer.usage.prompt_tokens


def test_logprobs_agree_with_tokens(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL,
        messages=chat("Say hello."),
        temperature=0,
        max_tokens=12,
        logprobs=True,
        top_logprobs=4,
        extra_body={"return_token_ids": True},
    )
    choice = answer.choices[0]
    assert choice.logprobs is not None
    entries = choice.logprobs.content or []
    assert choice.model_extra is not None
    assert len(entries) == len(choice.model_extra["token_ids"])
    assert b"".join(bytes(entry.bytes or []) for entry in entries).decode() == choice.message.content
    for entry in entries:
        best = [top.logprob for top in entry.top_logprobs]
        assert best == sorted(best, reverse=True)
        assert entry.logprob == best[0]  # greedy takes the most likely
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob <= 0


def test_echo_scores_the_prompt(client: openai.OpenAI) -> None:
    text = "The capital of France is Paris 🦊."
    answer = client.completions.create(model=MODEL, prompt=text, echo=True, logprobs=1, max_tokens=0)
    choice = answer.choices[0]
    assert choice.text == text
    assert choice.logprobs is not None
    scores = choice.logprobs.token_logprobs or []
    assert all(score <= 0 for score in scores[1:])
    paris = (choice.logprobs.tokens or []).index(" Paris")
    assert scores[paris] > -3  # the model knows the text


def test_stop_string_over_tokens(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "Monday, Tuesday,", "temperature": 0, "max_tokens": 24}
    text = client.completions.create(**ask).choices[0].text
    stop = text[3:9]  # begins and ends inside words
    for stream in (False, True):
        answer = client.completions.create(**ask, stop=[stop], stream=stream)
        pieces = list(answer) if stream else [answer]
        assert "".join(p.choices[0].text for p in pieces) == text[: text.index(stop)]
        assert pieces[-1].choices[0].finish_reason == "stop"


def test_emoji_pass_whole(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model=MODEL, prompt="🦊🐻🦊🐻🦊🐻🦊🐻🦊", temperature=0, max_tokens=40, stream=True
    )
    pieces = [chunk.choices[0].text for chunk in stream]
    text = "".join(pieces)
    assert any(ord(c) > 0xFFFF for c in text)  # which emoji is a near-tie that depends on the CPU's rounding
    assert "\ufffd" not in text.rstrip("\ufffd")  # the limit may cut the last character


def test_logit_bias_forces_a_token(server: Server, client: openai.OpenAI) -> None:
    (token,) = httpx.post(f"{server.url}/tokenize", json={"prompt": " boat", "add_special_tokens": False}).json()[
        "tokens"
    ]
    answer = client.completions.create(
        model=MODEL, prompt="x", temperature=0, max_tokens=3, logit_bias={str(token): 100}
    )
    assert answer.choices[0].text == " boat boat boat"


@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_malformed_bodies(server: Server, number: int) -> None:
    response = httpx.post(
        f"{server.url}/v1/chat/completions",
        content=MALFORMED[number],
        headers={"content-type": "application/json"},
    )
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=20)
    age: int = pydantic.Field(ge=0, le=150)


def test_structured_output(client: openai.OpenAI) -> None:
    """OpenAI's helper for pydantic models, plain and streamed, greedy and random; other servers' fields."""
    asked: dict[str, Any] = {"model": MODEL, "messages": chat("Describe a person."), "max_tokens": 120}
    for wishes in ({"temperature": 0}, {"temperature": 1.2, "seed": 1}):
        answer = client.chat.completions.parse(**asked, **wishes, response_format=Person)
        assert isinstance(answer.choices[0].message.parsed, Person)
        assert answer.choices[0].finish_reason == "stop"
    with client.chat.completions.stream(**asked, response_format=Person) as stream:
        assert isinstance(stream.get_final_completion().choices[0].message.parsed, Person)
    extra: dict[str, Any]
    for extra, pattern in (
        ({"guided_choice": ["red", "green"]}, "red|green"),
        ({"structured_outputs": {"regex": r"\d{4}-\d\d"}}, r"[0-9]{4}-[0-9]{2}"),
        ({"grammar": 'root ::= "is " [a-z] [a-z]? "."'}, r"is [a-z]{1,2}\."),
    ):
        text = client.completions.create(model=MODEL, prompt="The colour", n=2, temperature=1, extra_body=extra)
        assert all(re.fullmatch(pattern, choice.text) for choice in text.choices)
    cut = client.chat.completions.create(
        **{**asked, "max_tokens": 4}, extra_body={"guided_json": {"type": "array", "minItems": 9}}
    )
    assert cut.choices[0].finish_reason == "length"
    with pytest.raises(openai.BadRequestError, match=r"schema\.properties\.a\.uniqueItems"):
        client.chat.completions.create(**asked, response_format={"type": "json_schema", "json_schema": {
            "name": "n", "schema": {"properties": {"a": {"type": "array", "uniqueItems": True}}}}})  # fmt: skip


def test_anthropic_client(server: Server) -> None:
    ask: dict[str, Any] = {"model": MODEL, "system": "Be brief.", "extra_body": {"temperature": 0}}
    question = chat("What is the capital of France? One word.")
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0, timeout=300) as client:
        answer = client.messages.create(messages=question, max_tokens=12, **ask)
        with client.messages.stream(messages=question, max_tokens=12, **ask) as stream:
            streamed = stream.get_final_message()
        begun = [*question, {"role": "assistant", "content": "The capital of France is"}]
        goes_on = client.messages.create(messages=begun, max_tokens=1, **ask)
        count = client.messages.count_tokens(model=MODEL, system="Be brief.", messages=question).input_tokens
    text = answer.model_dump()["content"][0]["text"]
    assert "Paris" in text
    assert streamed.model_dump()["content"][0]["text"] == text
    assert goes_on.model_dump()["content"][0]["text"] == " Paris"
    assert goes_on.stop_reason == "max_tokens"
    assert answer.usage.input_tokens + (answer.usage.cache_read_input_tokens or 0) == count
    wait_for(server.is_idle, 10)


def test_prompt_longer_than_the_context(server: Server, client: openai.OpenAI) -> None:
    context = int(server.metrics()["proa_context_tokens"])
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=MODEL, prompt=[100] * (context + 1))
    assert caught.value.code == "context_length_exceeded"
    assert str(context) in caught.value.message


def test_health_generates(server: Server) -> None:
    assert httpx.get(f"{server.url}/health/generate", timeout=40).json() == {"status": "ready"}


def test_everything_is_free_in_the_end(server: Server) -> None:
    wait_for(server.is_idle, 10)
    assert server.process.poll() is None


def test_sigterm_lets_the_answer_finish(tmp_path: Path) -> None:
    with serve(tmp_path) as server, server.client as client:
        stream = client.completions.create(
            model=MODEL, prompt="A", max_tokens=60, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        server.process.send_signal(signal.SIGTERM)
        assert list(stream)[-1].choices[0].finish_reason == "length"
        assert server.process.wait(30) == 0


def test_a_killed_engine_is_told_and_ends_the_server(tmp_path: Path) -> None:
    with serve(tmp_path, "--no-restart") as server, server.client as client:
        stream = client.completions.create(
            model=MODEL, prompt="A", max_tokens=2000, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        for child in family_of(server.process.pid)[1:]:
            os.kill(child, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="engine"):
            list(stream)
        assert server.process.wait(30) == 6
        assert "SIGKILL" in server.log.read_text()
