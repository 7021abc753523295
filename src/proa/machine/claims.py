"""Announces to other engines on this machine which CPUs this engine's workers are bound to.

A claim is an abstract Unix socket whose name lists the CPUs: the kernel lists it in /proc/net/unix and removes it when
the process ends. Engines in containers with separate network namespaces do not see each other's claims.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Sequence
from pathlib import Path

from proa.machine.files import parse_cpu_list, read_text
from proa.obs.units import format_ranges

_PREFIX = "proa-cpus/"
_RANGES = 8  # CPU ranges per socket: a name has at most 107 bytes


class CpuClaim:
    """A claim on CPUs, valid for the lifetime of this object. Raises OSError if a sandbox forbids Unix sockets."""

    def __init__(self, cpus: Sequence[int]) -> None:
        ranges = format_ranges(sorted(cpus)).split(", ")
        sockets = [_named(ranges[first : first + _RANGES]) for first in range(0, len(ranges), _RANGES)]
        self.close = weakref.finalize(self, _close, sockets)


def _close(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


def claimed_cpus(root: Path = Path("/")) -> frozenset[int]:
    """Return the CPUs of all current claims of all processes."""
    names = (line.rpartition("@")[2] for line in (read_text(root / "proc/net/unix") or "").splitlines())
    lists = (name.split("/")[2] for name in names if name.startswith(_PREFIX))
    return frozenset(cpu for each in lists for cpu in parse_cpu_list(each))


def _named(ranges: Sequence[str]) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    made.bind(f"\0{_PREFIX}{os.getpid()}/{','.join(ranges)}/{os.urandom(4).hex()}")
    return made
