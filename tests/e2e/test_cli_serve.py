"""`proa serve` and `proa chat`, run as by a user: real processes, a real engine, a tiny model."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.torch import load_file, save_file

import programs
from e2e.serving import LIMIT_S, children_of, engines_of, serving, wait_for
from engine_forks import EngineForks
from fakes import make_tokenizer
from tiny import make_tiny

ENDING_S = 2.0  # from closing its files to being gone


def proa(*argv: str, text: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(programs.proa(*argv), input=text, capture_output=True, text=True, timeout=LIMIT_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_tiny("qwen3-moe", tmp_path_factory.mktemp("models") / "tiny", vocab_size=512)
    return make_tokenizer(folder, vocab_size=512)


def test_json_report_and_sigterm(folder: Path) -> None:
    with serving(folder, "--context=128") as (process, report):
        assert report["model"]["asked"] == str(folder)
        assert (report["model"]["experts"], report["model"]["experts_per_token"]) == (8, 3)
        assert report["context_tokens"] == 128
        assert {"name": "context", "value": "128", "source": "--context"} in report["options"]
        assert report["ready"]["ops"]
        assert report["roof"]["tokens_per_s"] > 0
        assert all({"name", "asked", "got", "why"} == set(row) for row in report["decisions"])
        assert httpx.get(report["url"] + "/health", trust_env=False).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0


def bound_threads(pid: int) -> list[frozenset[int]]:
    """Return the CPU affinity of each thread of the engine process of `proa serve`."""
    (engine,) = engines_of(pid)
    return [frozenset(os.sched_getaffinity(int(task.name))) for task in Path(f"/proc/{engine}/task").iterdir()]


@pytest.mark.seldom
@pytest.mark.parametrize(
    ("flags", "rows", "bound"),
    [
        ([], {"CPU binding": "core", "power saving": "off", "NUMA memory": "bind"}, True),
        (["--cpu-binding=node", "--power-saving"], {"CPU binding": "node", "power saving": "on"}, False),
        (["--cpu-binding=none", "--numa-memory=interleave"], {"CPU binding": "none"}, False),
    ],
)
def test_workers_follow_cpu_binding(folder: Path, flags: list[str], rows: dict[str, str], bound: bool) -> None:
    mine = frozenset(os.sched_getaffinity(0))
    with serving(folder, "--context=128", "--dtype=bfloat16", "--gpu=none", *flags) as (process, report):
        got = {row["name"]: row["got"] for row in report["decisions"]}
        assert rows.items() <= got.items()
        tried = [row for row in report["ready"]["decisions"] if row["name"] == "threads for decode"]
        assert len(tried) == (1 if len(mine) > 1 else 0)
        singles = [cpus for cpus in bound_threads(process.pid) if len(cpus) == 1]
        if len(mine) > 1:
            assert len(set(singles)) == (len(mine) if bound else 0)


@pytest.mark.seldom
def test_two_engines_take_cpus_of_their_own(folder: Path) -> None:
    """And a number of threads is not tried."""
    flags = ["--context=128", "--dtype=bfloat16", "--gpu=none", "--threads=1"]
    with serving(folder, *flags) as (first, _), serving(folder, *flags) as (second, report):
        assert "decode threads" not in {row["name"] for row in report["ready"]["decisions"]}
        assert report["ready"]["decode_threads"] == 1
        theirs, own = (
            {cpu for cpus in bound_threads(p.pid) if len(cpus) == 1 for cpu in cpus} for p in (first, second)
        )
        (why,) = [row["why"] for row in report["decisions"] if row["name"] == "CPU binding"]
        assert "other Proa engines" in why
        assert theirs != own or "with --threads" in why  # if no CPU is left, the report says so


def test_it_ends_when_stdin_closes(folder: Path) -> None:
    with serving(folder) as (process, report):
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(LIMIT_S) == 0
        with pytest.raises(httpx.TransportError):
            httpx.get(report["url"], trust_env=False)


def test_the_table_for_people(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("port: 0\ncache:\n  context: 64\n")
    with subprocess.Popen(
        programs.proa("serve", str(folder), "--config", str(file)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if "Anthropic" in line:
                break
        process.send_signal(signal.SIGINT)
        out, rest = process.communicate(timeout=LIMIT_S)
    text = "".join(seen)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in rest
    order = (
        "listening on http://127.0.0.1:", "3 of 8 experts per token", "roof", "asked",
        "context = 64 (serve.yaml line 3)", "\nloaded", "\nops", "is ready at", "curl http://127.0.0.1:",
        "OPENAI_BASE_URL",
    )  # fmt: skip
    places = [text.find(part) for part in order]
    assert -1 not in places, text
    assert places == sorted(places)


def test_a_taken_port_is_refused_before_anything_is_loaded(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-c", WATCH, "serve", str(folder), "--port", str(port)],
            capture_output=True, text=True, timeout=LIMIT_S,
        )  # fmt: skip
    assert done.returncode == 4
    assert f"Port {port} on 127.0.0.1 is in use" in done.stderr
    assert [line for line in done.stderr.splitlines() if "WATCHED" in line] == ["WATCHED socket.bind "]
    assert done.stderr.count("\n") == 2


# An audit hook that writes a line to stderr for each import of torch or the HTTP server's libraries, and each port.
WATCH = """
import sys
def watch(event, arguments):
    heavy = event == "import" and arguments[0] in ("torch", "uvicorn", "fastapi", "transformers")
    if heavy or event in ("socket.bind", "socket.connect", "subprocess.Popen"):
        print("WATCHED", event, arguments[0] if heavy else "", file=sys.stderr)
sys.addaudithook(watch)
from proa.cli.main import main
sys.argv = ["proa", *sys.argv[1:]]
sys.exit(main())
"""


def unknown_architecture(folder: Path) -> None:
    change_config(folder, architectures=["MambaForCausalLM"])


def refused_quantisation(folder: Path) -> None:
    change_config(folder, quantization_config={"quant_method": "bitsandbytes"})


def missing_tensor(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")


def cut_off(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])


def change_config(folder: Path, **keys: Any) -> None:
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | keys))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (unknown_architecture, "the architecture 'MambaForCausalLM' is not implemented"),
        (refused_quantisation, "the quantisation 'bitsandbytes' is not implemented"),
        (missing_tensor, "model.norm.weight: not in the checkpoint"),
        (cut_off, "the header describes"),
        (None, "There is no model demoo: no such folder"),
    ],
)
def test_header_errors_are_refused_before_the_port_opens(
    damage: Callable[[Path], None] | None, message: str, folder: Path, tmp_path: Path
) -> None:
    model = "demoo"
    if damage is not None:
        model = str(shutil.copytree(folder, tmp_path / "m"))
        damage(Path(model))
    done = subprocess.run(
        [sys.executable, "-c", WATCH, "serve", model, "--port=0"],
        capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 3
    assert message in done.stderr
    assert (done.stdout, done.stderr.count("\n")) == ("", 1)  # not listening, nothing watched


def test_a_nan_is_refused_by_its_place(folder: Path, tmp_path: Path) -> None:
    model = shutil.copytree(folder, tmp_path / "m")
    tensors = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.experts.5.up_proj.weight"
    tensors[name][3, 7] = float("nan")
    save_file(tensors, model / "model.safetensors")
    done = proa("serve", str(model), "--port=0")
    assert done.returncode == 3
    assert f"{model / 'model.safetensors'}: {name} is nan at [3, 7]. Weights must be finite." in done.stderr


def test_the_audit_hook_sees_a_start(folder: Path) -> None:
    """Checks the audit hook: without this, the test above could not fail."""
    with subprocess.Popen(
        programs.python("-c", WATCH, "serve", str(folder), "--port=0"), stderr=subprocess.PIPE, text=True
    ) as process:  # fmt: skip
        assert process.stderr is not None
        seen = []
        for line in process.stderr:
            seen.append(line)
            if "listening on" in line:
                break
        process.kill()
    # The engine's process imports torch while this one imports its HTTP server and plans.
    steps = ("WATCHED socket.bind", "WATCHED subprocess.Popen", "WATCHED import uvicorn", "listening on")
    order = ["".join(seen).find(text) for text in steps]
    assert -1 not in order
    assert order == sorted(order)


def test_too_little_memory_is_refused_with_numbers(folder: Path) -> None:
    """Before the HTTP server is imported. The engine's process, which has begun by then, ends with the start."""
    mark = f"REFUSED_START={os.getpid()}-{time.monotonic_ns()}"
    name, _, value = mark.partition("=")
    done = subprocess.run(
        [sys.executable, "-c", WATCH, "serve", str(folder), "--port=0", "--ram=1MiB"],
        env={**os.environ, name: value}, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    assert done.returncode == 4
    *watched, message = done.stderr.splitlines()
    assert watched == ["WATCHED socket.bind ", "WATCHED subprocess.Popen "]
    assert "MiB" in message
    assert not with_environ(mark)


def with_environ(mark: str) -> list[str]:
    """Return the ids of processes that have this variable in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_text(errors="replace").split("\0"):
                found.append(path.parent.name)
    return found


def test_a_missing_model_is_refused(tmp_path: Path) -> None:
    done = proa("serve", str(tmp_path / "nothing"), "--port=0")
    assert done.returncode == 3
    assert "Traceback" not in done.stderr


def test_chat_starts_a_server_of_its_own(folder: Path) -> None:
    # A server that is late sends several tokens in one chunk: of 4 all, and one chunk has no speed.
    done = proa("chat", str(folder), "-p", "hello", "--set=max_tokens=400", "--set=temperature=0", "--context=512")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert "tokens/s of at most" in done.stderr


def test_chat_passes_on_why_no_server_could_start(tmp_path: Path) -> None:
    done = proa("chat", str(tmp_path / "nothing"), "-p", "hello", "--context=128")
    assert done.returncode == 3
    assert "see its message above" in done.stderr
    assert "Traceback" not in done.stderr


def test_chat_uses_the_running_server(folder: Path, engine_forks: EngineForks | None) -> None:
    with serving(folder, "--served-model-name=tiny", forks=engine_forks) as (_, report):
        done = proa("chat", "tiny", "-p", "hello", "--set=max_tokens=4", f"--port={report['port']}")
        assert done.returncode == 0, done.stderr
        metrics = httpx.get(report["url"] + "/metrics", trust_env=False).text
    assert 'endpoint="/v1/chat/completions"' in metrics


def test_a_killed_chat_leaves_no_server(folder: Path) -> None:
    with subprocess.Popen(
        programs.proa("chat", str(folder), "-p", "hello", "--set=max_tokens=400", "--context=512"),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, start_new_session=True,
    ) as chat:  # fmt: skip
        assert chat.stderr is not None
        chat.stderr.readline()  # loading has begun
        (child,) = children_of(chat.pid)
        chat.kill()
        chat.wait(LIMIT_S)
        # The server shares this stderr, which is closed when the last process that has it ends.
        os.set_blocking(chat.stderr.fileno(), True)
        chat.stderr.read()
        end = time.monotonic() + ENDING_S
        while Path(f"/proc/{child}").exists() and state_of(child) != "Z":
            assert time.monotonic() < end, "a server that has closed everything lives on"
            time.sleep(0.001)


def test_a_killed_engine_is_replaced_three_times(folder: Path, sampled: bool) -> None:
    """In a sample once; tests/server/test_restart.py counts."""
    body = {"prompt": [5, 6, 7], "max_tokens": 500, "stream": True, "ignore_eos": True}
    with serving(folder) as (server, report), httpx.Client(
        base_url=report["url"], timeout=LIMIT_S, trust_env=False
    ) as client:  # fmt: skip
        for death in range(1 if sampled else 4):
            (engine,) = engines_of(server.pid)
            with client.stream("POST", "/v1/completions", json=body) as answer:
                lines = answer.iter_lines()
                next(lines)
                os.kill(engine, signal.SIGKILL)
                killed_s = time.monotonic()
                rest = "".join(lines)
                assert time.monotonic() - killed_s < 5
                assert '"code":"engine_dead"' in rest
                assert "SIGKILL" in rest
            if death < 3:
                assert client.get("/health").json()["status"] == "restarting"
                wait_for(lambda: client.get("/health").status_code == 200)
        if sampled:
            return
        assert server.wait(LIMIT_S) == 6
        assert server.stderr is not None
        assert "died 4 times within 10 minutes" in server.stderr.read()


@pytest.mark.parametrize("moment", ["loading", "answering"])
def test_a_killed_server_leaves_no_engine(folder: Path, moment: str) -> None:
    command = programs.proa("serve", str(folder), "--port=0", "--json", "--dtype=bfloat16", "--gpu=sim:64MiB")
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as server:
        try:
            assert server.stdout is not None
            url = json.loads(server.stdout.readline())["url"]
            engine = wait_for(lambda: engines_of(server.pid))[0]
            if moment == "answering":
                server.stdout.readline()  # the model is loaded
                body = {
                    "model": str(folder),
                    "prompt": [5, 6, 7],
                    "max_tokens": 500,
                    "stream": True,
                    "ignore_eos": True,
                }
                with httpx.stream(
                    "POST", f"{url}/v1/completions", json=body, timeout=LIMIT_S, trust_env=False
                ) as answer:
                    next(line for line in answer.iter_lines() if line.startswith("data: "))
                    server.kill()
        finally:
            server.kill()
        wait_for(lambda: not Path(f"/proc/{engine}").exists() or state_of(engine) == "Z")


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_a_log_that_nothing_reads_does_not_stop_the_server(folder: Path, engine_forks: EngineForks | None) -> None:
    """Programs that start a server often leave its stderr a pipe without a reader, which holds 64 KiB."""
    with (
        serving(folder, "--gpu=none", forks=engine_forks) as (_, report),
        httpx.Client(base_url=report["url"], timeout=30) as client,
    ):
        for i in range(400):
            assert client.get(f"/nosuch/{i}/{'x' * 1000}").status_code == 404
        assert client.get("/health").status_code == 200
