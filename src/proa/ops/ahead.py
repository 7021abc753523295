"""Ahead-of-time compilation of kernels, in processes without a GPU: launches are recorded instead of run, and compiled
from the record into Triton's cache on disk, which later launches read. Never: which launches to record.

Only Triton's own mechanisms are used, so that cache keys equal those of real launches: a driver that names the target
GPU, and the hook that Triton calls for a variant that is not compiled yet. (Triton's `preload` accepts the same data
but turns constants such as "bf16" into types.)
"""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.backends.nvidia import driver as nvidia
from triton.compiler import ASTSource
from triton.runtime.cache import triton_key
from triton.runtime.jit import JITCallable, JITFunction

WARP = 32
_PACKAGE = "proa.ops.triton"
_DEVICE = -1  # the number of no GPU, so that recorded variants are not mistaken for compiled ones

_Path = tuple[int, ...]  # position of an argument, possibly inside tuples


@dataclass(frozen=True)
class Variant:
    """A kernel specialised as a launch needs it. kernel: module and function; key: Triton's key of the variant within a
    process; the other fields are Triton's inputs for compilation."""

    kernel: str
    key: str
    signature: Mapping[str, str]
    constants: Mapping[_Path, object]
    attributes: Mapping[_Path, object]
    options: Mapping[str, object]

    @property
    def name(self) -> str:
        """A short name for logs."""
        return self.kernel.removeprefix(f"{_PACKAGE}.")


@functools.cache
def settle() -> Sequence[Any]:
    """Hash the sources of all jit functions in a fixed order; returns them. Up to Triton 3.7 the hash of a kernel
    depends on whether the functions that it calls were hashed before (it collects the constants that they use too
    early), so that processes that start with different kernels would miss each other's cache entries."""
    package, found = importlib.import_module(_PACKAGE), []
    for module in sorted(each.name for each in pkgutil.iter_modules(package.__path__)):
        path = f"{_PACKAGE}.{module}"
        for value in vars(importlib.import_module(path)).values():
            if isinstance(value, JITCallable) and value.__module__ == path:
                value.cache_key  # noqa: B018 - a property, which keeps what it works out
                found.append(value)
    return found


class TargetDriver(DriverBase):  # type: ignore[misc]  # Triton has no types
    """A Triton driver that only names the target GPU, for a process that launches nothing."""

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, WARP)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def map_python_to_cpp_type(self, ty: str) -> str:
        raise NotImplementedError(ty)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return _DEVICE

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("meta")

    def get_benchmarker(self) -> Any:
        raise NotImplementedError("nothing is launched here")


class _NotLaunched:
    """A stand-in for a compiled kernel; its launch does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *args: object) -> None:
        pass

    def run(self, *args: object) -> None:
        pass


class Recorder:
    """Records the variants that launches need, each once, in the order of their first launch."""

    def __init__(self) -> None:
        self.variants: list[Variant] = []

    def note(self, *, key: str, fn: Any, **details: Any) -> bool:
        """Triton's hook before compilation; returns True, which skips the compilation."""
        kernel = f"{fn.module}.{fn.name}"
        fn.jit_function.device_caches[_DEVICE][0][key] = _NotLaunched()  # later launches of the variant find this
        compile_by = details["compile"]
        options = json.loads(compile_by["specialization_data"])["options"]
        known = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        self.variants.append(
            Variant(kernel, key, compile_by["signature"], compile_by["constants"], compile_by["configs"][0], known)
        )
        return True


@contextmanager
def recording(capability: int) -> Iterator[Recorder]:
    """Context in which kernel launches are recorded for a GPU of this compute capability instead of run."""
    recorder = Recorder()
    _forget()
    triton.runtime.driver.set_active(TargetDriver(capability))
    knobs.runtime.jit_cache_hook = recorder.note
    try:
        yield recorder
    finally:
        knobs.runtime.jit_cache_hook = None
        _forget()


def _forget() -> None:
    for function in settle():
        if isinstance(function, JITFunction):
            function.device_caches.pop(_DEVICE, None)


@dataclass(frozen=True)
class Compiled:
    """The result of compiling a variant. cached: it was in the cache on disk already. error: why compilation failed; ""
    if it did not."""

    cached: bool
    seconds: float
    error: str = ""


class Compiler:
    """Compiles variants into the cache on disk, for a GPU of this compute capability. One per process.

    launchers: build the C launch stubs too, with the system's C compiler, which needs the CUDA driver's library; Triton
    up to 3.6 builds one per signature, later versions share one.
    """

    def __init__(self, capability: int, *, launchers: bool) -> None:
        self._driver = TargetDriver(capability)
        self._launchers = launchers
        self._cached = False

    def prepare(self) -> str:
        """Do the work common to all kernels once, before compiling processes are forked: hash Triton itself, build what
        all launch stubs share. Returns why launch stubs cannot be built; "" if they can."""
        hashing = threading.Thread(target=hash_triton)  # a second or less, beside the C compiler's 0.4 s
        hashing.start()
        settle()
        missing = self._share_stubs() if self._launchers else "they were not requested"
        hashing.join()
        return missing

    def _share_stubs(self) -> str:
        try:
            self._driver.utils = nvidia.CudaUtils()
        except Exception as error:  # noqa: BLE001 - no driver library, no C compiler: any of Triton's errors
            self._launchers = False
            return f"{type(error).__name__}: {error}"
        return ""

    def compile(self, variant: Variant) -> Compiled:
        begin = time.perf_counter()
        triton.runtime.driver.set_active(self._driver)
        knobs.compilation.listener = self._listen
        try:
            kernel = _compile(variant, self._driver.get_current_target())
            if self._launchers:
                nvidia.CudaLauncher(kernel.src, kernel.metadata)
        except Exception as error:  # noqa: BLE001 - whatever the compiler throws is the finding
            return Compiled(False, time.perf_counter() - begin, f"{type(error).__name__}: {error}")
        return Compiled(self._cached, time.perf_counter() - begin)

    def _listen(self, *, cache_hit: bool, **_: object) -> None:
        self._cached = cache_hit


def hash_triton() -> None:
    """Hash the Triton installation, which every cache key includes: reads 400 MB, once per process, with the GIL
    released."""
    triton_key()


def load(variant: Variant) -> None:
    """Load a compiled variant from the cache on disk onto the current GPU, where its first launch finds it; compile it
    if it is not cached. Raises Triton's errors."""
    settle()
    driver = triton.runtime.driver.active
    kernel = _compile(variant, driver.get_current_target())
    kernel.run  # noqa: B018 - a property, which loads the kernel
    _function(variant).device_caches[driver.get_current_device()][0][variant.key] = kernel


def _compile(variant: Variant, target: GPUTarget) -> Any:
    source = ASTSource(_function(variant), variant.signature, variant.constants, variant.attributes)
    return triton.compile(source, target=target, options=dict(variant.options))


def _function(variant: Variant) -> Any:
    module, _, name = variant.kernel.rpartition(".")
    return getattr(importlib.import_module(module), name)


def watch(late: Callable[[str, float], None]) -> None:
    """Call `late(kernel, seconds)` from now on, whenever a launch had to wait because its kernel was neither compiled
    nor loaded before."""
    waiting: list[tuple[str, float]] = []  # used only by the one thread that launches

    def begins(*, fn: Any, **_: object) -> None:
        waiting[:] = [(f"{fn.module}.{fn.name}".removeprefix(f"{_PACKAGE}."), time.perf_counter())]

    def ends(*_: object) -> None:
        while waiting:
            kernel, begin = waiting.pop()
            late(kernel, time.perf_counter() - begin)

    knobs.runtime.jit_cache_hook = begins
    knobs.runtime.kernel_load_end_hook.add(ends)
