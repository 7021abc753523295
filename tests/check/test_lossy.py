"""`proa check --deferred-experts N`: the loss is measured and shown, and the answer stays that of the exact paths."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch

import proa.check.lossy
import proa.check.run
from check_runs import SIM, checked, found
from proa.check.lossy import exact_options, kl_nats, measure
from proa.check.report import as_json, notes
from proa.check.run import _for_check, _plan
from proa.check.sample import sample
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.errors import NumericsError
from proa.plan.opened import open_model
from tiny import make_tiny

Patch = pytest.MonkeyPatch
T = TypeVar("T")


def here(work: Callable[[], T]) -> T:
    return work()


@pytest.mark.seldom
@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3-next", "deepseek-v3"])
def test_the_loss_is_measured_and_changes_no_answer(name: str, tmp_path: Path, monkeypatch: Patch) -> None:
    report = checked(make_tiny(name, tmp_path), monkeypatch, gpu=SIM, only="experts in RAM", deferred_experts=1)
    assert found(report) == []
    assert report.agrees
    (loss,) = report.losses
    assert 0 < loss.mean_nats <= loss.most_nats
    assert 0 <= loss.same_best <= 1
    assert loss.steps == 4 * proa.check.lossy.STEPS
    line = next(line for line in notes(report) if line.startswith("lossy: "))
    assert "--deferred-experts 1, sim, experts in RAM" in line
    assert f"{loss.mean_nats:.3g} nats on average" in line
    told = json.loads(json.dumps(as_json(report)))
    assert told["answer"] == "yes"
    assert told["lossy"][0]["kl_mean_nats"] == loss.mean_nats
    assert told["lossy"][0]["kl_most_nats"] == loss.most_nats


@pytest.mark.seldom
def test_exact_paths_defer_nothing(tmp_path: Path, monkeypatch: Patch) -> None:
    """Their differences are those without the option."""
    folder = make_tiny("qwen3-moe", tmp_path)
    reports = [checked(folder, monkeypatch, gpu=SIM, only="RAM", deferred_experts=n) for n in (0, 3)]
    worst = [{path.name: path.worst for path in report.observed} for report in reports]
    assert worst[0] == worst[1]
    assert not reports[0].losses


@pytest.mark.parametrize(
    ("asked", "why"),
    [({"gpu": "none"}, "no GPU is used"), ({"gpu": SIM, "gpu_experts": "all"}, "no layer of .* has experts in RAM"),
     ({"gpu": SIM, "deferred_experts": 9}, "more than the 3 experts of a token")],
)  # fmt: skip
def test_what_has_no_effect_is_not_measured(
    asked: dict[str, Any], why: str, tmp_path: Path, monkeypatch: Patch
) -> None:
    asked = {"deferred_experts": 2} | asked
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, only="CPU, a", **asked)
    assert report.agrees == bool(report.observed)
    assert not report.losses
    (line,) = [line for line in notes(report) if line.startswith("not measured: --deferred-experts")]
    assert re.search(why, line)


def test_a_lossy_path_that_fails_is_a_failure(tmp_path: Path, monkeypatch: Patch) -> None:
    def fails(*_: object) -> None:
        raise NumericsError("A layer is on fire.")

    monkeypatch.setattr(proa.check.lossy, "_compare", fails)
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=SIM, only="experts in RAM", deferred_experts=1)
    assert [failed.name for failed in report.failed] == ["--deferred-experts 1"]
    assert "on fire" in report.failed[0].why
    assert not report.agrees


def test_time_for_the_loss_is_its_own(tmp_path: Path, monkeypatch: Patch) -> None:
    def late(*_: object, **__: object) -> None:
        raise proa.check.run.OutOfTime

    monkeypatch.setattr(proa.check.run, "measure", late)
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=SIM, only="experts in RAM", deferred_experts=1)
    assert report.agrees
    assert "time limit" in report.unmeasured["--deferred-experts 1"]


def test_without_deferral_nothing_is_lost(tmp_path: Path) -> None:
    """The exact path measured against itself: KL is 0, so all that is measured is the option's."""
    opened = open_model(make_tiny("qwen3-moe", tmp_path), "auto", EngineOptions().model)
    asked = from_keywords(EngineOptions, dtype="bfloat16", gpu=SIM, deferred_experts=2)
    asked = _for_check(asked, opened.declared.spec)
    whole = sample(opened, 0)

    def exact(options: EngineOptions) -> Any:
        return _plan("m", replace(options, gpus=replace(options.gpus, deferred_experts=0)), whole)

    loss = measure(asked, whole, [[5, 6, 7, 8], [9]], 3, exact, here)
    assert (loss.mean_nats, loss.most_nats, loss.same_best) == (0, 0, 1)
    assert exact_options(asked).gpus.gpu_experts == "none"


def test_kl(rng: torch.Generator) -> None:
    exact, other = (3 * torch.randn(7, 50, generator=rng) for _ in range(2))
    want = torch.nn.functional.kl_div(
        other.double().log_softmax(1), exact.double().softmax(1), reduction="none"
    ).sum(1)  # fmt: skip
    torch.testing.assert_close(kl_nats(exact, other), want, rtol=1e-12, atol=1e-12)
    assert torch.equal(kl_nats(exact, exact), torch.zeros(7, dtype=torch.float64))
    shifted = torch.full((1, 50), 9.0)
    assert kl_nats(shifted, shifted - 4).item() == pytest.approx(0, abs=1e-12)
