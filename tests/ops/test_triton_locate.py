"""Locating each pair's expert: the Triton kernel and the reference, against the rule written out."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from proa.ops import device_reference
from proa.ops.residency import IN_PLACE_PAIRS, InPlace, Located, Residency
from proa.ops.triton.locate import locate

EXPERTS, TOP_K = 11, 6
SHARE = [0, 1, 0, 2, 2, 5, 3, 4, 6, 7, 4, 11] + [0] * (IN_PLACE_PAIRS - EXPERTS)


def run(kind: str, ids: Tensor, residency: Residency) -> Located:
    if kind == "reference":
        return device_reference.locate(ids, residency)
    at = Located(ids, *(torch.full_like(ids, -7, dtype=t) for t in (torch.int64, torch.int64, torch.int32)))
    locate(ids, residency, at)
    return at


def residency(device: torch.device, rng: torch.Generator, *, counted: bool, in_place: bool) -> Residency:
    """Half of the experts are on the GPU; the GPU cannot read all of the others in RAM."""
    order = torch.arange(1, EXPERTS + 1)
    here = torch.randint(0, 2, (EXPERTS,), generator=rng).bool()
    readable = torch.rand(EXPERTS, generator=rng) < 0.8
    up, down = (torch.where(here, order * step, 0).to(device) for step in (64, 128))
    cpu = torch.where(here, -1, order.flip(0)).int().to(device)
    places = [torch.where(readable, order * step, 0).to(device) for step in (4096, 8192)]
    share = torch.tensor(SHARE, dtype=torch.int32, device=device)
    counts = torch.full((EXPERTS,), 100, dtype=torch.int32, device=device) if counted else None
    return Residency(up, down, cpu, counts, InPlace(*places, share) if in_place else None)


def expected(ids: list[int], of: Residency) -> list[tuple[int, int, int]]:
    """(up, down, cpu) of each pair of a step."""
    up, down, cpu = (t.tolist() for t in (of.up, of.down, of.cpu))
    found = [(up[e], down[e], cpu[e]) if e >= 0 else (0, 0, -1) for e in ids]
    if of.in_place is not None and len(ids) <= IN_PLACE_PAIRS:
        places = list(zip(of.in_place.up.tolist(), of.in_place.down.tolist(), strict=True))
        missing = [e for e in ids if e >= 0 and cpu[e] >= 0 and places[e][0]]
        alone = [j for j, e in enumerate(ids) if missing.count(e) == 1]
        wanted = SHARE[len(set(missing))]
        for j in alone[max(0, len(alone) - wanted) :]:
            found[j] = (*places[ids[j]], -1)
    return found


@pytest.mark.parametrize("kind", ["triton", "reference"])
@pytest.mark.parametrize("counted", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 5, 40])
def test_located(
    kind: str, counted: bool, in_place: bool, tokens: int, rng: torch.Generator, device: torch.device
) -> None:
    fetched = 0
    on = torch.device("cpu") if kind == "sim" else device
    for _ in range(5):
        of = residency(on, rng, counted=counted, in_place=in_place)
        ids = torch.rand(tokens, EXPERTS, generator=rng).argsort(1)[:, :TOP_K].int()
        ids[torch.rand(tokens, TOP_K, generator=rng) < 0.2] = -1
        at = run(kind, ids.to(on), of)
        got = list(zip(*(t.flatten().tolist() for t in (at.up, at.down, at.cpu)), strict=True))
        assert got == expected(ids.flatten().tolist(), of)
        fetched += sum(up >= 4096 for up, _, _ in got)
        if of.counts is not None:
            chosen = torch.bincount(ids[ids >= 0], minlength=EXPERTS)
            assert of.counts.tolist() == (100 + chosen).tolist()
    assert bool(fetched) == (in_place and tokens * TOP_K <= IN_PLACE_PAIRS)
