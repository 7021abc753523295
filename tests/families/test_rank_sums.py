"""Every family divided over ranks, in plain torch: summed over the ranks it computes what the whole model does."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from examples import examples
from ops_run import NativeRun
from proa.models.ranks import Mesh, divide
from proa.models.spec import ExpertGroups, Held, Router
from proa.ops.reference import route
from proa.ops.table import RouterRule
from proa.ops.triton.route import check_rule
from rank_runs import Work, all_experts, logits, meshes, random_values
from tiny import TINY, tiny_spec

BOUND = 1e-4  # of the largest logit, as in test_logits.py; float32 sums in another order


@pytest.mark.parametrize("family", sorted(TINY))
@settings(deadline=None, max_examples=examples(4))
@given(data=st.data())
def test_ranks_sum_to_the_whole(family: str, data: st.DataObject) -> None:
    spec = all_experts(tiny_spec(family))
    mesh, seed = data.draw(meshes(len(spec.blocks))), data.draw(st.integers(0, 9))
    values = random_values(spec, seed)
    tokens = torch.randint(0, spec.vocab, (16,), generator=torch.Generator().manual_seed(seed)).tolist()
    work = Work((tuple(tokens[:11]), tuple(tokens[11:])), (9, 4))
    whole, parts = (logits(divide(spec, of), values, work) for of in (Mesh(), mesh))
    for want, got in zip(whole, parts, strict=True):
        assert (got - want).abs().max() <= BOUND * want.abs().max()


@settings(deadline=None)
@given(
    scores=st.lists(st.integers(-8, 8), min_size=12, max_size=12),
    cuts=st.lists(st.integers(1, 11), max_size=4, unique=True),
    grouped=st.booleans(),
)
def test_ranks_choose_the_same_experts(scores: list[int], cuts: list[int], grouped: bool) -> None:
    """The experts that ranks hold and chose are those of the whole layer, with the same weights; ties too."""
    router = Router("sigmoid", True, groups=ExpertGroups(4, 2, 2) if grouped else None)
    rows, slots = torch.tensor([scores, scores[::-1]]) / 4, torch.tensor([0, -1])
    ids, weights = route(rows, slots, RouterRule(4, router))
    ends, found = [0, *sorted(cuts), 12], torch.full_like(ids, -1)
    for first, end in pairwise(ends):
        part = Router("sigmoid", True, groups=router.groups, held=Held(first, end - first, 12))
        here, same = route(rows, slots, RouterRule(4, part))
        assert torch.equal(same, weights)
        assert here.max() < end - first
        assert ((here < 0) | (found < 0)).all(), "two ranks hold the same expert"
        found = torch.where(here >= 0, here + first, found)
    assert torch.equal(found, ids)


def test_kernels_that_route_over_all_experts_refuse_a_rank() -> None:
    """They would count ids from the whole layer's first expert."""
    rule = RouterRule(2, Router("softmax", True, held=Held(4, 4, 8)))
    with pytest.raises(ValueError, match="one of several ranks"):
        NativeRun("").route(torch.zeros(1, 8), torch.zeros(1, dtype=torch.int64), rule)
    with pytest.raises(ValueError, match="one of several ranks"):
        check_rule(8, rule)
