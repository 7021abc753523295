"""The expert counts file: round trip and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from proa.errors import UsageError
from proa.plan.expert_counts import check_writable, read_counts, write_counts
from unit.vram_cases import DEMO, MIXED

BLOCKS = range(1, 30)  # of MIXED, whose first block has no experts
COUNTS = tuple(tuple(100 * i + e for e in range(16)) for i in BLOCKS)


def test_round_trip(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    for counts in (COUNTS, COUNTS[::-1]):
        write_counts(file, "some/model", BLOCKS, counts)
        assert read_counts(file, MIXED) == counts
    assert [entry.name for entry in tmp_path.iterdir()] == ["counts.json"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "proa expert counts 2"}, "has the format 'proa expert counts 2'"),
        ({"layers": {"1": [1] * 16}}, "of another model, some/model: layer 2 has none in the file, 16 experts here"),
        ({"layers": {str(i): [1] * (16 if i != 7 else 15) for i in BLOCKS}}, "layer 7 has 15 experts in the file, 16"),
        ({"layers": {str(i): [1] * 15 + [-1] for i in BLOCKS}}, "negative counts"),
        ({"layers": []}, "is not a file of expert counts"),
    ],
)
def test_other_files_are_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    write_counts(file, "some/model", BLOCKS, COUNTS)
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(UsageError, match=message):
        read_counts(file, MIXED)


def test_counts_of_another_number_of_layers(tmp_path: Path) -> None:
    write_counts(tmp_path / "c", "demo", range(30), [[1] * 16] * 30)
    assert len(read_counts(tmp_path / "c", DEMO)) == 30
    with pytest.raises(UsageError, match="layer 0 has 16 experts in the file, none here"):
        read_counts(tmp_path / "c", MIXED)


def test_unreadable_and_unwritable_files(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_counts(tmp_path / "none", MIXED)
    (tmp_path / "text").write_text("not JSON")
    with pytest.raises(UsageError, match="is not a file of expert counts"):
        read_counts(tmp_path / "text", MIXED)
    check_writable(tmp_path / "new")
    for wrong in (tmp_path / "no folder" / "file", tmp_path):
        with pytest.raises(UsageError, match="cannot be written"):
            check_writable(wrong)
