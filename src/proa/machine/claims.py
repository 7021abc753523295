"""Telling other engines on this machine which CPUs have workers bound to them. Never: deciding what follows from it.

A claim is a socket that nobody connects to: the kernel lists its name, which says the CPUs, and forgets it with the
process. Engines in containers with networks of their own do not see each other.
"""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import Sequence
from pathlib import Path

from proa.machine.files import cpu_list, read
from proa.obs.units import format_spans

_PREFIX = "proa-cpus/"
_SPANS = 8  # a name has 107 bytes at most


class Claim:
    """Stands as long as this object. Raises OSError where a sandbox forbids it."""

    def __init__(self, cpus: Sequence[int]) -> None:
        spans = format_spans(sorted(cpus)).split(", ")
        sockets = [_named(spans[first : first + _SPANS]) for first in range(0, len(spans), _SPANS)]
        self.close = weakref.finalize(self, _close, sockets)


def _close(sockets: Sequence[socket.socket]) -> None:
    for each in sockets:
        each.close()


def claimed_cpus(root: Path = Path("/")) -> frozenset[int]:
    """The CPUs of all claims that stand now."""
    names = (line.rpartition("@")[2] for line in (read(root / "proc/net/unix") or "").splitlines())
    lists = (name.split("/")[2] for name in names if name.startswith(_PREFIX))
    return frozenset(cpu for each in lists for cpu in cpu_list(each))


def _named(spans: Sequence[str]) -> socket.socket:
    made = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
    made.bind(f"\0{_PREFIX}{os.getpid()}/{','.join(spans)}/{os.urandom(4).hex()}")
    return made
