"""Fixtures of tests that compute prompts in passes."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from hybrid.passes import Load, loader
from proa.native.pool import Pool


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


@pytest.fixture(scope="module")
def load(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Load]:
    with loader(pool, tmp_path_factory.mktemp("passes")) as made:
        yield made
