"""Errors of the kinds that engines have had, put into the product: check finds each, and names layer, op and expert."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import proa.engine.executors.angles
import proa.engine.executors.eager
import proa.engine.executors.recorded
import proa.weights.coded
from check_runs import SIM, checked, found, said
from gpu_llm import poison
from proa.cache.radix import PrefixCache
from proa.errors import ResourceError
from proa.hybrid.copies import GpuCopier, HostCopier
from proa.hybrid.layer_memory import LayerMemory
from proa.hybrid.tables import Tables
from proa.models.ranks import CPU
from proa.native.weights import Experts
from proa.ops.cpu import CpuExperts, CpuOps, CpuUnderway
from proa.weights.coded import CodedFiles
from tiny import make_tiny
from tiny_quantised import SCHEMES, make_quantised

LAYER, EXPERT = 1, 5
Patch = pytest.MonkeyPatch
DEVICES = [
    pytest.param("none", "CPU, avx2", id="cpu"),
    pytest.param(SIM, "experts in VRAM and RAM", id="sim"),
    pytest.param("0", "experts in VRAM and RAM", id="cuda", marks=pytest.mark.gpu),
]
SPLIT_DEVICES = DEVICES[1:]


def quantised(folder: Path, scheme: str) -> Path:
    made, _ = make_quantised(SCHEMES[scheme], "qwen3-moe", folder / "m", moe_intermediate_size=96)
    return made


def swapped_scales(patch: Patch) -> None:
    """The gate of one expert has the scales of another expert's."""
    read = CodedFiles._read_scales
    mine = f"layers.{LAYER}.mlp.experts.{EXPERT}.gate_proj"
    others: dict[str, Any] = {}

    def of_another(self: Any, info: Any, of: Any, matrix: int) -> Any:
        others[of.codes.name] = of.scales
        if mine in of.codes.name:
            of = dataclasses.replace(of, scales=others[of.codes.name.replace(f"experts.{EXPERT}", "experts.0")])
        return read(self, info, of, matrix)

    patch.setattr(CodedFiles, "_read_scales", of_another)


def reciprocal_scales(patch: Patch) -> None:
    kept = proa.weights.coded._as_kept
    patch.setattr(proa.weights.coded, "_as_kept", lambda scales, stored: 1 / kept(scales, stored))


def wrong_rope(patch: Patch) -> None:
    """Positions count twice."""
    for executor in (proa.engine.executors.recorded, proa.engine.executors.eager, proa.engine.executors.angles):
        right = executor.cos_sin
        wrong = lambda rope, positions, lengths, right=right: right(rope, 2 * positions, lengths)  # noqa: E731
        patch.setattr(executor, "cos_sin", wrong)


def page_of_another_prompt(patch: Patch) -> None:
    match, insert = PrefixCache.match, PrefixCache.insert
    kept: list[list[int]] = []

    def remember(self: PrefixCache, node: Any, keys: Any, pages: Any) -> Any:
        kept.append(list(pages))
        return insert(self, node, keys, pages)

    def other(self: PrefixCache, keys: Any) -> Any:
        right = match(self, keys)
        others = [page for pages in kept for page in pages if page not in right.pages]
        if not right.pages or not others:
            return right
        return dataclasses.replace(right, pages=[others[0], *right.pages[1:]])

    patch.setattr(PrefixCache, "insert", remember)
    patch.setattr(PrefixCache, "match", other)


@pytest.mark.parametrize(("gpu", "path"), DEVICES)
@pytest.mark.parametrize("scheme", ["fp8 rows", "int4"])
def test_swapped_scales(scheme: str, gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = quantised(tmp_path, scheme)
    swapped_scales(monkeypatch)
    report = checked(folder, monkeypatch, gpu=gpu, only=path)
    assert not report.agrees
    assert said(report)[0].startswith(f"layer {LAYER}, experts, expert {EXPERT}: ")


@pytest.mark.parametrize(("gpu", "path"), DEVICES)
@pytest.mark.parametrize("scheme", ["fp8 rows", "fp8 block f32"])
def test_reciprocal_fp8_scale(scheme: str, gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = quantised(tmp_path, scheme)
    reciprocal_scales(monkeypatch)
    assert "layer 0, attention" in said(checked(folder, monkeypatch, gpu=gpu, only=path))[0]


@pytest.mark.parametrize(("gpu", "path"), DEVICES)
@pytest.mark.parametrize("name", ["qwen3-moe", "deepseek-v3"])
def test_wrong_rope(name: str, gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    wrong_rope(monkeypatch)
    report = checked(make_tiny(name, tmp_path), monkeypatch, gpu=gpu, only=path)
    assert "attention" in said(report)[0]
    assert said(report)[0].startswith("layer 0")


@pytest.mark.parametrize(("gpu", "path"), DEVICES)
def test_page_of_another_prompt(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    page_of_another_prompt(monkeypatch)
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=gpu, only=path)
    assert said(report)[0].startswith("layer 0, attention: ")
    assert {problem.phase for of in report.observed for problem in of.problems} <= {"cached prefix", "decode"}


@pytest.mark.parametrize(("gpu", "path"), DEVICES)
def test_nan_expert(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    folder = make_tiny("qwen3-moe", tmp_path)
    poison(folder, LAYER, EXPERT)
    report = checked(folder, monkeypatch, gpu=gpu, only=path)
    assert said(report)[0].startswith(f"layer {LAYER}, experts, expert {EXPERT}: NaN or infinity")


def test_expert_id_off_by_one_on_the_cpu(tmp_path: Path, monkeypatch: Patch) -> None:
    parameters, made = CpuExperts.parameters, []

    def next_expert(self: CpuExperts) -> Any:
        made.append(self)
        if len(made) <= LAYER:
            yield from parameters(self)
            return
        for name, sink in parameters(self):
            number, _, part = name.partition(".")
            yield f"{(int(number) + 1) % self._experts}.{part}", sink

    monkeypatch.setattr(CpuExperts, "parameters", next_expert)
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, only="CPU, avx2")
    assert said(report)[0].startswith(f"layer {LAYER}, experts, all experts")


def test_routed_to_the_next_expert(tmp_path: Path, monkeypatch: Patch) -> None:
    """The router's rows are shifted by one, as if ids were counted from 1."""
    linear = CpuOps.route

    def shifted(self: CpuOps, logits: torch.Tensor, slots: torch.Tensor, rule: Any) -> Any:
        return linear(self, logits[:, 1:], slots, rule)

    monkeypatch.setattr(CpuOps, "route", shifted)
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, only="CPU, avx2")
    assert said(report)[0].startswith("layer 0, router, expert ")


@pytest.mark.parametrize(("gpu", "path"), SPLIT_DEVICES)
def test_expert_id_off_by_one_in_ram(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """The tables map one expert to the next one's weights in RAM."""
    to_cpu = Tables.to_cpu

    def next_number(self: Tables, layer: int, expert: int, number: int) -> None:
        off = layer == LAYER and expert == in_ram()[0]
        to_cpu(self, layer, expert, (number + off) % len(self._layers[layer].in_ram))

    monkeypatch.setattr(Tables, "to_cpu", next_number)
    in_ram = placed(monkeypatch)
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=gpu, only=path)
    assert said(report)[0].startswith(f"layer {LAYER}, experts, expert {in_ram()[0]}")


@pytest.mark.parametrize(("gpu", "path"), SPLIT_DEVICES)
def test_lost_partial_sum(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """The CPU's experts of one layer are computed by nobody."""

    def lost(self: Tables, layer: int, expert: int, number: int) -> None:
        self._set(layer, expert, (0, 0, 0, 0), -1 if layer == LAYER else number, CPU)

    monkeypatch.setattr(Tables, "to_cpu", lost)
    in_ram = placed(monkeypatch)
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=gpu, only=path)
    names = ", ".join(f"expert {e}" for e in in_ram())
    assert said(report)[0].startswith(f"layer {LAYER}, experts, {names}, missing from the sum: ")


def placed(monkeypatch: Patch) -> Callable[[], list[int]]:
    """Returns a function that gives the ids of the mutated layer's experts in RAM, once a path was made."""
    fill, made = LayerMemory.fill_slots, []

    def remember(self: LayerMemory) -> None:
        made.append(self)
        fill(self)

    monkeypatch.setattr(LayerMemory, "fill_slots", remember)
    return lambda: [e for e, owner in enumerate(made[LAYER].owners) if owner == CPU]


def test_lost_shared_expert(tmp_path: Path, monkeypatch: Patch) -> None:
    monkeypatch.setattr(CpuUnderway, "finish", lambda self, shared, gate: self._routed)
    report = checked(make_tiny("qwen2-moe", tmp_path), monkeypatch, only="CPU, avx2")
    assert said(report)[0].startswith("layer 0, experts, the shared expert, missing from the sum")


@pytest.mark.parametrize(("gpu", "path"), SPLIT_DEVICES)
def test_stale_slot(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    fill, made = LayerMemory.fill_slots, []

    def one_stale(self: LayerMemory) -> None:
        fill(self)
        made.append(self)
        if len(made) == LAYER + 1:
            for slots in (self.slots.up, self.slots.down):
                slots[1].copy_(slots[0])

    monkeypatch.setattr(LayerMemory, "fill_slots", one_stale)
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=gpu, only=path)
    first, second, *_ = made[LAYER].slots.resident
    assert said(report)[0].startswith(f"layer {LAYER}, experts, expert {second}")
    assert f"expert {second}, computed as expert {first}" in said(report)[0] or f"expert {first}" not in said(report)[0]


@pytest.mark.parametrize(("gpu", "path"), SPLIT_DEVICES)
def test_torn_swap_of_a_moved_expert(gpu: str, path: str, tmp_path: Path, monkeypatch: Patch) -> None:
    """Of a moved expert only gate and up arrive."""
    for copier in (HostCopier, GpuCopier):
        start = copier.start
        monkeypatch.setattr(
            copier, "start", lambda self, pairs, start=start: start(self, pairs[: (len(pairs) + 1) // 2])
        )
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, gpu=gpu, only="experts that move")
    assert ", experts, expert " in said(report)[0]


def test_a_path_that_raises_is_named(tmp_path: Path, monkeypatch: Patch) -> None:
    def broken(*args: object, **more: object) -> None:
        raise ResourceError("There is no memory for experts.")

    monkeypatch.setattr(Experts, "__init__", broken)
    report = checked(make_tiny("qwen3-moe", tmp_path), monkeypatch, only="CPU, avx2")
    assert not report.agrees
    assert found(report) == ["CPU, avx2: There is no memory for experts."]
