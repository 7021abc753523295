"""How many examples hypothesis makes of a law: fewer in `make test`. Never: laws."""

from __future__ import annotations

from hypothesis import settings

PERCENT = 30  # in `make test`, of the examples that all cases have
SAMPLE = "sample"
_ALL = 100  # what hypothesis' own profiles make


def fewer() -> None:
    """Reduce all laws to PERCENT of their examples: those that call `examples`, and those that give no count. Call it
    before tests are imported."""
    settings.register_profile(SAMPLE, max_examples=PERCENT)
    settings.load_profile(SAMPLE)


def examples(number: int) -> int:
    """The number of examples to make now, of `number` in a run of all cases."""
    return max(1, number * settings.default.max_examples // _ALL)
