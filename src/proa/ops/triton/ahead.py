"""Kernels compiled before they are launched, in processes that have no GPU: what launchers would launch is recorded,
and compiled from the record into the cache on disk that the launch will read. Never: which launches those are.

All parts are Triton's own, so that keys of the cache are those of a launch: a driver that names the target, and the
hook that is called where a variant is not compiled yet. Its `preload` takes what the hook was given too, but turns
constants such as "bf16" into types.
"""

from __future__ import annotations

import functools
import importlib
import json
import pkgutil
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
_PACKAGE = "proa.ops.triton."
_DEVICE = -1  # no GPU has this number, so that what is recorded is not taken for what was compiled

_Path = tuple[int, ...]  # of an argument


@dataclass(frozen=True)
class Variant:
    """A kernel as some launch needs it. kernel: module and function; key: by which a launch finds it in its process;
    the rest is what Triton compiles by."""

    kernel: str
    key: str
    signature: Mapping[str, str]
    constants: Mapping[_Path, object]
    attributes: Mapping[_Path, object]
    options: Mapping[str, object]

    @property
    def name(self) -> str:
        """For people."""
        return self.kernel.removeprefix(_PACKAGE)


@functools.cache
def settle() -> Sequence[Any]:
    """All functions that Triton compiles, their sources hashed in one order. Up to Triton 3.7 the hash of a kernel
    depends on whether the functions that it calls were hashed before (it takes over too early which constants they
    use), so that processes that begin with different kernels would not find each other's in the cache."""
    package, found = importlib.import_module(__package__), []
    for module in sorted(each.name for each in pkgutil.iter_modules(package.__path__)):
        path = f"{__package__}.{module}"
        for value in vars(importlib.import_module(path)).values():
            if isinstance(value, JITCallable) and value.__module__ == path:
                value.cache_key  # noqa: B018 - a property, which keeps what it works out
                found.append(value)
    return found


class TargetDriver(DriverBase):  # type: ignore[misc]  # Triton has no types
    """In the CUDA driver's place, in a process that launches nothing."""

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
    """In a compiled kernel's place: a launch does nothing."""

    function = packed_metadata = None

    def launch_metadata(self, *args: object) -> None:
        pass

    def run(self, *args: object) -> None:
        pass


class Recorder:
    """`variants`: those that launches asked for, each once, in the order of their first launch."""

    def __init__(self) -> None:
        self.variants: list[Variant] = []

    def note(self, *, key: str, fn: Any, **told: Any) -> bool:
        """Triton's hook: true, so that nothing is compiled."""
        kernel = f"{fn.module}.{fn.name}"
        fn.jit_function.device_caches[_DEVICE][0][key] = _NotLaunched()  # from now on it is found
        compile_by = told["compile"]
        options = json.loads(compile_by["specialization_data"])["options"]
        known = {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}
        self.variants.append(
            Variant(kernel, key, compile_by["signature"], compile_by["constants"], compile_by["configs"][0], known)
        )
        return True


@contextmanager
def recording(capability: int) -> Iterator[Recorder]:
    """While it lasts, launches of kernels are recorded for a GPU of this compute capability, and not run."""
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
    """cached: it was in the cache on disk already. error: why it is not there now; empty if it is."""

    cached: bool
    seconds: float
    error: str = ""


class Compiler:
    """Compiles into the cache on disk, for a GPU of this compute capability. One for each process.

    launchers: whether what calls a kernel is built too, by Triton with the system's C compiler, which needs the CUDA
    driver's library; Triton up to 3.6 builds one for each signature, later ones share one.
    """

    def __init__(self, capability: int, *, launchers: bool) -> None:
        self._driver = TargetDriver(capability)
        self._launchers = launchers
        self._cached = False

    def prepare(self) -> str:
        """What is the same for all kernels, once, before processes are forked that compile: the hash of Triton itself,
        and what all launchers share. Why there are no launchers; empty if there are."""
        settle()
        hash_triton()
        if not self._launchers:
            return "they were not asked for"
        try:
            self._driver.utils = nvidia.CudaUtils()
        except Exception as error:  # noqa: BLE001 - no driver library, no C compiler: whatever Triton says about it
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
    """Of which every key in the cache on disk has a part: 400 MB are read, once a process, without Python's lock."""
    triton_key()


def load(variant: Variant) -> None:
    """Read a compiled variant from the cache on disk, and put it on the current GPU, where its first launch finds it.
    Compiles it if it is not there. Raises what Triton raises."""
    settle()
    driver = triton.runtime.driver.active
    kernel = _compile(variant, driver.get_current_target())
    kernel.run  # noqa: B018 - a property: asked for, it loads
    _function(variant).device_caches[driver.get_current_device()][0][variant.key] = kernel


def _compile(variant: Variant, target: GPUTarget) -> Any:
    source = ASTSource(_function(variant), variant.signature, variant.constants, variant.attributes)
    return triton.compile(source, target=target, options=dict(variant.options))


def _function(variant: Variant) -> Any:
    module, _, name = variant.kernel.rpartition(".")
    return getattr(importlib.import_module(module), name)


def watch(late: Callable[[str, float], None]) -> None:
    """From now on, `late(kernel, seconds)` is called where a launch had to wait for its kernel, since that was neither
    compiled nor loaded before."""
    waiting: list[tuple[str, float]] = []  # by the one thread that launches

    def begins(*, fn: Any, **_: object) -> None:
        waiting[:] = [(f"{fn.module}.{fn.name}".removeprefix(_PACKAGE), time.perf_counter())]

    def ends(*_: object) -> None:
        while waiting:
            kernel, begin = waiting.pop()
            late(kernel, time.perf_counter() - begin)

    knobs.runtime.jit_cache_hook = begins
    knobs.runtime.kernel_load_end_hook.add(ends)
