"""Fixtures that every folder shares."""

from __future__ import annotations

import gc
import json
import os
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock

import sample
from at_once import beside_others, processes
from engine_forks import EngineForks
from examples import fewer
from have_gpu import HAVE_GPU
from proa.engine.processes import process

if not HAVE_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports a kernel

# Of every program under test too: four times the cache of a large server would take each some seconds to touch.
os.environ["PROA_RAM_PROBE"] = "64MiB"

# Ignored for a shell's background jobs, and by nohup; programs under test would inherit that.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)

pytest_plugins = ["crash_reports"]
SAMPLED = pytest.StashKey[tuple[int, int]]()  # how many cases of how many
MUCH_VRAM_BYTES = 64 << 20
HAVE_TRITON = find_spec("triton") is not None  # not on every machine that has no GPU
collect_ignore_glob = [] if HAVE_TRITON else ["*/test_triton_*.py", "*/test_check_kernels.py"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--sample",
        metavar="SEED",
        help="run a sample of each table of cases, drawn by this number, or by any",
    )


def pytest_configure(config: pytest.Config) -> None:
    """For a sample: fewer examples of laws, and a seed; a worker of pytest-xdist takes its controller's, since all
    must draw alike."""
    if config.option.sample is not None:
        given = getattr(config, "workerinput", {})
        config.option.sample = given.get("sample") or sample.draw_seed(config.option.sample)
        fewer()


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_configure_node(node: Any) -> None:
    node.workerinput["sample"] = node.config.option.sample


def pytest_sessionstart(session: pytest.Session) -> None:
    """From here on, warnings are errors. Before, other plugins start, and what they warn of is not this project's."""
    session.config.addinivalue_line("filterwarnings", "error")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keep the garbage collector off what lives as long as the run, torch's modules and the tests: it would look at
    these objects again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


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
    """An engine in this process leaves the rest of the VRAM to others, for good; and what it had itself is not counted
    as the next engine's."""
    yield
    if HAVE_GPU:
        torch.cuda.memory.set_per_process_memory_fraction(1.0)
        if torch.cuda.memory_allocated() > MUCH_VRAM_BYTES:
            gc.collect()  # engines have cycles
            torch._C._cuda_clearCublasWorkspaces()  # 32 MiB for each stream that ever multiplied


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """Fresh random numbers, the same for the same test."""
    return torch.Generator().manual_seed(sum(request.node.nodeid.encode()))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """`pytest.mark.parts(argument, count)`: a test that does `count` things in one case. A run of all cases passes it
    None; a sample has an axis of their numbers, so that a row of another axis need not meet them all."""
    for mark in metafunc.definition.iter_markers("parts"):
        argument, count = mark.args
        whole = metafunc.config.option.sample is None
        metafunc.parametrize(argument, [None] if whole else range(count), ids=["all"] if whole else None)


@pytest.fixture
def drawn(request: pytest.FixtureRequest) -> Callable[[Sequence[Mapping[str, str]]], list[int]]:
    """The rows of a table inside a test to try: all, or a sample that has every value of every key."""
    seed = request.config.option.sample
    return lambda rows: (
        list(range(len(rows))) if seed is None else sample.covering(rows, f"{seed} {request.node.nodeid}")
    )


@pytest.fixture(scope="session")
def sampled(request: pytest.FixtureRequest) -> bool:
    """Whether this run is a sample, `make test`; a test whose length is a number may take a smaller one."""
    return request.config.option.sample is not None


@pytest.fixture(scope="session")
def run_folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all processes of this run share."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if getattr(request.config, "workerinput", None) is not None else own


@pytest.fixture(scope="session")
def once(run_folder: Path) -> Callable[[str, Callable[[], Any]], Any]:
    """Returns a JSON value by its name; the first process of this run that needs it makes it."""

    def made(name: str, make: Callable[[], Any]) -> Any:
        file = run_folder / f"{name}.json"
        with FileLock(f"{file}.lock"):
            if not file.is_file():
                file.write_text(json.dumps(make()))
        return json.loads(file.read_text())

    return made


@pytest.fixture(scope="session")
def engine_forks() -> Iterator[EngineForks | None]:
    """Starts engines without their imports; None with a GPU, where they start as in service."""
    forks = EngineForks()
    yield None if HAVE_GPU else forks
    forks.close()


@pytest.fixture(scope="module")
def forked_engines(engine_forks: EngineForks | None) -> Iterator[None]:
    """Engines that this module's tests start in this process are forked from one that has imported torch."""
    with pytest.MonkeyPatch.context() as patch:
        if engine_forks is not None:
            patch.setattr(process, "subprocess", engine_forks.subprocess)
        yield


@pytest.fixture
def forked_engine(engine_forks: EngineForks | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of this test, as in forked_engines; for modules whose other tests are about the process itself."""
    if engine_forks is not None:
        monkeypatch.setattr(process, "subprocess", engine_forks.subprocess)


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The device that Triton's kernels run on: the GPU if there is one, else the CPU, in Triton's interpreter."""
    if HAVE_GPU:
        return torch.device("cuda")
    from interpreter import repair

    repair()
    return torch.device("cpu")


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items:
        if HAVE_GPU and runs_kernels(item):
            item.add_marker(pytest.mark.gpu)
        elif item.get_closest_marker("gpu") and not HAVE_GPU:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if config.option.sample is not None:
        drawn = sample.sampled(items, config.option.sample)
        config.stash[SAMPLED] = len(drawn), len(items)
        items[:] = drawn


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """In a worker of pytest-xdist: tell its controller, which collects nothing itself."""
    output = getattr(session.config, "workeroutput", None)
    if output is not None:
        output["sampled"] = session.config.stash.get(SAMPLED, None)


@pytest.hookimpl(optionalhook=True)  # of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    if found := getattr(node, "workeroutput", {}).get("sampled"):
        node.config.stash[SAMPLED] = found


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.option.sample is not None:
        drawn, all_cases = config.stash.get(SAMPLED, ("?", "?"))
        terminalreporter.write_line(
            f"sample {config.option.sample}: {drawn} of {all_cases} cases, each row of each table in at least one, "
            f"a third of the seldom; the same again: make test SEED={config.option.sample}; all: make test-all"
        )


def runs_kernels(item: pytest.Item) -> bool:
    """Its `device` is the fixture above, not a parameter of its own."""
    given = item.callspec.params if isinstance(item, pytest.Function) and "callspec" in vars(item) else {}
    return isinstance(item, pytest.Function) and "device" in item.fixturenames and "device" not in given
