"""A server that is killed and started again restores the prefix cache from its files."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

from serving import serving, wait_for

from fakes import make_tokenizer
from tiny import make_tiny

PROMPT = [(7 * i * i + 3) % 97 + 1 for i in range(1100)]
WHOLE_RUNS = 4  # of 256 tokens


def post(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    data = json.dumps(body).encode()
    asked = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def ask(url: str) -> dict[str, Any]:
    body = {"prompt": PROMPT, "max_tokens": 5, "temperature": 0, "logprobs": 3}
    return post(url, "/v1/completions", body)


def metric(url: str, name: str) -> float:
    with urllib.request.urlopen(f"{url}/metrics", timeout=60) as response:
        text = response.read().decode()
    return next(float(line.split()[1]) for line in text.splitlines() if line.startswith(name + " "))


def cached(answer: dict[str, Any]) -> int:
    tokens: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_a_killed_server_restores_what_it_had_computed(tmp_path: Path) -> None:
    tiny = make_tiny("qwen3-moe", tmp_path / "model", vocab_size=512, max_position_embeddings=2048)
    model = make_tokenizer(tiny, vocab_size=512)
    folder = tmp_path / "cache"
    files = (f"--prefix-cache-dir={folder}", "--prefix-cache-disk=1GiB")
    options = ("--gpu=none", "--dtype=bfloat16", "--threads=2", "--deterministic", *files)
    with serving(model, *options) as (process, report):
        computed = ask(report["url"])
        wait_for(lambda: len(list(folder.glob("*.kv"))) == WHOLE_RUNS)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    with serving(model, *options) as (process, report):
        restored = ask(report["url"])
        assert metric(report["url"], "proa_prefix_file_restored_pages_total") == WHOLE_RUNS * 16
        os.kill(process.pid, signal.SIGTERM)
        process.wait(30)
    assert cached(computed) == 0
    assert cached(restored) == WHOLE_RUNS * 256
    assert restored["choices"] == computed["choices"]
