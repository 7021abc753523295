"""A server for `proa chat` and `proa launch`: one that runs, or one that is started for them."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console

from proa.cli.api_client import ApiClient, Served
from proa.cli.server_process import server_process
from proa.config.options import EngineOptions
from proa.config.parse import given_options, to_argv

_POLL_S = 0.5


@dataclass(frozen=True)
class Wanted:
    """Which server is wanted: the one on host and port if it serves `model` (None: any), else a new one."""

    model: str | None
    host: str
    port: int
    api_key: str | None
    engine: EngineOptions


@contextmanager
def running_or_started(wanted: Wanted, notes: Console) -> Iterator[tuple[ApiClient, Served]]:
    """Yield a client of a server that is ready; a server that was started here ends with the block."""
    with ApiClient(wanted.host, wanted.port, wanted.api_key) as client:
        served = _running(client, wanted, notes)
        if served is not None:
            _wait_ready(client, notes)
            yield client, next(one for one in client.models() or [served] if one.name == served.name)
            return
    with (
        server_process([wanted.model or "demo", "--port=0", *to_argv(wanted.engine)]) as report,
        ApiClient("127.0.0.1", report["port"]) as client,
    ):
        yield client, (client.models() or [])[0]


def _running(client: ApiClient, wanted: Wanted, notes: Console) -> Served | None:
    """Return the requested model if a running server serves it, else None."""
    if given_options(wanted.engine):  # engine options have no effect on a server that is already running
        return None
    models = client.models()
    if not models:
        return None
    for served in models:
        if wanted.model in (None, served.name, served.source):
            return served
    names = ", ".join(served.name for served in models)
    notes.print(
        f"{client.url} serves {names}, not {wanted.model}: starting another server.", markup=False, soft_wrap=True
    )
    return None


def _wait_ready(client: ApiClient, notes: Console) -> None:
    with notes.status("loading") as status:
        while (loading := client.health()) is not None:
            status.update(f"{loading.get('phase', 'loading')}: {loading.get('percent', 0):.0f} %")
            time.sleep(_POLL_S)
