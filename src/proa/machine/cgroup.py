"""Reads the control group limits (cgroup v1 and v2) of this process from /proc and /sys.

A group's limit applies to all groups below it, so limits are read at every level, from this process's group up to the
mount point (https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from proa.machine.files import parse_cpu_list, read_int, read_text


@dataclass(frozen=True)
class CgroupLimits:
    """The effective limits; None if no group sets one. memory_left_bytes: limit minus unreclaimable memory in use."""

    quota_cores: float | None
    cpus: frozenset[int] | None
    memory_left_bytes: int | None
    memory_group: str = ""  # the group whose limit gives memory_left_bytes


@dataclass(frozen=True)
class _Level:
    """A control group: its folder, its path in the hierarchy, and the cgroup version."""

    folder: Path
    name: str
    version: int


def cgroup_limits(root: Path) -> CgroupLimits:
    """Read the tightest limits on this process; all None on a system without control groups."""
    quotas = [q for level in _levels(root, "cpu") if (q := _quota(level)) is not None]
    sets = [s for level in _levels(root, "cpuset") if (s := _cpuset(level))]
    memory = [(left, level.name) for level in _levels(root, "memory") if (left := _memory_left(level)) is not None]
    left_bytes, group = min(memory, default=(None, ""))
    return CgroupLimits(
        quota_cores=min(quotas, default=None),
        cpus=frozenset.intersection(*sets) if sets else None,
        memory_left_bytes=left_bytes,
        memory_group=group,
    )


def _levels(root: Path, controller: str) -> Iterator[_Level]:
    """Yield this process's groups that may limit `controller`, innermost first, for each mounted hierarchy."""
    paths = _own_paths(root)
    for line in (read_text(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), right.split(" ")[:3]  # the source, in the middle, may be empty
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        if version is None or (version == 1 and controller not in options.split(",")):
            continue
        path = paths.get("" if version == 2 else controller, "/")
        mount, shown = root / fields[4].lstrip("/"), fields[3]
        inside = [part for part in path.removeprefix(shown).split("/") if part]
        if ".." in inside or not path.startswith(shown):
            inside = []  # in a container, this mount may not include the process's group: use the mount's top level
        for depth in range(len(inside), -1, -1):
            yield _Level(mount.joinpath(*inside[:depth]), "/" + "/".join(inside[:depth]), version)


def _own_paths(root: Path) -> dict[str, str]:
    """Read /proc/self/cgroup; return the group path by controller. The key of cgroup v2 is the empty string."""
    paths = {}
    for line in (read_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _quota(level: _Level) -> float | None:
    if level.version == 2:
        quota, _, period = (read_text(level.folder / "cpu.max") or "max").partition(" ")
        return int(quota) / int(period) if quota != "max" else None
    quota_us = read_int(level.folder / "cpu.cfs_quota_us")
    period_us = read_int(level.folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _cpuset(level: _Level) -> frozenset[int]:
    names = ("cpuset.cpus.effective",) if level.version == 2 else ("cpuset.effective_cpus", "cpuset.cpus")
    return next(
        (frozenset(parse_cpu_list(text)) for name in names if (text := read_text(level.folder / name))), frozenset()
    )


def _memory_left(level: _Level) -> int | None:
    if level.version == 2:
        # The kernel throttles above memory.high and kills above memory.max: stay below both.
        names, usage, prefix = ["memory.max", "memory.high"], "memory.current", ""
    else:
        names, usage, prefix = ["memory.limit_in_bytes"], "memory.usage_in_bytes", "total_"
    limits = [limit for name in names if (limit := read_int(level.folder / name)) is not None]
    used = read_int(level.folder / usage)
    if not limits or used is None:
        return None
    return max(0, min(limits) - used + _reclaimable(level.folder / "memory.stat", prefix))


def _reclaimable(stat: Path, prefix: str) -> int:
    """Return the bytes of page cache, which the kernel drops on demand; memory.stat includes the groups below."""
    wanted = {f"{prefix}inactive_file", f"{prefix}active_file"}
    rows = (line.split() for line in (read_text(stat) or "").splitlines())
    return sum(int(row[1]) for row in rows if row[0] in wanted)
