"""The handover of experts to the CPU and of their sum back to the GPU: the only synchronisation of CPU and GPU. Belongs
here: the block of memory that both address, which side writes which word when, and why each side sees what the other
wrote. Never: which experts the CPU computes, kernels.

In each MoE layer the GPU pushes: it writes layer, tokens, ids, weights and rows into the block, then the job's number
into `rung`. A CPU thread that polls `rung` (csrc/src/doorbell.cc) runs the experts, writes y, then the same number
into `answered`. The GPU pulls: it polls `answered`, then copies y. One block is enough for a lane, since the next
push comes after the pull. If the CPU has no pair, push does not ring and pull does not wait: both read that from one
word in the GPU's memory. With expert deferral every layer of a decode step rings (DECODE_JOB), since its answer has
what was deferred to it. The number lives there too and push adds one to it, so that a replayed graph goes on counting.

Why a job is whole when its number is seen (kernels: ops/triton/bell.py; for a few rows the kernel that chooses experts
pushes, choose.py, and the one that adds them up pulls, expert_sum.py, by the same functions in the same order):
1. Every thread of a program stores its part of the job, then the program meets at a barrier: what the threads stored is
   before anything that any of them does next.
2. With several programs, one thread of each then increments a counter in the GPU's memory, as an acquire and a release
   for the whole system. By that, everything that the other programs stored is before what the last thread to increment
   does next; it meets the other threads of its program at a barrier again.
3. One thread stores the number with st.release.sys. A release covers what the thread stored and what was before it by
   1 and 2; on the bus, all of that is written before the number.
4. The CPU's thread loads the number as an acquire. What it loads afterwards is at least as new as the job. The pool's
   workers get it from that thread through the pool's own releases and acquires.
Why y is whole when its number is seen: the workers store rows of y and say so by a release; the doorbell's thread has
acquired all of them when it stores `answered` as a release. The GPU's polling thread loads it with ld.acquire.sys and
meets its program at a barrier; only then y is loaded, past the caches that might hold a former one (volatile). Where a
kernel of one program waits for those of the next one, the border between kernels does the barrier's work.
Why both hold if jobs are copied (gpu_ways.py): kernels write the job to the GPU's memory, and the stream starts a copy
once they have ended. It then signals through the driver that the copy is complete, and waits for the answer's signal
before it copies y:
- by flags (stream memory operations): the driver's store comes behind a fence of all that the stream did before, and
  the CPU's thread acquires it; `done` is released after y, and the copy of y is not begun before the driver sees it. A
  graph stores the same value at each replay, so a handshake has four stores: GPU rung = 1, CPU done = 1, GPU rung = 0,
  CPU done = 0 and ready = 1. The job's number is copied with it. The next copy waits for `ready`: before that the CPU
  may still see the former rung = 1, and would take whatever the block holds for a job.
- by calls: the driver calls a function in the stream's order, which stores the number in `rung` as a CPU can, and
  another one that returns when it has acquired the answer.
In both ways each push rings. Without a job the number is that of the last job, and the CPU answers at once.
Why nothing is written too early: the CPU reads a job only between its number's arrival and its own answer (a worker
that is late may read rows later still, and drops what it made of them), the GPU writes the next one only after it saw
that answer and read y in a former kernel. The state words are touched by kernels of one stream alone.
A hint of the next layer's experts (ops/triton/look_ahead.py) is written and released like a job, into words of its own.
It has no answer, and nothing waits for it: the next hint may overwrite it while the CPU's thread reads. Then workers
prefetch the weights of other experts, which exist too; nothing else happens.
The GPU's atomics do not work on host memory, so there are none: each word has one writer.
`dead` is the high half of the word that holds `answered`: one load tells whether to go on waiting. It is never cleared,
so nothing waits after a failure, and `check` says what it was. Flags keep a bit of their own for that, which ends every
wait for them; calls look at `dead`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from proa.native.doorbell import (
    ANY_SERVICE,
    PROBE_LAYER,
    Counters,
    Doorbell,
    JobSize,
    Memory,
    Service,
    Way,
    block_layout,
)
from proa.native.pool import Pool
from proa.native.weights import Experts
from proa.ops.bell_block import Bell, BellBlock, awaited, check_pull, check_push, copied, views
from proa.ops.device_reference import foresee, write_job
from proa.ops.table import NextRouter


class Transport(Protocol):
    """The handover of one lane. A step: arm, then push and pull in each MoE layer, disarm once it has ended, check.

    can_foresee: hints can be launched. foresees: `foresee` launches them from now on; a captured graph keeps what it
    has.
    """

    @property
    def can_foresee(self) -> bool: ...

    foresees: bool

    def arm(self) -> None:
        """Wake the CPU's threads, before a step is launched."""

    def disarm(self) -> None:
        """Let the CPU's threads sleep. The step must have ended, not only been launched."""

    def push(self, x: Tensor, ids: Tensor, weights: Tensor, up_address: Tensor, layer: int) -> None:
        """Hand over the (token, expert) pairs of `layer` that the CPU computes: id >= 0 and up_address 0. layer:
        with DECODE_JOB added in a decode step of which pairs may be deferred; then every layer must be pushed.

        x bfloat16 [T, hidden]; ids int32 or int64, weights float32, up_address int64 [T, k]. Raises ValueError.
        """

    def foresee(self, x: Tensor, slots: Tensor, following: NextRouter, cpu: Tensor, layer: int) -> None:
        """Hint which experts of `layer` the CPU will probably need; only in steps of few rows. cpu: int32 [E], each
        expert's number in RAM. Call it between push and pull of the former MoE layer, with x as in Experts.foresee."""

    def pull(self, out: Tensor) -> None:
        """Write the CPU's sum of the last push to out, float32 [T, hidden], with what was deferred to it; zeros for
        rows without a pair there."""

    def bell(self, layer: int) -> Bell | None:
        """The layer's doorbell, for kernels that push or pull besides their main work; None: call push and pull."""

    def check(self) -> None:
        """Call it after a step, before its results are used. Raises NativeError or ValueError at every call once a job
        has failed; NumericsError once after a non-finite sum."""

    def probe_us(self, rounds: int = 200) -> float:
        """Microseconds of an empty round trip. Raises NativeError if the CPU does not answer."""

    def counters(self) -> Counters:
        """The CPU's work so far."""

    def close(self) -> None:
        """Stop. No step may be under way."""


class HostTransport:
    """Implements Transport for a simulated GPU: tensors are on the CPU, push and pull are synchronous. A pull without
    an answer within `timeout_s` fails the doorbell."""

    def __init__(
        self, pool: Pool, layers: Sequence[Experts], size: JobSize, service: Service = ANY_SERVICE,
        way: Way = Way.NUMBER, *, timeout_s: float = 60.0,
    ) -> None:  # fmt: skip
        layout = block_layout(size)
        memory = torch.zeros(layout.bytes, dtype=torch.uint8)
        self.size, self.timeout_s = size, timeout_s
        self.doorbell = Doorbell(pool, layers, size, Memory(memory.data_ptr(), layout.bytes, memory), service, way)
        self._memory = memory
        self._block = views(memory, layout, size)
        self._number = 0
        self.can_foresee = self.foresees = service.read_ahead and way is Way.NUMBER
        self._copies = way is not Way.NUMBER  # a GPU copies jobs in these ways, and rings in every layer
        self._rows: Tensor | None = None  # bool [T]: rows of the last push that the CPU has a pair of

    def arm(self) -> None:
        self.doorbell.arm()

    def disarm(self) -> None:
        self.doorbell.disarm()

    def push(self, x: Tensor, ids: Tensor, weights: Tensor, up_address: Tensor, layer: int) -> None:
        check_push(x, ids, weights, up_address, self._block)
        on_cpu, counts = awaited(ids, up_address, layer)
        rows = counts > 0
        self._rows = rows if bool(rows.any()) else None
        if self._rows is not None:
            self._number = (self._number + 1) % (1 << 32)
            write_job(self._block_of(len(x)), x, ids, weights, on_cpu, layer, self._number)
        elif not self._copies:
            return
        self.doorbell.ring(self._number)

    def _block_of(self, tokens: int) -> BellBlock:
        return copied(self._memory, self.size, tokens).block if self._copies else self._block

    def foresee(self, x: Tensor, slots: Tensor, following: NextRouter, cpu: Tensor, layer: int) -> None:
        if self.foresees:
            foresee(x, slots, following, cpu, layer, self._block)

    def pull(self, out: Tensor) -> None:
        check_pull(out, self._block)
        out.zero_()
        rows = self._rows
        if rows is None and not self._copies:
            return
        if not self.doorbell.wait(self._number, self.timeout_s):
            self.doorbell.fail(f"The CPU did not answer a job of the simulated GPU within {self.timeout_s:g} s.")
            return  # like a GPU, which cannot raise: check() raises the reason
        if rows is not None:
            out[rows] = self._block.y[: len(out)][rows]

    def bell(self, layer: int) -> Bell | None:
        return None

    def check(self) -> None:
        self.doorbell.check()

    def counters(self) -> Counters:
        return self.doorbell.counters()

    def probe_us(self, rounds: int = 200) -> float:
        again = empty_round(self, self.size, torch.device("cpu"))
        self.arm()
        try:
            again()
            begin = time.perf_counter()
            for _ in range(rounds):
                again()
            took_s = time.perf_counter() - begin
        finally:
            self.disarm()
        self.check()
        return took_s / rounds * 1e6

    def close(self) -> None:
        self.doorbell.close()


def empty_round(transport: Transport, size: JobSize, device: torch.device) -> Callable[[], None]:
    """Return a function that pushes and pulls a job of one row, which the CPU answers without work."""
    x = torch.zeros(1, size.hidden, dtype=torch.bfloat16, device=device)
    ids, up = (torch.zeros(1, size.top_k, dtype=torch.int64, device=device) for _ in range(2))
    weights = torch.zeros(1, size.top_k, device=device)
    out = torch.empty(1, size.hidden, device=device)

    def again() -> None:
        transport.push(x, ids, weights, up, PROBE_LAYER)
        transport.pull(out)

    return again
