"""A real engine process: it loads, serves, refuses, and ends in every way that an engine can."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest

from engines import request, tokens_of
from fakes import make_plan
from grammars import EOS, text_of, vocabulary
from proa.config.options import CacheOptions, EngineOptions, GpuOptions, MachineOptions, ModelOptions
from proa.engine.processes.client import EngineClient
from proa.errors import ContextLengthExceeded, EngineDead, QueueFull, RequestError, WeightsError
from proa.plan.expert_counts import read_counts
from proa.plan.plan import Plan
from proa.types import Constraint, EngineRequest, TokenEvent
from quick_plan import prepare
from tiny import make_tiny
from tiny_gguf import make_tiny_gguf


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny("qwen3-moe", tmp_path_factory.mktemp("tiny"))


@pytest.mark.usefixtures("forked_engine")
def test_a_grammar_that_compiles_holds_up_no_other_request(folder: Path) -> None:
    async def go() -> None:
        async with running(plan_for(folder)) as client:
            await client.wait_ready()
            client.learn(vocabulary(256))
            # Compiling 2000 properties takes a second or more.
            wide = Constraint.json({"type": "object", "properties": {f"p{i}": {"type": "null"} for i in range(2000)}})
            slow = asyncio.create_task(collect(client, request("slow", [5], 4, constraint=wide, eos_token_ids=(EOS,))))
            gone = asyncio.create_task(collect(client, request("gone", [5], 4, constraint=wide, eos_token_ids=(EOS,))))
            await asyncio.sleep(0.01)
            gone.cancel()
            assert len(tokens_of(await collect(client, request("quick", [5, 6], 3)))) == 3
            assert not slow.done()
            assert tokens_of(await slow)[0] in (ord("{"), 0xC0)
            bad = Constraint.regex("(", param="regex")
            with pytest.raises(RequestError, match="unclosed") as refused:
                await collect(client, request("bad", [5], 4, constraint=bad, eos_token_ids=(EOS,)))
            assert refused.value.param == "regex"
            choice = Constraint.choice(["yes"])
            once = await collect(client, request("choice", [5], 9, constraint=choice, eos_token_ids=(EOS,)))
            assert (text_of(tokens_of(once)), once[-1].finish) == ("yes", "stop")

    asyncio.run(go())


def plan_for(folder: Path) -> Plan:
    return make_plan(path=str(folder), context_tokens=256, page_tokens=4, num_pages=256, max_queued=8)


@asynccontextmanager
async def running(plan: Plan) -> AsyncIterator[EngineClient]:
    client = await EngineClient.launch(plan)
    try:
        yield client
    finally:
        await client.close()


async def collect(client: EngineClient, asked: EngineRequest) -> list[TokenEvent]:
    return [event async for event in client.generate(asked)]


def pid_of(client: EngineClient) -> int:
    return client._process.pid


async def until(condition: object, seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < end, "waited too long"
        await asyncio.sleep(0.01)


def test_serves_refuses_aborts_and_stays_quiet(folder: Path) -> None:
    async def go() -> None:
        async with running(plan_for(folder)) as client:
            ready = await client.wait_ready()
            assert client.state == "ready"
            assert ready.weights_bytes > 0
            assert set(ready.ops.values()) == {"torch"}
            environ = Path(f"/proc/{pid_of(client)}/environ").read_text().split("\0")
            assert "OMP_WAIT_POLICY=passive" in environ
            together = await asyncio.gather(*(collect(client, request(f"r{i}", [5 + i, 6, 7], 10)) for i in range(8)))
            alone = await collect(client, request("again", [5, 6, 7], 10))
            assert tokens_of(together[0]) == tokens_of(alone)
            assert all(len(tokens_of(events)) == 10 for events in together)
            assert [e.finish for e in alone][-1] == "length"

            with pytest.raises(ContextLengthExceeded, match="256"):
                await collect(client, request("long", [1] * 300, 10))
            with pytest.raises(RequestError, match="vocabulary"):
                await collect(client, request("outside", [9999], 10))

            crowd = [asyncio.create_task(collect(client, request(f"c{i}", [3, i], 100))) for i in range(20)]
            ended = await asyncio.gather(*crowd, return_exceptions=True)
            assert sum(isinstance(e, QueueFull) for e in ended) == 20 - 4 - 8
            assert sum(isinstance(e, list) for e in ended) == 4 + 8

            stream = client.generate(request("left", [4, 4], 200))
            await anext(stream)
            await stream.aclose()
            await until(lambda: client.stats.scheduler.running == 0)
            stats = client.stats
            assert stats.scheduler.pages_free + stats.scheduler.pages_cached == stats.scheduler.pages_total
            before = cpu_seconds(pid_of(client))
            await asyncio.sleep(1.0)
            assert cpu_seconds(pid_of(client)) - before <= 0.02, "an idle engine must sleep"
        assert not Path(f"/proc/{pid_of(client)}").exists()

    asyncio.run(go())


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_closing_while_it_loads_stays_closed(folder: Path) -> None:
    async def go() -> None:
        client = await EngineClient.launch(plan_for(folder))
        await asyncio.sleep(0.5)
        await client.close()
        assert client.state == "stopped"
        with pytest.raises(EngineDead, match="stopped"):
            await client.wait_ready()
        async with running(plan_for(folder)) as another:
            await another.wait_ready()

    asyncio.run(go())


def test_a_killed_engine_fails_its_requests_at_once(folder: Path) -> None:
    async def go() -> None:
        async with running(plan_for(folder)) as client:
            await client.wait_ready()
            stream = client.generate(request("a", [1, 2], 200))
            await anext(stream)
            os.kill(pid_of(client), signal.SIGKILL)
            begin = time.monotonic()
            with pytest.raises(EngineDead, match=r"SIGKILL.*memory"):
                async for _ in stream:
                    pass
            assert time.monotonic() - begin < 3
            assert client.state == "failed"
            with pytest.raises(EngineDead):
                await collect(client, request("b", [1], 5))

    asyncio.run(go())


@pytest.mark.usefixtures("forked_engine")
def test_a_crashed_engine_prints_its_stacks(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def go() -> None:
        async with running(plan_for(folder)) as client:
            await client.wait_ready()
            os.kill(pid_of(client), signal.SIGSEGV)
            await until(lambda: client.state == "failed")
            with pytest.raises(EngineDead, match=r"crashed: SIGSEGV.*stacks"):
                await collect(client, request("a", [1], 5))

    asyncio.run(go())
    printed = capfd.readouterr().err
    assert "Fatal Python error: Segmentation fault" in printed
    assert "in run" in printed


def test_an_engine_that_dies_before_its_first_message(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")

    async def go() -> None:
        async with running(plan_for(folder)) as client:
            with pytest.raises(EngineDead, match="exit code 1"):
                await client.wait_ready()

    asyncio.run(go())


@pytest.mark.usefixtures("forked_engine")
def test_a_model_that_cannot_load_says_why(folder: Path, tmp_path: Path) -> None:
    broken = make_tiny("qwen3-moe", tmp_path / "broken")
    weights = next(broken.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-100])

    async def go() -> None:
        async with running(plan_for(broken)) as client:
            with pytest.raises(WeightsError, match="damaged"):
                await client.wait_ready()
            assert client.state == "failed"
            assert isinstance(client.failure, WeightsError)

    asyncio.run(go())


def test_an_engine_does_not_outlive_its_frontend(folder: Path, tmp_path: Path) -> None:
    """The frontend is killed with SIGKILL and sends no Shutdown, yet the engine must end."""
    script = tmp_path / "frontend.py"
    script.write_text(
        "import asyncio, sys, msgspec\n"
        "from proa.engine.processes.client import EngineClient\n"
        "from proa.plan.plan import Plan\n"
        "async def main():\n"
        "    client = await EngineClient.launch(msgspec.json.decode(sys.stdin.read(), type=Plan))\n"
        "    await client.wait_ready()\n"
        "    print(client._process.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )

    async def go() -> None:
        frontend = await asyncio.create_subprocess_exec(
            sys.executable, str(script), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
        )
        assert frontend.stdin
        assert frontend.stdout
        frontend.stdin.write(msgspec.json.encode(plan_for(folder)))
        frontend.stdin.close()
        engine = int(await frontend.stdout.readline())
        assert Path(f"/proc/{engine}").exists()
        frontend.kill()
        await frontend.wait()
        await until(lambda: not Path(f"/proc/{engine}").exists() or "Z" in Path(f"/proc/{engine}/stat").read_text())

    asyncio.run(go())


@pytest.mark.usefixtures("forked_engine")
def test_cpu_jobs_for_a_gpu_are_counted(folder: Path) -> None:
    """Each MoE layer of each step is one job, since the CPU has all experts."""
    options = EngineOptions(
        model=ModelOptions(dtype="bfloat16"), cache=CacheOptions(context=128), machine=MachineOptions(threads=1),
        gpus=GpuOptions(gpu="sim:64MiB", gpu_experts="none", prefill="cpu"),
    )  # fmt: skip
    plan = prepare(str(folder), options).plan
    assert plan.gpu is not None
    layers, (expert_bytes, *_) = len(plan.gpu.resident), plan.gpu.expert_bytes

    async def go() -> None:
        async with running(plan) as client:
            ready = await client.wait_ready()
            assert ready.round_trip_us is not None
            assert 0 < ready.round_trip_us < 1e6
            assert client.stats.cpu_experts.jobs == 0, "jobs of the probe are not counted"
            await collect(client, request("a", [5, 6, 7], 10))
            await until(lambda: client.stats.scheduler.running == 0)
            stats = client.stats
            assert stats.cpu_experts.jobs == stats.scheduler.steps * layers
            per_job = stats.cpu_experts.weight_bytes / stats.cpu_experts.jobs / expert_bytes
            assert (
                3 <= per_job <= 3 + (8 - 3) / stats.scheduler.steps
            )  # top 3 of a token; more in the prompt's step only
            assert 0 < stats.cpu_experts.seconds < stats.seconds.program
            assert stats.cpu_experts.waiting_seconds > 0

    asyncio.run(go())


@pytest.mark.usefixtures("forked_engine")
def test_expert_counts_are_saved_at_the_end(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    options = EngineOptions(
        model=ModelOptions(dtype="bfloat16"), cache=CacheOptions(context=128), machine=MachineOptions(threads=1),
        gpus=GpuOptions(gpu="sim:64MiB", gpu_experts="3", save_expert_counts=str(file)),
    )  # fmt: skip
    prepared = prepare(str(folder), options)

    async def go() -> None:
        async with running(prepared.plan) as client:
            await client.wait_ready()
            await collect(client, request("a", [5, 6, 7], 10))
            assert not file.exists()

    asyncio.run(go())
    counts = read_counts(file, prepared.declared.spec)
    assert {sum(of) for of in counts} == {3 * (3 + 9)}, "top 3 of all tokens but the last"


@pytest.mark.usefixtures("forked_engine")
def test_a_gguf_over_a_gpu_and_the_cpu(tmp_path: Path) -> None:
    """Its experts keep their GGUF blocks; all other weights are bfloat16 on a simulated GPU."""
    file = make_tiny_gguf("qwen3-moe", tmp_path / "m.gguf", "Q4_0", down="Q8_0", moe_intermediate_size=32)
    options = EngineOptions(
        cache=CacheOptions(context=128), machine=MachineOptions(threads=1),
        gpus=GpuOptions(gpu="sim:64MiB", gpu_experts="3"),
    )  # fmt: skip
    plan = prepare(str(file), options).plan

    async def go() -> None:
        async with running(plan) as client:
            ready = await client.wait_ready()
            assert set(ready.formats) == {"int4_f16", "int8_f16"}
            assert sum(ready.formats.values()) == plan.memory.weights_bytes
            assert len(await collect(client, request("a", [5, 6, 7], 10))) > 0
            assert client.stats.cpu_experts.jobs > 0

    asyncio.run(go())
