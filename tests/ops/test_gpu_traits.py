"""Traits of GPUs that are known without a device."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from proa.ops.gpu_traits import SHARED_KIB, GpuTraits, traits_of

TOOL = Path(__file__).parents[2] / "tools" / "check_kernels.py"


def tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_kernels", TOOL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kernels_are_checked_with_launch_parameters() -> None:
    checked: dict[int, int] = tool().SHARED_BYTES
    assert checked == {capability: SHARED_KIB[capability] for capability in checked}


@pytest.mark.parametrize(
    ("capability", "kib", "converts"),
    [(75, 64, False), (80, 163, False), (86, 99, False), (88, 163, False), (89, 99, True), (90, 227, True),
     (104, 227, True), (120, 99, True), (130, 99, True), (70, 64, False)],
)  # fmt: skip
def test_an_unknown_capability_gets_the_next_lower_ones_traits(capability: int, kib: int, converts: bool) -> None:
    traits = GpuTraits(capability, 1)
    assert (traits.shared_bytes, traits.converts_e4m3) == (kib << 10, converts)


@pytest.mark.gpu
def test_traits_agree_with_the_device() -> None:
    properties = torch.cuda.get_device_properties(0)
    traits = traits_of(torch.device("cuda:0"))
    assert traits.processors == properties.multi_processor_count
    if traits.capability >= 80:
        assert traits.shared_bytes == properties.shared_memory_per_multiprocessor - 1024
