"""Fixtures of the server's tests."""

from __future__ import annotations

import pytest

from fakes import make_tokenizer
from proa.text.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))
