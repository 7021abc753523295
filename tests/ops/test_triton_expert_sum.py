"""The sum of a MoE layer on a GPU against float64: alone, added to the residual stream, and with the next norm."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from ops.triton_bounds import BF16, EPS32, assert_within, poisoned, rand, stored
from proa.ops.added import Added
from proa.ops.table import Norm
from proa.ops.triton import expert_sum
from proa.ops.triton.expert_sum import ExpertSum, Into, combine

GIVEN = [(), ("cpu",), ("shared",), ("shared", "gate"), ("cpu", "shared", "gate")]


@dataclass
class Case:
    """The terms of a sum, and its value in float64; error: bound for float32 sums."""

    sum: ExpertSum
    want: Tensor
    error: Tensor


def case(given: tuple[str, ...], shape: tuple[int, int, int], rng: torch.Generator, device: torch.device) -> Case:
    tokens, top_k, hidden = shape
    partial = torch.randn(tokens * top_k, hidden, generator=rng)
    weights = torch.rand(tokens, top_k, generator=rng)
    address = torch.randint(0, 2, (tokens, top_k), generator=rng) * 64
    partial[address.flatten() == 0] = torch.nan  # not written by any kernel
    each = partial.nan_to_num().double().view(tokens, top_k, hidden) * weights.double()[..., None]
    want, size = each.sum(1), each.abs().sum(1)
    cpu = torch.randn(tokens, hidden, generator=rng) if "cpu" in given else None
    shared = rand(rng, tokens, hidden) if "shared" in given else None
    gate = rand(rng, tokens, 1) if "gate" in given else None
    for extra in (cpu, None if shared is None else shared.double() * (1 if gate is None else gate.double().sigmoid())):
        if extra is not None:
            want, size = want + extra.double(), size + extra.double().abs()
    added = Added(*(None if t is None else t.to(device) for t in (cpu, shared, gate)))
    made = ExpertSum(partial.to(device), weights.to(device), address.to(device), added)
    return Case(made, want, size * (top_k + 17) * EPS32)


@pytest.mark.parametrize("given", GIVEN)
@pytest.mark.parametrize("shape", [(1, 1, 32), (3, 4, 40), (2, 8, 700)])
def test_alone(given: tuple[str, ...], shape: tuple[int, int, int], rng: torch.Generator, device: torch.device) -> None:
    of = case(given, shape, rng, device)
    out = poisoned(*of.want.shape).to(device)
    combine(of.sum.partial, of.sum.weights, of.sum.address, of.sum.added, Into(out))
    assert_within(out, of.want, of.error + stored(of.want.abs() + of.error))
    assert torch.equal(of.sum.total(), out)


@pytest.mark.parametrize("given", [(), ("cpu",)])
def test_parts_of_a_sum_are_float32(given: tuple[str, ...], rng: torch.Generator, device: torch.device) -> None:
    of = case(given, (3, 4, 700), rng, device)
    out = poisoned(*of.want.shape).float().to(device) if of.sum.added.cpu is None else of.sum.added.cpu
    combine(of.sum.partial, of.sum.weights, of.sum.address, of.sum.added, Into(out))
    assert_within(out, of.want, of.error)


@pytest.mark.parametrize("offset", [0.0, 1.0])
@pytest.mark.parametrize("most_columns", [expert_sum.MOST_COLUMNS, 512], ids=["in one", "in two"])
@pytest.mark.parametrize("given", [(), ("cpu", "shared", "gate")])
@pytest.mark.parametrize("shape", [(1, 1, 32), (3, 4, 40), (2, 8, 700)])
def test_on_the_residual_with_its_norm(
    shape: tuple[int, int, int], given: tuple[str, ...], most_columns: int, offset: float, rng: torch.Generator,
    device: torch.device, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(expert_sum, "MOST_COLUMNS", most_columns)
    of = case(given, shape, rng, device)
    residual = rand(rng, *of.want.shape)
    whole = residual.double() + of.want
    added = of.sum.add(residual.clone().to(device))
    norm = Norm(rand(rng, whole.shape[1]).to(device), 1e-6, offset)
    x, normed = of.sum.add_norm(residual.clone().to(device), norm)
    in_two = shape[2] > most_columns  # then the sum is rounded before it is added
    error = of.error + whole.abs() * EPS32 + (stored(of.want.abs() + of.error) if in_two else 0)
    assert_within(x, whole, error + stored(whole.abs() + error))
    assert in_two or torch.equal(added, x)
    kept = x.cpu().double()
    want = (norm.weight.cpu().double() + offset) * kept / (kept.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    assert_within(normed, want, want.abs() * (whole.shape[1] / 2 + 9) * EPS32 + stored(want))


@pytest.mark.parametrize("given", [(), ("cpu", "shared", "gate")])
def test_times_a_factor(given: tuple[str, ...], rng: torch.Generator, device: torch.device) -> None:
    """The residual factor multiplies the whole sum, before it is rounded."""
    of = case(given, (3, 4, 40), rng, device)
    want, error = 0.22 * of.want, 0.22 * of.error + of.want.abs() * EPS32
    assert_within(of.sum.scaled(0.44).scaled(0.5).total(), want, error + stored(want.abs() + error))
    residual = rand(rng, *of.want.shape)
    whole = residual.double() + want
    error += whole.abs() * EPS32
    assert_within(of.sum.scaled(0.22).add(residual.to(device)), whole, error + stored(whole.abs() + error))


def test_unsupported_arguments_are_refused(rng: torch.Generator, device: torch.device) -> None:
    of = case((), (2, 2, 64), rng, device).sum
    x, short = (torch.zeros(2, n, dtype=BF16, device=device) for n in (64, 63))
    norm = Norm(x[0], 1e-6)
    for into in (Into(x, norm=norm), Into(x, normed=x), Into(x[:1]), Into(x, short), Into(short)):
        with pytest.raises(ValueError, match=r"all rows must have|norm and normed"):
            combine(of.partial, of.weights, of.address, of.added, into)
