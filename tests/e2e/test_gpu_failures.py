"""A worker thread or the engine's process dies under load: every request gets an error within 2 s, the server ends."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from e2e.serving import LIMIT_S, engines_of, serving, wait_for
from gpu_llm import GPUS, make_model

CLIENTS = 4
MOST_TOKENS, CONTEXT = 30000, 32768  # answers shall not end before the death
GPU_LAYERS = 32  # three take a GPU so little time that the server is seconds behind it
# A signal that has no other use: Triton's compiler handles SIGUSR1 and others.
END_A_WORKER = signal.SIGRTMIN + 5
# What Python runs first in each of the server's processes: that signal ends a worker of the engine's pool.
SITE = f"""
import signal
import threading
from ctypes import c_void_p

from proa.native.library import library
from proa.native.pool import Pool

made, init = [], Pool.__init__

def remember(self, *args, **kwargs):
    init(self, *args, **kwargs)
    made.append(self)
    if threading.current_thread() is threading.main_thread():  # the pool that measures RAM is made in another
        hooks = library().bind({{"proa_hook_kill_worker": (c_void_p,)}})
        signal.signal({END_A_WORKER}, lambda *_: hooks.proa_hook_kill_worker(self.handle))

Pool.__init__ = remember
"""


class Client(threading.Thread):
    """Reads one streamed answer to its end."""

    def __init__(self, url: str, model: str, number: int) -> None:
        super().__init__()
        self._url, self._body = f"{url}/v1/completions", {
            "model": model, "prompt": [5 + number, 6, 7], "max_tokens": MOST_TOKENS, "stream": True, "ignore_eos": True
        }  # fmt: skip
        self.tokens, self.error, self.ended = 0, "", 0.0

    def run(self) -> None:
        with httpx.stream("POST", self._url, json=self._body, timeout=LIMIT_S, trust_env=False) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    self.error = event["error"]["message"]
                    break
                self.tokens += 1
        self.ended = time.monotonic()


WAYS = ["kernel", *(pytest.param(way, marks=pytest.mark.gpu) for way in ("memops", "callback"))]  # sim: test_ways.py


@pytest.mark.parametrize("doorbell", WAYS)
@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(
    ("number", "says"),
    [(END_A_WORKER, "worker thread of the CPU pool"), (signal.SIGKILL, "SIGKILL")],
    ids=["worker", "process"],
)
def test_death_under_load(
    gpu: str, number: int, says: str, doorbell: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if len(os.sched_getaffinity(0)) < 2:
        pytest.skip("with one CPU there is no worker beside the caller")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"), prepend=os.pathsep)
    layers = 3 if gpu.startswith("sim") else GPU_LAYERS
    folder = make_model(tmp_path / "tiny", max_position_embeddings=CONTEXT, num_hidden_layers=layers)
    flags = (f"--context={CONTEXT}", "--dtype=bfloat16", f"--gpu={gpu}", "--gpu-experts=4", "--served-model-name=tiny",
             f"--doorbell={doorbell}", "--no-restart")  # fmt: skip
    with serving(folder, *flags) as (process, report):
        assert report["gpus"][0]["device"] == ("sim" if gpu.startswith("sim") else "cuda:0")
        (engine,) = engines_of(process.pid)
        clients = [Client(report["url"], "tiny", i) for i in range(CLIENTS)]
        for client in clients:
            client.start()
        wait_for(lambda: all(client.tokens > 3 for client in clients))
        begin = time.monotonic()
        os.kill(engine, number)
        for client in clients:
            client.join(LIMIT_S)
        took_s = max(client.ended for client in clients) - begin
        assert [says in client.error for client in clients] == [True] * CLIENTS, [(c.error, c.tokens) for c in clients]
        assert 0 < took_s < 2
        assert process.wait(LIMIT_S) == 6
        assert process.stderr is not None
        assert says in process.stderr.read()
        assert not Path(f"/proc/{engine}").exists()
