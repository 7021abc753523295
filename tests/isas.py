"""The instruction sets of the native kernels as parameters of tests; those that this CPU lacks are skipped aloud."""

from __future__ import annotations

from typing import Any

import pytest

from proa.native.pool import select_isa


def _param(isa: str) -> Any:
    try:
        select_isa(isa)
    except ValueError as error:
        return pytest.param(isa, id=isa, marks=pytest.mark.skip(reason=str(error)))
    return pytest.param(isa, id=isa)


ISAS = [_param(isa) for isa in ("scalar", "scalar-tiles", "avx2", "avx512", "avx512-bf16", "amx")]
