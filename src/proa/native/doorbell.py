"""The doorbell: a GPU hands jobs for the experts of several layers to the CPU from inside its graph. Belongs here: the
block of memory that both sides address, and the thread that runs the jobs. Never: writing jobs (hybrid/transport.py),
torch.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import astuple, dataclass

from proa.native.library import Signatures, finalizer, library
from proa.native.pool import Pool
from proa.native.weights import Experts

FORESEEN_ROWS = 4  # most rows of a prediction (experts that the next job will probably need)
PROBE_LAYER = -1  # a job of this layer is answered at once, without work
DECODE_JOB = 1 << 20  # added to the layer of a decode step's job, of which pairs may be deferred


class Way(enum.IntEnum):
    """The GPU's way to signal a job; hybrid/transport.py explains why each is correct."""

    NUMBER = 0  # a kernel writes the job and stores its number
    FLAGS = 1  # the stream copies the job, then sets a flag
    CALLS = 2  # the stream copies the job, then calls a host function


class BlockLayout(ctypes.Structure):
    """Offsets in bytes from the beginning of the doorbell's block, which is aligned to 64 bytes.

    rung, answered, dead, done, ready: uint32. header: int32 layer, tokens, number. ids int32, weights float32 [T, k];
    x bfloat16, y float32 [T, hidden]. answered and dead are the halves of one 64-bit word. The prediction: number
    (uint32), layer and rows (int32), contiguous; ids int32 [FORESEEN_ROWS, k].
    """

    rung: int
    answered: int
    dead: int
    done: int
    ready: int
    header: int
    ids: int
    weights: int
    x: int
    y: int
    foreseen: int
    foreseen_layer: int
    foreseen_rows: int
    foreseen_ids: int
    bytes: int  # size of the block
    _fields_ = [
        (name, c_int64)
        for name in (
            "rung", "answered", "dead", "done", "ready", "header", "ids", "weights", "x", "y", "foreseen",
            "foreseen_layer", "foreseen_rows", "foreseen_ids", "bytes",
        )
    ]  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """`nbytes` bytes at an address aligned to 64 bytes; `owner` is referenced to keep them allocated."""

    address: int
    nbytes: int
    owner: object


@dataclass(frozen=True)
class Service:
    """Settings of the thread that runs the jobs, as the pool's caller on `lane`."""

    lane: int = 0
    spin_us: int = 1000  # how long it polls for a ring after the last step
    cpus: tuple[int, ...] = ()  # its affinity, preferably CPUs without workers; empty: any
    read_ahead: bool = False  # idle workers read predicted experts into their caches
    decode_tokens: int = 0  # jobs of up to this many tokens count as decode and use its fixed kernels; 0: none
    deferred: int = 0  # of a token's choices in a DECODE_JOB, the most that are computed after the answer (lossy)


ANY_SERVICE = Service()


class _Options(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(c_void_p)), ("layer_count", c_int64), ("memory", c_void_p), ("memory_bytes", c_int64),
        ("most_tokens", c_int64), ("top_k", c_int64), ("hidden", c_int64),
        ("cpus", POINTER(c_int32)), ("cpu_count", c_int64), ("lane", c_int32), ("spin_us", c_int32), ("way", c_int32),
        ("read_ahead", c_int32), ("decode_tokens", c_int32), ("deferred", c_int32),
    ]  # fmt: skip


_COUNTED = (
    "jobs", "pairs", "weight_bytes", "moe_ns", "waiting_ns", "experts", "foreseen", "gaps", "gap_ns", "deferred",
    "deferred_ns",
)  # fmt: skip


class _Counters(ctypes.Structure):
    _fields_ = [(name, c_uint64) for name in _COUNTED]


_SIGNATURES: Signatures = {
    "proa_doorbell_layout_of": (c_int64, c_int64, c_int64, POINTER(BlockLayout)),
    "proa_doorbell_create": (c_void_p, POINTER(_Options), POINTER(c_void_p)),
    "proa_doorbell_destroy": (c_void_p,),
    "proa_doorbell_arm": (c_void_p,),
    "proa_doorbell_disarm": (c_void_p,),
    "proa_doorbell_check": (c_void_p,),
    "proa_doorbell_fail": (c_void_p, c_char_p),
    "proa_doorbell_ring": (c_void_p, c_uint32),
    "proa_doorbell_wait": (c_void_p, c_uint32, c_int64, POINTER(c_int)),
    "proa_doorbell_get_counters": (c_void_p, POINTER(_Counters)),
}


@functools.cache
def _native() -> ctypes.CDLL:
    return library().bind(_SIGNATURES)


@dataclass(frozen=True)
class JobSize:
    """Size of the largest job: tokens, experts per token, elements per row."""

    most_tokens: int
    top_k: int
    hidden: int


@dataclass(frozen=True)
class Counters:
    """Totals since the doorbell was created; a job is included once `check` has returned after it. Fields from
    `choices` on are totals of steps, filled by hybrid/counting.py, from `passes` on by hybrid/streaming.py."""

    jobs: int
    pairs: int  # (token, expert) pairs
    weight_bytes: int  # weights of the experts in jobs, each expert once per job
    moe_s: float  # from ring to answer, and for deferred pairs
    waiting_s: float  # from an answer (or from arming) to the next ring
    experts: int = 0  # experts in jobs, each once per job
    foreseen: int = 0  # of these, predicted
    gaps: int = 0  # intervals between the jobs of consecutive layers
    gap_s: float = 0.0  # their total
    deferred: int = 0  # of the pairs, those computed after the answer
    deferred_s: float = 0.0  # of moe_s, for these
    looks: int = 0
    choices: int = 0  # (token, expert) pairs chosen, on any device
    hits: int = 0  # of these, experts resident on the GPU
    hit_bytes: int = 0  # weights of the hits, each expert once per step
    missed_bytes: int = 0  # weights of the other choices, each expert once per step
    moved_bytes: int = 0  # weights of experts that changed places, copied both ways
    lent_slots: int = 0  # in idle KV pages, now; filled by hybrid/model.py, as the next one
    lent_bytes: int = 0  # rooms for experts in lent pages, now
    passes: int = 0  # steps in parts whose experts in RAM were divided
    pass_tokens: int = 0
    streamed: int = 0  # experts copied to the ring in these passes, over all layers
    left_to_cpu: int = 0  # experts in RAM that were not
    streamed_bytes: int = 0
    copy_s: float = 0.0  # in the passes that were measured, as are the next ones
    predicted_s: float = 0.0  # sum over layers of the longer of copies and computing
    took_s: float = 0.0  # from the start of each pass to the end of its launches
    own_s: float = 0.0  # of this, the GPU's time for all but experts
    experts_s: float = 0.0  # for experts
    waited_s: float = 0.0  # its waits for copies
    cpu_wait_s: float = 0.0  # its waits for the CPU's sums
    decided_s: float = 0.0  # its waits for the division of experts by a layer's routing
    routed: int = 0  # passes divided by their routing to the end
    promoted: int = 0  # experts that moved from the ring to slots
    copy_bytes_per_s: float = 0.0  # the present rates, by which passes are divided
    cpu_expert_s: float = 0.0
    cpu_pair_s: float = 0.0


NOTHING_COUNTED = Counters(jobs=0, pairs=0, weight_bytes=0, moe_s=0.0, waiting_s=0.0)


def counted_since(then: Counters, now: Counters) -> Counters:
    """What was counted between the two."""
    return Counters(*(after - before for before, after in zip(astuple(then), astuple(now), strict=True)))


def block_layout(size: JobSize) -> BlockLayout:
    """The layout of the block for jobs of this size. Raises ValueError for impossible sizes."""
    layout = BlockLayout()
    _native().proa_doorbell_layout_of(size.most_tokens, size.top_k, size.hidden, ctypes.byref(layout))
    return layout


@dataclass(frozen=True)
class Calls:
    """Addresses of native host functions for the GPU driver to call in stream order, with `doorbell` as argument:
    `ring` after a job was copied, `wait` until it is answered. They do not take the GIL, and return at once after a
    failure.
    """

    ring: int
    wait: int
    doorbell: int


class Doorbell:
    """A thread that runs jobs written into a block of memory (see block_layout).

    Raises ValueError if the memory is too small or layers have other widths, NativeError if the thread cannot be
    bound to its CPUs.
    """

    def __init__(
        self, pool: Pool, layers: Sequence[Experts], size: JobSize, memory: Memory, service: Service = ANY_SERVICE,
        way: Way = Way.NUMBER,
    ) -> None:  # fmt: skip
        self.size, self.way = size, way
        self._handle = c_void_p()
        options = _Options(
            (c_void_p * len(layers))(*(layer.handle.value for layer in layers)), len(layers),
            memory.address, memory.nbytes, size.most_tokens, size.top_k, size.hidden,
            (c_int32 * len(service.cpus))(*service.cpus), len(service.cpus), service.lane, service.spin_us,
            way, service.read_ahead, service.decode_tokens, service.deferred,
        )  # fmt: skip
        _native().proa_doorbell_create(pool.handle, ctypes.byref(options), ctypes.byref(self._handle))
        keep = pool, tuple(layers), memory
        self._end = finalizer(self, _native().proa_doorbell_destroy, c_void_p(self._handle.value), keep)

    def arm(self) -> None:
        """Call before launching a step that may ring: its thread and workers no longer sleep."""
        _native().proa_doorbell_arm(self._handle)

    def disarm(self) -> None:
        """Call after the step; after the last armed one no worker reads weights. Raises ValueError if none was
        armed."""
        _native().proa_doorbell_disarm(self._handle)

    def check(self) -> None:
        """Call after a step, before using its results. Raises the error of a failed job (NativeError, ValueError) at
        this and every later call; raises NumericsError, once, if a job's result was non-finite."""
        _native().proa_doorbell_check(self._handle)

    def fail(self, why: str) -> None:
        """Fail the doorbell: waits for answers return, and `check` raises NativeError with this text."""
        _native().proa_doorbell_fail(self._handle, why.encode())

    @property
    def calls(self) -> Calls:
        """The host functions for Way.CALLS. Raises ValueError once closed."""
        native, handle = _native(), self._handle.value
        if handle is None:
            raise ValueError("the doorbell is closed")
        ring, wait = (
            ctypes.cast(function, c_void_p).value or 0
            for function in (native.proa_doorbell_call_ring, native.proa_doorbell_call_wait)
        )
        return Calls(ring, wait, handle)

    def ring(self, number: int) -> None:
        """Signal from the CPU, in place of a GPU, that the job with this number is written."""
        _native().proa_doorbell_ring(self._handle, number)

    def wait(self, number: int, timeout_s: float) -> bool:
        """Wait from the CPU, in place of a GPU, until the job is answered (with Way.FLAGS: until the next job may be
        written); False after a failure or the timeout."""
        answered = c_int()
        _native().proa_doorbell_wait(self._handle, number, int(timeout_s * 1e6), ctypes.byref(answered))
        return bool(answered.value)

    def counters(self) -> Counters:
        """Totals so far."""
        found = _Counters()
        _native().proa_doorbell_get_counters(self._handle, ctypes.byref(found))
        return Counters(
            found.jobs,
            found.pairs,
            found.weight_bytes,
            found.moe_ns * 1e-9,
            found.waiting_ns * 1e-9,
            found.experts,
            found.foreseen,
            found.gaps,
            found.gap_ns * 1e-9,
            found.deferred,
            found.deferred_ns * 1e-9,
        )

    def close(self) -> None:
        """Stop the thread. Pending waits return with a failure; no method may be called afterwards."""
        self._handle = c_void_p()
        self._end()
