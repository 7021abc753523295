"""Models whose blocks lack a mixer or an FFN, whose MLPs have no gate, and which multiply embeddings, residuals and
logits by factors: plain torch against the residual loop written out, native kernels against plain torch, and the GPU's
refusals."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from engines import HEAD_ROWS, Loaded
from proa.cache.pool import allocate_pool
from proa.engine.executors.batch import Span, StepBatch, StepLimits
from proa.engine.executors.eager import EagerExecutor
from proa.engine.executors.executor import Executor
from proa.engine.executors.recorded import RecordedExecutor
from proa.errors import UsageError
from proa.layers.decoder import Decoder
from proa.layers.rope import cos_sin
from proa.layers.step import Step
from proa.models.ranks import Mesh, divide
from proa.models.spec import Attention, Block, GatedDeltaNet, Gating, Mlp, Model, Moe, Rope, Router
from proa.native.pool import Pool
from proa.ops.cpu import CpuOps, Recorder
from proa.ops.packed import Memory
from proa.ops.reference import reference, rms_norm
from proa.ops.table import Norm, batch_of
from rank_runs import Work
from rank_runs import logits as rank_logits
from unit.vram_cases import gpu, machine, plan, row

HIDDEN, VOCAB = 64, 96
# With random weights a first token's q and k may be at right angles but for rounding, which the gated norm of a small
# eps would amplify.
EPS = 1e-3
ATTENTION, DELTA = Attention(HIDDEN, 4, 2, 16, Rope(16)), GatedDeltaNet(HIDDEN, 2, 4, 16, 16, 4)
PLAIN, GATED = Mlp(HIDDEN, 80, gating=Gating("relu2")), Mlp(HIDDEN, 48)
# All experts are chosen, so that a near tie cannot change logits.
EXPERTS = Moe(HIDDEN, 4, 4, 24, Router("softmax", True), shared=PLAIN, gating=Gating("relu2"))
FIRST = tuple(Block(*parts) for parts in (
    (None, PLAIN), (ATTENTION, None), (None, EXPERTS), (DELTA, None), (None, replace(PLAIN, bias=True)),
    (ATTENTION, GATED), (None, EXPERTS),
))  # fmt: skip
MIXERS_ONLY = (Block(ATTENTION, None), Block(DELTA, None))
SPECS = {
    "FFN first": Model(HIDDEN, VOCAB, FIRST, EPS, 512),
    "mixers only, tied": Model(HIDDEN, VOCAB, MIXERS_ONLY, EPS, 512, tied=True),
    "factors": Model(
        HIDDEN, VOCAB, FIRST, EPS, 512, embedding_factor=3.0, residual_factor=0.3, logits_factor=1 / 1.7
    ),
}  # fmt: skip
LIMITS = StepLimits(rows=48, sequences=4, context_tokens=64, page_tokens=4, head_rows=HEAD_ROWS)
PAGES = 32
PROMPT = torch.randint(0, VOCAB, (41,), generator=torch.Generator().manual_seed(5)).tolist()
PLACES = list(range(4, 15))  # pages of the prompt


@pytest.fixture(scope="module", params=SPECS)
def spec(request: pytest.FixtureRequest) -> Model:
    return SPECS[request.param]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


def weights(spec: Model) -> dict[str, Tensor]:
    """Random parameters that bfloat16 holds exactly."""
    generator = torch.Generator().manual_seed(3)
    found = {}
    for name, shape in spec.params():
        scale = 0.2 if len(shape) > 1 else 0.1
        values = scale * torch.randn(shape, generator=generator) + (1.0 if "norm" in name else 0.0)
        found[name] = values.bfloat16().float()
    return found


def filled(spec: Model, model: Decoder) -> Decoder:
    targets, values = dict(model.parameters()), weights(spec)
    assert targets.keys() == values.keys()
    for target in targets.values():
        if not isinstance(target, Tensor):
            target.expect("BF16")
    for name, target in targets.items():
        if isinstance(target, Tensor):
            target.copy_(values[name].view(target.shape))
        else:
            target.write(0, values[name].view(target.shape))
    return model


def torch_model(spec: Model, dtype: torch.dtype) -> Loaded:
    model = filled(spec, Decoder(spec, reference(dtype)))

    def make(limits: StepLimits, num_pages: int) -> Executor[object]:
        return EagerExecutor(model, allocate_pool(spec, num_pages, limits.page_tokens, dtype, sequences=4), 4)

    return Loaded(spec, make, model)


def native_model(spec: Model, pool: Pool) -> Loaded:
    def make(limits: StepLimits, num_pages: int) -> Executor[object]:
        recorder = Recorder(pool, Memory(pool, [None]), limits.rows, limits.sequences, PAGES)
        model = filled(spec, Decoder(spec, CpuOps(recorder).table()))
        caches = allocate_pool(spec, num_pages, limits.page_tokens, torch.bfloat16, sequences=4)
        return RecordedExecutor(model, recorder, caches, limits)

    return Loaded(spec, make)


def steps(model: Loaded) -> Tensor:
    """Logits of the prompt, computed in chunks of 33, 7 and 1 tokens."""
    executor, parts, start = model.make(LIMITS, PAGES), [], 0
    for count in (33, 7, 1):
        step = executor.launch(StepBatch((Span(PROMPT[start : start + count], start, PLACES, len(PROMPT), 2),)))
        executor.sample(step, (), ())
        parts.append(executor.logits_of(step, range(count)).clone())
        executor.wait(step)
        start += count
    return torch.cat(parts)


def mlp(of: Mlp, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
    def linear(name: str, x: Tensor) -> Tensor:
        return functional.linear(x, values[f"{name}.weight"], values.get(f"{name}.bias"))

    up = linear("up", x)
    inner = functional.silu(linear("gate", x)) * up if of.gating.gated else up.clamp(min=0) ** 2
    return linear("down", inner)


def inside(values: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in values.items() if name.startswith(prefix)}


def ffn(of: Mlp | Moe, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
    if isinstance(of, Mlp):
        return mlp(of, values, x)
    shares = torch.softmax(x @ values["router.weight"].T, -1)
    experts = sum(shares[:, e, None] * mlp(of.expert, inside(values, f"experts.{e}."), x) for e in range(of.experts))
    return experts + mlp(of.shared, inside(values, "shared."), x)  # type: ignore[no-any-return,arg-type]


def test_the_residual_loop(spec: Model) -> None:
    """Everything but the mixers themselves is written out here."""
    made = torch_model(spec, torch.float32)
    found, values, decoder = steps(made), weights(spec), made.decoder
    assert decoder is not None
    mixed: list[Tensor] = []
    for block in decoder.blocks:
        if block.mixer is not None:
            block.mixer = Noted(block.mixer, mixed)
    executor = made.make(LIMITS, PAGES)
    executor.launch(StepBatch((Span(PROMPT, 0, PLACES, len(PROMPT), 2),)))
    outputs = iter(mixed)
    x = values["embed.weight"][PROMPT] * spec.embedding_factor
    for i, block in enumerate(spec.blocks):
        if block.mixer is not None:
            norm = rms_norm(x, Norm(values[f"blocks.{i}.norm1.weight"], spec.norm_eps))
            torch.testing.assert_close(next(outputs), norm, atol=1e-4, rtol=1e-4)
            x = x + spec.residual_factor * next(outputs)
        if block.ffn is not None:
            norm = rms_norm(x, Norm(values[f"blocks.{i}.norm2.weight"], spec.norm_eps))
            x = x + spec.residual_factor * ffn(block.ffn, inside(values, f"blocks.{i}.ffn."), norm)
    head = values["embed.weight" if spec.tied else "head.weight"]
    logits = rms_norm(x, Norm(values["norm.weight"], spec.norm_eps)) @ head.T * spec.logits_factor
    torch.testing.assert_close(found, logits, atol=1e-3, rtol=1e-4)


class Noted:
    """A mixer whose inputs and outputs are noted."""

    def __init__(self, mixer: object, noted: list[Tensor]) -> None:
        self._mixer, self._noted = mixer, noted

    def __call__(self, x: Tensor, *more: object) -> Tensor:
        y: Tensor = self._mixer(x, *more)  # type: ignore[operator]
        self._noted += [x.clone(), y.clone()]
        return y


def test_native_is_no_further_from_float32_than_torch_in_bfloat16(spec: Model, pool: Pool) -> None:
    exact, torch_rows = (steps(torch_model(spec, dtype)) for dtype in (torch.float32, torch.bfloat16))
    native, scale = steps(native_model(spec, pool)), exact.abs().max()
    off_torch, off_native = (torch_rows - exact).pow(2).mean().sqrt(), (native - exact).pow(2).mean().sqrt()
    assert off_torch <= 0.05 * scale, "the yardstick itself is off"
    assert off_native <= 1.05 * off_torch + 1e-4 * scale


def test_rows_of_embeddings(spec: Model) -> None:
    """A step of rows of embeddings is that of their tokens."""
    made = torch_model(spec, torch.float32)
    decoder = made.decoder
    assert decoder is not None
    rows = weights(spec)["embed.weight"][PROMPT] * spec.embedding_factor
    found = []
    for inputs in (torch.tensor(PROMPT), rows):
        batch = batch_of([len(PROMPT)], [len(PROMPT)], [PLACES], 4, [2])
        positions = torch.arange(len(PROMPT))
        angles = {rope: cos_sin(rope, positions, positions + 1) for rope in spec.ropes}
        caches = allocate_pool(spec, PAGES, 4, torch.float32, sequences=4)
        found.append(decoder(inputs, Step(batch, angles, caches)))
    assert torch.equal(*found)


@pytest.mark.parametrize("mesh", [Mesh(((1, 1),)), Mesh(((2, 1), (1,)))], ids=["two ranks", "two stages"])
def test_ranks(mesh: Mesh, spec: Model) -> None:
    work = Work((tuple(PROMPT[:12]),), (9,))
    one, many = (rank_logits(divide(spec, of), weights(spec), work) for of in (Mesh(), mesh))
    torch.testing.assert_close(torch.cat(many), torch.cat(one), atol=1e-3, rtol=1e-4)


def test_step_in_parts(spec: Model, pool: Pool) -> None:
    """Block by block as at once, with a step in between."""
    for model in (torch_model(spec, torch.float32), native_model(spec, pool)):
        found = []
        for in_parts in (False, True):
            executor = model.make(LIMITS, PAGES)
            batch = StepBatch((Span(PROMPT, 0, PLACES, len(PROMPT), 2),))
            step = (executor.launch_in_parts if in_parts else executor.launch)(batch)
            while in_parts and not executor.advance(step, 1):
                executor.wait(executor.launch(StepBatch((Span([9], 0, [3], 1, 1),))))
            executor.sample(step, (), ())
            found.append(executor.logits_of(step, range(len(PROMPT))).clone())
        assert torch.equal(*found)


@pytest.mark.parametrize(
    ("blocks", "why"),
    [
        (MIXERS_ONLY, "an FFN in every block"),
        ((Block(ATTENTION, PLAIN),), "no MLPs without a gate"),
        ((Block(ATTENTION, replace(EXPERTS, gating=Gating())),), "no MLPs without a gate"),
        ((Block(ATTENTION, EXPERTS),), "no experts without a gate"),
    ],
)
def test_gpus_refuse(blocks: tuple[Block, ...], why: str) -> None:
    spec = Model(HIDDEN, VOCAB, blocks, EPS, 512)
    with pytest.raises(UsageError, match=why) as caught:
        plan(spec, machine(64, gpu(80)), gpu="0")
    assert caught.value.remedy == "Use --gpu none."
    got = plan(spec, machine(64, gpu(80)))
    assert got.gpu is None
    assert why in row(got, "GPU")[2]
    if "experts" not in why:  # on a simulated GPU, all but routed experts is plain torch
        assert plan(spec, machine(64), gpu="sim:1GiB").gpu is not None
