"""Engines whose KV cache is fp8 (E4M3), plain, native and split with a GPU.

Bounds: rounding K and V moves them by 2^-4 of their size at most, evenly spread by 2^-4 / sqrt(3) or less, and so moves
what attention adds to the residual stream; logits as a whole may move by 2^-4 of their size. Engines that round the
same values are no further from float32 than plain torch is.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from engines import Loaded, finish_all, load_decoder, load_native, make_engine, request, tokens_of
from hybrid_engines import SPLITS, load_split
from proa.cache.pool import KvStorage
from proa.native.pool import Pool
from teacher_forced import all_experts, prompts, rows
from tiny import make_tiny

MODELS = ["qwen3-moe", "qwen3-next", "llama-bias", "mixtral-window"]  # states; heads of 24; a window
FP8 = KvStorage(torch.float8_e4m3fn)
SCALED = KvStorage(torch.float8_e4m3fn, [(0.25, 0.5), (1.0, 2.0), (torch.tensor(0.03).item(), 1.0)])


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


@pytest.fixture(scope="module", params=MODELS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


def rms(x: Tensor) -> Tensor:
    return x.pow(2).mean().sqrt()


def scaled(model: Loaded) -> KvStorage:
    return KvStorage(torch.float8_e4m3fn, [SCALED.scales[i % 3] for i in range(len(model.spec.blocks))])


def test_no_further_from_float32_than_plain_torch(folder: Path, pool: Pool) -> None:
    override, texts = all_experts(folder), prompts([41, 5, 1])
    none: list[list[int]] = [[] for _ in texts]
    whole = load_decoder(folder, torch.float32, **override)
    exact, kv = rows(whole, texts, none), scaled(whole)
    wide, torch_rows, native = (
        rows(load_decoder(folder, torch.bfloat16, **override), texts, none),
        rows(load_decoder(folder, torch.bfloat16, kv, **override), texts, none),
        rows(load_native(folder, pool, kv, **override), texts, none),
    )
    off_torch, off_native = rms(torch_rows - exact), rms(native - exact)
    assert rms(wide - exact) < off_torch <= 2.0**-4 * rms(exact)
    assert off_native <= 1.05 * off_torch + 1e-4 * exact.abs().max()


@pytest.mark.parametrize("device", ["sim", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-next"])
def test_split_with_a_gpu(name: str, device: str, pool: Pool, tmp_path: Path) -> None:
    folder = make_tiny(name, tmp_path)
    override, texts = all_experts(folder), prompts([41, 5, 1])
    none: list[list[int]] = [[] for _ in texts]
    whole = load_decoder(folder, torch.float32, **override)
    exact, kv = rows(whole, texts, none), scaled(whole)
    plain = rows(load_decoder(folder, torch.bfloat16, kv, **override), texts, none)
    split = rows(load_split(folder, pool, SPLITS["half"], device, kv=kv, **override), texts, none)
    assert rms(split - exact) <= 1.05 * rms(plain - exact) + 1e-4 * exact.abs().max()


def answers(model: Loaded, texts: dict[str, list[int]], **engine: int | bool) -> tuple[dict[str, list[int]], Tensor]:
    """Each answer, and the logits after the last token."""
    made, runner = make_engine(model, **engine)  # type: ignore[arg-type]
    for name, tokens in texts.items():
        made.submit(request(name, tokens, 9))
    events = finish_all(made)
    if engine.get("num_pages") == 40:
        assert made.stats().scheduler.preemptions > 0
    last = torch.stack([runner.logits[name][max(runner.logits[name])] for name in texts])
    return {name: tokens_of(events[name]) for name in texts}, last


@pytest.mark.parametrize(
    "engine", [{"max_batch_tokens": 7}, {"num_pages": 40, "prefix_cache": False}], ids=["chunks", "preemption"]
)
def test_chunks_and_batches_change_only_rounding(folder: Path, engine: dict[str, int | bool]) -> None:
    """All attention reads what was stored, so that only roundings differ. A code is 2^20 times one of float32's, and
    some of thousands of values lie that near to where the next code begins; it is 2^49 times one of float64's."""
    texts = {f"r{i}": tokens for i, tokens in enumerate(prompts([24, 25, 26, 27, 28]))}
    model = load_decoder(folder, torch.float64, FP8)
    want, logits = answers(model, texts, num_pages=128)
    got, found = answers(model, texts, **engine)
    assert got == want
    assert (found - logits).abs().max() <= 1e-4 * logits.abs().max()


def test_after_a_prefix_hit(tmp_path: Path) -> None:
    model = load_decoder(make_tiny("qwen3-moe", tmp_path), torch.float32, FP8)
    shared, first, second = prompts([20, 7, 9])
    want, logits = answers(model, {"second": shared + second})
    made, runner = make_engine(model)
    for name, own in (("first", first), ("second", second)):
        made.submit(request(name, shared + own, 9))
        events = finish_all(made)
    assert min(runner.logits["second"]) == 20, "the shared pages must not be recomputed"
    assert tokens_of(events["second"]) == want["second"]
    last = runner.logits["second"][max(runner.logits["second"])]
    assert (last - logits[0]).abs().max() <= 1e-4 * logits.abs().max()
