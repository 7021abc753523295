"""Divides the usable CPUs into teams, one per NUMA node, within affinity, cpusets and quota. Pure functions of Machine.

How many of a team's CPUs run is measured at start; native/arena.py binds memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import chain, zip_longest

import msgspec

from proa.errors import UsageError
from proa.machine.machine import Machine, NumaNode

UNBOUND = -1  # Team.node if memory is bound to no node: no NUMA information, or CPUs of several nodes
_LOCAL, _REMOTE = 10, 20  # ACPI's default distances, for nodes that do not report theirs


class Team(msgspec.Struct, frozen=True):
    """The CPUs that work on the weights of one NUMA node. A team's id is its index in the tuple of teams."""

    node: int  # the node of its memory, or UNBOUND; simulated teams may share a node
    cpus: tuple[int, ...]  # distinct physical cores first, spread over last-level caches; then their SMT siblings
    memory_bytes: int | None  # free on the node now, ignoring control group limits; None if unknown


def teams(machine: Machine, workers: int | None = None, memory_bytes: int = 0) -> tuple[Team, ...]:
    """Make one team per node with usable CPUs and memory, in ascending order of nodes.

    CPUs of nodes without memory join the nearest node with memory. The teams have `workers` CPUs in total; default: the
    number that the quota allows to run at once. If that is fewer than there are physical cores, the fewest nodes are
    used that have so many cores and `memory_bytes` of free memory.
    """
    members = _members(machine)
    limit = machine.usable_cores if workers is None else max(1, min(workers, len(machine.usable_cpus)))
    free = {node.id: node.available_bytes for node in machine.numa} | {UNBOUND: machine.available_bytes}
    order = sorted(members, key=lambda node: (-_count_cores(machine, members[node]), -(free[node] or 0), node))
    chosen = _fewest(machine, [(members[node], free[node]) for node in order], limit, memory_bytes)
    shares = _shares(machine, [members[node] for node in order[:chosen]], limit)
    return tuple(
        Team(node, _ordered(machine, members[node])[:share], free[node])
        for node, share in sorted(zip(order, shares, strict=False))
    )


def pretend(machine: Machine, nodes: int, workers: int | None = None) -> tuple[Team, ...]:
    """Make `nodes` teams on a machine with a different number of nodes, for tests: CPUs are divided evenly, by whole
    cores if possible; with fewer CPUs than nodes, teams share CPUs. Raises UsageError for less than one node.
    """
    if nodes < 1:
        raise UsageError(f"{nodes} simulated NUMA nodes are requested.", "Give at least 1, as in pretend:2.")
    real = teams(machine, workers)
    home = {cpu: team.node for team in real for cpu in team.cpus}
    parts: Sequence[tuple[int, ...]] = [core for team in real for core in _cores_of(machine, team.cpus)]
    if len(parts) < nodes:
        parts = [(cpu,) for cpu in chain(*parts)]
    memory = None if any(team.memory_bytes is None for team in real) else sum(team.memory_bytes or 0 for team in real)
    made = []
    for team in range(nodes):
        first, last = team * len(parts) // nodes, (team + 1) * len(parts) // nodes
        cpus = set(chain(*parts[first:last])) if len(parts) >= nodes else set(parts[team % len(parts)])
        homes = {home[cpu] for cpu in cpus}
        node = homes.pop() if len(homes) == 1 else UNBOUND
        made.append(Team(node, _ordered(machine, cpus), None if memory is None else memory // nodes))
    return tuple(made)


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


def left_out(machine: Machine, chosen: Collection[Team]) -> tuple[str, ...]:
    """Return one sentence for each node without a team, with the reason."""
    used = {team.node for team in chosen}
    return tuple(_why_unused(machine, node, chosen) for node in machine.numa if node.id not in used)


def _why_unused(machine: Machine, node: NumaNode, chosen: Collection[Team]) -> str:
    memory = "its memory" if node.memory_bytes is None else f"its {node.memory_bytes / 2**30:.1f} GiB"
    joined = sorted({team.node for team in chosen if set(team.cpus) & set(node.cpus)})
    if joined and not _has_memory(node):
        why = "is closed to this process by a cpuset" if node.memory_bytes else "is missing"
        return f"node {node.id}: local memory {why}; its CPUs work with node {joined[0]}"
    if not _has_memory(node):
        return f"node {node.id}: no memory for this process, and none of its CPUs is used"
    if not node.cpus:
        return f"node {node.id}: {memory} unused: the node has no CPU (CXL, HBM or a device)"
    if not set(node.cpus) & set(machine.usable_cpus):
        return f"node {node.id}: {memory} unused: this process may use none of its {len(node.cpus)} CPUs"
    return f"node {node.id}: {memory} unused: fewer nodes have enough cores for the CPU quota or worker limit"


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


def _fewest(machine: Machine, nodes: list[tuple[set[int], int | None]], limit: int, memory_bytes: int) -> int:
    """Count how many of `nodes` (CPUs, free bytes), taken in order, are needed for `limit` cores and `memory_bytes`;
    all if they do not suffice."""
    cores = memory = 0
    for count, (cpus, free) in enumerate(nodes, start=1):
        cores += _count_cores(machine, cpus)
        memory += free or 0
        if cores >= limit and (memory >= memory_bytes or count == limit):
            return count
    return len(nodes)


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
