"""Models for engines whose prompts are computed in turns; other modules have fixtures of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from engine.turn_cases import loader
from engines import Loaded
from proa.native.pool import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


@pytest.fixture(scope="module")
def load(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Loaded]:
    return loader(pool, tmp_path_factory.mktemp("tiny"))
