"""The doorbell: jobs for the experts of several layers, from a GPU inside its graph. Belongs here: the block of memory
that both sides address, and the thread that answers. Never: who writes a job (hybrid/transport.py), torch.
"""

from __future__ import annotations

import ctypes
import enum
import functools
from collections.abc import Sequence
from ctypes import POINTER, c_char_p, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass

from proa.native.library import Signatures, finalizer, library
from proa.native.pool import Pool
from proa.native.weights import Experts

FORESEEN_ROWS = 4  # of a message that says what the next job will probably need
PROBE_LAYER = -1  # a job of this layer is answered at once, without work


class Way(enum.IntEnum):
    """How the other side says that a job is there; hybrid/transport.py says how each is right."""

    NUMBER = 0  # stores its number
    FLAGS = 1  # has it copied, and sets a flag
    CALLS = 2  # has it copied, and a function called


class BlockLayout(ctypes.Structure):
    """Offsets in bytes from the block's beginning, which stands on a boundary of 64 bytes.

    rung, answered, dead, done, ready: uint32. header: int32 layer, tokens, number. ids int32, weights float32 [T, k];
    x bfloat16, y float32 [T, hidden]. answered and dead are the halves of one word of 64 bits. What is foreseen: number
    (uint32), layer and rows (int32) one behind the other; ids int32 [FORESEEN_ROWS, k].
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
    bytes: int  # of the block
    _fields_ = [
        (name, c_int64)
        for name in (
            "rung", "answered", "dead", "done", "ready", "header", "ids", "weights", "x", "y", "foreseen",
            "foreseen_layer", "foreseen_rows", "foreseen_ids", "bytes",
        )
    ]  # fmt: skip


@dataclass(frozen=True)
class Memory:
    """`nbytes` at an address on a boundary of 64 bytes; `owner` is kept, so that they stay."""

    address: int
    nbytes: int
    owner: object


@dataclass(frozen=True)
class Service:
    """Who answers: a thread that is the pool's caller on `lane`."""

    lane: int = 0
    spin_us: int = 1000  # how long it goes on looking for a ring after the last step
    cpus: tuple[int, ...] = ()  # where it may run, best where no worker does; empty: wherever the system likes
    read_ahead: bool = False  # idle workers read into their caches what is foreseen
    decode_tokens: int = 0  # jobs of up to so many tokens are decode, by kernels that are fixed; 0: none are


ANY_SERVICE = Service()


class _Options(ctypes.Structure):
    _fields_ = [
        ("layers", POINTER(c_void_p)), ("layer_count", c_int64), ("memory", c_void_p), ("memory_bytes", c_int64),
        ("most_tokens", c_int64), ("top_k", c_int64), ("hidden", c_int64),
        ("cpus", POINTER(c_int32)), ("cpu_count", c_int64), ("lane", c_int32), ("spin_us", c_int32), ("way", c_int32),
        ("read_ahead", c_int32), ("decode_tokens", c_int32),
    ]  # fmt: skip


_COUNTED = ("jobs", "pairs", "weight_bytes", "moe_ns", "waiting_ns", "experts", "foreseen", "gaps", "gap_ns")


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
    """What the largest job has: tokens, experts a token, values a row."""

    most_tokens: int
    top_k: int
    hidden: int


@dataclass(frozen=True)
class Counters:
    """Of a doorbell since it was made. A job counts once `check` has returned after it. From `choices` on: of steps,
    where they are counted (hybrid/counting.py)."""

    jobs: int
    pairs: int  # of a token and an expert
    weight_bytes: int  # of the experts that jobs needed, each once a job
    moe_s: float  # from ring to answer
    waiting_s: float  # from an answer to the next ring, or from arming
    experts: int = 0  # that jobs needed, each once a job
    foreseen: int = 0  # of these
    gaps: int = 0  # between a layer's experts and those of the next layer
    gap_s: float = 0.0  # of these
    looks: int = 0
    choices: int = 0  # of experts, by tokens
    hits: int = 0  # of these, what the device had
    hit_bytes: int = 0  # of their weights, each expert once a step
    missed_bytes: int = 0  # of the other choices' weights
    moved_bytes: int = 0  # of experts that changed places, copied both ways


NOTHING_COUNTED = Counters(jobs=0, pairs=0, weight_bytes=0, moe_s=0.0, waiting_s=0.0)


def block_layout(size: JobSize) -> BlockLayout:
    """How the block of such jobs lies in memory. Raises ValueError for impossible sizes."""
    layout = BlockLayout()
    _native().proa_doorbell_layout_of(size.most_tokens, size.top_k, size.hidden, ctypes.byref(layout))
    return layout


@dataclass(frozen=True)
class Calls:
    """Native functions for a driver to call in the order of its stream, each with `doorbell`: when a job was copied,
    and to wait until it is answered. They take no lock of Python's, and return at once after a failure.
    """

    ring: int
    wait: int
    doorbell: int


class Doorbell:
    """The thread that runs jobs written into a block of memory (see block_layout).

    Raises ValueError for memory that is too small and layers of other widths, NativeError where the thread cannot be
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
            way, service.read_ahead, service.decode_tokens,
        )  # fmt: skip
        _native().proa_doorbell_create(pool.handle, ctypes.byref(options), ctypes.byref(self._handle))
        keep = pool, tuple(layers), memory
        self._end = finalizer(self, _native().proa_doorbell_destroy, c_void_p(self._handle.value), keep)

    def arm(self) -> None:
        """Before a step that may ring is launched: nobody who works for this doorbell sleeps from now on."""
        _native().proa_doorbell_arm(self._handle)

    def disarm(self) -> None:
        """The step is over. Raises ValueError if none was armed. Behind the last one nobody reads weights any more."""
        _native().proa_doorbell_disarm(self._handle)

    def check(self) -> None:
        """After a step, before its results are used. Raises, at every call, what a job failed with (NativeError,
        ValueError); or, once, NumericsError if a job's result was not finite."""
        _native().proa_doorbell_check(self._handle)

    def fail(self, why: str) -> None:
        """Whoever waits for an answer stops waiting; `check` raises NativeError with this text."""
        _native().proa_doorbell_fail(self._handle, why.encode())

    @property
    def calls(self) -> Calls:
        """Of Way.CALLS."""
        native, handle = _native(), self._handle.value
        if handle is None:
            raise ValueError("the doorbell is closed")
        ring, wait = (
            ctypes.cast(function, c_void_p).value or 0
            for function in (native.proa_doorbell_call_ring, native.proa_doorbell_call_wait)
        )
        return Calls(ring, wait, handle)

    def ring(self, number: int) -> None:
        """The GPU's part, for a CPU that stands in for one: the job with this number is written, and by flags it says
        so itself."""
        _native().proa_doorbell_ring(self._handle, number)

    def wait(self, number: int, timeout_s: float) -> bool:
        """Whether it was answered, and by flags: whether the next job may be written; False after a failure, or when
        the time is over."""
        answered = c_int()
        _native().proa_doorbell_wait(self._handle, number, int(timeout_s * 1e6), ctypes.byref(answered))
        return bool(answered.value)

    def counters(self) -> Counters:
        """What it did so far."""
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
        )

    def close(self) -> None:
        """End the thread. Whoever waits for an answer is told of a failure; nothing may be called after it."""
        self._handle = c_void_p()
        self._end()
