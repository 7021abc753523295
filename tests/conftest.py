"""Fixtures that every folder shares."""

from __future__ import annotations

import signal

import pytest
import torch

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:  # a shell's background job; programs under test would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    """Small tensors: threads only add noise and waiting."""
    torch.set_num_threads(1)


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> torch.Generator:
    """Fresh random numbers, the same for the same test."""
    return torch.Generator().manual_seed(sum(request.node.nodeid.encode()))
