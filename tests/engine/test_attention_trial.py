"""The trial of a library's attention for long prompts: when it is used, and what it changes."""

from __future__ import annotations

import random
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from gpu_llm import logprobs_after, make_model
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.engine.building.attention_trial import OWN, ROW, AttentionTrial
from proa.ops.gpu_traits import GpuTraits
from proa.plan.plan import Plan
from proa.weights.checkpoint import open_checkpoint
from quick_plan import prepare

CPU, CONTEXT = torch.device("cpu"), 12288


def refuse(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    raise RuntimeError("No available kernel.\nThe second line is not shown.")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_model(tmp_path / "tiny", max_position_embeddings=CONTEXT)


def plan_of(folder: Path, gpu: str = "sim:1GiB", **options: object) -> Plan:
    asked = {"dtype": "bfloat16", "gpu": gpu, "gpu_experts": "4", "context": CONTEXT, "max_batch_tokens": 4096}
    return prepare(str(folder), from_keywords(EngineOptions, **(asked | options)), None).plan


@pytest.mark.parametrize(
    ("context", "deterministic", "why"),
    [
        (4000, False, None),  # no tile of rows has a segment before it
        (CONTEXT, True, "--deterministic: segments depend on where a prompt is cut"),
        (CONTEXT, False, "cuDNN: No available kernel."),
    ],
)
def test_proas_kernel_stays_and_the_row_says_why(
    folder: Path, context: int, deterministic: bool, why: str | None
) -> None:  # fmt: skip
    plan = plan_of(folder, context=context)
    plan = msgspec.structs.replace(plan, deterministic=deterministic)
    segmented, row = AttentionTrial(
        plan, open_checkpoint(folder, "auto", {}).declare().spec, CPU, GpuTraits(80, 1), refuse
    ).result(())
    assert segmented is None
    assert (row and (row.name, row.got, row.why)) == (why and (ROW, OWN, why))


@pytest.mark.gpu
@pytest.mark.alone
def test_a_long_prompt_has_the_same_log_probabilities(folder: Path) -> None:
    """With --deterministic all attention is Proa's kernel's."""
    rng, found = random.Random(0), []
    tokens = [rng.randrange(3, 500) for _ in range(11_000)]
    for deterministic in (False, True):
        logprobs, decisions = logprobs_after(plan_of(folder, "0", deterministic=deterministic), tokens)
        (row,) = (row for row in decisions if row.name == ROW)
        assert (row.why.startswith("--deterministic")) is deterministic
        found.append(logprobs)
    assert found[0] == pytest.approx(found[1], abs=0.05)
