"""The plan with which a path is run: how many experts are streamed and in how many groups, and why a path is left
out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from proa.check.adapt import Adapted, adapt
from proa.check.drive import FROM_FILES, FROM_RAM
from proa.check.paths import NoPath, Streams
from proa.check.paths import Path as OnePath
from proa.config.options import EngineOptions
from proa.config.parse import from_keywords
from proa.errors import UsageError
from proa.models.ranks import CPU
from proa.ops.sizes import RING_BANKS, ring_groups
from proa.plan.plan import Plan
from quick_plan import prepare
from tiny import make_tiny, tiny_spec

Make = Callable[[EngineOptions], Plan]
SPEC = tiny_spec("qwen3-moe")


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    folder = make_tiny("qwen3-moe", tmp_path_factory.mktemp("models") / "m")
    return lambda options: prepare(str(folder), options).plan


def options(**more: object) -> EngineOptions:
    return from_keywords(EngineOptions, **{"dtype": "bfloat16", "gpu": "sim:256MiB", "gpu_experts": "none", **more})


def groups(plan: Plan, streamed: int) -> set[int]:
    """Number of groups of each layer."""
    assert plan.gpu is not None
    bank_bytes = plan.gpu.ring_bytes // RING_BANKS
    return {ring_groups(streamed, nbytes, bank_bytes) for nbytes in plan.gpu.expert_bytes}


@pytest.mark.parametrize(("halved", "streamed"), [(True, 4), (False, 8)])
@pytest.mark.parametrize(("streams", "expected"), [(Streams.WHOLE, 1), (Streams.GROUPS, 2)])
def test_the_ring(halved: bool, streamed: int, streams: Streams, expected: int, make: Make) -> None:
    got = adapt(OnePath("p", options(), streams=streams, halved=halved), SPEC, "", make)
    assert isinstance(got, Adapted)
    assert got.plan.gpu is not None
    assert groups(got.plan, streamed) == {expected}
    assert got.plan.gpu.prefill == ("half" if halved else "auto")


def with_ring(make: Make, nbytes_each: float, *, in_ram: int = 8) -> Make:
    """Plans whose banks hold so many experts, and with so many experts of each layer in RAM."""

    def made(options: EngineOptions) -> Plan:
        plan = make(options)
        assert plan.gpu is not None
        nbytes = RING_BANKS * int(nbytes_each * max(plan.gpu.expert_bytes))
        owners = tuple((CPU,) * in_ram + (0,) * (len(layer) - in_ram) for layer in plan.gpu.owners)
        gpu = msgspec.structs.replace(plan.gpu, ring_bytes=nbytes, owners=owners)
        return msgspec.structs.replace(plan, gpus=(gpu,))

    return made


@pytest.mark.parametrize(
    ("streams", "halved", "banks", "in_ram", "why"),
    [
        (Streams.WHOLE, False, 4, 8, "holds a layer's streamed experts in 2 groups, not at once"),
        (Streams.GROUPS, False, 8, 1, "too few experts are streamed in a layer to be divided into groups"),
        (Streams.WHOLE, True, 8, 1, "no layer has two experts in RAM"),
    ],
)
def test_rings_that_a_path_cannot_have(
    streams: Streams, halved: bool, banks: int, in_ram: int, why: str, make: Make
) -> None:
    path = OnePath("p", options(), streams=streams, halved=halved)
    got = adapt(path, SPEC, "", with_ring(make, banks, in_ram=in_ram))
    assert isinstance(got, NoPath)
    assert why in got.why


def test_a_ring_that_is_small_stays_as_planned(make: Make) -> None:
    path = OnePath("p", options(), streams=Streams.GROUPS)
    got = adapt(path, SPEC, "", with_ring(make, 3.5))
    assert isinstance(got, Adapted)
    assert groups(got.plan, 8) == {3}


def test_no_ring(make: Make) -> None:
    got = adapt(OnePath("p", options(prefill="cpu"), streams=Streams.WHOLE), SPEC, "", make)
    assert got == NoPath("p", "experts in RAM are computed by the CPU: as asked")


def test_half_of_the_missed_experts_are_read_in_place(make: Make) -> None:
    got = adapt(OnePath("p", options(gpu_experts="4"), in_place=True), SPEC, "", make)
    assert isinstance(got, Adapted)
    assert got.plan.gpu is not None
    assert got.plan.gpu.co_fetch_half


def test_blocks_are_launched_op_by_op(make: Make) -> None:
    """Notes are copies of one step: a graph would write to those of the step that it was captured in."""

    def made(asked: EngineOptions) -> Plan:
        plan = make(asked)
        assert plan.gpu is not None
        return msgspec.structs.replace(plan, gpus=(msgspec.structs.replace(plan.gpu, block_graphs=True),))

    got = adapt(OnePath("p", options(gpu_experts="4")), SPEC, "", made)
    assert isinstance(got, Adapted)
    assert got.plan.gpu is not None
    assert not got.plan.gpu.block_graphs


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"co_fetch": "off"}, "as asked"),
        ({"gpu_experts": "all"}, "the CPU computes no experts that the GPU could read"),
    ],
)
def test_no_reads_in_place(asked: dict[str, str], why: str, make: Make) -> None:
    assert adapt(OnePath("p", options(**asked), in_place=True), SPEC, "", make) == NoPath("p", why)


def test_tiers(make: Make, tmp_path: Path) -> None:
    got = adapt(OnePath("p", options(), tiers=True), SPEC, str(tmp_path), make)
    assert isinstance(got, Adapted)
    assert got.left_out == {}
    assert got.plan.prefix_files is not None
    assert got.plan.prefix_files.folder == str(tmp_path)
    assert got.plan.memory.prefix_cache_bytes > 0


def test_tiers_that_do_not_fit_leave_the_path(make: Make, tmp_path: Path) -> None:
    def refusing(options: EngineOptions) -> Plan:
        if options.cache.prefix_cache_ram:
            raise UsageError("--prefix-cache-ram 4 MiB does not fit.")
        return make(options)

    got = adapt(OnePath("p", options(), tiers=True), SPEC, str(tmp_path), refusing)
    assert isinstance(got, Adapted)
    assert got.left_out == dict.fromkeys((FROM_RAM, FROM_FILES), "--prefix-cache-ram 4 MiB does not fit.")
    assert got.plan.prefix_files is None
