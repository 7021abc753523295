"""Starts a server and prints its progress, report and usage hints."""

from __future__ import annotations

import asyncio
import contextlib
import json
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace

import msgspec
from rich.console import Console

from proa.cli.begin import Begun
from proa.cli.report import Report, render_plan, render_ready, report_json
from proa.config.options import ServeOptions
from proa.config.parse import GivenOption
from proa.errors import ProaError, ShuttingDown
from proa.llm import AsyncLLM
from proa.obs.console import write_out
from proa.obs.progress import show_progress
from proa.obs.version import proa_version
from proa.plan.prepare import Prepared, prepare
from proa.server.listen import url_of
from proa.server.run import Shutdown, serve_on
from proa.types import ProgressCallback

_POLL_S = 0.1


def serve_model(
    model: str, begun: Begun, options: ServeOptions, asked: Sequence[GivenOption], console: Console, *, json: bool
) -> int:
    """Serve until a signal; return the exit code.

    The report is printed on `console`; with `json`, on stdout as JSON lines: one when the plan is made, one when the
    model is loaded. Raises ProaError.
    """
    startup = _Startup(model, begun, options, asked, console, json)
    return asyncio.run(serve_on(begun.listener, startup.launch, model, options.server, startup.announce, Shutdown()))


class _Startup:
    """One server start: plans and launches the model, and prints each stage."""

    def __init__(
        self, model: str, begun: Begun, options: ServeOptions, asked: Sequence[GivenOption], console: Console,
        as_json: bool,
    ) -> None:  # fmt: skip
        self._model, self._begun = model, begun
        self._options = options
        self._asked = asked
        self._console = console
        self._as_json = as_json
        self._welcome: asyncio.Queue[str] = asyncio.Queue()
        self._showing: asyncio.Task[None] | None = None

    def announce(self, text: str) -> None:
        """Print lines from the server: the address at once, the usage hints after the report of the loaded model."""
        if self._showing is None:
            self._show(text)
        else:
            self._welcome.put_nowait(text)

    async def launch(self, progress: ProgressCallback) -> AsyncLLM:
        """Download and plan the model, print the report, start the engine; return while it loads."""
        early = self._begun.early
        prepared = self._begun.prepared or await self._fetch(progress)
        report = self._report(prepared)
        self._show_report(report)
        llm = await AsyncLLM.launch_prepared(
            prepared, self._options.engine, early=early, own_thread=True, restart=self._options.server.restart
        )
        self._showing = asyncio.create_task(self._show_loading(llm, report))
        return llm

    async def _fetch(self, progress: ProgressCallback) -> Prepared:
        """Download or build the model, and plan it."""
        with show_progress(self._console) as show, _interruptible(progress, show) as report_progress:
            return await asyncio.to_thread(
                prepare, self._model, self._options.engine, report_progress, when_measured=self._begun.early.begin
            )

    async def _show_loading(self, llm: AsyncLLM, report: Report) -> None:
        with show_progress(self._console) as show:
            while llm.engine.state == "loading":
                if llm.engine.loading is not None:
                    loading = llm.engine.loading
                    show(loading.phase, loading.done_bytes, loading.total_bytes)
                await asyncio.sleep(_POLL_S)
        with contextlib.suppress(ProaError):  # the server raises the same error
            ready = await llm.engine.wait_ready()
            rows = (*ready.decisions, *llm.answers.decisions)
            self._show_report(replace(report, ready=msgspec.structs.replace(ready, decisions=rows)))
            self._show(await self._welcome.get())

    def _report(self, prepared: Prepared) -> Report:
        listener = self._begun.listener
        url, port = url_of(listener, self._options.server.scheme), listener.getsockname()[1]
        return Report(proa_version(), prepared.plan, prepared.declared.spec, self._asked, None, url, port)

    def _show_report(self, report: Report) -> None:
        if self._as_json:
            write_out(json.dumps(report_json(report)) + "\n")
        else:
            self._console.print(render_plan(report) if report.ready is None else render_ready(report.ready))

    def _show(self, text: str) -> None:
        if not self._as_json:
            self._console.print(text, markup=False, soft_wrap=True)


@contextlib.contextmanager
def _interruptible(*reports: ProgressCallback) -> Iterator[ProgressCallback]:
    """Yield a progress function for a worker thread. When the block has ended, its next call raises in that thread and
    so stops it."""
    ended = threading.Event()

    def report(phase: str, done_bytes: int, total_bytes: int) -> None:
        if ended.is_set():  # after Ctrl-C: stop the download
            raise ShuttingDown("Stopped.")
        for each in reports:
            each(phase, done_bytes, total_bytes)

    try:
        yield report
    finally:
        ended.set()
