"""--fp8-activations in the plan: refusals, the table's row, memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from proa.config.options import GpuOptions, ModelOptions
from proa.errors import UsageError
from proa.models.quantisation import Quantisation
from proa.models.spec import Block, Model
from proa.plan.fp8_activations import fp8_rows
from proa.plan.gpu_asked import unused_rows
from proa.plan.plan import Plan
from proa.plan.stored import weights_row
from unit import test_vram
from unit.vram_cases import DEMO, DENSE, MIXTRAL, QWEN3_30B, model, moe, row

FP8 = {"load_format": "dummy", "dummy_format": "fp8"}


def plan(
    gib: float = 24, capability: tuple[int, int] = (9, 0), spec: Model = QWEN3_30B, **asked: Any
) -> Plan:  # fmt: skip
    box = test_vram.machine(124, test_vram.gpu(gib, capability=capability))
    return test_vram.plan(spec, box, **(FP8 | asked))


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_start_up_row(capability: tuple[int, int]) -> None:
    on, off = plan(capability=capability, fp8_activations=True), plan(capability=capability)
    assert on.gpu is not None
    assert off.gpu is not None
    assert (on.gpu.fp8_activations, off.gpu.fp8_activations) == (True, False)
    asked, got, why = row(on, "fp8 activations")
    assert (asked, got) == ("on", "experts of many tokens")
    assert "lossy" in why
    steps = "in steps of more than 160 rows"
    assert steps in why
    whole = row(plan(80, capability=capability, fp8_activations=True), "fp8 activations")[2]
    assert whole.endswith(f"{steps} (a prompt of up to 512 tokens is padded to 32, 64, 128, 256 or 512 rows)")
    assert "fp8 activations" not in {decision.name for decision in off.decisions}


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        ({"capability": (8, 6)}, "8.9 or newer; cuda:0 has 8.6"),
        ({"gpu": "sim:24GiB"}, "sim is simulated"),
        ({"dummy_format": "int4"}, "some/model has none"),
        ({"spec": DENSE}, "some/model has none"),
        ({"load_format": "safetensors", "dummy_format": "bf16"}, "some/model has none"),
    ],
)
def test_refused(asked: dict[str, Any], match: str) -> None:
    with pytest.raises(UsageError, match=match):
        plan(fp8_activations=True, **asked)


def test_row_without_a_gpu() -> None:
    got = plan(gpu="none", fp8_activations=True)
    assert row(got, "--fp8-activations") == ("on", "none", "no GPU is used")
    assert unused_rows(GpuOptions()) == ()


@pytest.mark.parametrize("kind", ["FP8 block 64", "MXFP8", "INT8 channel", "NVFP4", "BF16"])
def test_only_experts_in_supported_codes_and_groups(kind: str) -> None:
    """Regardless of the linear layers' formats."""
    on = plan().gpu
    assert on is not None
    spec = model(64, 1, Block(DEMO.blocks[0].mixer, moe(576, 16, 12, 48)), 512)
    linear = {name: "FP8 channel" for name, _ in spec.params()}
    experts = [name for name in linear if ".experts." in name]
    down = [name for name in experts if ".down." in name]
    assert fp8_rows(True, "m", on, spec, linear | dict.fromkeys(down, kind))
    with pytest.raises(UsageError, match="128 x 128"):
        fp8_rows(True, "m", on, spec, linear | dict.fromkeys(experts, kind))


@pytest.mark.parametrize(("made_for", "said"), [("FP8, dynamic", "FP8, dynamic"), ("", "bfloat16")])
def test_weights_row_names_the_activations_of_the_checkpoint(made_for: str, said: str) -> None:
    on = plan(fp8_activations=True).gpu
    checkpoint = SimpleNamespace(
        load_format="safetensors", tensors={}, quantisation=Quantisation("fp8", activations=made_for)
    )
    got = weights_row(ModelOptions(), checkpoint, QWEN3_30B, {"a": "FP8 channel"}, on)  # type: ignore[arg-type]
    assert got.why.endswith(f"; activations stay bfloat16 except for experts of many tokens (made for {said})")


@pytest.mark.parametrize(
    ("spec", "running", "rows_bytes", "nodes"),
    [
        (QWEN3_30B, 64, 2048 + 8 * 768, 0),
        (MIXTRAL, 32, 4096 + 2 * 14336, 0),
        (MIXTRAL, 40, 4096 + 2 * 14336, 0),
        (MIXTRAL, 64, 4096 + 2 * 14336, 3 * 2 * 32),  # graphs of 48, 56 and 64
    ],
)
def test_rounded_rows_are_counted(spec: Model, running: int, rows_bytes: int, nodes: int) -> None:
    """Count rounded rows of 512 tokens, of x and of each pair, and nodes of graphs with over 10 tokens per expert."""
    asked = {"max_running": running, "max_batch_tokens": 512}
    on, off = (plan(40, spec=spec, fp8_activations=fp8, **asked).gpu for fp8 in (True, False))
    assert on is not None
    assert off is not None
    more = 512 * rows_bytes * 132 // 128 + nodes * (4 << 10)
    assert on.vram.workspace_bytes - off.vram.workspace_bytes == more
