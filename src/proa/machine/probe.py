"""Look at this machine: `probe()` reads /proc and /sys, nothing else. Never: measuring, decisions."""

from __future__ import annotations

from pathlib import Path

from proa.errors import ResourceError
from proa.machine.cgroup import CgroupLimits, cgroup_limits
from proa.machine.files import cpu_list, kib, number, read, size, table
from proa.machine.machine import Machine, NumaNode

# Instruction sets that decide which matrix kernels can run (x86-64, then Arm).
ISA_FLAGS = (
    "avx2", "fma", "f16c", "avx_vnni",
    "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni", "avx512_bf16", "avx512_fp16",
    "amx_tile", "amx_int8", "amx_bf16", "amx_fp16",
    "asimd", "asimddp", "i8mm", "bf16", "sve", "sve2",
)  # fmt: skip


def probe(root: Path = Path("/")) -> Machine:
    """Describe the machine whose /proc and /sys lie under `root`.

    Raises ResourceError where there is no Linux /proc.
    """
    memory, cpuinfo = read(root / "proc/meminfo"), table(read(root / "proc/cpuinfo") or "")
    if memory is None:
        raise ResourceError("This system has no /proc/meminfo.", "Proa runs on Linux; on Windows use WSL 2.")
    limits = cgroup_limits(root)
    notes: list[str] = []
    online = _online(root)
    cpus = _usable(root, online, limits)
    cores, packages = _topology(root, cpus)
    nodes = _numa(root)
    total, available, bound_by = _memory(table(memory), limits, notes)
    if not nodes:
        notes.append("no NUMA information: treated as one node")
    if cores is None:
        notes.append("no core topology: every logical CPU counts as a core")
    return Machine(
        cpu=cpuinfo.get("model name") or cpuinfo.get("CPU part") or "unknown",
        isa=_isa(cpuinfo),
        online_cpus=len(online),
        usable_cpus=cpus,
        quota_cores=limits.quota_cores,
        physical_cores=cores,
        packages=packages,
        l3_bytes=_l3_bytes(root, cpus),
        numa=nodes,
        total_bytes=total,
        available_bytes=available,
        memory_bound_by=bound_by,
        notes=tuple(notes),
    )


def _isa(cpuinfo: dict[str, str]) -> tuple[str, ...]:
    flags = set((cpuinfo.get("flags") or cpuinfo.get("Features") or "").split())
    return tuple(flag for flag in ISA_FLAGS if flag in flags)


def _online(root: Path) -> tuple[int, ...]:
    listed = read(root / "sys/devices/system/cpu/online")
    if listed:
        return cpu_list(listed)
    lines = (read(root / "proc/cpuinfo") or "").splitlines()
    return tuple(int(line.partition(":")[2]) for line in lines if line.startswith("processor")) or (0,)


def _usable(root: Path, online: tuple[int, ...], limits: CgroupLimits) -> tuple[int, ...]:
    """Online CPUs within the affinity mask (which the kernel already cuts by cpusets) and the cpuset."""
    allowed = table(read(root / "proc/self/status") or "").get("Cpus_allowed_list")
    mask = set(online) & set(cpu_list(allowed)) if allowed else set(online)
    if limits.cpus is not None:
        mask &= limits.cpus
    return tuple(sorted(mask)) or online


def _topology(root: Path, cpus: tuple[int, ...]) -> tuple[int | None, int | None]:
    """Distinct cores and packages among `cpus`; None if any CPU does not tell."""
    places = []
    for cpu in cpus:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/topology"
        package, core = number(folder / "physical_package_id"), number(folder / "core_id")
        if package is None or core is None:
            return None, None
        places.append((package, core))
    return len(set(places)), len({package for package, _ in places})


def _l3_bytes(root: Path, cpus: tuple[int, ...]) -> int | None:
    slices: dict[str, int] = {}
    for cpu in cpus:
        folder = root / f"sys/devices/system/cpu/cpu{cpu}/cache/index3"
        shared_by, cache_size = read(folder / "shared_cpu_list"), read(folder / "size")
        if shared_by and cache_size:
            slices[shared_by] = size(cache_size)
    return sum(slices.values()) or None


def _numa(root: Path) -> tuple[NumaNode, ...]:
    base = root / "sys/devices/system/node"
    nodes = []
    for node in cpu_list(read(base / "online") or ""):
        cpus = cpu_list(read(base / f"node{node}/cpulist") or "")
        facts = table((read(base / f"node{node}/meminfo") or "").replace(f"Node {node} ", ""))
        nodes.append(NumaNode(node, cpus, kib(facts["MemTotal"]) if "MemTotal" in facts else None))
    return tuple(nodes)


def _memory(facts: dict[str, str], limits: CgroupLimits, notes: list[str]) -> tuple[int, int, str]:
    """Total and available bytes, and what decided the latter."""
    if "MemAvailable" not in facts:
        notes.append("the kernel does not report MemAvailable: MemFree is used")
    available = kib(facts.get("MemAvailable", facts["MemFree"]))
    left = limits.memory_left_bytes
    if left is not None and left < available:
        return kib(facts["MemTotal"]), left, f"the memory limit of control group {limits.memory_group}"
    return kib(facts["MemTotal"]), available, "free memory"
