"""What writing to a socket costs whose reader sleeps, in us, by where the reader may run and whether its CPU is busy.

    python benchmarks/probes/wake.py

The writer works 5 ms on the first usable CPU between two messages, as an engine does; the reader 150 us on each
message; another process keeps the second CPU busy, as a worker that waits for its next task does. Needs two CPUs.
"""

from __future__ import annotations

import os
import signal
import socket
import statistics
import sys
import time

MESSAGES, STEP_S, READING_S = 200, 5e-3, 150e-6


def work(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def read(end: socket.socket, cpus: set[int]) -> None:
    os.sched_setaffinity(0, cpus)
    while end.recv(4096):
        work(READING_S)


def keep_busy(cpu: int) -> None:
    os.sched_setaffinity(0, {cpu})
    while True:
        pass


def measure(writer_cpu: int, reader_cpus: set[int], busy_cpu: int | None) -> tuple[float, float]:
    """Median and 90th percentile of a send, in us."""
    children = []
    if busy_cpu is not None:
        children.append(os.fork())
        if children[-1] == 0:
            keep_busy(busy_cpu)
    mine, its = socket.socketpair()
    children.append(os.fork())
    if children[-1] == 0:
        mine.close()
        read(its, reader_cpus)
        os._exit(0)
    its.close()
    os.sched_setaffinity(0, {writer_cpu})
    took = []
    for _ in range(MESSAGES):
        work(STEP_S)
        begin = time.perf_counter()
        mine.send(b"x" * 300)
        took.append(1e6 * (time.perf_counter() - begin))
    mine.close()
    for child in children:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return statistics.median(took), statistics.quantiles(took, n=10)[-1]


def main() -> None:
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        sys.exit("This needs two CPUs.")
    writer, other = cpus[:2]
    for what, reader, busy in (
        ("on the other CPU, which is idle", {other}, None),
        ("on the other CPU, which is busy", {other}, other),
        ("anywhere, the other CPU is idle", {writer, other}, None),
        ("anywhere, the other CPU is busy", {writer, other}, other),
        ("on the writer's CPU", {writer}, other),
    ):
        print("reader {:32} median {:6.1f} us, p90 {:6.1f}".format(what, *measure(writer, reader, busy)))


if __name__ == "__main__":
    main()
