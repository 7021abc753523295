"""What drawing on a GPU adds to a step, and what the CPU would have taken. Needs a CUDA device.

Per number of rows and wish: the kernels' time between two events, the host's for launching them (hidden while the model
computes), and the CPU sampler's on the same logits, the copy included. Logits: Gaussian, deviation 2.5 (a nucleus of
thousands of tokens), and the same with 30 large ones (a nucleus of a few).
Run: python benchmarks/probes/gpu_draw.py
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
from torch import Tensor

from proa.engine.executors.device_logprobs import DeviceLogprobs
from proa.engine.executors.device_sampler import DeviceSampler
from proa.ops.cuda_device import device_ops
from proa.ops.draws import TOO_MANY
from proa.sampling.choose import choose
from proa.sampling.rows import Row
from proa.types import Sampling

VOCAB = 151_936
ROUNDS = 20
WISHES: dict[str, dict[str, Any]] = {
    "temperature": {},
    "top_p 0.95": {"top_p": 0.95},
    "0.7, top_k 20, top_p 0.8": {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    "min_p 0.05": {"min_p": 0.05},
    "penalties of 2000 tokens, greedy": {"temperature": 0.0, "repetition_penalty": 1.1},
    "greedy, 5 logprobs": {"temperature": 0.0, "logprobs": 5},
    "greedy, 20 logprobs": {"temperature": 0.0, "logprobs": 20},
}


def milliseconds(call: Callable[[], object], rounds: int = ROUNDS) -> float:
    """On the host's clock, the device having finished before and after."""
    times = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        call()
        times.append(1000 * (time.perf_counter() - begin))
    return median(times)


def device_milliseconds(call: Callable[[], object]) -> float:
    """Median time of the kernels alone: they queue up behind a sleep while the host launches them."""
    times = []
    for _ in range(ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(20_000_000)  # about 10 ms
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return median(times)


def measure(count: int, name: str, peaked: bool, sampler: DeviceSampler) -> str:
    logits: Tensor = torch.randn(count, VOCAB, device="cuda") * 2.5
    if peaked:
        logits[:, :30] += 15
    history = torch.randint(VOCAB, (2000,)).tolist()
    rows = [
        Row(Sampling(max_tokens=1, **{"seed": i, **WISHES[name]}), history, len(history), f"r{i}") for i in range(count)
    ]
    best = logits.argmax(-1).int()
    tokens = best.clone()

    def launch() -> None:
        tokens.copy_(best)
        sampler.launch(logits, tokens, rows)

    launch()
    host, device = milliseconds(launch), device_milliseconds(launch)
    left = tokens.tolist().count(TOO_MANY)
    cpu = milliseconds(lambda: choose(best.tolist(), rows, logits.cpu()), 3)
    same = sum(a == b.token for a, b in zip(tokens.tolist(), choose(best.tolist(), rows, logits.cpu()), strict=True))
    shape = "peaked" if peaked else "flat"
    return (
        f"{count:3} rows, {shape:6} {name:34} kernels {1000 * device:7.0f} us, host {1000 * host:6.0f} us, "
        f"on the CPU {1000 * cpu:8.0f} us; {same} of {count} equal, {left} left to the CPU"
    )


def main() -> None:
    device = torch.device("cuda")
    ops = device_ops(device)
    sampler = DeviceSampler(64, VOCAB, device, ops, DeviceLogprobs(64, VOCAB, device, ops))
    for count in (1, 8, 32):
        for peaked in (True, False):
            for name in WISHES:
                print(measure(count, name, peaked, sampler), flush=True)


if __name__ == "__main__":
    main()
