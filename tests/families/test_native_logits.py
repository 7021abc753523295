"""Every family on the native kernels (bfloat16), however the engine batches and chunks the work: its distance from the
float32 model may not exceed that of plain torch in bfloat16, which rounds at least as often.

Routers choose all experts here: a near tie that flips is not an arithmetic error, but would change logits by hundreds
of percent. With the checkpoint's own top_k, outputs of the demo model are compared in tests/e2e.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engines import finish_all, load_decoder, load_native, make_engine, request
from proa.native.pool import Pool
from teacher_forced import all_experts, prompts, rows
from tiny import TINY, make_tiny

PROMPT = 41
ANSWER = 9
pytestmark = pytest.mark.one_table


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool([[0]], pin=False)


@pytest.fixture(scope="module", params=sorted(TINY))
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.mark.parametrize(
    ("lengths", "engine"),
    [([PROMPT], {}), ([PROMPT], {"max_batch_tokens": 7}), ([1, 2, 5, 16, 33], {"num_pages": 128})],
    ids=["prompt", "chunks of 7", "batch"],
)
def test_no_further_from_float32_than_torch_in_bfloat16(
    folder: Path, pool: Pool, lengths: list[int], engine: dict[str, int]
) -> None:
    override, texts = all_experts(folder), prompts(lengths)
    none: list[list[int]] = [[] for _ in texts]
    exact = rows(load_decoder(folder, torch.float32, **override), texts, none, **engine)
    torch_rows = rows(load_decoder(folder, torch.bfloat16, **override), texts, none, **engine)
    native = rows(load_native(folder, pool, **override), texts, none, **engine)
    scale = exact.abs().max()
    off_torch, off_native = (torch_rows - exact).pow(2).mean().sqrt(), (native - exact).pow(2).mean().sqrt()
    assert off_torch <= 0.05 * scale, "the yardstick itself is off"
    assert off_native <= 1.05 * off_torch + 1e-4 * scale


def test_same_bits_for_any_threads_and_nodes(folder: Path) -> None:
    texts, found = prompts([11, 3]), []
    for teams in ([[]], [[0]], [[0, 0, 0]], [[0], [0]], [[], [0], []]):
        with Pool(teams, pin=False) as pool:
            engine, runner = make_engine(load_native(folder, pool))
            for i, tokens in enumerate(texts):
                engine.submit(request(f"r{i}", tokens, ANSWER))
            finish_all(engine)
            found.append([runner.logits[f"r{i}"][p] for i in range(2) for p in sorted(runner.logits[f"r{i}"])])
            del engine, runner
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
