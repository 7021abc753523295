"""plan_workers() on machines of many topologies, which tests/topologies.py writes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa.config.options import MachineOptions
from proa.machine.probe import probe
from proa.plan.plan import Workers
from proa.plan.workers import LAUNCHED_NICE, SAVING_SPIN_US, SPIN_US, no_workers, plan_threads, plan_workers
from proa.types import Decision
from topologies import HostFiles, NodeFiles, block_numbered, sibling_numbered

ONE = block_numbered(1, 16, 1)
TWO = block_numbered(2, 8, 1)
UNEVEN = HostFiles(
    nodes={0: NodeFiles(tuple(range(12)), 64), 1: NodeFiles(tuple(range(12, 16)), 64)},
    cores={core: (core,) for core in range(16)},
)
SMALL_NODE = replace(UNEVEN, nodes={0: NodeFiles(tuple(range(14)), 64), 1: NodeFiles((14, 15), 64)})
CXL = replace(TWO, nodes={**TWO.nodes, 2: NodeFiles((), 256)})


def planned(host: HostFiles, root: Path, /, use: int, **asked: Any) -> tuple[Workers, dict[str, Decision]]:
    workers, rows = plan_workers(MachineOptions(**asked), probe(host.write(root)), use)
    return workers, {row.name: row for row in rows}


@pytest.mark.parametrize(
    ("host", "threads", "asked", "trials"),
    [
        pytest.param(ONE, 16, {}, [(16,), (15,), (8,)], id="all, one less, half"),
        pytest.param(ONE, 16, {"power_saving": True}, [(16,), (15,), (12,), (8,), (4,)], id="fewer to save power"),
        pytest.param(ONE, 16, {"threads": 16}, [(16,)], id="a requested number is not tried"),
        pytest.param(ONE, 6, {"threads": 6}, [(6,)], id="nor is a smaller one"),
        pytest.param(block_numbered(1, 8), 8, {}, [(8,), (7,), (4,), (16,)], id="SMT siblings"),
        pytest.param(block_numbered(1, 8), 8, {"threads": 8}, [(8,)], id="no siblings if 8 were requested"),
        pytest.param(TWO, 16, {}, [(8, 8), (7, 7), (4, 4)], id="one less on each of two nodes"),
        pytest.param(sibling_numbered(2, 4), 8, {}, [(4, 4), (3, 3), (2, 2), (8, 8)], id="siblings on two nodes"),
        pytest.param(UNEVEN, 16, {}, [(12, 4), (11, 3), (6, 2)], id="in proportion to the nodes"),
        pytest.param(replace(ONE, quota_cores=4), 4, {}, [(4,), (3,), (2,)], id="a quota"),
        pytest.param(HostFiles(cpus=2), 2, {}, [(2,), (1,)], id="two cores"),
        pytest.param(HostFiles(cpus=1), 1, {}, [(1,)], id="one core"),
    ],
)
def test_tried_worker_counts(
    host: HostFiles, threads: int, asked: dict[str, Any], trials: list[tuple[int, ...]], tmp_path: Path
) -> None:
    workers, _ = planned(host, tmp_path, threads, **asked)
    assert list(workers.trials) == trials
    for trial in trials:
        assert all(0 < count <= len(team.cpus) for count, team in zip(trial, workers.teams, strict=True))


@pytest.mark.parametrize(
    ("host", "asked", "shares", "why"),
    [
        pytest.param(ONE, None, (15,), "16 CPUs usable; one is left to the threads", id="one CPU is left"),
        pytest.param(ONE, 16, (16,), "as asked", id="unless all are asked for"),
        pytest.param(block_numbered(1, 8), None, (15,), "16 CPUs usable; one is left", id="SMT siblings have workers"),
        pytest.param(TWO, None, (7, 7), "16 CPUs usable; 2 are left, one for each memory node", id="one for each node"),
        pytest.param(sibling_numbered(2, 4), None, (7, 7), "2 are left", id="siblings on two nodes"),
        pytest.param(UNEVEN, None, (10, 4), "2 are left", id="uneven nodes"),
        pytest.param(SMALL_NODE, None, (14, 2), "16 CPUs usable", id="a node with two CPUs"),
        pytest.param(replace(sibling_numbered(2, 8), quota_cores=9), None, (5, 4), "9 of 32", id="no node is given up"),
        pytest.param(HostFiles(cpus=4), None, (3,), "4 CPUs usable; one is left", id="four CPUs"),
        pytest.param(HostFiles(cpus=3), None, (3,), "3 CPUs usable", id="too few"),
        pytest.param(block_numbered(2, 2, 1), None, (2, 2), "4 CPUs usable", id="too few on a node"),
        pytest.param(replace(ONE, quota_cores=4), None, (3,), "the CPU quota is 4 of 16 CPUs; one", id="a quota"),
        pytest.param(replace(ONE, quota_cores=3), None, (3,), "the CPU quota is 3 of 16 CPUs", id="a small quota"),
    ],
)
def test_workers_beside_a_gpu(
    host: HostFiles, asked: int | None, shares: tuple[int, ...], why: str, tmp_path: Path
) -> None:
    machine = probe(host.write(tmp_path))
    threads, row = plan_threads(asked, machine, launched=True)
    workers, _ = plan_workers(MachineOptions(threads=asked), machine, threads, launched=True)
    assert (threads, row.got, workers.trials) == (sum(shares), str(sum(shares)), (shares,))
    assert tuple(len(set(team.cpus)) for team in workers.teams) == shares
    assert why in row.why
    assert ("left" in row.why) == (asked is None and threads < machine.usable_cores)


def test_default_binds_each_worker_to_a_cpu(tmp_path: Path) -> None:
    workers, rows = planned(TWO, tmp_path, 16)
    assert (workers.binding, workers.homes, workers.interleave, workers.spin_us) == ("core", (), (), SPIN_US)
    assert workers.nice == 0
    assert rows["CPU binding"] == Decision("CPU binding", "core", "core", "each worker has a CPU of its own: 0-15")
    assert rows["NUMA memory"] == Decision("NUMA memory", "bind", "bind", "each team's weights lie on its node: 0, 1")
    assert (rows["power saving"].got, rows["power saving"].why) == ("off", "an idle worker sleeps after 1000 us")


@pytest.mark.parametrize(
    ("host", "threads", "homes", "why"),
    [
        (TWO, 4, [tuple(range(8))], "0-7"),  # four workers fit one node, and may use all of it
        (TWO, 16, [tuple(range(8)), tuple(range(8, 16))], "0-7; 8-15"),
        (replace(ONE, affinity=(0, 1, 5, 6, 7)), 2, [(0, 1, 5, 6, 7)], "0-1, 5-7"),
        (HostFiles(cpus=3), 2, [(0, 1, 2)], "0-2"),
    ],
)
def test_binding_to_nodes(
    host: HostFiles, threads: int, homes: list[tuple[int, ...]], why: str, tmp_path: Path
) -> None:
    workers, rows = planned(host, tmp_path, threads, threads=threads, cpu_binding="node")
    assert list(workers.homes) == homes
    assert rows["CPU binding"].why == f"each worker moves within its node: {why}"


BUSY = ("@/tmp/dbus-x", "/run/a@b", "@proa-cpus/12/0-3,9/0a", "@proa-cpus/13/5/0b", "")


@pytest.mark.parametrize(
    ("asked", "cpus", "why"),
    [
        ({"threads": 4}, (4, 6, 7, 8), "4, 6-8; other Proa engines have 0-3, 5, 9"),
        ({"threads": 10}, (4, 6, 7, 8, 10, 11, 12, 13, 14, 15), "other Proa engines have 0-3, 5, 9"),
        ({"threads": 11}, tuple(range(11)), "0-10; other Proa engines are bound to 0-3, 5, 9 too: with --threads"),
        ({}, tuple(range(16)), "0-15; other Proa engines are bound to 0-3, 5, 9 too"),
    ],
)
def test_cpus_of_other_engines_are_avoided(
    asked: dict[str, Any], cpus: tuple[int, ...], why: str, tmp_path: Path
) -> None:
    workers, rows = planned(replace(ONE, sockets_listed=BUSY), tmp_path, asked.get("threads", 16), **asked)
    assert sorted(cpu for team in workers.teams for cpu in team.cpus) == list(cpus)
    assert why in rows["CPU binding"].why


def test_smt_sibling_of_a_claimed_cpu_is_no_free_core(tmp_path: Path) -> None:
    host = replace(block_numbered(1, 8), sockets_listed=["@proa-cpus/1/0-3/00"])
    workers, _ = planned(host, tmp_path, 4, threads=4)
    assert workers.teams[0].cpus == (4, 5, 6, 7)


@pytest.mark.parametrize("binding", ["node", "none"])
def test_other_engines_are_ignored_without_binding_to_cores(binding: str, tmp_path: Path) -> None:
    host = replace(ONE, sockets_listed=BUSY)
    workers, rows = planned(host, tmp_path, 4, threads=4, cpu_binding=binding)
    assert workers.teams[0].cpus == (0, 1, 2, 3)
    assert "other" not in rows["CPU binding"].why


def test_no_binding(tmp_path: Path) -> None:
    workers, rows = planned(ONE, tmp_path, 16, cpu_binding="none")
    assert (workers.binding, rows["CPU binding"].got) == ("none", "none")


@pytest.mark.parametrize(
    ("host", "nodes", "got", "why"),
    [
        (TWO, (0, 1), "interleave", "pages of weights are interleaved over nodes 0, 1"),
        (UNEVEN, (0, 1), "interleave", "nodes 0, 1"),
        (CXL, (0, 1), "interleave", "nodes 0, 1"),  # memory without CPUs is slower and would slow down all workers
        (block_numbered(2, 8, 1, ids=(0, 8)), (0, 8), "interleave", "nodes 0, 8"),
        (replace(TWO, memory_nodes=(1,)), (), "bind", "there is only one memory node"),
        (ONE, (), "bind", "there is only one memory node"),
        (HostFiles(cpus=4), (), "bind", "there is only one memory node"),
    ],
)
def test_interleaving(host: HostFiles, nodes: tuple[int, ...], got: str, why: str, tmp_path: Path) -> None:
    workers, rows = planned(host, tmp_path, 4, numa_memory="interleave")
    assert workers.interleave == nodes
    assert (rows["NUMA memory"].asked, rows["NUMA memory"].got) == ("interleave", got)
    assert why in rows["NUMA memory"].why


def test_saving_power(tmp_path: Path) -> None:
    workers, rows = planned(ONE, tmp_path, 16, power_saving=True)
    assert (workers.saving, workers.spin_us) == (True, SAVING_SPIN_US)
    assert rows["power saving"].got == "on"
    assert f"after {SAVING_SPIN_US} us" in rows["power saving"].why


def test_power_saving_is_off_with_a_gpu(tmp_path: Path) -> None:
    workers, rows = plan_workers(MachineOptions(power_saving=True), probe(ONE.write(tmp_path)), 16, launched=True)
    row = next(row for row in rows if row.name == "power saving")
    assert (row.asked, row.got) == ("on", "off")
    assert "fewer workers are not tried" in row.why
    assert workers.nice == LAUNCHED_NICE
    assert f"; workers have nice {LAUNCHED_NICE}: the thread that launches" in row.why


def test_rows_for_plain_torch() -> None:
    workers, rows = no_workers(MachineOptions(cpu_binding="node", numa_memory="interleave", power_saving=True))
    assert workers is None
    assert [(row.name, row.asked, row.got) for row in rows] == [
        ("CPU binding", "node", "none"), ("NUMA memory", "interleave", "none"), ("power saving", "on", "off"),
    ]  # fmt: skip
