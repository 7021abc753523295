"""Devices that split experts are tested on. Never: tests."""

from __future__ import annotations

import pytest

DEVICES = ["sim", pytest.param("cuda", marks=pytest.mark.gpu)]
