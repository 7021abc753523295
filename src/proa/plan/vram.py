"""What a model needs in VRAM beside its routed experts, and what is left for the CPU's RAM then: pure formulas over its
spec. Never: options, free memory, decisions.

VRAM: context + dense weights + KV + recurrent states + workspace + graphs + resident experts
RAM:  process + experts (all of them, or those that are not resident) + loading + workspace

Terms that depend on kernels are upper bounds; docs/decisions/018-vram-plan.md says where each is from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from proa.models.spec import GatedDeltaNet, Model, Moe
from proa.native.formats import BF16_FORM, Form, Format, kept_form
from proa.plan.budget import LOADING_BYTES, PROCESS_BYTES, Demand, logits_bytes, row_bytes
from proa.plan.packed_size import of_heads
from proa.plan.placement import BF16_BYTES, MoeLayer, bias_bytes, packed_bytes

# CUDA's context, cuBLAS and its workspaces, modules of compiled kernels.
CONTEXT_BYTES = 600 << 20
# What CUDA and a CUDA build of torch add to the engine's process in RAM.
CUDA_PROCESS_BYTES = 1 << 30

# A captured decode step: kernels of a block and around the blocks, memory of a node, rows of the largest graph. There
# is a graph for every power of two up to --max-running.
GRAPH_NODES_PER_BLOCK, GRAPH_NODES_AROUND, GRAPH_NODE_BYTES, GRAPH_ROWS_MOST = 16, 32, 64 << 10, 64
LATENT_NODES = 4  # more, of a block of latent attention: queries' norm and second map, maps of heads

# Attention over a long context is cut into at most so many parts; each leaves a float32 vector a head, and its
# maximum and sum.
ATTENTION_PARTS = 64

# Latent attention is cut for 2 programs a multiprocessor, of which there are up to 192; a program has up to 64 heads.
LATENT_PARTS, LATENT_HEADS = 2 * 192, 64

# The gated delta rule goes by chunks of so many rows; each row leaves, of each head, two numbers a row of its chunk.
DELTA_CHUNK = 64

# Of a GPU's sampler: changed logits of a step, and what small vocabularies take. Its candidates fit into what the CPU's
# sampler would take; logits themselves are there twice, in float32 (engine/device_sampler.py, engine/graphs.py).
SAMPLER_BYTES, LOGIT_BYTES = 4 << 20, 8
# Programs that share the columns of packed linear layers leave their sums: up to 198 of them 128 x 128 in float32.
LINEAR_PARTIAL_BYTES = 13 << 20
# Those of many tokens become rows of bfloat16, so many bytes at a time.
LINEAR_ROWS_BYTES = 64 << 20

# The CPU's results of the down projection wait by slots, so many bytes at a time (decision 017).
SLOTS_BYTES = 64 << 20


def dense_bytes(spec: Model, stored: Mapping[str, str]) -> int:
    """Everything but routed experts, of which there are the biases: matrices in panels, vectors in float32. `stored`:
    see `dense_form`."""
    biases = sum(ffn.experts * bias_bytes(ffn) for ffn in _routed(spec))
    rest = spec.params(routed=False)
    return biases + sum(_param_bytes(shape, dense_form(name, shape, stored)) for name, shape in rest)


def dense_read_bytes(spec: Model, stored: Mapping[str, str]) -> int:
    """Of these, what one decoded token reads: of an embedding that is not the head, next to nothing."""
    idle_bytes = sum((ffn.experts - ffn.top_k) * bias_bytes(ffn) for ffn in _routed(spec))
    lookup_bytes = 0 if spec.tied else _param_bytes((spec.vocab, spec.hidden), BF16_FORM)
    return dense_bytes(spec, stored) - idle_bytes - lookup_bytes


def _routed(spec: Model) -> list[Moe]:
    return [block.ffn for block in spec.blocks if isinstance(block.ffn, Moe)]


def dense_form(name: str, shape: tuple[int, ...], stored: Mapping[str, str]) -> Form:
    """Of a parameter on the GPU. `stored`: the checkpoint's type of each, by our names; empty: nothing is kept. Rows of
    the embedding are looked up, and heads have maps of their own: both are bfloat16.
    """
    if not stored or len(shape) != 2 or name == "embed.weight" or of_heads(name):
        return BF16_FORM
    return kept_form({stored[name]}, shape[1])


def linear_bytes(spec: Model, stored: Mapping[str, str]) -> dict[Format, int]:
    """Of linear layers in VRAM, by format; see `dense_form`."""
    found: dict[Format, int] = {}
    for name, shape in spec.params(routed=False):
        if len(shape) == 2 and name != "embed.weight":
            form = dense_form(name, shape, stored)
            found[form.format] = found.get(form.format, 0) + _param_bytes(shape, form)
    return found


def context_bytes(simulated: bool) -> int:
    return 0 if simulated else CONTEXT_BYTES


def graphs_bytes(spec: Model, max_running: int, simulated: bool) -> int:
    if simulated:
        return 0
    graphs = (min(max_running, GRAPH_ROWS_MOST) - 1).bit_length() + 1
    nodes = GRAPH_NODES_PER_BLOCK * len(spec.blocks) + LATENT_NODES * len(spec.latent_attention) + GRAPH_NODES_AROUND
    return graphs * nodes * GRAPH_NODE_BYTES


def vram_demand(
    spec: Model, page_tokens: int, max_running: int, batch_tokens: int, simulated: bool, stored: Mapping[str, str],
    kv_elem_bytes: int = BF16_BYTES,
) -> Demand:  # fmt: skip
    """The demand on VRAM without routed experts, running steps of up to `batch_tokens`. `stored`: see `dense_form`."""
    partials = max((a.heads * (a.head_dim + 2) * 4 * ATTENTION_PARTS for a in spec.attention), default=0)
    return Demand(
        weights_bytes=dense_bytes(spec, stored),
        fixed_bytes=context_bytes(simulated) + graphs_bytes(spec, max_running, simulated),
        workspace_base_bytes=logits_bytes(spec, max_running)
        + (0 if simulated else SAMPLER_BYTES)
        + rows_bytes(spec, batch_tokens)
        + max(max_running * partials, latent_partials_bytes(spec, max_running))
        + _linear_workspace_bytes(spec, stored),
        # Page tables: an int64 for each page of each running request.
        workspace_bytes_per_context_token=-(-8 * max_running // page_tokens),
        page_bytes=page_tokens * spec.kv_bytes_per_token(kv_elem_bytes),
        page_tokens=page_tokens,
        states_bytes=max_running * spec.state_bytes_per_sequence(BF16_BYTES),
        copy_bytes=spec.state_bytes_per_sequence(BF16_BYTES),
    )


def rows_bytes(spec: Model, batch_tokens: int) -> int:
    """What the rows of a step of so many take on the GPU."""
    experts = max((_routed_row_bytes(b.ffn) for b in spec.blocks if isinstance(b.ffn, Moe)), default=0)
    return batch_tokens * (row_bytes(spec) + experts) + delta_chunks_bytes(spec, batch_tokens)


def latent_partials_bytes(spec: Model, max_running: int) -> int:
    """What splits leave: as many for all sequences together as keep every multiprocessor busy, and one more of each."""
    parts = [(-(-LATENT_PARTS // -(-a.heads // LATENT_HEADS)) + max_running, a) for a in spec.latent_attention]
    return max((count * a.heads * (a.rank + 1) * 4 for count, a in parts), default=0)


def delta_chunks_bytes(spec: Model, batch_tokens: int) -> int:
    """Of a layer of linear attention, what its chunks' inverses, scores and decays take in float32."""
    heads = max((b.mixer.value_heads for b in spec.blocks if isinstance(b.mixer, GatedDeltaNet)), default=0)
    return batch_tokens * heads * (2 * DELTA_CHUNK + 2) * 4


def process_bytes(simulated: bool) -> int:
    """RAM of the processes themselves."""
    return PROCESS_BYTES + (0 if simulated else CUDA_PROCESS_BYTES)


def host_workspace_bytes(spec: Model, max_running: int, batch_tokens: int) -> int:
    """RAM that steps need: what passes between CPU and GPU (rows in bfloat16, sums in float32, two steps in flight),
    the CPU's own experts, and logits that are sampled on the CPU."""
    passing = 2 * batch_tokens * spec.hidden * (2 + 4)
    routed = _routed(spec)
    experts = max((batch_tokens * ffn.top_k * ffn.width * 4 for ffn in routed), default=0)
    return logits_bytes(spec, max_running) + passing + experts + (SLOTS_BYTES if routed else 0)


def loading_bytes(layers: Sequence[MoeLayer], inclusive: bool) -> int:
    """RAM while loading: experts that will not stay in RAM are packed there, a layer at a time."""
    return LOADING_BYTES + (0 if inclusive else max((layer.total_bytes for layer in layers), default=0))


def _linear_workspace_bytes(spec: Model, stored: Mapping[str, str]) -> int:
    packed = linear_bytes(spec, stored).keys() - {Format.BF16}
    return LINEAR_PARTIAL_BYTES + LINEAR_ROWS_BYTES if packed else 0


def _routed_row_bytes(ffn: Moe) -> int:
    """One row of the experts' buffers: silu(gate) * up in bfloat16 and the result in float32, for each of top_k; and of
    a job that is copied to the CPU, and of its answer."""
    return ffn.top_k * (2 * ffn.width + 4 * ffn.hidden + 4 + 4) + ffn.hidden * (2 + 4)


def _param_bytes(shape: tuple[int, ...], form: Form) -> int:
    return packed_bytes(*shape, form) if len(shape) == 2 else 4 * prod(shape)
