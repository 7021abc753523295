"""Requests that schemathesis makes from /openapi.json, valid and invalid, against a real server and engine: none is
answered with a 5xx or not at all, and memory stays. OPENAPI_CASES: how many, 5000 for a thorough run; in `make
test` a third."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import children_of, serving

import programs
from fetched import installed
from scripted_model import write_scripted_model

LIST = Path(__file__).parents[1] / "clients" / "schemathesis.txt"
CASES = int(os.environ.get("OPENAPI_CASES", "240"))
GENERATING = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/api/chat", "/api/generate")
# Texts in grammars of their own, and limits that depend on each other: random ones are refused, as they should be.
INTRICATE = re.compile(
    r"guided_|grammar|regex|ebnf|structur|json_schema|format|tool_choice|function|output_config|thinking|reasoning"
    r"|best_of|length_penalty|early_stopping|beam|min_tokens|stop_token_ids|logprobs|previous|stream_options|continue"
)
TIMEOUT_S = 900


def run_cases(packages: Path, document: Path, url: str, examples: int, mode: str, seed: int) -> str:
    """Run `examples` cases for each operation; return the report, whose last lines count the cases."""
    command = ["-m", "schemathesis.cli", "run", str(document), f"--url={url}", "--checks=not_a_server_error"]
    command += ["--phases=fuzzing", f"--max-examples={examples}", f"--mode={mode}", f"--seed={seed}"]
    command += ["--request-timeout=60", "--suppress-health-check=all", "--continue-on-failure", "--no-color"]
    done = subprocess.run(
        programs.python(*command), env={**os.environ, "PYTHONPATH": str(packages)}, cwd=document.parent,
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-1000:]
    return done.stdout


def number_of_cases(report: str) -> int:
    (found,) = re.findall(r"(\d+) generated", report)
    return int(found)


def for_generation(whole: dict[str, Any]) -> dict[str, Any]:
    """The part of the document whose valid requests mostly reach the engine."""
    paths = {path: whole["paths"][path] for path in GENERATING}
    document: dict[str, Any] = json.loads(json.dumps({**whole, "paths": paths}))
    for schema in document["components"]["schemas"].values():
        fields = schema.get("properties", {})
        for name in [name for name in fields if INTRICATE.search(name)]:
            del fields[name]
        schema["additionalProperties"] = False
    return document


def answered(url: str) -> float:
    """Requests to generating endpoints that were answered well."""
    lines = [line for line in httpx.get(f"{url}/metrics").text.splitlines() if line.startswith("proa_requests_total")]
    wanted = [line for line in lines if 'outcome="ok"' in line and any(f'"{path}"' in line for path in GENERATING)]
    return sum(float(line.rsplit(" ", 1)[1]) for line in wanted)


def resident_mib(pids: list[int]) -> float:
    return sum(int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in pids) * 4096 / 2**20


@pytest.mark.seldom
@pytest.mark.timeout(2 * TIMEOUT_S)
def test_no_case_is_answered_with_a_5xx(tmp_path: Path, sampled: bool) -> None:
    wanted = CASES // 3 if sampled else CASES
    packages = installed(LIST)
    folder = write_scripted_model(tmp_path / "model", {"": "Hello!"})
    with serving(folder, "--context=4k", "--gpu=none") as (process, report):
        url = report["url"]
        whole = httpx.get(f"{url}/openapi.json").json()
        document, part = tmp_path / "openapi.json", tmp_path / "generating.json"
        document.write_text(json.dumps(whole))
        part.write_text(json.dumps(for_generation(whole)))
        operations = sum(len(set(of) & {"get", "post", "head"}) for of in whole["paths"].values())
        cases, sizes = 0, []
        for seed in (1, 2):
            any_cases = run_cases(packages, document, url, max(1, wanted // 4 // operations), "all", seed)
            valid = run_cases(packages, part, url, max(1, wanted // 4 // len(GENERATING)), "positive", seed)
            cases += number_of_cases(any_cases) + number_of_cases(valid)
            sizes.append(resident_mib([process.pid, *children_of(process.pid)]))
        reached = answered(url)
        assert reached >= cases / 2, f"{reached:.0f} of {cases} cases generated an answer"
        assert sizes[1] < 1.1 * sizes[0] + 32
        assert httpx.get(f"{url}/health").status_code == 200
