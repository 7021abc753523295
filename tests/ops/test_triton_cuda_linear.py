"""Linear layers on a GPU, loaded like a checkpoint: which parts are fused to one matrix, and their products."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from gguf_blocks import random_blocks
from ops.triton_bounds import EPS32, assert_within, rand, stored
from proa.native.fill import StoredRows, fill
from proa.native.formats import BF16_FORM, Form, Format, Stored, gguf_kept, kept_form, layout
from proa.native.pool import Pool
from proa.ops import cuda_linear
from proa.ops.cuda import CudaMaps
from proa.ops.cuda_latent import CudaLatentAttention
from proa.ops.cuda_linear import CudaLinear
from proa.ops.gpu_traits import GpuTraits
from proa.ops.sizes import FEW_ROWS
from proa.ops.staging import Staging
from proa.ops.table import Experts, Sink
from proa.ops.triton import linear_packed
from proa.plan import vram
from proa.weights.in_parts import in_parts

COLUMNS = 512
LEAST = {
    "Q4_K": 0.01 * 63,
    "Q5_K": 0.01 * 63,
    "Q2_K": 0.01 * 15,
}  # no minimum is further from zero, where minimums and codes have different signs


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[]], pin=False) as made:
        yield made


def maps_on(device: torch.device, staging: Staging) -> CudaMaps:
    return CudaMaps(device, no_experts, staging, CudaLatentAttention(GpuTraits(90, 1)))


def no_experts(experts: int, hidden: int, width: int) -> Experts:
    raise AssertionError("a linear map has no experts")


def rows_of(kind: str, rows: int, seed: int) -> tuple[np.ndarray, Tensor]:
    """Rows of a file, and their values float64 [rows, COLUMNS]."""
    rng = np.random.default_rng(seed)
    if kind == "F32":
        values = rng.standard_normal((rows, COLUMNS)).astype(np.float32)
        return values, torch.from_numpy(values).bfloat16().double()
    raw = random_blocks(kind, rows, COLUMNS, rng)
    values = torch.from_numpy(gguf.dequantize(raw, gguf.GGMLQuantizationType[kind]).copy())
    return raw, values.double() if kept_form([kind], COLUMNS) != BF16_FORM else values.bfloat16().double()


def load(target: Sink, kind: str, rows: np.ndarray, staging: Staging) -> int:
    """Load a parameter; returns the number of parts."""
    parts = 0
    for _, _, jobs in in_parts(target, StoredRows(Stored[kind], rows.ctypes.data, rows.strides[0]), staging.flush):
        fill(staging.pool, jobs)
        parts += 1
    staging.flush()
    return parts


class Loaded:
    """A fused linear layer of `outs`, stored with the types `kinds`, loaded through `staging_bytes` of staging."""

    def __init__(
        self, outs: Mapping[str, int], kinds: Mapping[str, str], bias: bool, staging_bytes: int, pool: Pool,
        device: torch.device,
    ) -> None:  # fmt: skip
        staging = Staging(pool, staging_bytes, pinned=device.type == "cuda")
        maps = maps_on(device, staging)
        self.map: CudaLinear = maps.linear(outs, COLUMNS, bias)
        targets = dict(self.map.parameters())
        made = {name: rows_of(kinds[name], rows, seed) for seed, (name, rows) in enumerate(outs.items())}
        for name, kind in kinds.items():
            targets[f"{name}.weight"].expect(kind)
        self.parts = {}
        for name, (rows, _) in made.items():
            target = targets[f"{name}.weight"]
            assert target.shape == (outs[name], COLUMNS)
            self.parts[name] = load(target, kinds[name], rows, staging)
            if bias:
                targets[f"{name}.bias"].copy_(torch.arange(outs[name]))
        self.values = torch.cat([values for _, values in made.values()])
        least = [torch.full_like(values, LEAST.get(kinds[name], 0.0)) for name, (_, values) in made.items()]
        self.sizes = self.values.abs() + 2 * torch.cat(least)  # of what is summed: codes with scales, and minimums
        offsets = [torch.arange(rows, dtype=torch.float64) * bias for rows in outs.values()]
        self.offset = torch.cat(offsets).bfloat16().double()


KEPT = gguf_kept()
QKV = {"q": 48, "k": 16, "v": 16}
CASES = {
    "one type": (QKV, ("Q4_0",) * 3, [KEPT["Q4_0"]]),
    "another value type": (QKV, ("Q4_K", "Q4_K", "Q6_K"), [KEPT["Q4_K"], KEPT["Q6_K"]]),
    "five bits": (QKV, ("Q5_K", "Q4_K", "Q5_K"), [KEPT["Q5_K"], KEPT["Q4_K"], KEPT["Q5_K"]]),
    "rows of numbers between": (QKV, ("Q8_0", "F32", "Q8_0"), [KEPT["Q8_0"], None, KEPT["Q8_0"]]),
    "tables as integers": (QKV, ("IQ4_NL", "Q5_0", "Q8_0"), [KEPT["Q8_0"]]),
    "scales in float32": (QKV, ("IQ4_XS", "Q3_K", "Q2_K"), [KEPT["IQ4_XS"], KEPT["Q3_K"], KEPT["Q2_K"]]),
    "a type that is not kept": (QKV, ("Q5_1", "Q5_1", "F32"), [None]),
    "parts of no whole panels": ({"q": 40, "k": 20, "v": 7}, ("Q4_1",) * 3, [KEPT["Q4_1"]] * 3),
    "the last one of no whole panels": ({"gate": 32, "up": 7}, ("Q4_1",) * 2, [KEPT["Q4_1"]]),
    "plain ones of no whole panels": ({"gate": 7, "up": 9}, ("F32",) * 2, [None]),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_linear(case: str, bias: bool, rng: torch.Generator, pool: Pool, device: torch.device) -> None:
    outs, kinds, kept = CASES[case]
    loaded = Loaded(outs, dict(zip(outs, kinds, strict=True)), bias, 1 << 20, pool, device)
    assert list(loaded.map.forms) == [BF16_FORM if k is None else Form(k.format, k.group) for k in kept]
    assert (loaded.map.weight is not None) == (kept == [None])
    for tokens in (1, 3, 17):
        x = rand(rng, tokens, COLUMNS)
        got = loaded.map(x.to(device))
        wide = x.double()
        want = wide @ loaded.values.T + loaded.offset
        bound = (wide.abs() @ loaded.sizes.T + loaded.offset) * (COLUMNS + 10) * EPS32
        if tokens > 1:  # on the matrix unit a weight is rounded to bfloat16
            bound += wide.abs() @ loaded.values.abs().T * 2.0**-8 * 1.01
        assert_within(got, want, bound + stored(want.abs() + bound))


@pytest.mark.parametrize("kind", ["Q4_0", "F32"])
def test_parameters_larger_than_the_staging_are_loaded_in_parts(
    kind: str, rng: torch.Generator, pool: Pool, device: torch.device
) -> None:
    outs, kinds = {"head": 200}, {"head": kind}
    whole, cut = (Loaded(outs, kinds, False, room, pool, device) for room in (1 << 20, 40 << 10))
    assert whole.parts["head"] == 1
    assert cut.parts["head"] > 2
    x = rand(rng, 1, COLUMNS).to(device)
    assert torch.equal(cut.map(x), whole.map(x))


@pytest.mark.parametrize("kind", ["Q4_0", "F32"])
def test_rows_from_several_places(kind: str, rng: torch.Generator, pool: Pool, device: torch.device) -> None:
    """Rows gathered from several places give the same layer as from one."""
    staging = Staging(pool, 24 << 10, pinned=device.type == "cuda")
    one, several = (maps_on(device, staging).linear({"out": 200}, COLUMNS, False) for _ in range(2))
    rows, _ = rows_of(kind, 200, 5)
    targets = [dict(linear.parameters())["out.weight"] for linear in (one, several)]
    for target in targets:
        target.expect(kind)
    load(targets[0], kind, rows, staging)
    for begin, end in ((96, 200), (0, 96)):
        stored_rows = StoredRows(Stored[kind], rows[begin:].ctypes.data, rows.strides[0])
        for _, _, jobs in in_parts(targets[1], stored_rows, staging.flush, begin, end):
            fill(pool, jobs)
        staging.flush()
    x = rand(rng, 1, COLUMNS).to(device)
    assert torch.equal(several(x), one(x))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", ["another value type", "the last one of no whole panels"])
def test_many_rows_by_a_library(
    case: str, bias: bool, rng: torch.Generator, pool: Pool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Panels are dequantised to rows, here 32 at a time."""
    monkeypatch.setattr(cuda_linear, "UNPACKED_TOKENS", 20)
    monkeypatch.setattr(cuda_linear, "UNPACKED_BYTES", 32 * COLUMNS * 2)
    outs, kinds, _ = CASES[case]
    loaded = Loaded(outs, dict(zip(outs, kinds, strict=True)), bias, 1 << 20, pool, device)
    monkeypatch.setattr(cuda_linear.linear_packed, "linear_packed", None)
    x = rand(rng, 20, COLUMNS)
    wide = x.double()
    want = wide @ loaded.values.T + loaded.offset
    bound = (wide.abs() @ loaded.sizes.T + loaded.offset) * (COLUMNS + 10) * EPS32
    bound += wide.abs() @ loaded.values.abs().T * 2.0**-8 * 1.01
    # A library may round before it adds the bias.
    assert_within(loaded.map(x.to(device)), want, bound + stored(want.abs() + bound) + stored(want - loaded.offset))


def test_few_and_many_rows_share_no_counters(
    rng: torch.Generator, pool: Pool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router of a chunk of a prompt, and of a decode step beside it."""
    head = maps_on(device, Staging(pool, 1 << 20, pinned=device.type == "cuda")).head(33, COLUMNS)
    ((_, target),) = head.parameters()
    target.expect("Q8_0")
    counters = dict[int, tuple[int, int]]()

    def noted(x: torch.Tensor, *args: object) -> None:
        arrived = args[-2]  # before least_rows
        assert isinstance(arrived, torch.Tensor)
        counters[len(x)] = arrived.data_ptr(), arrived.data_ptr() + arrived.nbytes

    monkeypatch.setattr(cuda_linear.linear_packed, "linear_packed", noted)
    for rows in (1, FEW_ROWS - 1, FEW_ROWS, 3 * FEW_ROWS):
        head(rand(rng, rows, COLUMNS).to(device))
    (few, also_few), (many, also_many) = list(counters.values())[:2], list(counters.values())[2:]
    assert few == also_few
    assert many == also_many
    assert few[1] <= many[0] or many[1] <= few[0]
    assert few[0] % 16 == many[0] % 16 == 0, "kernels are compiled for aligned addresses"


def test_a_head_is_not_rounded(rng: torch.Generator, pool: Pool, device: torch.device) -> None:
    staging = Staging(pool, 1 << 20, pinned=device.type == "cuda")
    head = maps_on(device, staging).head(33, COLUMNS)
    ((_, target),) = head.parameters()
    target.expect("Q8_0")
    rows, values = rows_of("Q8_0", 33, 1)
    load(target, "Q8_0", rows, staging)
    x = rand(rng, 1, COLUMNS)
    got, want = head(x.to(device)), x.double() @ values.T
    assert got.dtype == torch.float32
    assert_within(got, want, x.double().abs() @ values.abs().T * (COLUMNS + 10) * EPS32)


@pytest.mark.parametrize("tokens", [1, pytest.param(40, marks=pytest.mark.gpu)])  # many by a library
@pytest.mark.parametrize("bias", [False, True])
def test_a_router_is_not_rounded(
    tokens: int, bias: bool, rng: torch.Generator, pool: Pool, device: torch.device
) -> None:  # fmt: skip
    router = maps_on(device, Staging(pool, 1 << 20, pinned=device.type == "cuda")).router(24, 64, bias)
    assert router.weight is not None
    values = {"router.weight": rand(rng, 24, 64), "router.bias": rand(rng, 24)}
    router.weight.copy_(values["router.weight"])
    offset = torch.zeros(24, dtype=torch.float64)
    if router.bias is not None:
        router.bias.copy_(values["router.bias"])
        offset = values["router.bias"].double()
    x, weight = rand(rng, tokens, 64), values["router.weight"].double()
    got = router(x.to(device))
    assert got.dtype == torch.float32
    size = x.double().abs() @ weight.abs().T + offset.abs()
    assert_within(got, x.double() @ weight.T + offset, size * (64 + 2) * EPS32)


@pytest.mark.parametrize("form", [(Format.FP8_ROW, 128), (Format.INT4_F16, 32), (Format.NVFP4, 16), (Format.Q4_K, 32)])
def test_the_plan_has_room_for_partial_sums(form: tuple[Format, int]) -> None:
    for rows, columns in ((16, 256), (1536, 2048), (5120, 2048), (2048, 8192), (151936, 2048), (7168, 18432)):
        of = layout(form[0], rows, columns, form[1])
        for tokens in (1, 2, 16, 17, 33, 64, 65, 127, 512):
            assert 4 * linear_packed.partial_floats(tokens, of) <= vram.LINEAR_PARTIAL_BYTES
