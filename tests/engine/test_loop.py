"""The engine's message loop: when it checks its pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from proa.engine.ipc import Abort, FromEngine, Shutdown, Submit, ToEngine
from proa.engine.processes.channel import Channel
from proa.engine.processes.loop import CHECK_AFTER_MS, IDLE_POLL_MS, POLL_MS, serve
from proa.types import EngineRequest, Sampling

LATER = "later"
Script = list[ToEngine | str | None]
REQUEST = Submit(EngineRequest(id="r", tokens=[1], sampling=Sampling(max_tokens=1)))


class ScriptedChannel:
    """Delivers messages. LATER: there is no message now, but the next wait finds one; None: it does not."""

    def __init__(self, script: Script, done: list[str]) -> None:
        self._script, self._done = script, done

    def wait(self, timeout_ms: int) -> bool:
        if self._script[0] == LATER and not timeout_ms:
            self._script.pop(0)
            return False
        if self._script[0] is not None:
            return True
        if timeout_ms:
            self._script.pop(0)
            self._done.append(f"waited {timeout_ms}")
        return False

    def receive(self) -> ToEngine:
        message = self._script.pop(0)
        assert message is not None
        assert message != LATER
        return cast(ToEngine, message)

    def send(self, message: FromEngine) -> None:
        pass


class OneStepEngine:
    """Each request takes one step."""

    def __init__(self, done: list[str]) -> None:
        self._done, self._waiting, self.stalls = done, 0, False
        self.clock = SimpleNamespace(start=lambda: None, lap=lambda stage: None)
        self.scheduler = SimpleNamespace(check=lambda: done.append("check"))

    @property
    def has_work(self) -> bool:
        return self._waiting > 0

    def submit(self, request: EngineRequest) -> None:
        self._waiting += 1

    def step(self) -> list[Any]:
        self._waiting -= 1
        self._done.append("step")
        return []

    has_idle_work = False

    def keep_up(self) -> bool:
        return False

    def stats(self) -> None:
        pass

    def settle(self) -> None:
        self._done.append("settle")


ONCE, IDLE = f"waited {CHECK_AFTER_MS}", f"waited {IDLE_POLL_MS}"
SCRIPTS: list[tuple[Script, list[str]]] = [
    ([REQUEST, LATER, REQUEST, LATER, Shutdown()], ["step", "step", "check", "settle"]),
    ([REQUEST, None, REQUEST, None, None, Shutdown()], ["step", ONCE, "check", "step", ONCE, "check", IDLE, "settle"]),
    ([None, Abort([]), None, Shutdown()], [IDLE, IDLE, "settle"]),
]


@pytest.mark.parametrize(("script", "done"), SCRIPTS)
def test_pages_are_checked_when_no_request_can_wait_for_it(script: Script, done: list[str]) -> None:
    """Seen: an engine with 10^5 pages checked them after each request, and the next one waited 10 to 20 ms."""
    found: list[str] = []
    engine = OneStepEngine(found)
    admission = SimpleNamespace(holds=False, submit=engine.submit, release=list, abort=lambda name: True)
    serve(cast(Any, admission), cast(Any, engine), cast(Channel, ScriptedChannel(list(script), found)))
    assert found == done


class CopyingEngine(OneStepEngine):
    """Copies of a step's pages end at the second look after it."""

    looks = 0

    def step(self) -> list[Any]:
        self.looks = 2
        return super().step()

    def keep_up(self) -> bool:
        self.looks -= self.looks > 0
        return self.looks > 0

    def stats(self) -> None:
        self._done.append("stats")


def test_statistics_follow_when_copies_give_their_pages_back() -> None:
    """Seen: an idle engine reported pages as used that copies to files had held during its last step."""
    found: list[str] = []
    engine = CopyingEngine(found)
    admission = SimpleNamespace(holds=False, submit=engine.submit, release=list, abort=lambda name: True)
    script: Script = [REQUEST, None, None, Shutdown()]
    serve(cast(Any, admission), cast(Any, engine), cast(Channel, ScriptedChannel(script, found)))
    assert found == ["stats", "step", "stats", f"waited {POLL_MS}", "stats", ONCE, "check", "settle"]
