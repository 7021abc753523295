"""Engines with --deferred-experts: decode follows the semantics of deferral, prompts are computed as without it.

deferral_reference.py has the semantics twice: in plain torch, compared by the types' bounds where all experts are
chosen (a near tie of weights would defer another expert), and with the native kernels, compared bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from deferral_reference import LateTransport, load_late
from engine.split_cases import run
from engine.turn_cases import Case, case_of
from engines import Loaded, finish_all, make_engine, request, tokens_of
from hybrid_engines import Kept, NewHost, Split, load_split
from proa.hybrid.transport import HostTransport
from proa.native.doorbell import Way
from proa.native.pool import Pool
from proa.types import TokenEvent
from teacher_forced import all_experts, forced, prompts
from tiny import make_tiny

FAMILIES = ["qwen3-moe", "qwen3-next", "deepseek-v3"]
DEVICES = ["sim", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS, ANSWERS = [17, 1, 9, 30, 5], (12, 20, 3, 9, 15)
Load = Callable[[Split, NewHost], Loaded]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(request.param, tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def load(folder: Path, pool: Pool) -> Load:
    return lambda split, new_host: load_split(folder, pool, split, "sim", new_host=new_host)


def texts() -> dict[str, list[int]]:
    return {f"r{i}": tokens for i, tokens in enumerate(prompts(LENGTHS))}


def logits(model: Loaded, **sizes: int) -> dict[str, torch.Tensor]:
    """Logits of all rows, by request; the answers are generated."""
    _, runner, _ = run(model, texts(), ANSWERS, sizes)
    return {name: torch.stack([rows[at] for at in sorted(rows)]) for name, rows in runner.logits.items()}


def assert_equal(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> None:
    assert set(got) == set(want)
    for name, rows in want.items():
        assert torch.equal(got[name], rows), name


@pytest.mark.parametrize("way", list(Way))
@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("deferred", [1, 2, 3])
def test_bits_are_those_of_experts_called_directly(deferred: int, share: float, way: Way, load: Load) -> None:
    """share: of the experts in VRAM; 0.9: many rows have no pair on the CPU. Prompts are cut into chunks, which share
    their steps with decode."""
    split = Split(share, deferred=deferred, way=way)
    got, want = (logits(load(split, host), max_batch_tokens=7) for host in (HostTransport, LateTransport))
    assert_equal(got, want)


@pytest.mark.parametrize("deferred", [1, 3])
def test_a_preempted_request_is_computed_again(deferred: int, load: Load) -> None:
    """Its generated tokens are part of a prompt then, and nothing of them is deferred."""
    sizes = {"num_pages": 20, "prefix_cache": False}
    found = []
    for host in (HostTransport, LateTransport):
        engine, runner, events = run(load(Split(0.5, deferred=deferred), host), texts(), ANSWERS, sizes)
        assert engine.stats().scheduler.preemptions > 0
        assert [len(tokens_of(events[name])) for name in texts()] == list(ANSWERS)
        found.append({name: torch.stack([rows[at] for at in sorted(rows)]) for name, rows in runner.logits.items()})
    assert_equal(*found)


def test_only_decode_defers(load: Load) -> None:
    """Rows of prompts, computed before any token was generated, have the bits of d = 0; rows of decode differ."""
    with_it, without = (
        logits(load(Split(0.0, deferred=deferred), HostTransport), max_batch_tokens=128) for deferred in (2, 0)
    )
    for name, tokens in texts().items():
        assert torch.equal(with_it[name][: len(tokens)], without[name][: len(tokens)])
    assert any(
        not torch.equal(with_it[name][len(tokens)], without[name][len(tokens)]) for name, tokens in texts().items()
    )


@pytest.mark.parametrize("share", [0.0, 0.5])
@pytest.mark.parametrize("device", DEVICES)
def test_no_further_from_float32_than_torch_in_bfloat16(device: str, share: float, folder: Path, pool: Pool) -> None:
    """All experts are chosen and all that can be are deferred, so that no near tie decides."""
    override = all_experts(folder)
    split = Split(share, deferred=8)
    lengths = [9, 5, 12]
    whole = prompts([length + 10 for length in lengths])
    got = forced(load_split(folder, pool, split, device, **override), whole, lengths)
    exact, plain = (
        forced(load_late(folder, split, dtype, **override), whole, lengths) for dtype in (torch.float32, torch.bfloat16)
    )
    without = forced(load_late(folder, replace(split, deferred=0), torch.float32, **override), whole, lengths)
    prompt = sum(lengths)
    torch.testing.assert_close(without[:prompt], exact[:prompt], atol=0, rtol=0)
    scale = exact.abs().max()
    off_plain, off_got, lost = ((rows - exact).pow(2).mean().sqrt() for rows in (plain, got, without))
    assert lost > 2 * off_plain, "a path without deferral would pass"
    assert off_got <= 1.05 * off_plain + 1e-4 * scale


def both(load: Load, drive: Callable[[Case], dict[str, list[TokenEvent]]]) -> list[dict[str, list[int]]]:
    """Tokens of the same requests with the doorbell and without it, in engines that compute prompts between steps."""
    found = []
    for host in (HostTransport, LateTransport):
        case = case_of(load(Split(0.5, deferred=2), host), durations=(1.0, 1.0), over_rows=8)
        found.append({name: tokens_of(events) for name, events in drive(case).items()})
    return found


def decode(case: Case) -> dict[str, list[TokenEvent]]:
    events: dict[str, list[TokenEvent]] = {}
    for i, tokens in enumerate(prompts([3, 5])):
        case.engine.submit(request(f"d{i}", tokens, 60))
    for _ in range(4):
        for event in case.engine.step():
            events.setdefault(event.id, []).append(event)
    return events


def test_prompts_between_decode_steps(load: Load) -> None:
    """A prompt is paused after each block, and one of few tokens overtakes it; both defer nothing, and no decode step
    takes or gives what belongs to another."""

    def drive(case: Case) -> dict[str, list[TokenEvent]]:
        events = decode(case)
        long, short = prompts([70, 4])
        case.engine.submit(request("long", long, 9))
        for _ in range(3):
            for event in case.engine.step():
                events.setdefault(event.id, []).append(event)
        case.engine.submit(request("short", short, 9))
        for name, more in finish_all(case.engine).items():
            events.setdefault(name, []).extend(more)
        return events

    got, want = both(load, drive)
    assert got == want
    assert {len(tokens) for tokens in got.values()} == {60, 9}


def test_a_cancelled_prompt_between_decode_steps(load: Load) -> None:
    def drive(case: Case) -> dict[str, list[TokenEvent]]:
        events = decode(case)
        case.engine.submit(request("long", prompts([70])[0], 9))
        for step in range(6):
            for event in case.engine.step():
                events.setdefault(event.id, []).append(event)
            if step == 2:
                case.engine.abort("long")
            if step == 4:
                case.engine.abort("d0")
        case.engine.submit(request("next", prompts([20])[0], 9))
        for name, more in finish_all(case.engine).items():
            events.setdefault(name, []).extend(more)
        return events

    got, want = both(load, drive)
    assert got == want
    assert len(got["d1"]) == 60
    assert len(got["next"]) == 9


@pytest.mark.parametrize("device", DEVICES)
def test_pairs_are_counted(device: str, folder: Path, pool: Pool) -> None:
    """One sequence decodes: of every layer but the last, two of its choices are deferred. On a GPU a prompt's last
    chunk of one token, cut off where states are copied, runs the graph of decode."""
    keep: list[Kept] = []
    model = load_split(folder, pool, Split(0.0, deferred=2), device, keep=keep)
    engine, _ = make_engine(model)
    engine.submit(request("r", prompts([9])[0], 11))
    finish_all(engine)
    counted = keep[0].hybrid.counters()
    layers = len(keep[0].hybrid.layers)
    steps = 11 if device == "cuda" and model.spec.recurrent else 10
    assert counted.deferred == steps * (layers - 1) * 2
    assert 0 < counted.deferred_s < counted.moe_s
