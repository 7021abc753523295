"""How near the GPU kernels of linear maps and experts come to memory's speed. Needs a GPU and the native library.

Everything runs in CUDA graphs over several copies of the weights, so that L2 does not flatter. The share is bytes of
weights over the time, by the rate at which this GPU copies (read and written) in the same run.
Formats other than bfloat16 hold random codes, and scales that are numbers.
Run: PYTHONPATH=src python benchmarks/probes/gpu_experts.py [linear] [experts] [blocks] [sweep] [--format int4-f16]...
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from proa.models.spec import Router
from proa.native.formats import BF16_FORM, Format, Layout, facts
from proa.ops.added import Added
from proa.ops.faults import IDS, LayerFaults
from proa.ops.gpu_traits import traits_of
from proa.ops.residency import ExpertShape, Located, Residency
from proa.ops.sizes import BLOCK_TOKENS, WIDE_BLOCK
from proa.ops.table import RouterRule
from proa.ops.triton import experts_few, experts_grouped
from proa.ops.triton import linear as linear_maps
from proa.ops.triton.expert_sum import Into, Watch, combine
from proa.ops.triton.expert_tiles import HOPPER, Tile, block_tokens, tile_of
from proa.ops.triton.experts import expert_space, experts
from proa.ops.triton.formats import examples
from proa.ops.triton.linear import linear
from proa.ops.triton.locate import locate
from proa.ops.triton.route import route

DEVICE = torch.device("cuda")
EXPERTS, TOP_K, LAYERS = 128, 8, 4
RULE = RouterRule(TOP_K, Router("softmax", True))
FORMS = {form.format.name.lower().replace("_", "-"): form for form in (BF16_FORM, *examples())}
TOKENS = (1, 2, 4, 8, 16, 32, 128, 256, 512, 1024, 4096)
CAPABILITY = traits_of(DEVICE).capability


def microseconds(calls: Sequence[Callable[[], None]]) -> float:
    """Median time of one of the calls, which a graph holds one after another."""
    for call in calls:
        call()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(13):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / len(calls))
    return statistics.median(times[3:])


def copy_rate() -> float:
    source = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE)
    to = torch.empty_like(source)
    return 2 * source.numel() / microseconds([lambda: to.copy_(source)] * 3) / 1e3


def row(name: str, us: float, nbytes: int, flops: float, copy: float) -> None:
    rate = nbytes / us / 1e3
    print(f"{name:58} {us:9.1f} us {rate:7.0f} GB/s {rate / copy:5.0%} {flops / us / 1e6:7.1f} TFLOP/s", flush=True)


def time_linear(copy: float) -> None:
    for outputs, inputs in ((5120, 2048), (2048, 4096), (151936, 2048), (128, 2048), (512, 2048), (2048, 768)):
        copies = max(3, min(200, (1 << 30) // (outputs * inputs * 2)))
        weights = [torch.randn(outputs, inputs, device=DEVICE).bfloat16() for _ in range(copies)]
        for tokens in (1, 2, 4, 8, 16):
            time_matrix(copy, weights, tokens)


def time_matrix(copy: float, weights: Sequence[Tensor], tokens: int, *, beside: bool = True) -> None:
    outputs, inputs = weights[0].shape
    x = torch.randn(tokens, inputs, device=DEVICE).bfloat16()
    out = torch.empty(tokens, outputs, dtype=torch.bfloat16, device=DEVICE)
    nbytes, flops = weights[0].numel() * 2, 2 * tokens * outputs * inputs
    us = microseconds([lambda w=w: linear(x, w, None, out) for w in weights])
    row(f"linear {outputs} x {inputs}, {tokens} rows", us, nbytes, flops, copy)
    if beside:
        us = microseconds([lambda w=w: torch.mm(x, w.T, out=out) for w in weights])
        row(f"    torch.mm, {tokens} rows", us, nbytes, flops, copy)


def random_panels(of: Layout, count: int) -> Tensor:
    """uint8 [count * panels, panel bytes]. Bytes of a float's upper half below 64 are not NaN, nor large."""
    nbytes = count * of.matrix_bytes
    if of.format in (Format.BF16, Format.FP16):
        plain = torch.bfloat16 if of.format is Format.BF16 else torch.float16
        numbers = torch.randn(nbytes // 2, device=DEVICE).mul_(0.02).to(plain)
        return numbers.view(torch.uint8).view(-1, of.panel_bytes)
    made = torch.randint(0, 64, (nbytes // of.panel_bytes, of.panel_bytes), dtype=torch.uint8, device=DEVICE)
    codes = of.padded_columns // facts(of.format).unit_values * 64 * facts(of.format).unit_words
    if facts(of.format).unit_values > 4:  # all bits of a code; of 8, those of a NaN are left out
        made[:, :codes].random_(0, 256)
    return made


class Layer:
    """Random bytes in the packed layout: what they decode to does not matter here, but that they are numbers."""

    def __init__(self, shape: ExpertShape) -> None:
        self.shape = shape
        self.memory = [random_panels(of, EXPERTS) for of in (shape.up, shape.down)]
        order = torch.arange(EXPERTS, device=DEVICE)
        sizes = shape.up.matrix_bytes, shape.down.matrix_bytes
        up, down = (m.data_ptr() + order * n for m, n in zip(self.memory, sizes, strict=True))
        self.residency = Residency(up, down, torch.full_like(order, -1, dtype=torch.int32))


@dataclass(frozen=True)
class Routing:
    at: Located
    weights: Tensor


def routing_of(layer: Layer, tokens: int) -> Routing:
    logits = torch.randn(tokens, EXPERTS, device=DEVICE)
    ids, weights = (torch.empty(tokens, TOP_K, dtype=t, device=DEVICE) for t in (torch.int32, torch.float32))
    up, down = (torch.empty(tokens, TOP_K, dtype=torch.int64, device=DEVICE) for _ in range(2))
    at = Located(ids, up, down, torch.empty_like(ids))
    route(logits, torch.arange(tokens, device=DEVICE), RULE, ids, weights)
    locate(ids, layer.residency, at)
    return Routing(at, weights)


class Case:
    """A batch in each of several layers."""

    def __init__(self, layers: Sequence[Layer], tokens: int) -> None:
        self.tokens, self.layers, self.shape = tokens, layers, layers[0].shape
        shape = self.shape
        self.x = torch.randn(tokens, shape.hidden, device=DEVICE).bfloat16()
        self.routings = [routing_of(layer, tokens) for layer in layers]
        self.space = expert_space(tokens, TOP_K, EXPERTS, shape, DEVICE, capability=CAPABILITY)
        self.out = torch.empty_like(self.x)
        self.active = statistics.mean(len(r.at.ids.unique()) for r in self.routings)
        self.nbytes = int(self.active * (shape.up.matrix_bytes + shape.down.matrix_bytes))
        self.flops = 2 * tokens * TOP_K * 3 * shape.hidden * shape.width

    def each(self, call: Callable[[Routing], None]) -> float:
        return microseconds([lambda r=r: call(r) for r in self.routings])

    def whole(self, routing: Routing) -> None:
        experts(self.x, routing.at, self.shape, self.space)
        self.combine(routing)

    def combine(self, routing: Routing) -> None:
        combine(self.space.partial, routing.weights, routing.at.down, Added(), Into(self.out))

    def few_up(self, routing: Routing) -> None:
        experts_few.multiply_pairs(self.x, routing.at.up, self.shape, self.space.h, up=True)

    def few_down(self, routing: Routing) -> None:
        experts_few.multiply_pairs(self.space.h, routing.at.down, self.shape, self.space.partial, up=False)

    def group(self, routing: Routing, size: int) -> None:
        experts_grouped.group(routing.at.ids, EXPERTS, size, self.space.groups)

    def grouped_up(self, routing: Routing, tile: Tile) -> None:
        """With its group, which belongs to one routing."""
        self.group(routing, tile.tokens)
        at, by = routing.at.up, self.space.groups
        experts_grouped.multiply_blocks(self.x, at, by, tile, self.shape, self.space.h, up=True)

    def grouped_down(self, routing: Routing, tile: Tile) -> None:
        self.group(routing, tile.tokens)
        at, by = routing.at.down, self.space.groups
        experts_grouped.multiply_blocks(self.space.h, at, by, tile, self.shape, self.space.partial, up=False)


def time_experts(copy: float, layers: Sequence[Layer]) -> None:
    for tokens in TOKENS:
        case = Case(layers, tokens)
        name = f"experts, {tokens} tokens, {case.active:.0f} active"
        row(f"{name}: all", case.each(case.whole), case.nbytes, case.flops, copy)
        time_parts(case, copy)


def time_parts(case: Case, copy: float) -> None:
    pairs, up, down = case.tokens * TOP_K, 2 / 3, 1 / 3
    if pairs <= 64:
        row("    gate_up", case.each(case.few_up), int(case.nbytes * up), case.flops * up, copy)
        row("    down", case.each(case.few_down), int(case.nbytes * down), case.flops * down, copy)
    else:
        size = block_tokens(pairs, case.shape, EXPERTS, CAPABILITY)
        row(f"    group into blocks of {size}", case.each(lambda r: case.group(r, size)), pairs * 4, 0, copy)
        tiles = [tile_of(of, size, CAPABILITY) for of in (case.shape.up, case.shape.down)]
        us = case.each(lambda r: case.grouped_up(r, tiles[0]))
        row("    group and gate_up", us, int(case.nbytes * up), case.flops * up, copy)
        us = case.each(lambda r: case.grouped_down(r, tiles[1]))
        row("    group and down", us, int(case.nbytes * down), case.flops * down, copy)
    row("    combine", case.each(case.combine), case.space.partial.numel() * 4, 0, copy)
    time_combine(case)
    logits = torch.randn(case.tokens, EXPERTS, device=DEVICE)
    slots, made = torch.arange(case.tokens, device=DEVICE), case.routings[0]
    us = microseconds([lambda: route(logits, slots, RULE, made.at.ids, made.weights)] * 20)
    row("    route", us, logits.numel() * 4, 0, copy)


def time_combine(case: Case) -> None:
    """What it costs to look whether rows are finite: the same sums with and without, in turn."""
    made, partial = case.routings[0], case.space.partial.normal_()
    cpu = torch.randn(case.tokens, case.shape.hidden, device=DEVICE)
    records = torch.zeros(case.tokens, IDS + TOP_K, dtype=torch.int32, device=DEVICE)
    found = {}
    for watch in (None, Watch(LayerFaults(records, 0), made.at.ids, case.x)) * 3:
        call = partial_call(partial, made, Added(cpu), case.out, watch)
        found.setdefault(watch is None, []).append(microseconds([call] * 200))
    without, watched = (statistics.median(found[key]) for key in (True, False))
    assert not records.any()
    print(f"    combine with the CPU's sum {without:.2f} us, and looking {watched:.2f} us, {watched - without:+.2f}")


def partial_call(partial: Tensor, made: Routing, added: Added, out: Tensor, watch: Watch | None) -> Callable[[], None]:
    return lambda: combine(partial, made.weights, made.at.down, added, Into(out), watch)


def time_few(case: Case, name: str, copy: float) -> None:
    up, down = case.each(case.few_up), case.each(case.few_down)
    row(f"{name}, up {up:.1f} us", up + down, case.nbytes, case.flops, copy)


def time_grouped(case: Case, tiles: Sequence[Tile], name: str, copy: float) -> float:
    """tiles: of gate_up and of down."""
    up, down = case.each(lambda r: case.grouped_up(r, tiles[0])), case.each(lambda r: case.grouped_down(r, tiles[1]))
    row(f"{name}, up {up:.1f} us", up + down, case.nbytes, case.flops, copy)
    return up + down


def is_wide(shape: ExpertShape) -> bool:
    return CAPABILITY in HOPPER and shape.up.format is Format.BF16


def time_blocks(copy: float, layers: Sequence[Layer]) -> None:
    """Every way to run every batch: what the launcher's choice should be."""
    for tokens in TOKENS:
        case = Case(layers, tokens)
        if tokens * TOP_K <= 512:
            time_few(case, f"{tokens} tokens: pair by pair", copy)
        for size in (*BLOCK_TOKENS, WIDE_BLOCK) if is_wide(case.shape) else BLOCK_TOKENS:
            tiles = [tile_of(of, size, CAPABILITY) for of in (case.shape.up, case.shape.down)]
            time_grouped(case, tiles, f"{tokens} tokens: blocks of {size}", copy)


def sweep_linear(copy: float) -> None:
    """Other blocks: rows, columns, slices, warps, stages."""
    chosen = linear_maps._block
    one = [
        (4, 1024, 1, 4, 4),
        (8, 512, 1, 4, 4),
        (8, 1024, 1, 4, 3),
        (4, 2048, 1, 4, 2),
        (16, 256, 1, 4, 4),
        (2, 2048, 1, 4, 3),
    ]
    few = [
        (16, 64, 4, 4, 4),
        (8, 64, 8, 8, 4),
        (16, 64, 8, 8, 4),
        (8, 128, 4, 4, 4),
        (32, 64, 2, 4, 4),
        (32, 128, 2, 4, 4),
    ]
    for (outputs, inputs), (tokens, blocks) in itertools.product(
        ((5120, 2048), (2048, 4096), (151936, 2048), (128, 2048)), ((1, one), (4, few), (16, few))
    ):
        copies = max(3, min(200, (1 << 30) // (outputs * inputs * 2)))
        weights = [torch.randn(outputs, inputs, device=DEVICE).bfloat16() for _ in range(copies)]
        for block in blocks:
            linear_maps._block = lambda *_, block=block: linear_maps._Block(*block)
            print(block, end=" ")
            time_matrix(copy, weights, tokens, beside=False)
    linear_maps._block = chosen


def time_sweep(copy: float, layers: Sequence[Layer]) -> None:
    """Other tiles than those chosen: panels, lines, stages, warps."""
    sweep_linear(copy)
    case = Case(layers, 1)
    few: dict[str, tuple[float, tuple[int, ...]]] = {}
    for tile in itertools.product((2, 4, 8), (32, 64, 128), (3, 4, 6), (2, 4, 8)):
        panels, lines, stages, warps = tile
        if lines * panels * 64 * stages > 96 << 10 or lines >= warps * 32:
            continue
        experts_few._TILES |= dict.fromkeys(experts_few._TILES, experts_few.Tile(*tile))
        for which, call in (("up", case.few_up), ("down", case.few_down)):
            us = case.each(call)
            few[which] = min(few.get(which, (us, tile)), (us, tile))
            row(f"1 token: {which} {tile}", us, case.nbytes * (2 if which == "up" else 1) // 3, 0, copy)
    for which, (us, tile) in few.items():
        print(f"fastest for 1 token, {which}: panels, lines, stages, warps = {tile}, {us:.1f} us")
    sweep_grouped(copy, layers)


def sweep_grouped(copy: float, layers: Sequence[Layer]) -> None:
    """Panels, lines, stages, warps, fewest tokens of a product."""
    small = [(2, 64, 4, 4), (4, 32, 4, 4), (4, 64, 3, 4), (4, 64, 4, 4), (4, 64, 3, 8), (8, 32, 3, 4), (8, 64, 3, 8)]
    large = [(8, 32, 3, 4), (8, 32, 4, 4), (8, 32, 3, 8), (8, 64, 3, 8), (16, 32, 3, 8)]
    wider = [(8, 32, 3, 8), (8, 32, 4, 8)]  # others spill registers
    plain = layers[0].shape.up.format is Format.BF16
    for tokens, size, tiles in (
        (32, 16, small),
        (128, 16, small),
        (256, 32, small),
        (512, 64, large),
        (1024, 128, large),
        (4096, 128, large),
        (4096, WIDE_BLOCK, wider if plain else []),
    ):
        case, found = Case(layers, tokens), {}
        least = {size} if size < 64 else {size, 64}
        for tile in [Tile(size, *t, n, first) for t in tiles for n in least for first in {False, plain and size >= 64}]:
            try:
                found[tile] = time_grouped(case, (tile, tile), f"{tokens} tokens: {tile}", copy)
            except triton.runtime.OutOfResources as error:
                print(f"{tokens} tokens: {tile}: {error}")
        if found:
            best = min(found, key=lambda tile: found[tile])
            print(f"fastest for {tokens} tokens: {best}, {found[best]:.1f} us with two groups")


def main(arguments: Sequence[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", nargs="*", default=["linear", "experts"])
    parser.add_argument("--format", action="append", choices=[*FORMS, "all"], help="of experts; may be repeated")
    asked = parser.parse_args(arguments)
    what, named = asked.what, asked.format or ["bf16"]
    torch.manual_seed(1)
    copy = copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {copy:.0f} GB/s read and written")
    if "linear" in what:
        time_linear(copy)
    for name in (FORMS if "all" in named else named) if set(what) - {"linear"} else ():
        print(f"experts of {name}:")
        layers = [Layer(ExpertShape(2048, 768, FORMS[name], FORMS[name])) for _ in range(LAYERS)]
        for part, run in (("experts", time_experts), ("blocks", time_blocks), ("sweep", time_sweep)):
            if part in what:
                run(copy, layers)


if __name__ == "__main__":
    main(sys.argv[1:])
