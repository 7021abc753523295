"""A stand-in for FreeToken that its scripts in benchmarks/peers can use: without FreeToken and without a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "benchmarks" / "peers"

# The parts of FreeToken 0.2.1 that the scripts use. The stand-in's engine makes a token per request every 2 ms.
STAND_IN = {
    "freetoken/__init__.py": "",
    "freetoken/core.py": """
from dataclasses import dataclass
@dataclass
class SamplingParams:
    temperature: float = 0.0
    ignore_eos: bool = False
    max_tokens: int = 1024
""",
    "freetoken/message.py": """
class DetokenizeMsg:
    def __init__(self, uid): self.uid = uid
""",
    "freetoken/engine/__init__.py": "",
    "freetoken/engine/engine.py": "def _make_dummy_weight_state_dict(state, *, device, host_keys): raise KeyError",
    "freetoken/moe/__init__.py": "",
    "freetoken/moe/expert_banks.py": "def _dummy_fill(role, tensor): raise KeyError(role)",
    "freetoken/gpu_select.py": """
import torch
def bind_assigned_gpu(): return torch.device("cuda", 0)
""",
    "freetoken/moe/benchbw.py": """
import os
from pathlib import Path
def run_benchbw(device_index, checkpoints, cpu_threads):
    assert device_index == 0 and (Path(checkpoints[0]) / "config.json").exists()
    print("what goes to stdout by itself")
    profile = Path(os.environ["XDG_CACHE_HOME"]) / "profile"
    profile.parent.mkdir(parents=True, exist_ok=True)
    with profile.open("a") as file:
        file.write(f"{cpu_threads} ")
    row = {"cpu_threads": cpu_threads or 7, "cpu_moe_gbs": 20.0, "pcie_gather_gbs": 10.0,
           "cpu_moe_overlap_gbs": 15.0 + cpu_threads, "pcie_gather_overlap_gbs": 9.0}
    return {"benched": ["kind"], "layer_kinds": {"kind": row, "older": None}}
""",
    "freetoken/llm/__init__.py": """
import torch
torch.cuda.is_available = lambda: True
from .llm import LLM
""",
    "freetoken/llm/llm.py": """
import json, os, time
from pathlib import Path
from types import SimpleNamespace as Names
import torch
from freetoken.engine import engine
from freetoken.message import DetokenizeMsg
from freetoken.moe import expert_banks
class RequestAllFinished(Exception): pass
class LLM:
    def __init__(self, model, dtype, **options):
        print("a log on stdout")
        config = json.loads((Path(model) / "config.json").read_text())
        assert dtype is torch.bfloat16 and options["use_dummy_weight"]
        experts = config["num_experts"] * config["num_hidden_layers"]
        if options["moe_strategy"] == "hybrid":  # the engine reads the file that its bench wrote
            with (Path(os.environ["XDG_CACHE_HOME"]) / "profile").open("a") as file:
                file.write("engine ")
        for role in ("gate_up", "down"):
            expert_banks._dummy_fill(role, torch.empty(4, 8, 16, dtype=dtype))
        engine._make_dummy_weight_state_dict({"a.weight": torch.empty(2, 2)}, device=torch.device("cpu"),
                                             host_keys=frozenset())
        cache = workers = None
        if options["moe_strategy"] != "fused":
            cache = Names(cache_size=options.get("moe_cache_size", 2 * config["num_experts"]),
                          num_experts=config["num_experts"], num_layers=config["num_hidden_layers"],
                          hybrid_fetch_fraction=[0.375], collect_stats=False, reset_stats=self.reset,
                          decode_miss_stats=lambda: self.stats)
            workers = Names(num_threads=options["moe_cpu_threads"] or 7, isa="avx512bf16")
        self.engine = Names(moe_offload_cache=cache, cpu_moe_executor=workers, config=Names(attention_backend="triton"))
        self.stats = None
    def reset(self): self.stats = {"active_per_layer": 2.0, "fetched_per_layer": 0.5, "cpu_per_layer": 1.0}
    def rebuild_cache(self, moe_cache_size): assert self.engine.moe_offload_cache.collect_stats
    def offline_send_result(self, reply): pass
    def run_forever(self):
        left = {uid: sampling.max_tokens for uid, (_, sampling, _) in enumerate(self.pending_requests)}
        assert all(sampling.ignore_eos and sampling.temperature == 1 for _, sampling, _ in self.pending_requests)
        while left:
            time.sleep(0.002)
            self.offline_send_result([object(), *(DetokenizeMsg(uid) for uid in left)])
            left = {uid: count - 1 for uid, count in left.items() if count > 1}
        raise RequestAllFinished
""",
}


def write_wheel(folder: Path, name: str, version: str, files: dict[str, str], tags: str = "py3-none-any") -> Path:
    folder.mkdir(exist_ok=True)
    with zipfile.ZipFile(folder / f"{name}-{version}-{tags}.whl", "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
        wheel.writestr(
            f"{name}-{version}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"
        )
    return folder


def run_script(*argv: object) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONWARNINGS": "default"}
    command = [sys.executable, str(PEERS / "run_freetoken.py"), *map(str, argv)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
