"""Experts move while steps run: logits stay right, each expert is on one side, and no step reads half a copy."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engines import load_decoder, run_step
from hybrid.restless import DEVICES, Flight, PromptCopier, SlowCopier, SlowCopy, check_places, restless
from hybrid_engines import Kept, Split, load_split
from proa.engine.executors.batch import Span, StepBatch
from proa.hybrid.copies import Copiers, HostCopier, Pairs
from proa.hybrid.moves import Moves
from proa.native.doorbell import Counters
from proa.native.formats import Format
from proa.native.pool import Pool
from teacher_forced import LIMITS, MOE, PAGES, all_experts, forced, prompts
from tiny import make_tiny
from tiny_gguf import make_tiny_gguf


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("asks", [1, 2, 5])
@pytest.mark.parametrize("name", MOE)
def test_logits_stay_right_while_experts_move(
    name: str, asks: int, inclusive: bool, device: str, pool: Pool, tmp_path: Path
) -> None:
    check_logits(make_tiny(name, tmp_path), asks, inclusive, device, pool)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inclusive", [True, False])
def test_packed_experts_move_in_layers_of_different_formats(
    inclusive: bool, device: str, pool: Pool, tmp_path: Path
) -> None:
    file = tmp_path / "m.gguf"
    made = make_tiny_gguf("qwen3-moe", file, "Q4_0", down="Q8_0", first="Q4_1", moe_intermediate_size=32)
    layers = check_logits(made, 2, inclusive, device, pool).layers
    forms = [(layer.shape.up_form.format, layer.shape.down_form.format) for layer in layers]
    assert forms == [(Format.UINT4_F16, Format.UINT4_F16)] + [(Format.INT4_F16, Format.INT8_F16)] * (len(layers) - 1)
    assert len(layers) > 1


def check_logits(folder: Path, asks: int, inclusive: bool, device: str, pool: Pool) -> Moves:
    """Every step chooses all experts, and slots and places that are being written are full of NaN."""
    override = all_experts(folder)
    texts = prompts([30, 9])
    exact = forced(load_decoder(folder, torch.float32, **override), texts, [5, 3])
    plain = forced(load_decoder(folder, torch.bfloat16, **override), texts, [5, 3])
    copier = SlowCopier(asks)
    split = Split(0.5, inclusive, spare=2)
    model = restless(folder, pool, split, device, Copiers(copier, PromptCopier()), **override)
    got = forced(model.loaded, texts, [5, 3])
    off_plain, off_got = ((rows - exact).pow(2).mean().sqrt() for rows in (plain, got))
    assert off_got <= 1.05 * off_plain + 1e-4 * exact.abs().max()
    steps, takes = 1 + 25, asks if inclusive else 2 * asks
    assert model.moves.moved.experts >= min(len(model.moves.layers), 2 / takes) * steps - 4
    nbytes = sum(to.nbytes for copy in copier.started for to, _ in copy.pairs)
    assert model.moves.moved.nbytes == nbytes
    check_places(model.kept[-1].hybrid, inclusive)
    return model.moves


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("inclusive", [True, False])
def test_hot_experts_move_to_the_gpu(inclusive: bool, device: str, pool: Pool, tmp_path: Path) -> None:
    """Sequences that repeat one token: its experts end up in VRAM and stay there."""
    kept: list[Kept] = []
    folder = make_tiny("qwen3-moe", tmp_path)
    executor = load_split(folder, pool, Split(0.5, inclusive, spare=2), device, keep=kept).make(LIMITS, PAGES)
    moves = kept[0].hybrid.moves
    assert moves is not None
    for token in (3, 11):
        before = counts(moves)
        for _ in range(150):
            run_step(executor, StepBatch([Span([token], 0, [0], 1)]))
            time.sleep(0.0005)  # gives copies time
        chosen = counts(moves) - before
        for layer, row in enumerate(chosen):
            hot = row.topk(min(int((row > 0).sum()), len(moves.resident(layer)))).indices.tolist()
            assert set(hot) <= set(moves.resident(layer))
        moved = moves.moved.experts
        for _ in range(20):
            run_step(executor, StepBatch([Span([token], 0, [0], 1)]))
        assert moves.moved.experts == moved, "no needless moves"
    assert moves.moved.experts > 0
    check_places(kept[0].hybrid, inclusive)
    kept[0].close()


def counts(moves: Moves) -> Tensor:
    return moves.tables.counts.cpu().clone()


@pytest.mark.parametrize("rate", [None, 4e6])
def test_a_simulated_link_is_throttled(rate: float | None) -> None:
    copier = HostCopier(rate)
    source = torch.randint(0, 255, (2_000_000,), dtype=torch.uint8)
    to = torch.zeros_like(source)
    begin = time.perf_counter()
    copies = [copier.start([(to[i : i + 500_000], source[i : i + 500_000])]) for i in range(0, 2_000_000, 500_000)]
    assert time.perf_counter() - begin < 0.1, "start() does not wait for the copy"
    if rate is not None:
        assert not copies[0].done()
    while not copies[-1].done():
        time.sleep(0.001)
    took_s = time.perf_counter() - begin
    assert torch.equal(to, source)
    assert rate is None or took_s >= 2_000_000 / rate
    copier.close()


@dataclass
class WatchedCopier:
    """Copies that arrive at the second done(); asserts that none writes what a step in flight may read."""

    flight: Flight | None = None
    started: int = 0

    def start(self, pairs: Pairs) -> SlowCopy:
        assert self.flight is not None
        self.started += 1
        for to, _ in pairs:
            self.flight.writes(to)
        return SlowCopy(pairs, 2)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("inclusive", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_no_copy_writes_what_a_step_in_flight_may_read(seed: int, inclusive: bool, pool: Pool, tmp_path: Path) -> None:
    """Steps are launched without waiting for the end of the former ones, whichever copies have arrived."""
    copier = WatchedCopier()
    model = restless(make_tiny("qwen3-moe", tmp_path), pool, Split(0.5, inclusive, spare=2), "sim",
                     Copiers(copier, PromptCopier()))  # fmt: skip
    model.loaded.make(LIMITS, PAGES)
    flight = copier.flight = Flight(model.kept[-1].hybrid)
    flight.begin()
    draw = random.Random(seed)
    for _ in range(120):
        if len(flight.named) < 3 and draw.random() < 0.6:
            flight.begin()
        elif len(flight.named) > 1:
            flight.end()
    assert model.moves.moved.experts >= 8
    assert copier.started >= 8 * (1 if inclusive else 2)
    while flight.named:
        flight.end()
    check_places(model.kept[-1].hybrid, inclusive)
    with pytest.raises(ValueError, match="not armed"):
        model.kept[-1].hybrid.end()


@dataclass
class Rates:
    """Replaces CoFetch and counts its calls."""

    asked: int = 0

    def update(self, now: Counters) -> None:
        self.asked += 1


def test_when_co_fetch_rates_are_updated(pool: Pool, tmp_path: Path) -> None:
    """Rates are read before each step that runs alone, and before every 32nd step with others in flight."""
    kept: list[Kept] = []
    load_split(make_tiny("qwen3-moe", tmp_path), pool, Split(0.5), "sim", None, kept).make(LIMITS, PAGES)
    hybrid = kept[-1].hybrid
    rates = hybrid.co_fetch = Rates()
    for _ in range(3):
        hybrid.begin()
        hybrid.end()
    assert rates.asked == 3
    hybrid.begin()
    for _ in range(65):
        hybrid.begin()
        hybrid.end()
    assert rates.asked == 4 + 2
    hybrid.end()
