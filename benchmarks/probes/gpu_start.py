"""What a start with a GPU costs, cold and warm: seconds to ready by stage, kernels compiled before and after, and how
long a request waited for one. Needs a GPU, the native library and no network; takes about two minutes.

Serves a model of the demo's shapes with random weights by `proa serve`, each cold start with a cache folder of its own,
and asks it for prompts of many kinds, one by one and at once: first right after it is ready, then again.

Run: PYTHONPATH=src python benchmarks/probes/gpu_start.py [--gpu 0] [--cases all,hybrid,warm]
Prints a line a start and its stages; aims: ready cold in 10 s and warm in 6 s, no request waits 0.2 s for a kernel.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from proa.config.bytecode import bytecode_environ

READY_S, REQUEST_S = 120.0, 60.0
TAIL = 25  # lines of a server's log that are shown where it fails
CONFIG = {
    "architectures": ["Qwen2MoeForCausalLM"], "model_type": "qwen2_moe", "torch_dtype": "bfloat16",
    "vocab_size": 49152, "hidden_size": 576, "num_hidden_layers": 30, "num_attention_heads": 9,
    "num_key_value_heads": 3, "intermediate_size": 1536, "shared_expert_intermediate_size": 768,
    "moe_intermediate_size": 48, "num_experts": 16, "num_experts_per_tok": 12, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "qkv_bias": False, "hidden_act": "silu", "rms_norm_eps": 1e-05,
    "rope_theta": 100000.0, "rope_scaling": None, "use_sliding_window": False, "max_position_embeddings": 8192,
    "tie_word_embeddings": True, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 2,
}  # fmt: skip
IMPORTS = ("sys", "torch", "triton.language", "proa.cli.start", "proa.engine.processes.loop", "proa.engine.building.gpu")
# Words of the prompt, and what else is asked.
PROMPTS: tuple[tuple[int, dict[str, Any]], ...] = (
    (1, {"temperature": 0}), (5, {"temperature": 0}), (17, {"temperature": 0.8, "seed": 1}),
    (40, {"temperature": 0.8, "top_p": 0.9, "seed": 2}), (100, {"temperature": 0, "logprobs": 3}),
    (200, {"temperature": 0.7, "top_k": 40, "frequency_penalty": 0.5, "seed": 3}), (333, {"temperature": 0}),
    (700, {"temperature": 0}), (1500, {"temperature": 1.0, "seed": 4}), (2500, {"temperature": 0}),
)  # fmt: skip
AT_ONCE = (2, 3, 4, 7, 8)


def model_folder(folder: Path) -> Path:
    """A config, and a tokenizer that has a token for every byte."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    vocab = {token: i for i, token in enumerate(["<pad>", "<s>", "</s>", *pre_tokenizers.ByteLevel.alphabet()])}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return folder


@dataclass
class Server:
    """A start. Seconds since it was asked for; `lines` of its log with theirs."""

    process: subprocess.Popen[str]
    begin: float
    reports: list[tuple[float, dict[str, Any]]] = field(default_factory=list)
    lines: list[tuple[float, str]] = field(default_factory=list)

    def read(self) -> None:
        def out() -> None:
            assert self.process.stdout is not None
            for line in self.process.stdout:
                self.reports.append((time.monotonic() - self.begin, json.loads(line)))

        def err() -> None:
            assert self.process.stderr is not None
            for line in self.process.stderr:
                self.lines.append((time.monotonic() - self.begin, line.rstrip()))

        for target in (out, err):
            threading.Thread(target=target, daemon=True).start()

    def wait_ready(self) -> None:
        while len(self.reports) < 2:
            if self.process.poll() is not None or time.monotonic() - self.begin > READY_S:
                time.sleep(0.5)
                raise RuntimeError(f"not ready; exit code {self.process.poll()}")
            time.sleep(0.005)

    @property
    def model(self) -> str:
        """The name under which the server has its model; any other one is refused."""
        with urllib.request.urlopen(self.reports[0][1]["url"] + "/v1/models", timeout=REQUEST_S) as answer:
            name: str = json.loads(answer.read())["data"][0]["id"]
        return name

    def ask(self, words: int, **asked: Any) -> float:
        """Seconds until the whole answer was there."""
        text = " ".join(f"w{i % 97}" for i in range(words))[: 3 * words]
        body = {"model": self.model, "prompt": text, "max_tokens": 12, "ignore_eos": True, **asked}
        url = self.reports[0][1]["url"] + "/v1/completions"
        request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
        begin = time.monotonic()
        with urllib.request.urlopen(request, timeout=REQUEST_S) as answer:
            answer.read()
        return time.monotonic() - begin


@contextmanager
def serving(folder: Path, cache: Path, options: Sequence[str]) -> Iterator[Server]:
    command = [sys.executable, "-m", "proa.cli.main", "serve", str(folder), "--load-format", "dummy", "--json"]
    command += ["--port", "0", "--context", "8192", *options]
    begin = time.monotonic()
    process = subprocess.Popen(
        command, env=os.environ | {"PROA_CACHE": str(cache)}, text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    server = Server(process, begin)
    server.read()
    try:
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
            print("  !! the server did not end within 15 s of SIGTERM", flush=True)


def cubins(cache: Path) -> int:
    return len(list(cache.glob("triton/*/*/*.cubin")))


def prompts(server: Server) -> tuple[list[float], list[float]]:
    """Seconds of each prompt alone, and of the slowest of each number at once."""
    alone = [server.ask(words, **asked) for words, asked in PROMPTS]
    together = []
    for count in AT_ONCE:
        took: list[float] = []
        asking = [threading.Thread(target=lambda: took.append(server.ask(9, temperature=0))) for _ in range(count)]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join()
        together.append(max(took, default=float("nan")))
    return alone, together


def shown(seconds: Sequence[float]) -> str:
    return " ".join(f"{s:.2f}" for s in seconds)


def start(name: str, folder: Path, cache: Path, options: Sequence[str], *, ask: bool = True) -> None:
    before = cubins(cache)
    with serving(folder, cache, options) as server:
        try:
            server.wait_ready()
            report(name, server, before, cubins(cache))
            if ask:
                compiled = cubins(cache)
                first, again = prompts(server), prompts(server)
                print(f"  first prompts {shown(first[0])} s; {AT_ONCE} at once {shown(first[1])} s")
                print(f"  again         {shown(again[0])} s; {AT_ONCE} at once {shown(again[1])} s")
                late = [line for _, line in server.lines if "was not ready" in line]
                print(f"  kernels compiled after ready {cubins(cache) - compiled}; steps that waited {len(late)}")
                for line in late[:8]:
                    print(f"    {line[:160]}")
        except Exception as error:  # noqa: BLE001 - the next case goes on
            print(f"{name}: {type(error).__name__}: {error}")
            print("\n".join(f"    {at:6.2f} {line[:180]}" for at, line in server.lines[-TAIL:]))
    sys.stdout.flush()


def report(name: str, server: Server, before: int, after: int) -> None:
    (planned, _), (loaded, told) = server.reports[:2]
    ready = told["ready"]
    timeline = ready["timeline"]
    begun = loaded - timeline["ready"]
    print(f"{name}: ready {loaded:.2f} s; planned {planned:.2f}, engine begun about {begun:.2f}")
    last, stages = 0.0, []
    for stage, at in timeline.items():
        stages.append(f"{stage} {at - last:.2f}")
        last = at
    print(f"  engine by stage: {', '.join(stages)}; kernels compiled before ready {after - before}, kept {before}")
    rows = {row["name"]: row for row in ready["decisions"]}
    for row in ("GPU kernels", "first steps", "doorbell", "pinned RAM", "co-fetch"):
        if row in rows:
            print(f"  {row}: {rows[row]['got']}: {rows[row]['why'][:200]}")
    for at, line in server.lines:
        if "not compile" in line or "Traceback" in line or "Error" in line:
            print(f"    {at:6.2f} {line[:180]}")


def imports(cache: Path) -> None:
    env = os.environ | bytecode_environ(cache)  # as the servers
    for module in IMPORTS:
        took = []
        for _ in range(2):
            begin = time.monotonic()
            done = subprocess.run([sys.executable, "-c", f"import {module}"], env=env, capture_output=True, check=False)
            took.append(time.monotonic() - begin)
        failed = f" failed: {done.stderr.decode().splitlines()[-1]}" if done.returncode else ""
        print(f"import {module}: {shown(took)} s{failed}", flush=True)


def warmed(folder: Path, cache: Path, options: Sequence[str]) -> None:
    command = [
        sys.executable,
        "-m",
        "proa.cli.main",
        "warm",
        str(folder),
        "--load-format",
        "dummy",
        "--context",
        "8192",
    ]
    for _ in range(2):
        begin = time.monotonic()
        done = subprocess.run(
            [*command, *options], env=os.environ | {"PROA_CACHE": str(cache)}, text=True, capture_output=True,
            check=False,
        )  # fmt: skip
        print(f"proa warm: {time.monotonic() - begin:.2f} s, exit code {done.returncode}: {done.stdout.strip()[:300]}")
        if done.returncode:
            print(done.stderr[-1500:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", default="0")
    parser.add_argument("--cases", default="all,hybrid,warm")
    asked = parser.parse_args()
    print(
        f"{os.cpu_count()} CPUs, {len(os.sched_getaffinity(0))} usable; cc {shutil.which('gcc') or shutil.which('cc')}"
    )
    gpu = ["--gpu", asked.gpu]
    hybrid = [*gpu, "--gpu-experts", "4"]
    with tempfile.TemporaryDirectory() as made:
        imports(Path(made))
        folder, cases = model_folder(Path(made, "model")), asked.cases.split(",")
        for case, options in (("all", gpu), ("hybrid", hybrid)):
            if case in cases:
                cache = Path(made, f"cache-{case}")
                start(f"{case}, cold", folder, cache, options)
                start(f"{case}, warm", folder, cache, options)
                start(f"{case}, warm again", folder, cache, options, ask=False)
        if "warm" in cases:
            cache = Path(made, "cache-warm")
            warmed(folder, cache, hybrid)
            start("hybrid after proa warm", folder, cache, hybrid)


if __name__ == "__main__":
    main()
