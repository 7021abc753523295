"""`probe()` describes this machine: it reads /proc and /sys, and queries the GPU driver."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from proa.config.env import cuda_environ
from proa.errors import ResourceError
from proa.machine.cgroup import CgroupLimits, cgroup_limits
from proa.machine.claims import claimed_cpus
from proa.machine.files import (
    cpu_name,
    parse_cache_size,
    parse_cpu_list,
    parse_key_values,
    parse_kib,
    read_int,
    read_text,
)
from proa.machine.gpus import Nvml, find_gpus, torch_cuda
from proa.machine.machine import Machine, NumaNode
from proa.obs.units import format_ranges

# Instruction sets of the matrix kernels (x86-64, then Arm).
ISA_FLAGS = (
    "avx2", "fma", "f16c", "avx_vnni",
    "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16", "amx_fp16",
    "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip


def probe(root: Path = Path("/"), nvml: Nvml | None = None) -> Machine:
    """Describe the machine whose /proc and /sys are in the folder `root`; `nvml` replaces pynvml, for tests.

    Raises ResourceError on a system without Linux's /proc.
    """
    memory, cpuinfo = read_text(root / "proc/meminfo"), parse_key_values(read_text(root / "proc/cpuinfo") or "")
    if memory is None:
        raise ResourceError("This system has no /proc/meminfo.", "Proa runs on Linux; on Windows use WSL 2.")
    limits = cgroup_limits(root)
    notes: list[str] = []
    online = _online(root)
    cpus = _usable(root, online, limits)
    cores, packages = _cores(root, cpus)
    l3, l3_bytes = _l3(root, cpus)
    facts = parse_key_values(memory)
    nodes = _numa(root, facts)
    found = find_gpus(cuda_environ(), root, nvml)
    total, available, bound_by = _memory(facts, limits, nodes, notes)
    if not nodes:
        notes.append("no NUMA information: treated as one node")
    if not cores:
        notes.append("no core topology: every logical CPU counts as a core")
    return Machine(
        cpu=cpu_name(cpuinfo),
        isa=_isa(cpuinfo),
        online_cpus=len(online),
        usable_cpus=cpus,
        claimed_cpus=tuple(sorted(claimed_cpus(root) & set(cpus))),
        quota_cores=limits.quota_cores,
        physical_cores=len(cores) or None,
        packages=packages,
        cores=cores,
        l3=l3,
        l3_bytes=l3_bytes,
        numa=nodes,
        total_bytes=total,
        available_bytes=available,
        memory_bound_by=bound_by,
        gpus=found.gpus,
        gpus_note=found.note,
        torch_cuda=torch_cuda(),
        notes=tuple(notes),
    )


def _isa(cpuinfo: dict[str, str]) -> tuple[str, ...]:
    flags = set((cpuinfo.get("flags") or cpuinfo.get("Features") or "").split())
    return tuple(flag for flag in ISA_FLAGS if flag in flags)


def _online(root: Path) -> tuple[int, ...]:
    listed = read_text(root / "sys/devices/system/cpu/online")
    if listed:
        return parse_cpu_list(listed)
    lines = (read_text(root / "proc/cpuinfo") or "").splitlines()
    return tuple(int(line.partition(":")[2]) for line in lines if line.startswith("processor")) or (0,)


def _usable(root: Path, online: tuple[int, ...], limits: CgroupLimits) -> tuple[int, ...]:
    """Return the online CPUs allowed by the affinity mask (which the kernel restricts to the cpuset) and the cpuset."""
    allowed = parse_key_values(read_text(root / "proc/self/status") or "").get("Cpus_allowed_list")
    mask = set(online) & set(parse_cpu_list(allowed)) if allowed else set(online)
    if limits.cpus is not None:
        mask &= limits.cpus
    return tuple(sorted(mask)) or online


def _cores(root: Path, cpus: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], int | None]:
    """Return `cpus` grouped by physical core, and the number of packages; ((), None) if not reported for every CPU."""
    cores: dict[object, list[int]] = {}
    packages = set()
    for cpu in cpus:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        package, core = read_int(folder / "physical_package_id"), read_int(folder / "core_id")
        if package is None or core is None:
            return (), None
        # Core ids are not unique in packages with several dies or clusters; the kernel's list of siblings is reliable.
        cores.setdefault(read_text(folder / "thread_siblings_list") or (package, core), []).append(cpu)
        packages.add(package)
    return _groups(cores), len(packages)


def _l3(root: Path, cpus: tuple[int, ...]) -> tuple[tuple[tuple[int, ...], ...], int | None]:
    """Return `cpus` grouped by last-level cache, and the total bytes of those caches; ((), None) if not reported."""
    slices: dict[object, list[int]] = {}
    sizes: dict[str, int] = {}
    for cpu in cpus:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/cache/index3"
        shared_by, cache_size = read_text(folder / "shared_cpu_list"), read_text(folder / "size")
        if shared_by and cache_size:
            slices.setdefault(shared_by, []).append(cpu)
            sizes[shared_by] = parse_cache_size(cache_size)
    return _groups(slices), sum(sizes.values()) or None


def _groups(groups: dict[object, list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(group) for group in groups.values())


def _numa(root: Path, memory: dict[str, str]) -> tuple[NumaNode, ...]:
    base = root / "sys/devices/system/node"
    allowed = parse_key_values(read_text(root / "proc/self/status") or "").get("Mems_allowed_list")
    homes, nodes = parse_cpu_list(read_text(base / "has_memory") or ""), []
    # A virtual machine may count RAM in /proc/meminfo that its host adds to the node only when it is needed.
    only = homes[0] if len(homes) == 1 else None
    for node in parse_cpu_list(read_text(base / "online") or ""):
        own = parse_key_values((read_text(base / f"node{node}/meminfo") or "").replace(f"Node {node} ", ""))
        facts = memory if node == only else own
        nodes.append(
            NumaNode(
                id=node,
                cpus=parse_cpu_list(read_text(base / f"node{node}/cpulist") or ""),
                memory_bytes=parse_kib(facts["MemTotal"]) if "MemTotal" in facts else None,
                available_bytes=_node_available(facts),
                distances=tuple(int(text) for text in (read_text(base / f"node{node}/distance") or "").split()),
                memory_allowed=allowed is None or node in parse_cpu_list(allowed),
            )
        )
    return tuple(nodes)


def _node_available(facts: dict[str, str]) -> int | None:
    """Estimate a node's available bytes: without MemAvailable, which nodes do not have, free pages plus page cache,
    which the kernel drops on demand; None if unknown."""
    if "MemAvailable" in facts:
        return parse_kib(facts["MemAvailable"])
    if "MemFree" not in facts:
        return None
    return sum(parse_kib(facts.get(name, "0 kB")) for name in ("MemFree", "Active(file)", "Inactive(file)"))


def _memory(
    facts: dict[str, str], limits: CgroupLimits, nodes: Sequence[NumaNode], notes: list[str]
) -> tuple[int, int, str]:
    """Return (total bytes, available bytes, what limits the latter)."""
    if "MemAvailable" not in facts:
        notes.append("the kernel does not report MemAvailable: MemFree is used")
    left = [(parse_kib(facts.get("MemAvailable", facts["MemFree"])), "free memory")]
    if limits.memory_left_bytes is not None:
        left.append((limits.memory_left_bytes, f"the memory limit of control group {limits.memory_group}"))
    if any(node.memory_bytes != 0 and not node.memory_allowed for node in nodes):  # /proc/meminfo counts these too
        allowed = [node for node in nodes if node.memory_allowed]
        free = [node.available_bytes for node in allowed if node.available_bytes is not None]
        if len(free) == len(allowed):
            left.append((sum(free), f"the memory nodes of the cpuset, {format_ranges([node.id for node in allowed])}"))
    return parse_kib(facts["MemTotal"]), *min(left, key=lambda of: of[0])
