"""Fixtures that every folder shares."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from importlib.util import find_spec

import pytest
import torch

from at_once import beside_others, processes

HAVE_GPU = torch.cuda.is_available()
if not HAVE_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports a kernel

# Of every program under test too: four times the cache of a large server would take each some seconds to touch.
os.environ["PROA_RAM_PROBE"] = "64MiB"

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job; programs under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

HAVE_TRITON = find_spec("triton") is not None  # not on every machine that has no GPU
collect_ignore_glob = [] if HAVE_TRITON else ["*/test_triton_*.py", "*/test_check_kernels.py"]


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_xdist_auto_num_workers() -> int:
    return processes(HAVE_GPU)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # to wait is no time of the test
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    with beside_others(item.get_closest_marker("alone") is not None):
        return (yield)


def pytest_report_header() -> str:
    kernels = "on the GPU" if HAVE_GPU else "in Triton's interpreter"
    return f"GPU kernels: tested {kernels}" if HAVE_TRITON else "GPU kernels: not tested, there is no Triton here"


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small tensors: threads only add noise and waiting."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _subnormals() -> Iterator[None]:
    """Loading an engine flushes them to zero in its thread; hypothesis refuses to make floats then."""
    yield
    torch.set_flush_denormal(False)


@pytest.fixture(autouse=True)
def _vram() -> Iterator[None]:
    """An engine in this process leaves the rest of the VRAM to others, for good."""
    yield
    if HAVE_GPU:
        torch.cuda.memory.set_per_process_memory_fraction(1.0)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """Fresh random numbers, the same for the same test."""
    return torch.Generator().manual_seed(sum(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def device() -> torch.device:
    """Where Triton's kernels run: on the GPU where there is one, else in Triton's interpreter."""
    if HAVE_GPU:
        return torch.device("cuda")
    from interpreter import repair

    repair()
    return torch.device("cpu")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HAVE_GPU and runs_kernels(item):
            item.add_marker(pytest.mark.gpu)
        elif item.get_closest_marker("gpu") and not HAVE_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


def runs_kernels(item: pytest.Item) -> bool:
    """Its `device` is the fixture above, not a parameter of its own."""
    given = item.callspec.params if isinstance(item, pytest.Function) and "callspec" in vars(item) else {}
    return isinstance(item, pytest.Function) and "device" in item.fixturenames and "device" not in given
