"""Teams of CPUs on machines of many shapes (tests/topologies.py writes them)."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from proa.machine.machine import Machine
from proa.machine.probe import probe
from proa.machine.topology import UNBOUND, Team, homes, share_out, teams, unclaimed
from topologies import GIB, HostFiles, NodeFiles, block_numbered, round_robin_numbered, sibling_numbered, spans

# 2 sockets of 4 nodes (NPS4), firmware numbering in blocks; and SNC4 whose cores are dealt out in turn.
NPS4 = replace(block_numbered(8, 8), sockets=((0, 1, 2, 3), (4, 5, 6, 7)))
SNC4 = replace(round_robin_numbered(4, 6), sockets=((0, 1, 2, 3),))

# Two of the four nodes of each socket have no memory of their own.
MEMORYLESS = HostFiles(
    nodes={n: NodeFiles(tuple(range(8 * n, 8 * n + 8)), 0 if n % 2 else 32) for n in range(4)},
    cores={core: (core,) for core in range(32)},
    sockets=((0, 1), (2, 3)),
)
# As on POWER9 with GPUs: ids with gaps, and the devices' memory as nodes without CPUs.
GAPS = HostFiles(
    nodes={
        0: NodeFiles(tuple(range(8)), 128),
        8: NodeFiles(tuple(range(8, 16)), 128),
        252: NodeFiles((), 16),
        255: NodeFiles((), 16),
    },
    cores={core: (core,) for core in range(16)},
)
# Eight nodes and two CXL expanders.
TEN = replace(
    block_numbered(8, 4, 1),
    nodes={**block_numbered(8, 4, 1).nodes, 8: NodeFiles((), 256), 9: NodeFiles((), 256)},
    sockets=((0, 1, 2, 3, 8), (4, 5, 6, 7, 9)),
)

CASES: dict[str, tuple[HostFiles, dict[int, str]]] = {
    "one node": (block_numbered(1, 4), {0: "0-7"}),
    "two sockets": (block_numbered(2, 16), {0: "0-15,32-47", 1: "16-31,48-63"}),
    "three nodes": (block_numbered(3, 2, 1), {0: "0-1", 1: "2-3", 2: "4-5"}),
    "four nodes dealt out in turn (SNC4)": (SNC4, {n: spans(range(n, 48, 4)) for n in range(4)}),
    "eight nodes (NPS4 twice)": (NPS4, {n: f"{8 * n}-{8 * n + 7},{64 + 8 * n}-{71 + 8 * n}" for n in range(8)}),
    "ten nodes, two of them CXL": (TEN, {n: f"{4 * n}-{4 * n + 3}" for n in range(8)}),
    "thirty-two nodes": (block_numbered(32, 4, 1), {n: f"{4 * n}-{4 * n + 3}" for n in range(32)}),
    "siblings numbered in pairs": (sibling_numbered(2, 2), {0: "0-3", 1: "4-7"}),
    "nodes without memory": (MEMORYLESS, {0: "0-15", 2: "16-31"}),
    "ids with gaps": (GAPS, {0: "0-7", 8: "8-15"}),
    "no NUMA information": (HostFiles(cpus=6), {UNBOUND: "0-5"}),
    "cores told, nodes not": (replace(block_numbered(1, 4), nodes={}), {UNBOUND: "0-7"}),
    "nodes that list no CPUs": (
        HostFiles(cpus=4, nodes={0: NodeFiles((), 8), 1: NodeFiles((), 8)}),
        {UNBOUND: "0-3"},
    ),
    "a cpuset that cuts into a node": (
        replace(block_numbered(2, 16), affinity=(*range(16), *range(24, 28))),
        {0: "0-15", 1: "24-27"},
    ),
    "a cpuset that cuts a node off": (replace(block_numbered(2, 16), affinity=tuple(range(16, 32))), {1: "16-31"}),
    "CPUs of one node, memory of the other": (
        replace(block_numbered(2, 4, 1), affinity=(0, 1, 2, 3), memory_nodes=(1,)),
        {1: "0-3"},
    ),
    "memory of one node, CPUs of both": (replace(block_numbered(2, 4, 1), memory_nodes=(0,)), {0: "0-7"}),
    "CPUs off line": (replace(block_numbered(2, 4), offline=(1, 9, 12, 13, 14, 15)), {0: "0,2-3,8,10-11", 1: "4-7"}),
    "all CPUs of a node off line": (replace(block_numbered(2, 2, 1), offline=(2, 3)), {0: "0-1"}),
    "a CPU that no node lists": (
        replace(block_numbered(2, 4, 1), cores={core: (core,) for core in range(9)}),
        {0: "0-3,8", 1: "4-7"},
    ),
    # 3 of 64 cores: one node has enough; 48 of 64: two nodes are needed, both equally
    "a quota of 3 of 64 cores": (replace(block_numbered(2, 32, 1), quota_cores=3.7), {0: "0-2"}),
    "a quota of 3 on one core a node": (replace(block_numbered(4, 1), quota_cores=3), {0: "0", 1: "1", 2: "2"}),
    "a quota below one core": (replace(block_numbered(2, 4), quota_cores=0.5), {0: "0"}),
    "a quota above one node's cores": (
        replace(block_numbered(2, 32, 1), quota_cores=48),
        {0: "0-23", 1: "32-55"},
    ),
    "a quota above all physical cores": (
        replace(block_numbered(2, 4), quota_cores=12),
        {0: "0-3,8-9", 1: "4-7,12-13"},
    ),
    "a quota and a larger second node": (
        HostFiles(
            nodes={0: NodeFiles((0, 1), 8), 1: NodeFiles(tuple(range(2, 10)), 8)},
            cores={core: (core,) for core in range(10)},
            quota_cores=4,
        ),
        {1: "2-5"},
    ),
}


def look(host: HostFiles, root: Path) -> Machine:
    return probe(host.write(root))


@pytest.mark.parametrize("name", CASES)
def test_teams(name: str, tmp_path: Path) -> None:
    host, expected = CASES[name]
    assert {team.node: spans(team.cpus) for team in teams(look(host, tmp_path))} == expected


def test_distinct_cores_come_before_siblings(tmp_path: Path) -> None:
    first, second = teams(look(sibling_numbered(2, 3), tmp_path))
    assert first.cpus == (0, 2, 4, 1, 3, 5)
    assert second.cpus == (6, 8, 10, 7, 9, 11)


def test_cores_are_told_apart_without_sibling_lists(tmp_path: Path) -> None:
    host = replace(sibling_numbered(1, 3), siblings_told=False)
    assert teams(look(host, tmp_path))[0].cpus == (0, 2, 4, 1, 3, 5)


def test_a_core_whose_first_thread_is_taken_still_counts_as_a_core(tmp_path: Path) -> None:
    host = replace(sibling_numbered(1, 3), affinity=(1, 2, 3, 4, 5))
    assert teams(look(host, tmp_path))[0].cpus == (1, 2, 4, 3, 5)


def test_any_few_cpus_spread_over_caches(tmp_path: Path) -> None:
    """On chiplets each cache has its own link to memory, so few CPUs must be spread over the caches."""
    host = replace(block_numbered(1, 6), caches=((0, 1, 6, 7), (2, 3, 8, 9), (4, 5, 10, 11)))
    assert teams(look(host, tmp_path))[0].cpus == (0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11)


def test_free_memory_of_each_node(tmp_path: Path) -> None:
    host = HostFiles(nodes={0: NodeFiles((0,), 64, 40), 1: NodeFiles((1,), 64, 8)}, cores={0: (0,), 1: (1,)})
    assert [team.memory_bytes for team in teams(look(host, tmp_path))] == [40 * GIB, 8 * GIB]
    assert teams(look(HostFiles(cpus=2), tmp_path / "b"))[0].memory_bytes == 32 * GIB


def test_few_workers_take_the_node_with_most_free_memory(tmp_path: Path) -> None:
    nodes = {n: NodeFiles(tuple(range(4 * n, 4 * n + 4)), 64, free) for n, free in enumerate((10, 40, 30))}
    machine = look(HostFiles(nodes=nodes, cores={core: (core,) for core in range(12)}), tmp_path)
    assert [team.node for team in teams(machine, workers=3)] == [1]
    assert [team.node for team in teams(machine, workers=5)] == [1, 2]
    assert [len(team.cpus) for team in teams(machine, workers=5)] == [3, 2]


def test_an_explicit_number_of_workers_overrules_the_quota(tmp_path: Path) -> None:
    machine = look(replace(block_numbered(2, 4, 1), quota_cores=2), tmp_path)
    assert [len(team.cpus) for team in teams(machine)] == [2]
    assert [len(team.cpus) for team in teams(machine, workers=6)] == [3, 3]


def test_more_workers_than_cpus_are_all_cpus(tmp_path: Path) -> None:
    machine = look(block_numbered(2, 2), tmp_path)
    assert teams(machine, workers=99) == teams(machine)


def test_a_memoryless_nodes_cpus_prefer_ordinary_memory_over_nearer_cxl(tmp_path: Path) -> None:
    host = HostFiles(
        nodes={0: NodeFiles((0,), 64), 1: NodeFiles((1,), 0), 2: NodeFiles((), 256)},
        cores={0: (0,), 1: (1,)},
        sockets=((0,), (1, 2)),
    )
    assert [(team.node, team.cpus) for team in teams(look(host, tmp_path))] == [(0, (0, 1))]


@st.composite
def hosts(draw: st.DrawFn) -> HostFiles:
    """Generate machines with arbitrary assignments of cores to nodes, threads to cores and memory to nodes, and
    arbitrary limits."""
    ids = draw(st.lists(st.integers(0, 40), min_size=1, max_size=6, unique=True))
    cores, nodes, next_cpu = {}, {node: list[int]() for node in sorted(ids)}, 0
    for core in range(draw(st.integers(1, 12))):
        threads = draw(st.integers(1, 4))
        cores[core] = tuple(range(next_cpu, next_cpu + threads))
        next_cpu += threads
        nodes[draw(st.sampled_from(ids))] += cores[core]
    files = {node: NodeFiles(tuple(cpus), draw(st.sampled_from((0, 8, 64)))) for node, cpus in nodes.items()}
    offline = draw(st.sets(st.integers(0, next_cpu - 1), max_size=next_cpu - 1))
    online = sorted(set(range(next_cpu)) - offline)
    return HostFiles(
        nodes=files,
        cores=cores,
        sockets=(tuple(ids[::2]), tuple(ids[1::2])),
        offline=tuple(offline),
        affinity=tuple(draw(st.sets(st.sampled_from(online), min_size=1))),
        memory_nodes=tuple(draw(st.sets(st.sampled_from(ids)))) or None,
        quota_cores=draw(st.none() | st.floats(0.1, 50)),
        siblings_told=draw(st.booleans()),
    )


def check_teams(made: tuple[Team, ...], machine: Machine, limit: int) -> None:
    cpus = list(chain(*(team.cpus for team in made)))
    assert all(team.cpus for team in made), "an empty team"
    assert len(cpus) == len(set(cpus)), "a CPU in two teams"
    assert set(cpus) <= set(machine.usable_cpus)
    assert len(cpus) == limit, "all that may run do"
    for team in made:
        places = [next((n for n, core in enumerate(machine.cores) if cpu in core), -cpu) for cpu in team.cpus]
        distinct = len(set(places))
        assert len(set(places[:distinct])) == distinct, "a sibling before a core of its own"


@settings(max_examples=examples(150), deadline=None)
@given(host=hosts(), workers=st.none() | st.integers(1, 60))
def test_invariants(host: HostFiles, workers: int | None) -> None:
    with TemporaryDirectory() as folder:
        machine = look(host, Path(folder))
    made = teams(machine, workers)
    limit = min(workers, len(machine.usable_cpus)) if workers else machine.usable_cores
    check_teams(made, machine, limit)
    assert [team.node for team in made] == sorted({team.node for team in made})
    with_memory = {node.id for node in machine.numa if node.memory_bytes and node.memory_allowed}
    assert {team.node for team in made} <= (with_memory or {UNBOUND})


def test_this_machine() -> None:
    machine = probe()
    check_teams(teams(machine), machine, machine.usable_cores)


@pytest.mark.parametrize("name", CASES)
def test_any_number_of_workers_is_shared_out_in_proportion(name: str, tmp_path: Path) -> None:
    found = teams(look(CASES[name][0], tmp_path))
    sizes = [len(team.cpus) for team in found]
    for workers in range(1, sum(sizes) + 2):
        shares = share_out(found, workers)
        assert sum(shares) == max(len(found), min(workers, sum(sizes)))
        for share, size in zip(shares, sizes, strict=True):
            assert 1 <= share <= size
            assert abs(share - workers * size / sum(sizes)) < 2 or share == 1


@pytest.mark.parametrize("name", CASES)
def test_homes_are_whole_nodes(name: str, tmp_path: Path) -> None:
    machine = look(CASES[name][0], tmp_path)
    for team, home in zip(teams(machine, 1), homes(machine, teams(machine, 1)), strict=True):
        assert set(team.cpus) <= set(home) <= set(machine.usable_cpus)
        own = [node.cpus for node in machine.numa if node.id == team.node]
        assert all(set(cpus) & set(machine.usable_cpus) <= set(home) for cpus in own)


def test_claimed_cores_are_left_out_whole(tmp_path: Path) -> None:
    machine = look(replace(block_numbered(1, 4), sockets_listed=["@proa-cpus/1/0,6/00"]), tmp_path)
    assert machine.claimed_cpus == (0, 6)
    assert unclaimed(machine).usable_cpus == (1, 3, 5, 7)
    untold = look(HostFiles(cpus=4, sockets_listed=["@proa-cpus/1/0,2,99/00"]), tmp_path / "b")
    assert untold.claimed_cpus == (0, 2)
    assert unclaimed(untold).usable_cpus == (1, 3)
