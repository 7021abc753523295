"""Linear maps of a GPU that may round activations: which ones do, and from how many rows on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ops.fp8_cases import NEEDS_FP8
from ops.test_triton_cuda_linear import no_experts
from ops.test_triton_linear_fp8 import panels_of, rounded
from ops.triton_bounds import BF16, poisoned, rand
from packing import random_weights
from proa.native.formats import E4M3_FORMS, Form, Format, layout
from proa.native.pool import Pool
from proa.ops import cuda_linear
from proa.ops.cuda import CudaMaps
from proa.ops.cuda_linear import FP8_TOKENS, CudaLinear, PackedMatrix
from proa.ops.staging import Staging
from proa.ops.triton.experts_fp8 import LEAST_BLOCK
from proa.ops.triton.experts_grouped import block_tokens
from proa.ops.triton.fp8_rows import LEAST_CAPABILITY, fp8_rows
from proa.ops.triton.linear_fp8 import linear_fp8
from proa.plan import fp8_activations

pytestmark = NEEDS_FP8


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[]], pin=False) as made:
        yield made


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_linear, "FP8_TOKENS", 5)


def matrix(form: Form, fp8: bool, device: torch.device) -> PackedMatrix:
    weights = random_weights(*form, 40, 256, seed=1)
    made = PackedMatrix(weights.layout, device, fp8=fp8)
    made.panels.copy_(panels_of(weights, device))
    return made


@pytest.mark.parametrize("form", E4M3_FORMS, ids=str)
def test_many_rows_are_rounded(form: Form, rng: torch.Generator, device: torch.device) -> None:
    x, bias = rand(rng, 5, 256), rand(rng, 40).to(device)
    weights = random_weights(*form, 40, 256, seed=1)
    want = poisoned(5, 40).to(device)
    linear_fp8(rounded(x, weights, device), panels_of(weights, device), weights.layout, bias, want)
    assert torch.equal(matrix(form, True, device).product(x.to(device), bias, BF16), want)


@pytest.mark.parametrize(
    ("form", "tokens"),
    [(E4M3_FORMS[0], 1), (E4M3_FORMS[0], 4), (Form(Format.MXFP8, 32), 5), (Form(Format.Q4_K, 32), 5)],
)
def test_nothing_else_is(form: Form, tokens: int, rng: torch.Generator, device: torch.device) -> None:
    x = rand(rng, tokens, 256).to(device)
    rounds, exact = (matrix(form, fp8, device).product(x, None, BF16) for fp8 in (True, False))
    assert torch.equal(rounds, exact)


@pytest.mark.parametrize(("what", "rounds"), [("linear", True), ("mlp", True), ("router", False), ("head", False)])
def test_routers_and_heads_do_not(
    what: str, rounds: bool, rng: torch.Generator, pool: Pool, device: torch.device
) -> None:  # fmt: skip
    x = rand(rng, 5, 256).to(device)
    got = []
    for fp8 in (True, False):
        maps = CudaMaps(device, no_experts, Staging(pool, 1 << 20, pinned=device.type == "cuda"), fp8=fp8)
        made = {
            "linear": lambda m: m.linear({"o": 32}, 256, False), "mlp": lambda m: m.mlp(256, 32, False),
            "router": lambda m: m.router(32, 256), "head": lambda m: m.head(32, 256),
        }[what](maps)  # fmt: skip
        for _, target in made.parameters():
            target.expect("FP8 channel")
        for i, part in enumerate([made] if isinstance(made, CudaLinear) else [made._gate_up, made._down]):
            (piece,) = part._pieces
            of = piece.matrix.of
            piece.matrix.panels.copy_(
                panels_of(random_weights(of.format, of.group, of.rows, of.columns, seed=i), device)
            )
        got.append(made(x))
    assert torch.equal(*got) is not rounds


@pytest.mark.parametrize("form", E4M3_FORMS, ids=str)
@pytest.mark.parametrize("columns", [128, 150, 2880])
def test_the_plan_knows_what_rows_take(form: Form, columns: int, device: torch.device) -> None:
    rows = fp8_rows(7, layout(form.format, 16, columns, form.group), device)
    most = 7 * fp8_activations.row_bytes(columns)
    assert most - 7 * 4 * -(-columns // 128) <= rows.codes.nbytes + rows.scales.nbytes <= most


def test_the_plan_says_what_the_kernels_do() -> None:
    least = fp8_activations.LEAST_CAPABILITY
    assert 10 * least[0] + least[1] == LEAST_CAPABILITY
    assert FP8_TOKENS == fp8_activations.LEAST_TOKENS
    mean = fp8_activations.LEAST_OF_AN_EXPERT
    assert [block_tokens(mean * 100 + pairs, 100) >= LEAST_BLOCK for pairs in (-100, 0)] == [False, True]
