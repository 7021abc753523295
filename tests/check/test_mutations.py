"""`proa check` finds each mutation of tests/check_mutations.py, and names layer, op and expert."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import check_mutations as mutations
from check_mutations import EXPERT, GROUPS, IN_RAM, LAYER, ON_CPU, RESIDENT, RING_LAYER, RING_NUMBER, checked_with
from check_runs import FASTEST, SIM, checked, found
from gpu_llm import poison
from proa.errors import ResourceError
from proa.native.weights import Experts
from tiny import make_tiny
from tiny_quantised import SCHEMES, make_quantised

pytestmark = pytest.mark.one_table  # a mutation and a device
Patch = pytest.MonkeyPatch
DEVICES = [
    pytest.param("none", FASTEST, id="cpu"),
    pytest.param(SIM, "experts in VRAM and RAM", id="sim"),
    pytest.param("0", "experts in VRAM and RAM", id="cuda", marks=pytest.mark.gpu),
]
SPLIT_DEVICES = DEVICES[1:]


def on_gpus(*paths: str) -> list[Any]:
    """Parameters: a simulated GPU and a real one, each with these paths."""
    simulated = [pytest.param(SIM, path, id=f"sim: {path}") for path in paths]
    return simulated + [pytest.param("0", path, id=f"cuda: {path}", marks=pytest.mark.gpu) for path in paths]


BOTH, IN_GROUPS = "streamed and on CPU", "streamed in groups and on CPU"
IN_PLACE = "experts read over PCIe"
EXPERTS = f"layer {LAYER}, experts, "


def quantised(folder: Path, scheme: str) -> Path:
    made, _ = make_quantised(SCHEMES[scheme], "qwen3-moe", folder / "m", moe_intermediate_size=96)
    return made


@pytest.mark.parametrize(("gpu", "path"), DEVICES)
def test_no_mutation(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    assert checked_with(mutations.nothing, make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=gpu, only=path) == []


@pytest.mark.parametrize(("gpu", "path"), DEVICES)
@pytest.mark.parametrize("scheme", ["fp8 rows", "int4"])
def test_swapped_scales(scheme: str, gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = quantised(tmp_path, scheme)
    problems = checked_with(mutations.swapped_scales, folder, monkeypatch, gpu=gpu, only=path)
    assert problems[0].startswith(f"{EXPERTS}expert {EXPERT}: ")


@pytest.mark.parametrize(("gpu", "path"), DEVICES)
@pytest.mark.parametrize("scheme", ["fp8 rows", "fp8 block f32"])
def test_reciprocal_fp8_scale(scheme: str, gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = quantised(tmp_path, scheme)
    problems = checked_with(mutations.reciprocal_scales, folder, monkeypatch, gpu=gpu, only=path)
    assert problems[0].startswith("layer 0, attention: ")


@pytest.mark.parametrize(("gpu", "path"), DEVICES)
@pytest.mark.parametrize(("name", "op"), [("qwen3-moe", "attention"), ("deepseek-v3", "latent attention")])
def test_wrong_rope(name: str, op: str, gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = make_tiny(name, tmp_path)
    problems = checked_with(mutations.wrong_rope, folder, monkeypatch, gpu=gpu, only=path)
    assert problems[0].startswith(f"layer 0, {op}: ")


@pytest.mark.parametrize(("gpu", "path"), DEVICES)
def test_page_of_another_prompt(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    problems = checked_with(mutations.page_of_another_prompt, folder, monkeypatch, gpu=gpu, only=path)
    assert problems[0].startswith("layer 0, attention: ")
    assert "(prompt)" not in problems[0]


@pytest.mark.parametrize(("gpu", "path"), DEVICES)
def test_nan_expert(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    poison(folder, LAYER, EXPERT)
    problems = checked_with(mutations.nothing, folder, monkeypatch, gpu=gpu, only=path)
    assert problems[0].startswith(f"{EXPERTS}expert {EXPERT}: NaN or infinity")


def test_expert_id_off_by_one_on_the_cpu(tmp_path: Path, monkeypatch: Patch) -> None:
    problems = checked_with(mutations.next_expert_on_the_cpu, make_tiny("qwen3-moe", tmp_path), monkeypatch)
    assert problems[0].startswith(f"{EXPERTS}all experts")


def test_ids_counted_from_one(tmp_path: Path, monkeypatch: Patch) -> None:
    problems = checked_with(mutations.ids_from_one, make_tiny("qwen3-moe", tmp_path), monkeypatch)
    assert problems[0].startswith("layer 0, router, expert ")


@pytest.mark.parametrize(("gpu", "path"), SPLIT_DEVICES)
def test_expert_id_off_by_one_in_ram(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    problems = checked_with(mutations.next_expert_in_ram, folder, monkeypatch, gpu=gpu, only=path)
    assert problems[0].startswith(f"{EXPERTS}expert {IN_RAM[0]}")


@pytest.mark.parametrize(("gpu", "path"), SPLIT_DEVICES)
def test_lost_partial_sum(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    problems = checked_with(mutations.lost_partial_sum, folder, monkeypatch, gpu=gpu, only=path)
    names = ", ".join(f"expert {e}" for e in IN_RAM)
    assert problems[0].startswith(f"{EXPERTS}{names}, missing from the sum: ")


def test_lost_shared_expert(tmp_path: Path, monkeypatch: Patch) -> None:
    problems = checked_with(mutations.lost_shared_expert, make_tiny("qwen2-moe", tmp_path), monkeypatch)
    assert problems[0].startswith("layer 0, experts, the shared expert, missing from the sum: ")


@pytest.mark.parametrize(("gpu", "path"), SPLIT_DEVICES)
def test_stale_slot(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    problems = checked_with(mutations.stale_slot, folder, monkeypatch, gpu=gpu, only=path)
    assert problems[0].startswith(f"{EXPERTS}expert {RESIDENT[1]}")


@pytest.mark.parametrize("gpu", [SIM, pytest.param("0", marks=pytest.mark.gpu)])
def test_torn_swap_of_a_moved_expert(gpu: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    problems = checked_with(mutations.torn_swap, folder, monkeypatch, gpu=gpu, only="experts that move")
    assert ", experts, expert " in problems[0]


@pytest.mark.parametrize(("gpu", "path"), on_gpus(BOTH, IN_GROUPS))
def test_no_mutation_of_streamed_prompts(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    assert checked_with(mutations.nothing, make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=gpu, only=path) == []


@pytest.mark.parametrize(("gpu", "path"), on_gpus(BOTH, IN_GROUPS))
@pytest.mark.parametrize("mutation", [mutations.stale_ring_slot, mutations.torn_ring_copy])
def test_a_streamed_expert_is_not_copied(
    mutation: Any, gpu: str, path: str, tmp_path: Path, monkeypatch: Patch
) -> None:  # fmt: skip
    problems = checked_with(mutation, make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=gpu, only=path)
    groups = GROUPS if path == IN_GROUPS else [IN_RAM]
    names = ", ".join(f"expert {group[RING_NUMBER]}" for group in groups)
    assert problems[0].startswith(f"layer {RING_LAYER}, experts, {names}: ")


@pytest.mark.parametrize(("gpu", "path"), on_gpus(BOTH))
def test_expert_id_off_by_one_in_the_ring(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    problems = checked_with(mutations.next_expert_in_the_ring, folder, monkeypatch, gpu=gpu, only=path)
    assert problems[0].startswith(f"{EXPERTS}expert {IN_RAM[0]}")


@pytest.mark.parametrize(("gpu", "path"), on_gpus(BOTH))
def test_swapped_scales_of_a_streamed_expert(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = quantised(tmp_path, "int4")
    problems = checked_with(mutations.swapped_scales, folder, monkeypatch, gpu=gpu, only=path)
    assert problems[0].startswith(f"{EXPERTS}expert {EXPERT}: ")


@pytest.mark.parametrize(("gpu", "path"), on_gpus(BOTH, IN_GROUPS))
def test_a_streamed_nan_expert(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    poison(folder, LAYER, EXPERT)
    problems = checked_with(mutations.nothing, folder, monkeypatch, gpu=gpu, only=path)
    assert problems[0].startswith(f"{EXPERTS}expert {EXPERT}: NaN or infinity")


@pytest.mark.parametrize(("gpu", "path"), on_gpus(IN_GROUPS))
def test_lost_sum_of_a_streamed_group(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    problems = checked_with(mutations.lost_sum_of_a_group, folder, monkeypatch, gpu=gpu, only=path)
    names = ", ".join(f"expert {e}" for e in GROUPS[0])
    assert problems[0].startswith(f"{EXPERTS}{names}, missing from the sum: ")


@pytest.mark.parametrize(("gpu", "path"), on_gpus(IN_GROUPS))
def test_lost_sum_of_the_cpu_beside_groups(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    problems = checked_with(mutations.lost_sum_beside_groups, folder, monkeypatch, gpu=gpu, only=path)
    names = ", ".join(f"expert {e}" for e in ON_CPU)
    assert problems[0].startswith(f"{EXPERTS}{names}, missing from the sum: ")


@pytest.mark.parametrize(("gpu", "path"), on_gpus(IN_PLACE))
def test_no_mutation_of_experts_read_in_place(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    assert checked_with(mutations.nothing, make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=gpu, only=path) == []


@pytest.mark.parametrize(("gpu", "path"), on_gpus(IN_PLACE))
@pytest.mark.parametrize("mutation", [mutations.next_expert_in_place, mutations.torn_place])
def test_an_expert_is_read_at_a_wrong_address(
    mutation: Any, gpu: str, path: str, tmp_path: Path, monkeypatch: Patch
) -> None:  # fmt: skip
    """Prompts have too many pairs for reads in place: there the CPU computes the expert, rightly."""
    problems = checked_with(mutation, make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=gpu, only=path)
    assert problems[0].startswith(f"{EXPERTS}expert {IN_RAM[0]}")
    assert problems[0].endswith("(decode)")


@pytest.mark.parametrize(("gpu", "path"), SPLIT_DEVICES)
def test_page_of_another_prompt_out_of_ram(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    problems = checked_with(mutations.page_of_another_prompt_in_ram, folder, monkeypatch, gpu=gpu, only=path)
    assert problems[0].startswith("layer 0, attention: ")
    assert problems[0].endswith("(prefix from RAM)")


@pytest.mark.parametrize(("gpu", "path"), DEVICES)
def test_page_of_another_prompt_out_of_a_file(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    problems = checked_with(mutations.page_of_another_prompt_in_files, folder, monkeypatch, gpu=gpu, only=path)
    assert problems[0].startswith("layer 0, attention: ")
    assert problems[0].endswith("(prefix from files)")


@pytest.mark.parametrize(("gpu", "path"), DEVICES)
def test_states_restored_in_part(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = make_tiny("qwen3-next", tmp_path)
    problems = checked_with(mutations.states_restored_in_part, folder, monkeypatch, gpu=gpu, only=path)
    assert problems[0].startswith("layer 0, linear attention: ")
    assert problems[0].endswith("(prefix from files)" if gpu == "none" else "(prefix from RAM)")


@pytest.mark.parametrize(("gpu", "path"), [("none", FASTEST), (SIM, "experts in VRAM and RAM")])
def test_a_prefix_of_another_prompt_is_named(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    mutations.keys_without_tokens(monkeypatch)
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=gpu, only=path)
    assert found(report)[0].endswith("but their pages are of another prompt")


def test_a_path_that_raises_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    def broken(*args: object, **more: object) -> None:
        raise ResourceError("There is no memory for experts.")

    monkeypatch.setattr(Experts, "__init__", broken)
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, only="CPU, avx2")
    assert not report.agrees
    assert found(report) == ["CPU, avx2: There is no memory for experts."]


def test_a_path_that_crashes_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(Experts, "__init__", lambda *args, **more: os.kill(os.getpid(), signal.SIGKILL))
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, only="CPU, avx2")
    assert not report.agrees
    assert found(report) == ["CPU, avx2: its process was ended by SIGKILL."]
