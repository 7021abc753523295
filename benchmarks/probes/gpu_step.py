"""What a decode step of a Qwen3-30B-A3B costs on a GPU that holds all of it, and what would make it faster: every
kernel in its place, in one CUDA graph, over enough layers that L2 does not flatter. Needs a GPU; 12 GiB.

Run: PYTHONPATH=src python benchmarks/probes/gpu_step.py [tiles] [tokens=N] [context=N]
tiles: also with other blocks of the experts, and which are fastest.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from proa.models.spec import Router
from proa.ops.added import Added
from proa.ops.caches import KvPages
from proa.ops.residency import ExpertShape, Located, Residency
from proa.ops.sizes import LINEAR_ROWS, attention_floats, attention_splits
from proa.ops.table import Angles, Norm, QkNorm, RouterRule
from proa.ops.triton import attention, attention_decode, experts_few, heads, linear, norm, route
from proa.ops.triton.expert_sum import Into, combine
from proa.ops.triton.experts import ExpertSpace, expert_space, experts
from proa.ops.triton.locate import locate

DEVICE = torch.device("cuda")
SHAPE, EXPERTS, TOP_K, HEADS, KV_HEADS, DIM = ExpertShape(2048, 768), 128, 8, 32, 4, 128
RULE = RouterRule(TOP_K, Router("softmax", True))
MODEL_LAYERS, LAYERS, VOCAB, PAGE_TOKENS = 48, 8, 151936, 16
TILES = [(2, 32, 4, 2), (2, 32, 6, 2), (2, 64, 3, 4), (2, 64, 4, 4), (2, 64, 6, 4), (2, 128, 3, 8), (2, 128, 4, 8),
         (4, 32, 4, 4), (4, 64, 3, 4), (4, 64, 4, 4), (4, 64, 4, 8), (4, 128, 3, 8), (8, 32, 3, 4),
         (8, 64, 3, 8)]  # fmt: skip


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.bfloat16, device=DEVICE).mul_(0.03)


class Layer:
    """Random weights; of experts, random bytes in the packed layout."""

    def __init__(self, tokens: int, context: int) -> None:
        width, pages = (HEADS + 2 * KV_HEADS) * DIM, -(-context // PAGE_TOKENS)
        self.qkv, self.out, self.router = rand(width, 2048), rand(2048, HEADS * DIM), rand(EXPERTS, 2048)
        self.norms = [torch.ones(n, dtype=torch.bfloat16, device=DEVICE) for n in (2048, 2048, DIM, DIM)]
        self.cache = KvPages(*(rand(tokens * pages, PAGE_TOKENS, KV_HEADS, DIM) for _ in range(2)))
        sizes = SHAPE.up.matrix_bytes, SHAPE.down.matrix_bytes
        self.memory = [rand(EXPERTS * n // 2) for n in sizes]
        order = torch.arange(EXPERTS, device=DEVICE)
        up, down = (m.data_ptr() + order * n for m, n in zip(self.memory, sizes, strict=True))
        self.residency = Residency(up, down, torch.full_like(order, -1, dtype=torch.int32))


@dataclass
class Rows:
    """A step's activations."""

    x: Tensor
    y: Tensor
    normed: Tensor
    qkv: Tensor
    attended: Tensor
    logits: Tensor
    at: Located
    weights: Tensor
    vocabulary: Tensor


class Step:
    def __init__(self, tokens: int, context: int) -> None:
        bf16 = dict.fromkeys(("dtype",), torch.bfloat16)
        kinds = (torch.int32, torch.int64, torch.int64, torch.int32)
        self.tokens = tokens
        self.layers = [Layer(tokens, context) for _ in range(LAYERS)]
        self.head, self.last = rand(VOCAB, 2048), torch.ones(2048, device=DEVICE, **bf16)
        self.rows = Rows(
            rand(tokens, 2048), rand(tokens, 2048), rand(tokens, 2048), rand(tokens, HEADS + 2 * KV_HEADS, DIM),
            rand(tokens, HEADS, DIM), rand(tokens, EXPERTS),
            Located(*(torch.empty(tokens, TOP_K, dtype=t, device=DEVICE) for t in kinds)),
            torch.empty(tokens, TOP_K, device=DEVICE),
            torch.empty(tokens, VOCAB, device=DEVICE),
        )  # fmt: skip
        pages = -(-context // PAGE_TOKENS)
        self.table = torch.randperm(tokens * pages, device=DEVICE).to(torch.int32).view(tokens, pages)
        self.lens = torch.full((tokens,), context, dtype=torch.int32, device=DEVICE)
        self.slots = self.table[:, -1].long() * PAGE_TOKENS + (context - 1) % PAGE_TOKENS
        angle = torch.rand(tokens, DIM // 2, device=DEVICE)
        self.angles = Angles(angle.cos(), angle.sin(), False)
        processors = torch.cuda.get_device_properties(0).multi_processor_count
        self.splits = attention_splits(tokens, KV_HEADS, processors)
        self.floats = torch.empty(attention_floats(tokens, HEADS, DIM, self.splits), device=DEVICE)
        self.space: ExpertSpace = expert_space(tokens, TOP_K, EXPERTS, SHAPE, DEVICE)

    def block(self, of: Layer) -> None:
        r, (before, after, of_q, of_k) = self.rows, of.norms
        norm.add_rms_norm(r.x, r.y, Norm(before, 1e-6), r.normed)
        self.map(r.normed, of.qkv, r.qkv.flatten(1))
        q, kv = r.qkv[:, :HEADS], r.qkv[:, HEADS:]
        heads.rotate_store(q, kv, QkNorm(of_q, of_k, 1e-6), self.angles, of.cache, self.slots, q)
        softmax = attention.Softmax(DIM**-0.5)
        attention_decode.decode(q, of.cache, self.table, self.lens, softmax, self.splits, self.floats, r.attended)
        self.map(r.attended.flatten(1), of.out, r.y)
        norm.add_rms_norm(r.x, r.y, Norm(after, 1e-6), r.normed)
        self.map(r.normed, of.router, r.logits)
        route.route(r.logits, self.slots, RULE, r.at.ids, r.weights)
        locate(r.at.ids, of.residency, r.at)
        experts(r.normed, r.at, SHAPE, self.space)
        combine(self.space.partial, r.weights, r.at.down, Added(), Into(r.y))

    def map(self, x: Tensor, weight: Tensor, out: Tensor) -> None:
        if self.tokens <= LINEAR_ROWS:
            linear.linear(x, weight, None, out)
        else:
            torch.mm(x, weight.T, out=out)

    def run(self) -> None:
        """As many layers as the model has, each a few times."""
        for i in range(MODEL_LAYERS):
            self.block(self.layers[i % LAYERS])
        norm.add_rms_norm(self.rows.x, self.rows.y, Norm(self.last, 1e-6), self.rows.normed)
        self.map(self.rows.normed, self.head, self.rows.vocabulary)


def milliseconds(run: Callable[[], None]) -> float:
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for _ in range(23):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[3:])


def sweep(step: Step) -> None:
    """Try tiles of gate_up, then of down, by the time of the whole step."""
    for which in ("up of few", "down"):
        found = {}
        for tile in TILES:
            experts_few._TILES[which] = experts_few.Tile(*tile)
            found[tile] = milliseconds(step.run)
            print(f"  {which} {tile}: {found[tile]:.3f} ms a step", flush=True)
        best = min(found, key=lambda tile: found[tile])
        experts_few._TILES[which] = experts_few.Tile(*best)
        print(f"fastest {which}: panels, lines, stages, warps = {best}: {found[best]:.3f} ms a step")


def main(options: Sequence[str]) -> None:
    torch.manual_seed(1)
    numbers = {"tokens": 1, "context": 1000} | {k: int(v) for k, v in (o.split("=") for o in options if "=" in o)}
    step = Step(**numbers)
    text = ", ".join(f"{k} {v}" for k, v in numbers.items())
    print(f"step, {text}: {milliseconds(step.run):.3f} ms, {torch.cuda.get_device_name()}", flush=True)
    if "tiles" in options:
        sweep(step)


if __name__ == "__main__":
    main(sys.argv[1:])
