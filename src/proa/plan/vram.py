"""The VRAM that a model needs beside its routed experts, and the RAM that it needs with a GPU: pure formulas over its
spec. Never: options, free memory, decisions.

VRAM: context + dense weights + KV + recurrent states + workspace + graphs + resident experts
RAM:  process + experts (all of them, or those that are not resident) + loading + workspace

Terms that depend on kernels are upper bounds; docs/decisions/018-vram-plan.md has their sources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from proa.machine.cost.turns import over_tokens
from proa.models.spec import Block, Model, Moe
from proa.native.formats import BF16_FORM, Form, Format, kept_form, layout
from proa.ops import sizes
from proa.plan.budget import LOADING_BYTES, PROCESS_BYTES, SCORED_ROWS, Demand, logits_bytes, row_bytes
from proa.plan.kernels import chunks_bytes, long_bytes, partials_bytes
from proa.plan.packed_size import of_heads, packed_bytes
from proa.plan.placement import BF16_BYTES, MoeLayer, bias_bytes, moe_layers

# CUDA's context, cuBLAS and its workspaces, modules of compiled kernels. Measured on an H200 (torch 2.11): 527 MiB for
# the context, 92 more when weights are loaded, 138 for modules, 32 for cuBLAS, for any model: 789.
CONTEXT_BYTES = 800 << 20
CUBLAS_BYTES = 32 << 20  # of these; for each stream that computes products
# RAM that CUDA and a CUDA build of torch add to the engine's process.
CUDA_PROCESS_BYTES = 1 << 30

# torch takes memory from CUDA in segments: of 2 MiB for blocks up to 1 MiB, of 20 MiB for blocks up to 10 MiB. Graphs
# and steps without graphs have separate segments, and the last one of each kind may be almost empty.
ALLOCATOR_BYTES = 2 * (20 + 2) << 20

# Nodes of a captured decode step: per FFN (mixers say their own), around the blocks, and of the head, which is a
# separate graph; bytes per node (measured on an H200: 23 graphs of 8 blocks took 4 MiB, 1.1 KiB a node). sizes.buckets
# gives the number of graphs; one more head scores the rows of a prompt.
FFN_NODES, GRAPH_NODES_AROUND, HEAD_NODES, GRAPH_NODE_BYTES = 8, 16, 16, 4 << 10
# Nodes of a step with prompts for each of a decode step: 28 for each layer of Qwen3-30B-A3B and 35 of SmolLM2, with
# copies, where 16 are counted.
PROMPT_NODES = 2.5

# Graphs of a block of a step in parts: before and behind the wait for copies, behind that for the CPU. Bytes of each,
# besides its nodes (measured on an H100: 100 graphs of 2 nodes took 12.6 MB).
BLOCK_GRAPHS, GRAPH_BYTES = 3, 128 << 10

LOGIT_COPIES = 3  # float32: the graphs' common output, one in the graphs' pool, one in that of steps without graphs

# Split-K programs of packed linear layers write partial sums: up to 198 of 128 x 128 in float32.
LINEAR_PARTIAL_BYTES = 13 << 20

ROW_PERCENT = 125  # of the bytes of rows' tensors, with what torch's allocator loses between them

# Buffer for the CPU's results of the down projection, by (token, expert) pair (decision 017).
SLOTS_BYTES = 64 << 20


def dense_bytes(spec: Model, stored: Mapping[str, str]) -> int:
    """Bytes of all parameters but routed experts' matrices: matrices in panels, vectors and experts' biases in float32.
    stored: see `dense_form`."""
    biases = sum(ffn.experts * bias_bytes(ffn) for ffn in spec.routed.values())
    rest = spec.params(routed=False)
    return biases + sum(_param_bytes(shape, dense_form(name, shape, stored)) for name, shape in rest)


def dense_read_bytes(spec: Model, stored: Mapping[str, str]) -> int:
    """Bytes of dense_bytes that one decoded token reads; an untied embedding counts as 0."""
    idle_bytes = sum((ffn.experts - ffn.top_k) * bias_bytes(ffn) for ffn in spec.routed.values())
    lookup_bytes = 0 if spec.tied else _param_bytes((spec.vocab, spec.hidden), BF16_FORM)
    return dense_bytes(spec, stored) - idle_bytes - lookup_bytes


def dense_form(name: str, shape: tuple[int, ...], stored: Mapping[str, str]) -> Form:
    """The form of a parameter on the GPU. stored: the checkpoint's type of each, by Proa's names; empty: all bfloat16.
    The embedding, whose rows are looked up, and parameters split by head are bfloat16 in any case.
    """
    if not stored or len(shape) != 2 or name == "embed.weight" or of_heads(name):
        return BF16_FORM
    return kept_form({stored[name]}, shape[1])


def linear_bytes(spec: Model, stored: Mapping[str, str]) -> dict[Format, int]:
    """Bytes of linear layers in VRAM, by format. stored: see `dense_form`."""
    found: dict[Format, int] = {}
    for name, shape in spec.params(routed=False):
        if len(shape) == 2 and name != "embed.weight":
            form = dense_form(name, shape, stored)
            found[form.format] = found.get(form.format, 0) + _param_bytes(shape, form)
    return found


def context_bytes(simulated: bool) -> int:
    return 0 if simulated else CONTEXT_BYTES


def graphs_bytes(spec: Model, max_running: int, simulated: bool) -> int:
    """Bytes of the graphs of decode and of heads."""
    if simulated:
        return 0
    steps = sizes.buckets(max_running)
    heads = {*steps, max(max_running, SCORED_ROWS)}
    return (len(steps) * _step_nodes(spec) + len(heads) * HEAD_NODES) * GRAPH_NODE_BYTES


def prompt_graphs_bytes(spec: Model, batch_tokens: int) -> int:
    """Bytes of the graphs of whole steps with prompts, and of the activations of the largest one, in the graphs' pool.
    vram_demand does not count them: they are made where they fit."""
    rows = sizes.prompt_rows(batch_tokens)
    if not rows:
        return 0
    nodes = round(PROMPT_NODES * len(rows) * _step_nodes(spec))
    return nodes * GRAPH_NODE_BYTES + rows[-1] * row_bytes(spec) + chunks_bytes(spec, rows[-1])


def block_graphs_bytes(spec: Model, batch_tokens: int) -> int:
    """Bytes of the graphs of single blocks for short steps in parts, and of what they read and write. As
    prompt_graphs_bytes, vram_demand does not count them."""
    rows = sizes.prompt_rows(batch_tokens)
    if not rows:
        return 0
    angles = sum(sizes.angle_bytes(rows[-1], rope.dim) for rope in spec.ropes)
    pieces = BLOCK_GRAPHS * len(spec.blocks) * len(rows)
    return prompt_graphs_bytes(spec, batch_tokens) + pieces * GRAPH_BYTES + 2 * rows[-1] * spec.hidden + angles


def _step_nodes(spec: Model) -> int:
    nodes = sum(mixer.graph_nodes for mixer in spec.mixers) + FFN_NODES * len(spec.ffns) + GRAPH_NODES_AROUND
    if spec.scaled:  # the embeddings, the hidden states of the head, and what each mixer and MLP adds
        nodes += 2 + 2 * len(spec.blocks)
    return nodes


def vram_demand(
    spec: Model, page_tokens: int, max_running: int, batch_tokens: int, simulated: bool, stored: Mapping[str, str],
    kv_elem_bytes: int = BF16_BYTES,
) -> Demand:  # fmt: skip
    """The demand on VRAM without routed experts, for steps of up to `batch_tokens`. stored: see `dense_form`."""
    if simulated:  # steps are plain torch: page tables have an int64 for each page of each running request
        base = logits_bytes(spec, max_running) + rows_bytes(spec, batch_tokens, row_bytes(spec), stored)
        per_token = -(-8 * max_running // page_tokens)
    else:
        base, per_token = _workspace(spec, page_tokens, max_running, batch_tokens, stored)
    return Demand(
        weights_bytes=dense_bytes(spec, stored),
        fixed_bytes=context_bytes(simulated) + graphs_bytes(spec, max_running, simulated),
        workspace_base_bytes=base,
        workspace_bytes_per_context_token=per_token,
        page_bytes=page_tokens * spec.kv_bytes_per_token(kv_elem_bytes),
        page_tokens=page_tokens,
        states_bytes=max_running * spec.state_bytes_per_sequence(BF16_BYTES),
        copy_bytes=spec.state_bytes_per_sequence(BF16_BYTES),
    )


def _workspace(
    spec: Model, page_tokens: int, max_running: int, batch_tokens: int, stored: Mapping[str, str]
) -> tuple[int, int]:  # fmt: skip
    """The workspace of a real GPU in bytes: (fixed, per token of context)."""
    inputs, inputs_per_token = inputs_bytes(max_running, batch_tokens, page_tokens)
    angles, angles_per_token = angles_bytes(spec, batch_tokens)
    fixed = (
        ALLOCATOR_BYTES,
        scoring_bytes(spec.vocab, max_running),
        rows_bytes(spec, batch_tokens, device_row_bytes(spec), stored),
        max_running * row_bytes(spec),  # activations in the graphs' pool
        _over_bytes(spec, max_running, over_tokens(batch_tokens)),
        partials_bytes(spec, max_running),
        long_bytes(spec, batch_tokens),
        _linear_workspace_bytes(spec, stored),
        _hybrid_bytes(spec, batch_tokens),
        inputs,
        angles,
    )
    return sum(fixed), inputs_per_token + angles_per_token


def _over_bytes(spec: Model, max_running: int, tokens: int) -> int:
    """Bytes of a paused prefill step that overtakes another one, without its page tables: inputs, angles, hidden
    states before and after a block, and a copy at its end."""
    angles = sum(sizes.angle_bytes(tokens, rope.dim) for rope in spec.ropes)
    return sizes.input_bytes(tokens, max_running, 1) + angles + 3 * 2 * tokens * spec.hidden


def device_row_bytes(spec: Model) -> int:
    """Activations of one row on a GPU, in bfloat16: residual, norms and their sums with it (6 * hidden), and what the
    mixer or the FFN writes, gate, up and their product (4 * width); then what the allocator loses between them."""

    def nbytes(block: Block) -> int:
        mixed = block.mixer.device_row_bytes if block.mixer else 0
        return 2 * 6 * spec.hidden + max(mixed, 2 * 4 * (block.ffn.widest if block.ffn else 0))

    return max(map(nbytes, spec.blocks), default=0) * ROW_PERCENT // 100


def rows_bytes(
    spec: Model, batch_tokens: int, each_bytes: int, stored: Mapping[str, str] | None = None
) -> int:  # fmt: skip
    """Bytes on the GPU for the rows of a step: activations, experts' workspaces, copies of rows to and from the CPU.
    each_bytes: activations of one row."""
    passing = max((6 * ffn.hidden for ffn in spec.routed.values()), default=0)
    experts = experts_bytes(spec, stored or {}, batch_tokens)
    return batch_tokens * (each_bytes + passing) + experts + chunks_bytes(spec, batch_tokens)


def experts_bytes(spec: Model, stored: Mapping[str, str], batch_tokens: int) -> int:
    """Workspaces between the kernels of experts, one for each padded size: layers with experts of one size share it."""
    top_k = max((ffn.top_k for ffn in spec.routed.values()), default=0)
    shapes = {
        (ffn.experts, ffn.hidden, _padded_columns(ffn, layer.forms[1]))
        for ffn, layer in zip(spec.routed.values(), moe_layers(spec, stored), strict=True)
    }
    return sum(sizes.expert_space_bytes(batch_tokens, top_k, *shape) for shape in shapes)


def beside_bytes(spec: Model, stored: Mapping[str, str], batch_tokens: int) -> int:
    """Bytes on the GPU for prompts beside decode steps, on a stream of their own: cuBLAS's workspace, segments of the
    allocator and sums of packed linear layers once more, and workspaces of experts for the few rows of decode steps."""
    few = min(batch_tokens, sizes.FEW_ROWS - 1)
    sums = LINEAR_PARTIAL_BYTES if _has_packed(spec, stored) else 0
    return CUBLAS_BYTES + ALLOCATOR_BYTES // 2 + sums + experts_bytes(spec, stored, few)


def _padded_columns(ffn: Moe, down: Form) -> int:
    return layout(down.format, ffn.hidden, ffn.width, down.group).padded_columns


def scoring_bytes(vocab: int, max_running: int) -> int:
    """Bytes for logits of a step's rows or of a chunk of a scored prompt, and for the sampler and logprobs."""
    rows = max(max_running, SCORED_ROWS)
    logits = LOGIT_COPIES * 4 * rows * vocab + (LOGIT_COPIES - 1) * 8 * sizes.argmax_keys(rows, vocab)
    return logits + sizes.sampler_bytes(max_running, vocab) + sizes.logprobs_bytes(rows, vocab)


def inputs_bytes(max_running: int, batch_tokens: int, page_tokens: int) -> tuple[int, int]:
    """Bytes of step inputs, for each graph and for steps without graphs: (fixed, per token of context). Each graph has
    its own page tables, and so has a step that overtakes another one (_over_bytes)."""
    buckets = sizes.buckets(max_running)
    fixed = sum(sizes.input_bytes(n, n, 1) for n in buckets) + sizes.input_bytes(batch_tokens, max_running, 1)
    return fixed, -(-4 * (sum(buckets) + 2 * max_running) // page_tokens)


def angles_bytes(spec: Model, batch_tokens: int) -> tuple[int, int]:
    """Bytes of rotary angles: (of a step's rows, for dynamic ropes; per token of context, for static ones)."""
    changing = sum(sizes.angle_bytes(batch_tokens, rope.dim) for rope in spec.ropes if rope.dynamic)
    return changing, sum(sizes.angle_bytes(1, rope.dim) for rope in spec.ropes if not rope.dynamic)


def _hybrid_bytes(spec: Model, batch_tokens: int) -> int:
    """Bytes of residency tables and fault records."""
    routed = list(spec.routed.values())
    if not routed:
        return 0
    tables = sizes.residency_bytes(len(routed), max(ffn.experts for ffn in routed))
    return tables + sizes.fault_bytes(batch_tokens, max(ffn.top_k for ffn in routed))


def process_bytes(simulated: bool) -> int:
    """RAM of both processes, without weights."""
    return PROCESS_BYTES + (0 if simulated else CUDA_PROCESS_BYTES)


def host_workspace_bytes(spec: Model, max_running: int, batch_tokens: int) -> int:
    """RAM that steps need: transfers between CPU and GPU (rows in bfloat16, sums in float32, two steps in flight), the
    activations of the CPU's experts, and logits sampled on the CPU."""
    passing = 2 * batch_tokens * spec.hidden * (2 + 4)
    routed = list(spec.routed.values())
    experts = max((batch_tokens * ffn.top_k * ffn.width * 4 for ffn in routed), default=0)
    return logits_bytes(spec, max_running) + passing + experts + (SLOTS_BYTES if routed else 0)


def loading_bytes(layers: Sequence[MoeLayer], inclusive: bool) -> int:
    """RAM that loading needs: experts that do not stay in RAM are packed there first, one layer at a time."""
    return LOADING_BYTES + (0 if inclusive else max((layer.total_bytes for layer in layers), default=0))


def _linear_workspace_bytes(spec: Model, stored: Mapping[str, str]) -> int:
    return LINEAR_PARTIAL_BYTES + sizes.UNPACKED_BYTES if _has_packed(spec, stored) else 0


def _has_packed(spec: Model, stored: Mapping[str, str]) -> bool:
    """True if a linear layer is kept in another format than bfloat16."""
    return bool(linear_bytes(spec, stored).keys() - {Format.BF16})


def _param_bytes(shape: tuple[int, ...], form: Form) -> int:
    return packed_bytes(*shape, form) if len(shape) == 2 else 4 * prod(shape)
