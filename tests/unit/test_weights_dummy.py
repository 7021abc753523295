"""Dummy weights: finite, seeded, and routed as requested, measured with transformers' model."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from proa.errors import UsageError
from proa.models.families import declare
from proa.models.spec import Model
from proa.native.formats import BF16_FORM, Format, layout
from proa.native.pool import Pool
from proa.ops.packed import Memory, RowSink, Stack
from proa.ops.staging import DevicePanels, DeviceRows, Staging
from proa.ops.table import Target
from proa.weights.dummy import fill_dummy
from proa.weights.frequencies import zipf_frequencies
from tiny import TINY, reference_params, tiny_reference

LARGER: dict[str, Any] = {
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "moe_intermediate_size": 32,
    "num_experts": 32,
    "num_experts_per_tok": 4,
    "vocab_size": 4096,
}


def spec_of(model: Any) -> Model:
    return declare(model.config.to_dict() | {"architectures": [type(model).__name__]}).spec


def dummy_model(name: str, router: str, seed: int = 0, **overrides: Any) -> Any:
    model = tiny_reference(name, **overrides)
    fill_dummy(spec_of(model), reference_params(model), seed, router)
    return model


@pytest.mark.parametrize("name", TINY)
def test_activations_stay_near_one(name: str) -> None:
    model = dummy_model(name, "zipf")
    with torch.no_grad():
        states = model(torch.arange(3, 200)[None], output_hidden_states=True)
    assert torch.isfinite(states.logits).all()
    assert 0.3 < float(states.logits.std()) < 30
    assert all(0.3 < float(h.std()) < 3 for h in states.hidden_states)


def test_seed() -> None:
    first, same, other = (dummy_model("qwen2-moe", "uniform", seed=s) for s in (1, 1, 2))
    for name, tensor in reference_params(first).items():
        assert torch.equal(tensor, reference_params(same)[name])
        if tensor.dim() == 2:
            assert not torch.equal(tensor, reference_params(other)[name])


def test_experts_differ() -> None:
    params = reference_params(dummy_model("qwen3-moe", "uniform"))
    experts = [params[f"blocks.{i}.ffn.experts.{e}.up.weight"] for i in range(3) for e in range(8)]
    assert len({round(float(e[1, 1]), 6) for e in experts}) == len(experts)


def test_every_parameter_is_filled_in_any_type() -> None:
    spec = spec_of(tiny_reference("qwen2-moe-mixed"))
    targets = {n: torch.full(shape, torch.nan, dtype=torch.bfloat16) for n, shape in spec.params()}
    fill_dummy(spec, targets, 0, "uniform")
    assert all(torch.isfinite(target).all() for target in targets.values())


def test_corrections_do_not_choose() -> None:
    params = reference_params(dummy_model("minimax-m2", "zipf"))
    corrections = [tensor for name, tensor in params.items() if name.endswith("router.correction")]
    assert len(corrections) == 3
    assert not any(tensor.any() for tensor in corrections)


def frequencies(name: str, router: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """[layers, experts]: how often each expert is chosen, over random tokens, hottest first."""
    model = dummy_model(name, router, **LARGER)
    tokens = torch.randint(0, 4096, (4, 500), generator=torch.Generator().manual_seed(5))
    with torch.no_grad():
        logits = model(tokens, output_router_logits=True).router_logits
    chosen = [layer.topk(4, dim=-1).indices.flatten().bincount(minlength=32) for layer in logits]
    return np.stack([np.sort(c.numpy())[::-1] / 2000 for c in chosen])


@pytest.mark.parametrize("name", ["qwen2-moe", "qwen3-moe"])
def test_uniform(name: str) -> None:
    found = frequencies(name, "uniform")
    # 4 of 32 = 0.125; directions of 32 experts in 256 dimensions are nearly, not exactly, orthogonal.
    assert found.min() > 0.125 / 1.6
    assert found.max() < 0.125 * 1.6


@pytest.mark.parametrize("name", ["qwen2-moe", "qwen3-moe"])
def test_zipf(name: str) -> None:
    found, want = frequencies(name, "zipf"), np.array(zipf_frequencies(32, 4))
    assert want.sum() == pytest.approx(4.0)
    for layer in found:
        assert layer.sum() == pytest.approx(4.0)
        # Order statistics of 2000 tokens and a threshold that varies a little: within a quarter, or 0.03.
        assert (np.abs(layer - want) < np.maximum(0.25 * want, 0.03)).all()


@pytest.mark.parametrize("name", ["qwen2-moe", "qwen3-moe"])
def test_drift(name: str) -> None:
    """Each half of the vocabulary has hot experts of its own, with zipf's frequencies, and is followed by tokens of its
    half."""
    model, half = dummy_model(name, "drift", **LARGER), LARGER["vocab_size"] // 2
    rng, want = torch.Generator().manual_seed(5), np.array(zipf_frequencies(32, 4))
    found = []
    for first in (0, half):
        tokens = torch.randint(first, first + half, (4, 500), generator=rng)
        with torch.no_grad():
            out = model(tokens, output_router_logits=True)
        odds = torch.softmax(out.logits.double(), -1)[..., first : first + half].sum(-1)
        assert odds.min() > 1 - 1e-9
        chosen = [layer.topk(4, dim=-1).indices.flatten().bincount(minlength=32) for layer in out.router_logits]
        found.append(np.stack([layer.numpy() / 2000 for layer in chosen]))
    for layers in found:
        off = np.abs(np.sort(layers, 1)[:, ::-1] - want)
        assert (off < np.maximum(0.25 * want, 0.03)).all()  # as under zipf
    hottest = [set(map(tuple, np.argwhere(layers > 0.2))) for layers in found]
    assert len(hottest[0] & hottest[1]) < len(hottest[0]) / 2


def test_drift_needs_an_untied_head() -> None:
    spec = spec_of(tiny_reference("qwen3-moe", tie_word_embeddings=True))
    with pytest.raises(UsageError, match="needs an untied head"):
        fill_dummy(spec, {}, 0, "drift")


def test_hot_experts_are_not_the_same_in_every_layer() -> None:
    spec = spec_of(tiny_reference("qwen3-moe", **LARGER))
    targets = {n: torch.empty(shape) for n, shape in spec.params()}
    fill_dummy(spec, targets, 0, "zipf")
    hottest = [int(targets[f"blocks.{i}.ffn.router.weight"][:, 0].argmax()) for i in range(6)]
    assert len(set(hottest)) > 2


def unpacked(memory: Tensor, rows: int, columns: int) -> Tensor:
    """bfloat16 [rows, columns] of panels uint8 [panels, panel bytes]: 16 rows, two columns at a time."""
    lines = memory.view(torch.bfloat16).view(len(memory), -1, 16, 2)
    return lines.transpose(1, 2).reshape(16 * len(memory), -1)[:rows, :columns]


@pytest.mark.parametrize("router", ["uniform", "drift"])
@pytest.mark.parametrize("staging_bytes", [1 << 20, 4 << 10], ids=["room for all", "room for few"])
@pytest.mark.parametrize("family", ["qwen3-moe", "qwen3-next"])
def test_workers_fill_the_same_numbers(
    family: str, staging_bytes: int, router: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proa.weights.random_pool.POOL", 1 << 12)  # matrices of several copies, and of parts of one
    spec = spec_of(tiny_reference(family))
    wanted = {name: torch.full(shape, torch.nan) for name, shape in spec.params()}
    fill_dummy(spec, wanted, 3, router)
    with Pool([[], []], pin=False) as pool:
        staging, memory = Staging(pool, staging_bytes, pinned=False), Memory(pool, [None, None])
        targets: dict[str, Target] = {}
        read: dict[str, Callable[[], Tensor]] = {}
        for number, (name, shape) in enumerate(spec.params()):
            if len(shape) != 2 or number % 3 == 0:
                rows = torch.full(shape, torch.nan, dtype=torch.bfloat16)
                targets[name], read[name] = DeviceRows(rows, staging), lambda rows=rows: rows
            elif number % 3 == 1:
                of = layout(Format.BF16, *shape)
                panels = torch.full((of.panels, of.panel_bytes), 255, dtype=torch.uint8)
                targets[name] = DevicePanels(
                    *shape, lambda stored: None, lambda panels=panels: (panels, BF16_FORM), staging
                )
                read[name] = lambda panels=panels, shape=shape: unpacked(panels, *shape)
            else:
                stack = Stack(memory, 1, *shape)  # each team has some of its panels
                targets[name] = RowSink(*shape, stack.expect, lambda stack=stack: (stack, 0))
                read[name] = lambda stack=stack, shape=shape: unpacked(of_stack(stack), *shape)
        assert {"q", "head", "embed", "down"} <= {name.split(".")[-2] for name in targets}
        fill_dummy(spec, targets, 3, router, pool, staging.flush)
        for name, values in wanted.items():
            assert torch.equal(read[name](), values.bfloat16()), name


def of_stack(stack: Stack) -> Tensor:
    """The panels of the stack's only matrix, uint8 [panels, panel bytes]."""
    parts = [ctypes.string_at(piece.address, piece.nbytes) for piece in stack.pieces(0)]
    return torch.frombuffer(bytearray(b"".join(parts)), dtype=torch.uint8).view(stack.matrix.layout.panels, -1)
