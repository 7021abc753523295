"""Divides the usable CPUs into teams, one per NUMA node, within affinity, cpusets and quota. Pure functions of Machine.

How many of a team's CPUs run is measured at start; native/arena.py binds memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import accumulate, chain, zip_longest

import msgspec

from proa.machine.machine import Machine, NumaNode

UNBOUND = -1  # Team.node if memory is bound to no node: no NUMA information, or CPUs of several nodes
_LOCAL, _REMOTE = 10, 20  # ACPI's default distances, for nodes that do not report theirs


class Team(msgspec.Struct, frozen=True):
    """The CPUs that work on the weights of one NUMA node. A team's id is its index in the tuple of teams."""

    node: int  # the node of its memory, or UNBOUND
    cpus: tuple[int, ...]  # distinct physical cores first, spread over last-level caches; then their SMT siblings
    memory_bytes: int | None  # free on the node now, ignoring control group limits; None if unknown


def teams(machine: Machine, workers: int | None = None) -> tuple[Team, ...]:
    """Make one team per node with usable CPUs and memory, in ascending order of nodes.

    CPUs of nodes without memory join the nearest node with memory. The teams have `workers` CPUs in total; default: the
    number that the quota allows to run at once. If that is fewer than there are physical cores, the fewest nodes are
    used that have so many cores.
    """
    members = _members(machine)
    limit = machine.usable_cores if workers is None else max(1, min(workers, len(machine.usable_cpus)))
    free = {node.id: node.available_bytes for node in machine.numa} | {UNBOUND: machine.available_bytes}
    order = sorted(members, key=lambda node: (-_count_cores(machine, members[node]), -(free[node] or 0), node))
    shares = _shares(machine, _fewest(machine, [members[node] for node in order], limit), limit)
    return tuple(
        Team(node, _ordered(machine, members[node])[:share], free[node])
        for node, share in sorted(zip(order, shares, strict=False))
    )


def unclaimed(machine: Machine) -> Machine:
    """Return the machine without the cores that other engines have claimed."""
    claimed = set(machine.claimed_cpus)
    free = [core for core in _cores_of(machine, machine.usable_cpus) if not claimed & set(core)]
    left = tuple(sorted(chain(*free)))
    return msgspec.structs.replace(machine, usable_cpus=left, claimed_cpus=())


def share_out(of: Sequence[Team], workers: int) -> tuple[int, ...]:
    """Divide `workers` over the teams in proportion to their CPUs; each team gets at least one."""
    shares = [1] * len(of)
    for _ in range(min(workers, sum(len(team.cpus) for team in of)) - len(of)):
        open_teams = [i for i, team in enumerate(of) if shares[i] < len(team.cpus)]
        shares[min(open_teams, key=lambda i: shares[i] / len(of[i].cpus))] += 1
    return tuple(shares)


def homes(machine: Machine, of: Sequence[Team]) -> tuple[tuple[int, ...], ...]:
    """Return, for each team, all usable CPUs of its node, including those that are not in the team."""
    members = _members(machine)
    return tuple(tuple(sorted(members.get(team.node, team.cpus))) for team in of)


def _members(machine: Machine) -> dict[int, set[int]]:
    """Assign each usable CPU to exactly one home node with memory; return the CPUs by home node."""
    usable = set(machine.usable_cpus)
    homes = [node for node in machine.numa if _has_memory(node)]
    if not homes or not any(usable & set(node.cpus) for node in machine.numa):
        return {UNBOUND: usable}
    members: dict[int, set[int]] = {node.id: set() for node in homes}
    strays: list[tuple[NumaNode | None, set[int]]] = []
    for node in machine.numa:
        own = usable & set(node.cpus)
        usable -= own
        if node.id in members:
            members[node.id] |= own
        elif own:
            strays.append((node, own))
    strays.append((None, usable))  # CPUs that no node lists
    for origin, cpus in strays:
        home = min(homes, key=lambda home: _nearness(machine, origin, home, len(members[home.id])))
        members[home.id] |= cpus
    return {node: cpus for node, cpus in members.items() if cpus}


def _nearness(machine: Machine, origin: NumaNode | None, home: NumaNode, cpus: int) -> tuple[bool, int, int, int]:
    """Sort key of home nodes for CPUs of a node without memory: ordinary memory (the node has CPUs) before CXL or HBM,
    then by distance, then by number of CPUs already assigned."""
    distance = _REMOTE if origin is None else _distance(machine, origin, home)
    return not home.cpus, distance, cpus, home.id


def _distance(machine: Machine, a: NumaNode, b: NumaNode) -> int:
    if len(a.distances) != len(machine.numa):
        return _LOCAL if a.id == b.id else _REMOTE
    return a.distances[machine.numa.index(b)]


def _has_memory(node: NumaNode) -> bool:
    return node.memory_bytes != 0 and node.memory_allowed


def _fewest(machine: Machine, nodes: list[set[int]], limit: int) -> list[set[int]]:
    """The first of `nodes`, each given by its CPUs, that together have `limit` cores; all if there are fewer."""
    cores = accumulate(_count_cores(machine, cpus) for cpus in nodes)
    return nodes[: next((count for count, sum_of in enumerate(cores, 1) if sum_of >= limit), len(nodes))]


def _shares(machine: Machine, nodes: list[set[int]], limit: int) -> list[int]:
    """Divide `limit` CPUs over nodes in proportion to their cores, so that all finish their slices of the weights at
    the same time."""
    cores = [_count_cores(machine, cpus) for cpus in nodes]
    shares = [0] * len(nodes)
    for _ in range(limit):
        open_nodes = [node for node, cpus in enumerate(nodes) if shares[node] < len(cpus)]
        shares[min(open_nodes, key=lambda node: shares[node] / cores[node])] += 1
    return shares


def _count_cores(machine: Machine, cpus: Collection[int]) -> int:
    return len(_cores_of(machine, cpus))


def _cores_of(machine: Machine, cpus: Collection[int]) -> list[tuple[int, ...]]:
    """Group `cpus` by physical core; a CPU of unknown core is a group of its own."""
    wanted = set(cpus)
    cores = [tuple(cpu for cpu in core if cpu in wanted) for core in machine.cores]
    unknown = wanted.difference(*machine.cores)
    return [core for core in cores if core] + [(cpu,) for cpu in sorted(unknown)]


def _ordered(machine: Machine, cpus: Collection[int]) -> tuple[int, ...]:
    """Order CPUs so that every prefix has maximal RAM bandwidth: distinct cores first, alternating over caches."""
    cache = {cpu: number for number, group in enumerate(machine.l3) for cpu in group}
    by_cache: dict[int | None, list[tuple[int, ...]]] = {}
    for core in _cores_of(machine, cpus):
        by_cache.setdefault(cache.get(core[0]), []).append(core)
    spread = [core for turn in zip_longest(*by_cache.values()) for core in turn if core]
    return tuple(cpu for rank in zip_longest(*spread) for cpu in rank if cpu is not None)
