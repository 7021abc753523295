"""An engine without a model: each step gives every running request one token of a fixed text, at a fixed rate.

    python benchmarks/probes/scripted_engine.py STEP_MS TOKEN,TOKEN,... DESCRIPTOR

benchmarks/probes/server_rate.py starts it in place of the engine's process. It speaks the same messages.
"""

from __future__ import annotations

import socket
import sys
import time
from itertools import cycle

from proa.engine.ipc import Abort, Ready, Shutdown, Start, Submit, Tokens
from proa.engine.processes.channel import Channel
from proa.engine.processes.wire import EngineEnd
from proa.engine.stats import Stats
from proa.types import TokenEvent


def main(step_ms: float, text: list[int], end: socket.socket) -> None:
    channel, running, stats = Channel(EngineEnd(end)), dict[str, int](), Stats()
    if not isinstance(channel.receive(), Start):
        raise SystemExit("the first message is not Start")
    channel.send(Ready(load_seconds=0, weights_bytes=0, ops={}, peak_rss_bytes=0, decode_threads=1, prefill_threads=1))
    tokens, due_s = cycle(text), time.perf_counter()
    while True:
        while channel.wait(0 if running else 10_000):
            match channel.receive():
                case Submit(request):
                    running[request.id] = request.sampling.max_tokens
                case Abort(ids):
                    for one in ids:
                        running.pop(one, None)
                case Shutdown():
                    return
        due_s = max(due_s + step_ms / 1000, time.perf_counter())
        time.sleep(max(due_s - time.perf_counter(), 0))
        events = []
        for one, left in list(running.items()):
            running[one] = left - 1
            events.append(TokenEvent(id=one, tokens=[next(tokens)], finish=None if left > 1 else "length"))
            if left == 1:
                del running[one]
        channel.send(Tokens(events, stats))


if __name__ == "__main__":
    try:
        main(float(sys.argv[1]), [int(t) for t in sys.argv[2].split(",")], socket.socket(fileno=int(sys.argv[3])))
    except EOFError:
        pass
