"""Co-fetch, with static and moving experts: logits stay the same, and the CPU computes fewer pairs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from engines import Loaded, load_decoder
from hybrid.restless import DEVICES, Restless
from hybrid_engines import Kept, Split, load_split
from proa.engine.executors.executor import Executor
from proa.native.pool import Pool
from teacher_forced import all_experts, forced, prompts
from tiny import make_tiny

PROMPT, TOKENS = 5, 20


def fetching(folder: Path, pool: Pool, split: Split, device: str, kept: list[Kept], **override: object) -> Loaded:
    """Share half of the misses with the GPU, rounded up; experts change places if the split has spare slots."""
    loaded = load_split(folder, pool, split, device, keep=kept, **override)

    def make(*sizes: object) -> Executor[Any]:
        executor = loaded.make(*sizes)
        hybrid = kept[-1].hybrid
        if hybrid.moves is not None:
            hybrid.moves.heat = Restless()
        return executor

    return Loaded(loaded.spec, make)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("teams", [1, 2])
@pytest.mark.parametrize(("inclusive", "spare"), [(True, 0), (False, 0), (True, 2), (False, 2)])
@pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])  # without biases and with
def test_logits_with_co_fetch(name: str, inclusive: bool, spare: int, teams: int, device: str, tmp_path: Path) -> None:
    folder = make_tiny(name, tmp_path)
    override = all_experts(folder)
    texts, kept = prompts([TOKENS]), list[Kept]()
    exact = forced(load_decoder(folder, torch.float32, **override), texts, [PROMPT])
    plain = forced(load_decoder(folder, torch.bfloat16, **override), texts, [PROMPT])
    with Pool([[0]] * teams, pin=False) as pool:
        split = Split(0.4, inclusive, spare, in_place=True)
        got = forced(fetching(folder, pool, split, device, kept, **override), texts, [PROMPT])
        off_plain, off_got = ((rows - exact).pow(2).mean().sqrt() for rows in (plain, got))
        assert off_got <= 1.05 * off_plain + 1e-4 * exact.abs().max()
        hybrid = kept[0].hybrid
        assert hybrid.transport is not None
        pairs, layers, single = hybrid.transport.counters().pairs, len(hybrid.layers), TOKENS - PROMPT
        if not spare:  # 5 of 8 experts are missing; in single steps, two of them are left to the CPU
            assert pairs == layers * (5 * PROMPT + 2 * single), "warm-up has no pairs"
        else:
            assert pairs < layers * 5 * TOKENS
        kept[0].close()


@pytest.mark.parametrize("device", DEVICES)
def test_logits_with_co_fetch_of_several_tokens(device: str, tmp_path: Path) -> None:
    """Three sequences, each token with three of eight experts: the same logits as without co-fetch, and fewer pairs for
    the CPU. Both round a row to bfloat16 once per layer, of sums in another order; on a GPU that may change the expert
    of a token, but not of most tokens."""
    folder, texts, kept = make_tiny("qwen3-moe", tmp_path), prompts([TOKENS] * 3), list[Kept]()
    with Pool([[0]], pin=False) as pool:
        alone = forced(load_split(folder, pool, Split(0.4), device, keep=kept), texts, [PROMPT] * 3)
        both = forced(fetching(folder, pool, Split(0.4, in_place=True), device, kept), texts, [PROMPT] * 3)
        transports = [of.hybrid.transport for of in kept]
        pairs = [transport.counters().pairs for transport in transports if transport is not None]
        for of in kept:
            of.close()
    assert pairs[1] < 0.8 * pairs[0]
    off = (alone - both).abs().amax(1)
    bound = (len(kept[0].hybrid.layers) + 1) * 2**-8 * alone.abs().max()
    assert (off.max() if device == "sim" else off.median()) <= bound


def test_a_matrix_with_few_panels_lies_on_fewer_memory_nodes_than_another(tmp_path: Path) -> None:
    """Gate and up of 16 neurons have one pair of panels, down of 64 rows has two: on four nodes one and two pieces, as
    with the demo's 48 neurons three and four. A simulated GPU reads both in place."""
    folder, texts, kept = make_tiny("qwen3-moe", tmp_path, moe_intermediate_size=16), prompts([TOKENS]), list[Kept]()
    found = []
    for teams in (1, 4):
        with Pool([[0]] * teams, pin=False) as pool:
            found.append(forced(fetching(folder, pool, Split(0.4, in_place=True), "sim", kept), texts, [PROMPT]))
            up, down = kept[-1].hybrid.layers[0].memory.pieces()
            kept[-1].close()
    assert len(up) < len(down)
    assert torch.equal(*found)
