"""Control-group limits of this process, versions 1 and 2, from files under a root. Never: the machine's own facts.

A group's limit holds for everything below it, so each is read at every level from our own group up to the mount
(https://docs.kernel.org/admin-guide/cgroup-v2.html and cgroup-v1/memory.html).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from proa.machine.files import cpu_list, number, read


@dataclass(frozen=True)
class CgroupLimits:
    """None where no group sets a limit. memory_left_bytes is limit minus usage that cannot be reclaimed."""

    quota_cores: float | None
    cpus: frozenset[int] | None
    memory_left_bytes: int | None
    memory_group: str = ""  # the group whose memory limit is tightest


@dataclass(frozen=True)
class _Level:
    """One group's folder, and its path inside the hierarchy."""

    folder: Path
    name: str
    version: int


def cgroup_limits(root: Path) -> CgroupLimits:
    """The tightest limits on this process; a system without control groups has none."""
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
    """Our groups that may govern `controller`, innermost first, in every hierarchy that is mounted."""
    paths = _own_paths(root)
    for line in (read(root / "proc/self/mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        fields, (kind, _, options) = left.split(), right.split()[:3]
        version = {"cgroup": 1, "cgroup2": 2}.get(kind)
        if version is None or (version == 1 and controller not in options.split(",")):
            continue
        path = paths.get("" if version == 2 else controller, "/")
        mount, shown = root / fields[4].lstrip("/"), fields[3]
        inside = [part for part in path.removeprefix(shown).split("/") if part]
        if ".." in inside or not path.startswith(shown):
            inside = []  # our group lies outside what this mount shows (containers): the mount's top is all we see
        for depth in range(len(inside), -1, -1):
            yield _Level(mount.joinpath(*inside[:depth]), "/" + "/".join(inside[:depth]), version)


def _own_paths(root: Path) -> dict[str, str]:
    """controller -> group path, from /proc/self/cgroup; version 2 has the empty name."""
    paths = {}
    for line in (read(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        paths.update(dict.fromkeys(controllers.split(","), path))
    return paths


def _quota(level: _Level) -> float | None:
    if level.version == 2:
        quota, _, period = (read(level.folder / "cpu.max") or "max").partition(" ")
        return int(quota) / int(period) if quota != "max" else None
    quota_us = number(level.folder / "cpu.cfs_quota_us")
    period_us = number(level.folder / "cpu.cfs_period_us")
    return quota_us / period_us if quota_us and period_us and quota_us > 0 else None


def _cpuset(level: _Level) -> frozenset[int]:
    names = ("cpuset.cpus.effective",) if level.version == 2 else ("cpuset.effective_cpus", "cpuset.cpus")
    return next((frozenset(cpu_list(text)) for name in names if (text := read(level.folder / name))), frozenset())


def _memory_left(level: _Level) -> int | None:
    if level.version == 2:
        # At memory.high the kernel throttles, at memory.max it kills: stay below both.
        limits = [n for name in ("memory.max", "memory.high") if (n := number(level.folder / name)) is not None]
        used, prefix = number(level.folder / "memory.current"), ""
    else:
        limits = [n for n in (number(level.folder / "memory.limit_in_bytes"),) if n is not None]
        used, prefix = number(level.folder / "memory.usage_in_bytes"), "total_"
    if not limits or used is None:
        return None
    return max(0, min(limits) - used + _reclaimable(level.folder / "memory.stat", prefix))


def _reclaimable(stat: Path, prefix: str) -> int:
    """File pages, which the kernel drops when memory is asked for; memory.stat counts the groups below as well."""
    wanted = {f"{prefix}inactive_file", f"{prefix}active_file"}
    rows = (line.split() for line in (read(stat) or "").splitlines())
    return sum(int(row[1]) for row in rows if row[0] in wanted)
