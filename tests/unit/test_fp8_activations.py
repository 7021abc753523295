"""--fp8-activations in the plan: where it is refused, what the table says, what it takes from experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from proa.config.options import GpuOptions, ModelOptions
from proa.errors import UsageError
from proa.models.quantisation import Quantisation
from proa.plan.fp8_activations import fp8_rows
from proa.plan.gpu_asked import unused_rows
from proa.plan.plan import Plan
from proa.plan.stored import weights_row
from unit import test_vram
from unit.test_vram import QWEN3_30B, row

FP8 = {"load_format": "dummy", "dummy_format": "fp8"}


def plan(gib: float = 24, capability: tuple[int, int] = (9, 0), **asked: Any) -> Plan:
    box = test_vram.machine(124, test_vram.gpu(gib, capability=capability))
    return test_vram.plan(QWEN3_30B, box, **(FP8 | asked))


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_the_table_says_it(capability: tuple[int, int]) -> None:
    on, off = plan(capability=capability, fp8_activations=True), plan(capability=capability)
    assert on.gpu is not None
    assert off.gpu is not None
    assert (on.gpu.fp8_activations, off.gpu.fp8_activations) == (True, False)
    asked, got, why = row(on, "fp8 activations")
    assert (asked, got) == ("on", "on")
    assert "lossy" in why
    assert "fp8 activations" not in {decision.name for decision in off.decisions}


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"capability": (8, 6)}, "8.9 or newer; cuda:0 has 8.6"),
        ({"gpu": "sim:24GiB"}, "sim is simulated"),
        ({"dummy_format": "int4"}, "some/model has none"),
        ({"load_format": "safetensors", "dummy_format": "bf16"}, "some/model has none"),
    ],
)
def test_refused(asked: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        plan(fp8_activations=True, **asked)


def test_without_a_gpu_it_does_nothing_and_says_so() -> None:
    got = plan(gpu="none", fp8_activations=True)
    assert row(got, "--fp8-activations") == ("on", "none", "no GPU is used")
    assert unused_rows(GpuOptions()) == ()


@pytest.mark.parametrize("kind", ["FP8 block 64", "MXFP8", "INT8 channel", "NVFP4"])
def test_other_codes_and_groups_are_not_such(kind: str) -> None:
    on = plan().gpu
    assert on is not None
    assert fp8_rows(True, "m", on, {"a": kind, "b": "FP8 channel"})
    with pytest.raises(UsageError, match="128 x 128"):
        fp8_rows(True, "m", on, {"a": kind, "b": "BF16"})


@pytest.mark.parametrize(("made_for", "said"), [("FP8, dynamic", "FP8, dynamic"), ("", "bfloat16")])
def test_what_the_checkpoint_was_made_for(made_for: str, said: str) -> None:
    on = plan(fp8_activations=True).gpu
    checkpoint = SimpleNamespace(
        load_format="safetensors", tensors={}, quantisation=Quantisation("fp8", activations=made_for)
    )
    got = weights_row(ModelOptions(), checkpoint, QWEN3_30B, {"a": "FP8 channel"}, on)  # type: ignore[arg-type]
    assert got.why.endswith(f"; made for activations in {said}")


def test_rounded_rows_are_counted() -> None:
    """Of 512 tokens: the widest linear layer's rows of 4096, and of experts rows of 2048 and 8 of 768."""
    rows, nodes = 512 * (4096 + 2048 + 8 * 768) * 132 // 128, 8 * 48 * (64 << 10)  # of graphs of many sequences
    for running, more in ((4, rows), (64, rows + nodes)):
        on, off = (plan(fp8_activations=fp8, max_running=running).gpu for fp8 in (True, False))
        assert on is not None
        assert off is not None
        assert on.vram.workspace_bytes - off.vram.workspace_bytes == more
