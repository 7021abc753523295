"""Machines of many topologies, as trees of the /proc and /sys files that Linux shows for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

GIB = 1 << 30
_UNIX = "0000000000000000: 00000002 00000000 00000000 0002 01 12345 {}"


@dataclass(frozen=True)
class NodeFiles:
    """One NUMA node with all its CPUs, including those that are offline."""

    cpus: tuple[int, ...]
    memory_gib: int
    free_gib: int | None = None  # half of memory_gib unless given


@dataclass(frozen=True)
class HostFiles:
    """A machine. nodes: by node id. Distances follow from `sockets`: 10 to itself, 12 within a socket, 32 otherwise."""

    nodes: Mapping[int, NodeFiles] = field(default_factory=dict)
    cores: Mapping[int, tuple[int, ...]] = field(default_factory=dict)  # core number -> its CPUs (SMT siblings)
    cpus: int = 0  # of a machine that tells neither nodes nor cores
    sockets: Sequence[tuple[int, ...]] = ()  # node ids of each socket; default: one node per socket
    offline: tuple[int, ...] = ()
    affinity: tuple[int, ...] | None = None
    memory_nodes: tuple[int, ...] | None = None  # Mems_allowed
    quota_cores: float | None = None
    caches: Sequence[tuple[int, ...]] = ()  # CPUs that share a last-level cache
    siblings_told: bool = True
    sockets_listed: Sequence[str] = ()  # names, as /proc/net/unix shows them

    def write(self, root: Path) -> Path:
        """Write the tree below `root` and return `root`."""
        for name, text in (self._general() | self._cpu_files() | self._node_files()).items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        return root

    @property
    def online(self) -> tuple[int, ...]:
        known = {cpu for core in self.cores.values() for cpu in core} or set(range(self.cpus))
        return tuple(sorted(known - set(self.offline)))

    def socket_of(self, node: int) -> int:
        return next((number for number, nodes in enumerate(self.sockets) if node in nodes), node)

    def _general(self) -> dict[str, str]:
        allowed = spans(self.online if self.affinity is None else self.affinity)
        total_kib = (sum(node.memory_gib for node in self.nodes.values()) or 64) << 20
        mems = "" if self.memory_nodes is None else f"\nMems_allowed_list:\t{spans(self.memory_nodes)}"
        files = {
            "proc/cpuinfo": "\n".join(f"processor\t: {cpu}" for cpu in self.online),
            "proc/meminfo": f"MemTotal: {total_kib} kB\nMemFree: 1 kB\nMemAvailable: {total_kib // 2} kB",
            "proc/self/status": f"Cpus_allowed_list:\t{allowed}{mems}",
            "sys/devices/system/cpu/online": spans(self.online),
        }
        if self.sockets_listed:
            files["proc/net/unix"] = "\n".join(
                ["Num       RefCount Protocol Flags    Type St Inode Path", *map(_UNIX.format, self.sockets_listed)]
            )
        if self.quota_cores is not None:
            files |= {
                "proc/self/cgroup": "0::/box",
                "proc/self/mountinfo": "30 23 0:26 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw",
                "sys/fs/cgroup/box/cpu.max": f"{int(self.quota_cores * 100_000)} 100000",
            }
        return files

    def _cpu_files(self) -> dict[str, str]:
        files = {}
        for number, core in self.cores.items():
            live = tuple(cpu for cpu in core if cpu in self.online)  # offline CPUs have no topology folder
            for cpu in live:
                base = f"sys/devices/system/cpu/cpu{cpu}"
                node = next((node for node, facts in self.nodes.items() if cpu in facts.cpus), 0)
                files[f"{base}/topology/physical_package_id"] = str(self.socket_of(node))
                files[f"{base}/topology/core_id"] = str(number)
                if self.siblings_told:
                    files[f"{base}/topology/thread_siblings_list"] = spans(live)
        for cache in self.caches:
            for cpu in cache:
                files[f"sys/devices/system/cpu/cpu{cpu}/cache/index3/size"] = "32768K"
                files[f"sys/devices/system/cpu/cpu{cpu}/cache/index3/shared_cpu_list"] = spans(cache)
        return files

    def _node_files(self) -> dict[str, str]:
        if not self.nodes:
            return {}
        base = "sys/devices/system/node"
        files = {f"{base}/online": spans(tuple(self.nodes))}
        for node, facts in self.nodes.items():
            free_kib = (facts.memory_gib << 20) // 2 if facts.free_gib is None else facts.free_gib << 20
            sizes = {"MemTotal": facts.memory_gib << 20, "MemFree": free_kib - free_kib // 4}
            sizes |= {"Active(file)": free_kib // 8, "Inactive(file)": free_kib // 4 - free_kib // 8}
            distances = (10 if n == node else 12 if self._same_socket(n, node) else 32 for n in self.nodes)
            files[f"{base}/node{node}/cpulist"] = spans(tuple(cpu for cpu in facts.cpus if cpu in self.online))
            files[f"{base}/node{node}/distance"] = " ".join(map(str, distances))
            files[f"{base}/node{node}/meminfo"] = "\n".join(
                f"Node {node} {name + ':':<15} {kib} kB" for name, kib in sizes.items()
            )
        return files

    def _same_socket(self, a: int, b: int) -> bool:
        return self.socket_of(a) == self.socket_of(b)


def spans(numbers: Sequence[int]) -> str:
    """Format a CPU list as the kernel does: (0, 1, 2, 8) -> "0-2,8"."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and parts[-1][-1] == number - 1:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def block_numbered(
    nodes: int, cores_per_node: int, threads: int = 2, memory_gib: int = 64, ids: Sequence[int] | None = None
) -> HostFiles:
    """Make a machine with the usual CPU numbering: cores in order of nodes; second threads: core + number of cores."""
    total = nodes * cores_per_node
    cores = {core: tuple(core + total * thread for thread in range(threads)) for core in range(total)}
    return _divided(cores, lambda core: core // cores_per_node, memory_gib, ids or range(nodes))


def round_robin_numbered(nodes: int, cores_per_node: int, threads: int = 2, memory_gib: int = 64) -> HostFiles:
    """Make a machine whose firmware numbers cores round-robin over nodes: node 0 of four has CPUs 0, 4, 8, ..."""
    total = nodes * cores_per_node
    cores = {core: tuple(core + total * thread for thread in range(threads)) for core in range(total)}
    return _divided(cores, lambda core: core % nodes, memory_gib, range(nodes))


def sibling_numbered(nodes: int, cores_per_node: int, memory_gib: int = 64) -> HostFiles:
    """Make a machine that numbers the two threads of a core consecutively, as virtual machines often do."""
    cores = {core: (2 * core, 2 * core + 1) for core in range(nodes * cores_per_node)}
    return _divided(cores, lambda core: core // cores_per_node, memory_gib, range(nodes))


def _divided(
    cores: Mapping[int, tuple[int, ...]], place: Callable[[int], int], memory_gib: int, ids: Sequence[int]
) -> HostFiles:
    """Make a machine whose core `core` belongs to the node ids[place(core)]."""
    nodes = {}
    for index, node in enumerate(ids):
        cpus = sorted(cpu for core, threads in cores.items() if place(core) == index for cpu in threads)
        nodes[node] = NodeFiles(tuple(cpus), memory_gib)
    return HostFiles(nodes=nodes, cores=cores)
