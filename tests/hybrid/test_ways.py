"""The first way to ring that works is taken, and failures are named. On a simulated GPU, whose probes are made to
fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from bell_cases import Layer
from engines import finish_all, request, tokens_of
from proa.config.field import declarations
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, MachineOptions, ModelOptions
from proa.engine.building.load import load_engine
from proa.engine.engine import Engine
from proa.engine.ipc import Ready
from proa.errors import NativeError
from proa.hybrid.transport import HostTransport
from proa.hybrid.ways import WAYS, take
from proa.native.doorbell import JobSize, Way
from proa.native.pool import Pool
from quick_plan import prepare
from tiny import make_tiny

SIZE = JobSize(most_tokens=4, top_k=2, hidden=64)


class Box:
    """A machine where some ways cannot be made, and others get no answer."""

    def __init__(self, pool: Pool, missing: tuple[str, ...], silent: tuple[str, ...]) -> None:
        self.pool, self.missing, self.silent = pool, missing, silent
        self.layer = Layer(SIZE.hidden, 0)
        self.tried: list[str] = []

    def make(self, way: Way) -> HostTransport:
        name = next(name for name, each in WAYS.items() if each is way)
        self.tried.append(name)
        if name in self.missing:
            raise NativeError(f"There is no {name} here.")
        silent = name in self.silent
        timeout_s = 0.01 if silent else 10.0  # other processes may use the CPU for a while
        transport = HostTransport(self.pool, [self.layer.experts], SIZE, way=way, timeout_s=timeout_s)
        if silent:
            transport.doorbell.ring = lambda number: None  # type: ignore[method-assign]
        return transport


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool([[]], pin=False) as made:
        yield made


@pytest.mark.parametrize(
    ("asked", "missing", "silent", "got"),
    [
        ("auto", (), (), "kernel"),
        ("auto", (), ("kernel",), "memops"),
        ("auto", ("kernel",), (), "memops"),
        ("auto", ("memops",), ("kernel",), "callback"),
        ("memops", (), (), "memops"),
        ("callback", (), ("kernel", "memops"), "callback"),
    ],
)
def test_auto_takes_the_first_way_that_works(
    asked: str, missing: tuple[str, ...], silent: tuple[str, ...], got: str, pool: Pool
) -> None:
    box = Box(pool, missing, silent)
    taken = take(asked, box.make, 20)
    names = list(WAYS)
    assert box.tried == (names[: names.index(got) + 1] if asked == "auto" else [asked])
    assert (taken.decision.name, taken.decision.asked, taken.decision.got) == ("doorbell", asked, got)
    assert f"an empty round trip takes {taken.round_trip_us:.1f} us" in taken.decision.why
    for name in box.tried[:-1]:
        said = f"{name}: There is no {name} here." if name in missing else f"{name}: The CPU did not answer a job"
        assert said in taken.decision.why
    taken.transport.close()


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        ("auto", r"kernel: The CPU did not .* memops: There is no memops here\. callback: .*`proa doctor`"),
        ("kernel", r"does not work by kernel: The CPU did not answer .*`--doorbell auto`"),
        ("memops", r"does not work by memops: There is no memops here\. `--doorbell auto`"),
    ],
)  # fmt: skip
def test_none_that_works_is_an_error_with_a_remedy(asked: str, text: str, pool: Pool) -> None:
    box = Box(pool, ("memops",), ("kernel", "callback"))
    with pytest.raises(NativeError, match=text):
        take(asked, box.make, 20)


def test_choices_of_the_option_are_the_ways() -> None:
    (declared,) = [each for each in declarations(GpuOptions).values() if each.name == "doorbell"]
    assert declared.info.choices == ("auto", *WAYS)


def test_an_engine_takes_a_way_that_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine reports the way, and its answers are the same in each."""
    folder = make_tiny("qwen3-moe", tmp_path)
    probe = HostTransport.probe_us
    broken: set[Way] = set()

    def fails(self: HostTransport, rounds: int = 0) -> float:
        if self.doorbell.way in broken:
            raise NativeError("The ring was not heard.")
        return probe(self, rounds)

    monkeypatch.setattr(HostTransport, "probe_us", fails)
    answers, got = [], []
    for asked, each in (("auto", set[Way]()), ("memops", set()), ("auto", {Way.NUMBER, Way.FLAGS})):
        broken.clear()
        broken.update(each)
        engine, ready = load(folder, asked)
        (row,) = [row for row in ready.decisions if row.name == "doorbell"]
        got.append((row.asked, row.got))
        assert row.why.count("The ring was not heard.") == len(each)
        engine.submit(request("r", list(range(20, 40)), 30))
        answers.append(tokens_of(finish_all(engine)["r"]))
    assert got == [("auto", "kernel"), ("memops", "memops"), ("auto", "callback")]
    assert answers[0] == answers[1] == answers[2]
    assert len(answers[0]) == 30
    broken.add(Way.CALLS)
    with pytest.raises(NativeError, match=r"callback: The ring was not heard\."):
        load(folder, "callback")


def load(folder: Path, doorbell: str) -> tuple[Engine, Ready]:
    options = EngineOptions(
        ModelOptions(load_format="dummy", dtype="bfloat16"),
        CacheOptions(context=128),
        machine=MachineOptions(threads=2, cpu_binding="none"),
        gpus=GpuOptions(gpu="sim:64MiB", gpu_experts="3", doorbell=doorbell),
    )
    return load_engine(prepare(str(folder), options).plan, lambda loading: None)
