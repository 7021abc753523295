"""Programs under test that end when this process does, however it ends. Never: tests, what a program is asked."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

# Runs before the program, in its process: when the thread that started it ends, by SIGKILL too, the kernel kills the
# program (PR_SET_PDEATHSIG, 1, kept through exec). A parent that has ended already sends no signal: its id tells.
_ENDING = """
import ctypes, os, signal, sys
if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL) != 0:
    raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
if os.getppid() != int(sys.argv[1]):
    sys.exit("the process that started this one has ended")
os.execv(sys.argv[2], sys.argv[2:])
"""


def python(*argv: str) -> list[str]:
    """The command that runs this Python with `argv`, and ends with this process."""
    return ends_with_this_process([sys.executable, *argv])


def proa(*argv: str) -> list[str]:
    """The command of `proa ARGV` with this Python, which ends with this process; what it starts ends with it."""
    return python("-m", "proa.cli.main", *argv)


def ends_with_this_process(command: Sequence[str]) -> list[str]:
    """`command`, whose first word is a path, as a command that is killed when this process ends.

    The process id, session and streams are those of the program. Start it from the main thread: the kernel kills it
    when the thread that started it ends.
    """
    return [sys.executable, "-ISc", _ENDING, str(os.getpid()), *command]
