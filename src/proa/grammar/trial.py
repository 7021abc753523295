"""Compiles constraints in a process that may crash or hang: `python -m proa.grammar.trial`. Never: the answer's masks.

Writes a line when it is ready; then reads one Constraint as JSON per line and writes one Verdict per line. The stack is
smaller than that of the engine's threads, so a grammar that passes here does not overflow there.
"""

from __future__ import annotations

import resource
import sys
import threading

import msgspec
from llguidance import LLTokenizer

from proa.errors import RequestError
from proa.grammar.compile import compiled, follow
from proa.grammar.verdict import Verdict
from proa.types import Constraint

STACK_BYTES = 2 << 20
MEMORY_BYTES = 2 << 30
TRIED_TOKENS = 32


def verdict(constraint: Constraint, tree: LLTokenizer) -> Verdict:
    """Compile a constraint and follow one text through its grammar, because llguidance compiles lazily."""
    try:
        parser = compiled(constraint, tree, {})
        follow(parser, tree, TRIED_TOKENS)
        if parser.is_error():
            why = parser.get_error().partition("\n")[0].strip()
            raise RequestError(
                f"{constraint.param}: no text fulfils it, or it is too complex ({why}).", "Simplify it.",
                param=constraint.param,
            )  # fmt: skip
    except RequestError as error:
        return Verdict(error.message, error.remedy, error.param)
    return Verdict()


def _serve() -> None:
    tree = LLTokenizer("byte")
    decoder, encoder = msgspec.json.Decoder(Constraint), msgspec.json.Encoder()
    sys.stdout.buffer.write(b"ready\n")
    sys.stdout.buffer.flush()
    while line := sys.stdin.buffer.readline():
        sys.stdout.buffer.write(encoder.encode(verdict(decoder.decode(line), tree)) + b"\n")
        sys.stdout.buffer.flush()


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
