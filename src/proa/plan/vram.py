"""What a model needs in VRAM beside its routed experts, and what is left for the CPU's RAM then: pure formulas over its
spec. Never: options, free memory, decisions.

VRAM: context + dense weights + KV + workspace + graphs + resident experts
RAM:  process + experts (all of them, or those that are not resident) + loading + workspace

Terms that depend on kernels are upper bounds; docs/decisions/018-vram-plan.md says where each is from.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from proa.models.spec import Model, Moe
from proa.plan.budget import LOADING_BYTES, PROCESS_BYTES, Demand, logits_bytes, row_bytes
from proa.plan.placement import BF16_BYTES, MoeLayer, packed_bytes

# CUDA's context, cuBLAS and its workspaces, modules of compiled kernels.
CONTEXT_BYTES = 600 << 20
# What CUDA and a CUDA build of torch add to the engine's process in RAM.
CUDA_PROCESS_BYTES = 1 << 30

# A captured decode step: kernels of a block and around the blocks, memory of a node, rows of the largest graph. There
# is a graph for every power of two up to --max-running.
GRAPH_NODES_PER_BLOCK, GRAPH_NODES_AROUND, GRAPH_NODE_BYTES, GRAPH_ROWS_MOST = 16, 32, 64 << 10, 64

# Attention over a long context is cut into at most so many parts; each leaves a float32 vector a head, and its
# maximum and sum.
ATTENTION_PARTS = 64

# Of a GPU's sampler: changed logits of a step, and what small vocabularies take. Its candidates fit into what the CPU's
# sampler would take; logits themselves are there twice, in float32 (engine/device_sampler.py, engine/graphs.py).
SAMPLER_BYTES, LOGIT_BYTES = 4 << 20, 8

# The CPU's results of the down projection wait by slots, so many bytes at a time (decision 017).
SLOTS_BYTES = 64 << 20


def dense_bytes(spec: Model) -> int:
    """Everything but routed experts: matrices in bfloat16 panels, vectors in float32."""
    return sum(_param_bytes(shape) for name, shape in spec.params() if ".ffn.experts." not in name)


def dense_read_bytes(spec: Model) -> int:
    """Of these, what one decoded token reads: of an embedding that is not the head, next to nothing."""
    return dense_bytes(spec) - (0 if spec.tied else _param_bytes((spec.vocab, spec.hidden)))


def context_bytes(simulated: bool) -> int:
    return 0 if simulated else CONTEXT_BYTES


def graphs_bytes(spec: Model, max_running: int, simulated: bool) -> int:
    if simulated:
        return 0
    graphs = (min(max_running, GRAPH_ROWS_MOST) - 1).bit_length() + 1
    return graphs * (GRAPH_NODES_PER_BLOCK * len(spec.blocks) + GRAPH_NODES_AROUND) * GRAPH_NODE_BYTES


def vram_demand(spec: Model, page_tokens: int, max_running: int, batch_tokens: int, simulated: bool) -> Demand:
    """The demand on VRAM without routed experts, running steps of up to `batch_tokens`."""
    experts = max((_routed_row_bytes(b.ffn) for b in spec.blocks if isinstance(b.ffn, Moe)), default=0)
    partials = max((b.mixer.heads * (b.mixer.head_dim + 2) * 4 * ATTENTION_PARTS for b in spec.blocks), default=0)
    return Demand(
        weights_bytes=dense_bytes(spec),
        fixed_bytes=context_bytes(simulated) + graphs_bytes(spec, max_running, simulated),
        workspace_base_bytes=logits_bytes(spec, max_running)
        + (0 if simulated else SAMPLER_BYTES)
        + batch_tokens * (row_bytes(spec) + experts)
        + max_running * partials,
        # Page tables: an int64 for each page of each running request.
        workspace_bytes_per_context_token=-(-8 * max_running // page_tokens),
        page_bytes=page_tokens * spec.kv_bytes_per_token(BF16_BYTES),
        page_tokens=page_tokens,
    )


def process_bytes(simulated: bool) -> int:
    """RAM of the processes themselves."""
    return PROCESS_BYTES + (0 if simulated else CUDA_PROCESS_BYTES)


def host_workspace_bytes(spec: Model, max_running: int, batch_tokens: int) -> int:
    """RAM that steps need: what passes between CPU and GPU (rows in bfloat16, sums in float32, two steps in flight),
    the CPU's own experts, and logits that are sampled on the CPU."""
    passing = 2 * batch_tokens * spec.hidden * (2 + 4)
    routed = [b.ffn for b in spec.blocks if isinstance(b.ffn, Moe)]
    experts = max((batch_tokens * ffn.top_k * ffn.width * 4 for ffn in routed), default=0)
    return logits_bytes(spec, max_running) + passing + experts + (SLOTS_BYTES if routed else 0)


def loading_bytes(layers: Sequence[MoeLayer], inclusive: bool) -> int:
    """RAM while loading: experts that will not stay in RAM are packed there, a layer at a time."""
    return LOADING_BYTES + (0 if inclusive else max((layer.total_bytes for layer in layers), default=0))


def _routed_row_bytes(ffn: Moe) -> int:
    """One row of the experts' buffers: silu(gate) * up in bfloat16 and the result in float32, for each of top_k."""
    return ffn.top_k * (2 * ffn.width + 4 * ffn.hidden)


def _param_bytes(shape: tuple[int, ...]) -> int:
    return packed_bytes(*shape) if len(shape) == 2 else 4 * prod(shape)
