"""The simulated GPU sums its own experts in the order of their ids, at any addresses."""

from __future__ import annotations

from itertools import permutations
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from proa.hybrid.sim_experts import SimExperts
from proa.ops.added import Added
from proa.ops.faults import LayerFaults
from proa.ops.residency import Located, Residency

VALUES = (2.0**25, 1.0, -(2.0**25))  # the sum depends on the order of additions


def test_sums_do_not_depend_on_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(self: SimExperts, expert: Any, x: Tensor) -> Tensor:
        return torch.full(x.shape, VALUES[expert])

    monkeypatch.setattr(SimExperts, "_expert", lambda self, up, down, expert: expert)
    monkeypatch.setattr(SimExperts, "_one", one)
    nothing = torch.zeros(3, dtype=torch.int64)
    memory = cast(Any, SimpleNamespace(shape=None, biases=None))
    experts = SimExperts(memory, Residency(nothing, nothing, nothing.int()), cast(Any, None), cast(LayerFaults, None))
    x, weights, ids = torch.ones(1, 8), torch.ones(1, 3), torch.arange(3, dtype=torch.int32)[None]
    sums = []
    for addresses in permutations((64, 128, 192)):
        at = Located(ids, torch.tensor([addresses]), torch.tensor([addresses]), torch.full_like(ids, -1))
        sums.append(experts.finish(experts.start(x, at, weights), x, at, weights, Added()))
    assert all(torch.equal(each, sums[0]) for each in sums)
