"""Tests in several processes: a test marked `alone` runs while no other test runs."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]
WORKER = """
import sys, time
from pathlib import Path
import at_once

at_once.__file__, at_once.FOLDER = (Path(sys.argv[1]) / name for name in ("turn", "running"))
alone, log = sys.argv[2] == "alone", Path(sys.argv[1]) / "log"
for _ in range(20):
    with at_once.beside_others(alone), log.open("a") as file:
        file.write(f"+{sys.argv[2]}\\n"), file.flush()
        time.sleep(0.005)
        file.write(f"-{sys.argv[2]}\\n"), file.flush()
"""


def test_no_test_runs_beside_one_marked_alone(tmp_path: Path) -> None:
    for name in ("turn", "running"):
        (tmp_path / name).touch()
    started = [
        subprocess.Popen([sys.executable, "-c", WORKER, str(tmp_path), kind], cwd=TESTS)
        for kind in ("alone", "beside", "beside")
    ]
    assert [process.wait(60) for process in started] == [0, 0, 0]
    running: list[str] = []
    most = 0
    for line in (tmp_path / "log").read_text().splitlines():
        if line[0] == "-":
            running.remove(line[1:])
            continue
        running.append(line[1:])
        assert running == ["alone"] or "alone" not in running
        most = max(most, len(running))
    assert not running
    assert most == 2, "others do run beside each other"
