"""The engine process: `python -m proa.engine.processes.worker SOCKET`. Belongs here: what must happen before torch is
imported. Never: messages other than that it could not be.

The frontend owns this process: its standard input is a pipe from the frontend, and when that closes, for any reason,
the process ends at once, so no engine outlives its frontend. SOCKET is the file descriptor of an inherited socket.

The process begins before there is a plan (early.py), and imports torch meanwhile. So nothing that torch reads when it
is imported may depend on the plan: its environment is config/env.py's, and numbers of threads are set afterwards.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import importlib
import logging
import os
import socket
import sys
import threading
from types import ModuleType

from proa.engine.ipc import Failed
from proa.engine.processes.channel import Channel
from proa.engine.processes.wire import EngineEnd

log = logging.getLogger(__name__)


def exit_with_frontend() -> None:
    """Watch standard input from a thread; end the process when the frontend closes it."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="frontend-watch", daemon=True).start()


def message_loop() -> ModuleType:
    """Import the message loop, and with it torch and the engine.

    What is imported lives as long as the process. Collections of garbage during the import, and every later one, would
    look at all of it: a tenth of the time that the import takes.
    """
    gc.disable()
    loop = importlib.import_module("proa.engine.processes.loop")
    gc.freeze()
    gc.enable()
    return loop


def main() -> None:
    code = 1
    # Registered first, so called last: what would follow takes torch's modules apart, for 0.2 s.
    atexit.register(lambda: _end(code))
    if sys.stderr is not None:  # it is None if standard error is closed
        faulthandler.enable()  # a crash of a kernel or a library prints what each thread of Python was doing
    exit_with_frontend()
    channel = Channel(EngineEnd(socket.socket(fileno=int(sys.argv[1]))))
    try:
        try:
            loop = message_loop()
        except Exception as error:  # any error at all: the frontend must be told why there is no engine
            log.exception("The engine cannot be imported.")
            channel.receive()  # until the frontend has a plan, and so listens
            channel.send(Failed("EngineDead", f"The engine cannot be imported: {type(error).__name__}: {error}"))
            code = 1
        else:
            code = loop.run(channel)
    except EOFError:
        code = 0  # the frontend has ended
    channel.close()
    sys.exit(code)


def _end(code: int) -> None:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
