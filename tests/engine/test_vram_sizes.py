"""The plan counts what a GPU's steps allocate beside weights and KV: the objects that allocate it are made on torch's
"meta" device, whose tensors have sizes and no memory, so that no GPU is needed. What only a GPU shows (graphs, modules,
the allocator) stands in test_gpu_memory.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from proa.engine.executors.angles import AngleTables
from proa.engine.executors.batch import StepLimits
from proa.engine.executors.device_inputs import DeviceInputs
from proa.engine.executors.device_logprobs import DeviceLogprobs
from proa.engine.executors.device_sampler import DeviceSampler
from proa.hybrid.faults import FaultRecords
from proa.hybrid.gpu_experts import GpuSpaces
from proa.models.spec import (
    Attention,
    Block,
    GatedDeltaNet,
    LatentAttention,
    Mlp,
    Model,
    Moe,
    Rope,
    RopeScaling,
    Router,
)
from proa.ops import sizes
from proa.ops.cuda_device import device_ops
from proa.ops.residency import ExpertShape
from proa.ops.triton.experts import expert_space
from proa.plan import kernels, vram
from proa.plan.budget import SCORED_ROWS

META = torch.device("meta")
OPS = device_ops(META)
RUNNING = (1, 12, 64, 256)
PROCESSORS = (46, 66, 82, 108, 114, 132, 148, 160, 192)


def device_bytes(*made: Any) -> int:
    """Bytes of all tensors on the meta device that these objects hold; shared memory counts once."""
    seen, found, waiting = set[int](), dict[int, int](), list(made)
    while waiting:
        one = waiting.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Tensor):
            if one.device == META:
                storage = one.untyped_storage()
                found[storage._cdata] = storage.nbytes()
        elif isinstance(one, dict):
            waiting += one.values()
        elif isinstance(one, list | tuple):
            waiting += one
        elif hasattr(one, "__dict__") and type(one).__module__.startswith("proa"):
            waiting += vars(one).values()
    return sum(found.values())


def attention(kv_heads: int, dim: int = 128, rope: Rope | None = None) -> Attention:
    return Attention(2048, 32, kv_heads, dim, rope or Rope(dim))


def model(mixer: Any, ffn: Any = None, layers: int = 3, vocab: int = 151936) -> Model:
    return Model(mixer.hidden, vocab, (Block(mixer, ffn or Mlp(mixer.hidden, 768)),) * layers, 1e-6, 40960)


MOE = Moe(2048, 128, 8, 768, Router("softmax", True))


def limits(running: int, context: int, batch: int = 512) -> StepLimits:
    return StepLimits(max(batch, running), running, context, 16, max(running, SCORED_ROWS))


# ---- graphs


def test_there_is_a_graph_for_each_bucket() -> None:
    """Seen: 7 were planned of a GPU that captures 11 at 64 requests, and 35 at 256."""
    assert [len(sizes.buckets(n)) for n in RUNNING] == [1, 5, 11, 35]
    spec = model(attention(4), layers=48)
    one = vram.graphs_bytes(spec, 1, False)
    steps = one - vram.HEAD_NODES * vram.GRAPH_NODE_BYTES * 2  # for one request, and for a scored prompt's rows
    for running in RUNNING:
        heads = {*sizes.buckets(running), max(running, SCORED_ROWS)}
        planned = vram.graphs_bytes(spec, running, False)
        assert planned == len(sizes.buckets(running)) * steps + len(heads) * vram.HEAD_NODES * vram.GRAPH_NODE_BYTES
    assert vram.graphs_bytes(spec, 256, True) == 0, "a simulated GPU has none"
    captured = limits(256, 4096).decode_sizes(deterministic=False)
    assert captured == sizes.buckets(256), "the executor captures those"


# ---- attention


@pytest.mark.parametrize("running", RUNNING)
@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8, 32])
def test_attention_has_room_for_its_splits_on_any_gpu(kv_heads: int, running: int) -> None:
    """Seen: 64 parts were planned of kernels that cut into 66 on an H200 with 4 KV heads, and into up to 256."""
    spec = model(attention(kv_heads))
    for processors in PROCESSORS:
        for sequences in sizes.buckets(running):
            splits = sizes.attention_splits(sequences, kv_heads, processors)
            need = 4 * sizes.attention_floats(sequences, 32, 128, splits)
            assert need <= kernels.partials_bytes(spec, running), (processors, sequences)


def test_attention_of_many_sequences_is_cut_less() -> None:
    """The plan is not a product of the most of both."""
    assert kernels.partials_bytes(model(attention(4)), 256) < 2 * vram.partials_bytes(model(attention(4)), 4)


# ---- what an executor holds


@pytest.mark.parametrize("running", RUNNING)
@pytest.mark.parametrize("context", [1024, 40960, 131072])
def test_inputs_of_all_graphs(context: int, running: int) -> None:
    """Each graph has its own page table: with 256 requests 8463 rows in all, where 256 were planned."""
    of = limits(running, context)
    pages = -(-context // of.page_tokens)
    each = [DeviceInputs(n, n, pages, rows_each=1, device=META) for n in sizes.buckets(running)]
    shared = DeviceInputs(of.rows, running, pages, rows_each=0, device=META)
    taken = device_bytes(each, shared)
    fixed, per_token = vram.inputs_bytes(running, of.rows, of.page_tokens)
    assert taken <= fixed + per_token * context <= 1.3 * taken + (1 << 20)


@pytest.mark.parametrize("rope", [Rope(128), Rope(64), Rope(128, scaling=RopeScaling("dynamic", 2.0, 4096))])
@pytest.mark.parametrize("context", [1024, 40960, 262144])
def test_angles_of_all_positions(context: int, rope: Rope) -> None:
    """Seen: a plan lacked the 20 MiB of a context of 40960 tokens."""
    spec, of = model(attention(4, rope=rope)), limits(4, context)
    fixed, per_token = vram.angles_bytes(spec, of.rows)
    assert device_bytes(AngleTables(spec.ropes, of, META)) == fixed + per_token * context


def on_host(logprobs: DeviceLogprobs) -> int:
    """Bytes of tensors that lie in RAM beside a GPU; on "meta" they cannot be told from the device's."""
    return logprobs._host_ids.nbytes + logprobs._host_logprobs.nbytes


@pytest.mark.parametrize("vocab", [50, 512, 16_384, 151_936])
@pytest.mark.parametrize("running", RUNNING)
def test_logits_and_sampler(running: int, vocab: int) -> None:
    """Logits exist three times: in the shared buffer, in the graphs' pool, in that of steps without graphs."""
    head_rows = max(running, SCORED_ROWS)
    logprobs = DeviceLogprobs(head_rows, vocab, META, OPS)
    sampler = DeviceSampler(running, vocab, META, OPS, logprobs)
    taken = device_bytes(sampler) - on_host(logprobs)
    taken += 3 * 4 * head_rows * vocab + 2 * 8 * sizes.argmax_keys(head_rows, vocab)
    planned = vram.scoring_bytes(vocab, running)
    assert taken <= planned <= 1.01 * taken + 4096


@pytest.mark.parametrize(("rows", "top_k"), [(1, 1), (512, 8), (4096, 10)])
def test_fault_records(rows: int, top_k: int) -> None:
    assert device_bytes(FaultRecords(rows, rows, top_k, META)) == sizes.fault_bytes(rows, top_k)


@pytest.mark.parametrize(("experts", "top_k", "width"), [(8, 2, 48), (128, 8, 768), (512, 10, 512), (64, 6, 1408)])
@pytest.mark.parametrize("tokens", [1, 24, 512, 4096])
def test_space_of_experts(tokens: int, experts: int, top_k: int, width: int) -> None:
    shape = ExpertShape(2048, width)
    taken = device_bytes(expert_space(tokens, top_k, experts, shape, META))
    assert taken == sizes.expert_space_bytes(tokens, top_k, experts, 2048, shape.down.padded_columns)


def test_layers_of_one_shape_share_their_space() -> None:
    """Others have one of their own: formats pad the columns of the down projection differently."""
    one = model(attention(4), MOE)
    other = Moe(2048, 64, 6, 704, Router("softmax", True))
    mixed = Model(2048, 1000, (Block(attention(4), MOE), Block(attention(4), other)), 1e-6, 4096)
    assert vram.experts_bytes(one, {}, 512) == sizes.expert_space_bytes(512, 8, 128, 2048, 768)
    both = vram.experts_bytes(one, {}, 512) + sizes.expert_space_bytes(512, 8, 64, 2048, 704)
    assert vram.experts_bytes(mixed, {}, 512) == both


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("tokens", [64, 512])
def test_few_rows_beside_prompts_have_a_space_of_their_own(tokens: int, beside: bool) -> None:
    spaces = GpuSpaces(OPS, tokens, 8, beside=beside)
    slots = SimpleNamespace(up=torch.zeros(0, device=META))
    layer: Any = SimpleNamespace(hidden=2048, experts=128, shape=ExpertShape(2048, 768), slots=slots)
    many, few = spaces.of(layer), spaces.of(layer, few=True)
    assert spaces.of(layer) is many
    assert (few is not many) == (beside and tokens >= sizes.FEW_ROWS)
    if few is not many:
        assert vram.experts_bytes(model(attention(4), MOE), {}, sizes.FEW_ROWS - 1) == device_bytes(few)
        least = device_bytes(few) + vram.CUBLAS_BYTES
        assert vram.beside_bytes(model(attention(4), MOE), {}, tokens) > least


# ---- together


@pytest.mark.parametrize("running", RUNNING)
@pytest.mark.parametrize(
    "mixer",
    [
        attention(4), LatentAttention(2048, 16, None, 512, 128, 128, Rope(64)),
        GatedDeltaNet(2048, 16, 32, 128, 128, 4),
    ],
    ids=["attention", "latent", "linear"],
)  # fmt: skip
def test_the_planned_demand_covers_all_buffers(mixer: Any, running: int) -> None:
    spec, context, page_tokens = model(mixer, MOE, vocab=32000), 40960, 16
    of = limits(running, context)
    pages = -(-context // page_tokens)
    logprobs = DeviceLogprobs(of.head_rows, spec.vocab, META, OPS)
    held = device_bytes(
        [DeviceInputs(n, n, pages, rows_each=1, device=META) for n in sizes.buckets(running)],
        DeviceInputs(of.rows, running, pages, rows_each=0, device=META), AngleTables(spec.ropes, of, META),
        DeviceSampler(running, spec.vocab, META, OPS, logprobs), FaultRecords(of.rows, of.rows, 8, META),
        expert_space(of.rows, 8, 128, ExpertShape(2048, 768), META),
    )  # fmt: skip
    held += -on_host(logprobs) + 3 * 4 * of.head_rows * spec.vocab + 2 * of.rows * spec.hidden
    need = vram.vram_demand(spec, page_tokens, running, of.rows, False, {})
    assert held + kernels.partials_bytes(spec, running) <= need.workspace_bytes(context)
