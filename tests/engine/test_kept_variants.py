"""The kept list of a model's kernels: when it is made again, and what its name depends on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from unit.vram_cases import QWEN3_30B, gpu, machine, plan

pytest.importorskip("triton")
from proa.engine.building.kept_variants import keep, key_of, read_kept
from proa.ops.ahead import Variant

FOUND = [Variant("proa.ops.triton.norm._norm", "key", {"x": "*bf16"}, {(1,): 8}, {}, {"num_warps": 4})]


def test_a_list_is_kept(tmp_path: Path) -> None:
    folder = tmp_path / "new"
    assert read_kept(folder, "a") is None
    keep(folder, "a", FOUND)
    assert read_kept(folder, "a") == FOUND
    assert read_kept(folder, "b") is None
    assert len(list(folder.iterdir())) == 1, "no temporary file is left"


@pytest.mark.parametrize("damage", [b"", b"\x80\x04not a pickle", None])
def test_a_damaged_list_is_made_again(tmp_path: Path, damage: bytes | None, caplog: pytest.LogCaptureFixture) -> None:
    keep(tmp_path, "a", FOUND)
    file = tmp_path / "variants-a.pickle"
    file.write_bytes(file.read_bytes()[:-9] if damage is None else damage)
    assert read_kept(tmp_path, "a") is None
    assert "cannot be read" in caplog.text
    keep(tmp_path, "a", FOUND)
    assert read_kept(tmp_path, "a") == FOUND


def test_a_folder_that_cannot_be_written(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").touch()
    assert read_kept(tmp_path / "file", "a") is None
    keep(tmp_path / "file", "a", FOUND)
    assert caplog.text.count("cannot be kept") == 1


def key(box_gib: float = 124, vram_gib: float = 24, stored: str = "BF16", capability: int = 90, **asked: Any) -> str:
    made = plan(QWEN3_30B, machine(box_gib, gpu(vram_gib)), context=4096, gpu_experts="8", **asked)
    return key_of(made, QWEN3_30B, {"head.weight": stored}, capability)


def test_what_the_key_depends_on() -> None:
    same = {key(), key(box_gib=125)}
    assert len(same) == 1, "the key is that of another amount of free RAM"
    others = [key(max_batch_tokens=256), key(max_running=3), key(stored="F8_E4M3"), key(capability=120)]
    assert len({*same, *others, key(deterministic=True)}) == 6


def test_measured_fields_are_those_of_the_plan() -> None:
    """Each name is a field: a renamed one would be an error at start."""
    made = plan(QWEN3_30B, machine(124, gpu(24)), context=4096)
    assert key_of(made, QWEN3_30B, {}, 90) == key_of(msgspec.structs.replace(made, decisions=()), QWEN3_30B, {}, 90)
