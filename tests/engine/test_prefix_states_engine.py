"""Copies of recurrent states in the tiers: where a restarted engine goes on from, whatever is missing or damaged."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from prefix_engines import NATIVE, PROMPT, RUN_TOKENS, ask, start, stop, wait_until_stored
from proa.cache import keys
from proa.cache.keys import RunKeys, state_key
from proa.engine.engine import Engine
from proa.engine.executors import restore_rates
from proa.engine.executors.page_tiers import PageTiers
from proa.weights.checkpoint import open_checkpoint
from tiny import make_tiny

OTHER = [token % 97 + 1 for token in PROMPT]


@pytest.fixture(autouse=True)
def short_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keys, "RUN_TOKENS", RUN_TOKENS)
    monkeypatch.setattr(restore_rates, "LEAST_PREFILL_TOKENS", 1 << 30)  # it is always restored


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return make_tiny("qwen3-next", tmp_path / "model")


def stored(folder: Path) -> list[Path]:
    return list(folder.glob("*.kv"))


def tiers(engine: Engine) -> PageTiers:
    assert engine._tiers is not None
    return engine._tiers


@dataclass
class Stored:
    """The files of two_turns. runs: in their order; short, long: parts of the states after 256 and 384 tokens."""

    runs: list[Path]
    short: list[Path]
    long: list[Path]


def two_turns(model: Path, folder: Path) -> Stored:
    """Store a prompt of 261 tokens, then one of 389 that begins with it: states after 256 and 384 tokens."""
    first = start(model, folder, **NATIVE)
    ask(first, "short", PROMPT[:261])
    wait_until_stored(first)
    assert ask(first, "long").cached_tokens == 256
    behind, files = tiers(first), tiers(first)._files
    stop(first)
    assert files is not None
    runs: list[bytes] = []
    RunKeys(behind.root, RUN_TOKENS, 16).extend(runs, PROMPT, "", 384 // RUN_TOKENS)
    ends = [[state_key(runs[n // RUN_TOKENS - 1], part) for part in range(behind.state_parts)] for n in (256, 384)]
    found = [[folder / files._name(key) for key in group] for group in (runs, *ends)]
    assert sorted(path for group in found for path in group) == sorted(stored(folder))
    return Stored(*found)


def damage(file: Path) -> None:
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


@pytest.mark.parametrize(
    ("harm", "cached", "bad"),
    [
        (lambda files: None, 384, 0),
        (lambda files: damage(files.long[-1]), 256, 1),
        (lambda files: files.long[-1].unlink(), 256, 0),
        (lambda files: files.runs[0].unlink(), 0, 0),
        (lambda files: damage(files.runs[0]), 0, 1),
        (lambda files: damage(files.short[0]), 384, 0),
        (lambda files: damage(files.runs[9]), 256, 1),
    ],
    ids=["whole", "damaged state", "no state", "no pages", "damaged pages", "another state", "pages behind the first"],
)
def test_the_deepest_whole_state_is_restored(
    harm: Callable[[Stored], object], cached: int, bad: int, model: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "cache"
    files = two_turns(model, folder)
    num_files = len(stored(folder))
    harm(files)
    again = start(model, folder, **NATIVE)
    want = start(model, tmp_path / "empty", **NATIVE)
    ask(want, "warm", PROMPT[:261])
    got = ask(again, "a")
    assert got.cached_tokens == cached
    assert got.tokens == ask(want, "a").tokens
    assert again.stats().prefix_files.bad_files == bad
    stop(again)
    stop(want)
    assert len(stored(folder)) == num_files, "what was missing is stored again"


def test_pages_behind_the_last_run_go_along(model: Path, tmp_path: Path) -> None:
    """A prompt of 345 tokens leaves its states after 336: 10 runs of 32, and a page."""
    folder, prompt, options = tmp_path / "cache", PROMPT[:345], NATIVE | {"max_batch_tokens": 512}
    first = start(model, folder, **options)
    ask(first, "a", prompt)
    hit = ask(first, "b", prompt)
    stop(first)
    again = start(model, folder, **options)
    assert ask(again, "a", prompt) == hit
    assert hit.cached_tokens == 336
    assert again.stats().prefix_files.restored_pages == 336 // 16
    assert ask(again, "c", [*prompt[:337], *OTHER[:9]]).cached_tokens == 336
    stop(again)


def test_the_last_copy_of_a_short_conversation_is_stored(model: Path, tmp_path: Path) -> None:
    """Steps of 64 tokens leave copies after 320 tokens and none at the prompt's end, so close to it."""
    folder, prompt = tmp_path / "cache", PROMPT[:345]
    first = start(model, folder, **NATIVE)
    ask(first, "a", prompt)
    parts = tiers(first).state_parts
    stop(first)
    assert len(stored(folder)) == 320 // RUN_TOKENS + parts, "of five copies one is stored"
    again = start(model, folder, **NATIVE)
    assert ask(again, "a", prompt).cached_tokens == 320
    stop(again)


def test_states_are_restored_alone_if_the_pages_are_there(model: Path, tmp_path: Path) -> None:
    each = open_checkpoint(model, "auto", {}).declare().spec.state_bytes_per_sequence(2)
    engine = start(model, tmp_path / "cache", **NATIVE, state_memory=each)
    first = ask(engine, "a")
    wait_until_stored(engine)
    ask(engine, "other", OTHER)
    wait_until_stored(engine)
    assert ask(engine, "b").cached_tokens == 384
    stats = engine.stats().prefix_files
    assert stats.restored_pages == 0
    assert stats.restored_bytes == tiers(engine).state_parts * tiers(engine)._entry_bytes
    assert first.cached_tokens == 0
    stop(engine)


def test_a_full_folder_keeps_whole_states(model: Path, tmp_path: Path) -> None:
    """The folder holds the files of two prompts: the first one's are deleted, the last one's are all there."""
    folder = tmp_path / "cache"
    plenty = start(model, folder, **NATIVE)
    ask(plenty, "a")
    stop(plenty)
    size = sum(file.stat().st_size for file in stored(folder))
    for file in stored(folder):
        file.unlink()
    first = start(model, folder, **NATIVE, prefix_cache_disk=2 * size)
    for name, prompt in (("a", PROMPT), ("b", OTHER), ("c", PROMPT[::2] + OTHER[::2])):
        ask(first, name, prompt)
        wait_until_stored(first)
        assert sum(file.stat().st_size for file in folder.iterdir()) <= 2 * size
    stop(first)
    again = start(model, folder, **NATIVE, prefix_cache_disk=2 * size)
    assert ask(again, "b", OTHER).cached_tokens == 384
    stop(again)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write to read-only folders")
def test_a_read_only_folder_is_restored_from(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    two_turns(model, folder)
    folder.chmod(0o500)
    try:
        again = start(model, folder, **NATIVE)
        assert ask(again, "a").cached_tokens == 384
        ask(again, "b", OTHER)
        stop(again)
        assert again.stats().prefix_files.failed_writes == 1
    finally:
        folder.chmod(0o700)
