"""An arena that two processes map: each reads what the other has written, however the descriptor came."""

from __future__ import annotations

import os
import socket
import subprocess
import tempfile

import numpy as np
import pytest

from proa.errors import NativeError
from proa.native.arena import Arena, AttachedArena
from programs import python

MIB = 1 << 20
NBYTES = 3 * MIB + 5

# Attaches as its arguments say, adds 1 to every byte, tells their sum before, and ends when its input does.
CHILD = """
import os, socket, sys
import numpy as np
from proa.native.arena import AttachedArena

how, number, nbytes = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
if how == "socket":
    _, (fd,), _, _ = socket.recv_fds(socket.socket(fileno=number), 1, 1)
elif how == "proc":
    fd = os.open(f"/proc/self/fd/{number}", os.O_RDWR)
else:
    fd = number
arena = AttachedArena(fd, nbytes)
os.close(fd)
values = np.frombuffer(arena.view(), dtype=np.uint8)
print(int(values.sum()), flush=True)
values += 1
print("written", flush=True)
sys.stdin.read()
print(int(values[-1]), flush=True)
"""


@pytest.mark.parametrize("how", ["inherited", "proc", "socket"])
def test_a_child_reads_and_writes_the_same_memory(how: str) -> None:
    with Arena(NBYTES, shared=True) as arena:
        assert arena.fd is not None
        values = np.frombuffer(arena.view(), dtype=np.uint8)
        values[:] = np.arange(NBYTES) % 200
        ours, theirs = socket.socketpair()
        passed = theirs.fileno() if how == "socket" else arena.fd
        command, pipe = python("-c", CHILD, how, str(passed), str(NBYTES)), subprocess.PIPE
        before = int(values.sum())
        with subprocess.Popen(command, stdin=pipe, stdout=pipe, pass_fds=[passed], text=True) as child:
            assert child.stdin is not None
            assert child.stdout is not None
            if how == "socket":
                socket.send_fds(ours, [b"a"], [arena.fd])
            assert int(child.stdout.readline()) == before
            assert child.stdout.readline() == "written\n"
            assert int(values.sum()) == before + NBYTES
            values[-1] = 77  # seen by a process that mapped it before
            child.stdin.close()
            assert int(child.stdout.readline()) == 77
            assert child.wait(30) == 0
        for end in (ours, theirs):
            end.close()


def test_memory_outlives_its_owner() -> None:
    arena = Arena(NBYTES, shared=True)
    assert arena.fd is not None
    arena.view()[:3] = b"abc"
    attached = AttachedArena(arena.fd, NBYTES)
    arena.close()
    assert bytes(attached.view(0, 4)) == b"abc\0"
    assert attached.data % 4096 == 0
    kept = attached.view(1, 2)
    attached.close()
    assert bytes(kept) == b"bc"
    with pytest.raises(NativeError, match="closed"):
        attached.view()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 1), (0, NBYTES + 1), (NBYTES, 1), (5, -1)])
def test_parts_outside_are_refused(offset: int, nbytes: int) -> None:
    with Arena(NBYTES, shared=True) as arena:
        assert arena.fd is not None
        with pytest.raises(ValueError, match="outside"):
            AttachedArena(arena.fd, NBYTES).view(offset, nbytes)


def test_what_is_no_arena_is_refused() -> None:
    with Arena(NBYTES, shared=True) as arena:
        assert arena.fd is not None
        with pytest.raises(ValueError, match="5242880 bytes of an arena were requested"):
            AttachedArena(arena.fd, 5 * MIB)
    with tempfile.TemporaryFile() as file:
        file.truncate(MIB)
        with pytest.raises(ValueError, match="can be cut off"):
            AttachedArena(file.fileno(), MIB)
    memory = os.memfd_create("unsealed")
    os.truncate(memory, MIB)
    with pytest.raises(ValueError, match="can be cut off"):
        AttachedArena(memory, MIB)
    os.close(memory)
