"""A sample of the tables of cases that tests are parametrised with: `make test` runs it, `make test-all` all cases.

A test has an axis for each `parametrize` and parametrised fixture, and a case for each combination of their rows. The
sample is as many cases, drawn by a seed, as it takes for every row of every axis to be in one of them. Tests of a
module that are marked `one_table` share their axes by name, and the test is one more axis. Of all cases that are marked
`seldom` together, the sample has a third.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import pytest

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
ANY = "any"
MOST_SEED = 10**6
SELDOM = 3  # of how many cases so marked one is in the sample


def draw_seed(asked: str) -> str:
    return str(random.randrange(MOST_SEED)) if asked == ANY else asked


def covering(cases: Sequence[Mapping[K, str]], seed: str) -> list[int]:
    """Indices of cases, in order, that have every value of every key of `cases` between them.

    Takes cases whose values are all new, then those with all new but one, and so on, each time in an order drawn by
    `seed`: about as many as the longest axis has rows.
    """
    order = random.Random(seed).sample(range(len(cases)), len(cases))
    seen: set[tuple[K, str]] = set()
    taken = []
    for wanted in range(max(map(len, cases), default=0), 0, -1):
        for i in order:
            new = cases[i].items() - seen
            if len(new) >= wanted:
                taken.append(i)
                seen.update(new)
    return sorted(taken)


def sampled(items: Sequence[pytest.Item], seed: str) -> list[pytest.Item]:
    """Those of `items` to run. Cases that this machine skips are a table of their own, since they test no row."""
    tables: dict[tuple[str, bool], list[pytest.Function]] = defaultdict(list)
    for item in items:
        if isinstance(item, pytest.Function) and hasattr(item, "callspec") and not item.get_closest_marker("seldom"):
            tables[table_of(item), skipped(item)].append(item)
    seldom = [item for item in items if item.get_closest_marker("seldom") and not skipped(item)]
    left_out: set[pytest.Item] = set(all_but_some(seldom, f"{seed} seldom"))
    for (name, _), table in tables.items():
        taken = covering([rows_of(item) for item in table], f"{seed} {name}")
        left_out.update(set(table) - {table[i] for i in taken})
    return [item for item in items if item not in left_out]


def all_but_some(items: Sequence[T], seed: str) -> list[T]:
    """Those to leave out: all but one in SELDOM, drawn by `seed`; one at least stays."""
    return random.Random(seed).sample(items, len(items) - -(-len(items) // SELDOM))


def table_of(item: pytest.Function) -> str:
    test = item.nodeid.removesuffix(f"[{item.callspec.id}]")
    return test.partition("::")[0] if item.get_closest_marker("one_table") else test


def rows_of(item: pytest.Function) -> dict[str, str]:
    """The name of this case's row in each axis, and the test's. pytest has no public name for the rows:
    `callspec.indices` counts cases."""
    together = {names[0]: names for names in map(argument_names, item.iter_markers("parametrize"))}
    axes, seen = [], set[str]()
    for name in item.callspec.params:
        if name not in seen:
            axes.append(name)
            seen.update(together.get(name, [name]))
    return {"": item.originalname, **dict(zip(axes, item.callspec._idlist, strict=True))}


def argument_names(parametrize: pytest.Mark) -> list[str]:
    names = parametrize.args[0]
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def skipped(item: pytest.Item) -> bool:
    return item.get_closest_marker("skip") is not None or any(
        mark.args and mark.args[0] is True for mark in item.iter_markers("skipif")
    )
