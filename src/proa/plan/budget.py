"""What a model needs in RAM where the CPU does everything: pure formulas over its spec. Never: options, free memory,
decisions. With a GPU: plan/vram.py.

process + weights + loading + kv + states + workspace
"""

from __future__ import annotations

from dataclasses import dataclass

from proa.models.spec import Attention, Block, LatentAttention, Mixer, Mlp, Model

ELEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
KV_ELEM_BYTES = {**ELEM_BYTES, "float8_e4m3fn": 1}

# Two processes, measured on x86-64 with Python 3.11 and torch 2.13 for CPUs, resident: the engine after its first
# operations 249 MB, the matrix kernels that oneDNN compiles and keeps 185 MB (docs/decisions/010), the server 118 MB.
PROCESS_BYTES = 576 << 20

# The loader streams chunks of about 1 MiB, each with its decoded form (weights/load.py), or fills dummy weights from
# 16 MiB of random numbers; the rest is what allocators keep.
LOADING_BYTES = 64 << 20

# The workspace is an upper bound: the peak was measured at 0.4 to 0.65 of it (Qwen3-30B's shapes, steps of 512 and
# 2048 rows, contexts of 4096 to 32768, bfloat16 and float32).
# Bytes per vocabulary entry of one row being sampled: logits in the model's type, float32 copies for penalties and
# temperature, float64 probabilities and their running sum, and what sorting adds (sampling/sampler.py).
SAMPLED_LOGIT_BYTES = 48
# Rows whose logits exist at once when a prompt's log-probabilities are asked (engine/runner.py), and their bytes
# per entry: the model's type, float32, its log-softmax.
SCORED_ROWS, SCORED_LOGIT_BYTES = 64, 12
# Bytes per (query, key) pair of the causal mask: up to three bools, and the mask in the widest type.
MASK_BYTES = 7
# And where heads have sinks: a head's logits in float32, and the mask once more.
SINK_BYTES = 5


@dataclass(frozen=True)
class Demand:
    """Bytes of one memory that a model needs as a function of what is still open: its context and its KV pages."""

    weights_bytes: int
    fixed_bytes: int  # whatever the model
    workspace_base_bytes: int
    workspace_bytes_per_context_token: int
    page_bytes: int
    page_tokens: int
    states_bytes: int = 0  # recurrent states of all that run at once
    copy_bytes: int = 0  # those of one sequence
    copies: int = 0  # of these, for prompts to go on from

    @property
    def slots_bytes(self) -> int:
        """States that are in use, and copies."""
        return self.states_bytes + self.copies * self.copy_bytes

    def pages(self, tokens: int) -> int:
        """KV pages that hold one sequence of `tokens`."""
        return -(-tokens // self.page_tokens)

    def workspace_bytes(self, context_tokens: int) -> int:
        return self.workspace_base_bytes + self.workspace_bytes_per_context_token * context_tokens

    def total_bytes(self, context_tokens: int, num_pages: int) -> int:
        kv_bytes = num_pages * self.page_bytes
        return (
            self.fixed_bytes + self.weights_bytes + self.slots_bytes + kv_bytes + self.workspace_bytes(context_tokens)
        )


def demand(
    spec: Model, elem_bytes: int, page_tokens: int, max_running: int, batch_tokens: int, kv_elem_bytes: int
) -> Demand:
    """The demand of a model held in `elem_bytes` per parameter, running steps of up to `batch_tokens`."""
    activations = batch_tokens * row_bytes(spec)
    # One layer at a time, one sequence at a time: its pages gathered into K and V, and its mask.
    gathered = max((block.mixer.cache.elems_per_token for block in spec.blocks), default=0)
    gathered *= elem_bytes if kv_elem_bytes == elem_bytes else kv_elem_bytes + elem_bytes  # as stored, then widened
    pair_bytes = MASK_BYTES + (SINK_BYTES if any(mixer.sinks for mixer in spec.attention) else 0)
    return Demand(
        weights_bytes=spec.num_params * elem_bytes,
        fixed_bytes=PROCESS_BYTES + LOADING_BYTES,
        workspace_base_bytes=logits_bytes(spec, max_running) + activations,
        workspace_bytes_per_context_token=gathered + batch_tokens * pair_bytes,
        page_bytes=page_tokens * spec.kv_bytes_per_token(kv_elem_bytes),
        page_tokens=page_tokens,
        states_bytes=max_running * spec.state_bytes_per_sequence(elem_bytes),
        copy_bytes=spec.state_bytes_per_sequence(elem_bytes),
    )


def logits_bytes(spec: Model, max_running: int) -> int:
    """Logits of a step's sampled rows and of a piece of a scored prompt, with all that is made of them."""
    return spec.vocab * (max_running * SAMPLED_LOGIT_BYTES + SCORED_ROWS * SCORED_LOGIT_BYTES)


def row_bytes(spec: Model) -> int:
    """Activations of one row in the widest layer."""
    return max((_row_bytes(block) for block in spec.blocks), default=0)


def _row_bytes(block: Block) -> int:
    """Activations of one row in one layer, all counted as float32: residual, norms and their squares (6 hidden), the
    mixer's, gate, up and their product (4 widths)."""
    mixer, ffn = block.mixer, block.ffn
    width = ffn.width if isinstance(ffn, Mlp) else max(ffn.width, ffn.shared.width if ffn.shared else 0)
    return 4 * (6 * mixer.hidden + _mixer_width(mixer) + 4 * width)


def _mixer_width(mixer: Mixer) -> int:
    """Queries, gates, keys and values before and after rotation (4 each); of latent attention the same, and what heads
    ask, see and say (2 each); of linear attention the projections and what is made of them (4 each), and the products
    of the convolution."""
    if isinstance(mixer, LatentAttention):
        among_latents = mixer.heads * (2 * mixer.rank + mixer.rope.dim + mixer.value_dim)
        return 4 * (mixer.q_rows + (mixer.q_rank or 0) + mixer.rank + mixer.rope.dim) + 2 * among_latents
    if isinstance(mixer, Attention):
        return 4 * (mixer.q_rows + 2 * mixer.kv_heads * mixer.head_dim)
    return (4 + mixer.taps) * mixer.channels + 4 * mixer.value_heads * mixer.value_dim
