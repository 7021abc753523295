"""Compiles constraints in a process that may crash or hang: `python -m proa.grammar.trial`. Never: the answer's masks.

Reads one Constraint as JSON per line, writes one Verdict per line. The stack is smaller than that of the engine's
threads, so a grammar that passes here does not overflow there.
"""

from __future__ import annotations

import resource
import sys
import threading

import msgspec
from llguidance import LLTokenizer

from proa.errors import RequestError
from proa.grammar.compile import compiled
from proa.types import Constraint

STACK_BYTES = 2 << 20
MEMORY_BYTES = 2 << 30
TRIED_TOKENS = 32


class Verdict(msgspec.Struct, omit_defaults=True):
    """message "": the constraint can be used. Else the RequestError."""

    message: str = ""
    remedy: str = ""
    param: str | None = None


def verdict(constraint: Constraint, tree: LLTokenizer) -> Verdict:
    """Compile a constraint and follow one text through its grammar, because llguidance compiles lazily."""
    try:
        parser = compiled(constraint, tree, {})
        for i in range(TRIED_TOKENS):
            mask = parser.compute_bitmask()
            if parser.is_error():
                break
            allowed = [t for t in range(tree.vocab_size) if mask[t // 8] >> t % 8 & 1 and t != tree.eos_token]
            if not allowed or not parser.consume_token(allowed[7919 * i % len(allowed)]):
                break
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
