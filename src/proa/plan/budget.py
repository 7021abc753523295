"""The RAM that a model needs if the CPU computes everything: pure formulas over its spec. Never: options, free memory,
decisions. With a GPU: plan/vram.py.

process + weights + loading + kv + states + workspace
"""

from __future__ import annotations

from dataclasses import dataclass

from proa.models.spec import Block, Model

ELEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
KV_ELEM_BYTES = {**ELEM_BYTES, "float8_e4m3fn": 1}

# Resident memory of both processes, measured on x86-64 with Python 3.11 and torch 2.13 for CPUs: the engine after its
# first operations 249 MB, matrix kernels that oneDNN compiles and keeps 185 MB (docs/decisions/010), the server 118 MB.
PROCESS_BYTES = 576 << 20

# The loader streams chunks of about 1 MiB, each with its decoded form (weights/load.py), or fills dummy weights from
# 16 MiB of random numbers; the rest is memory that allocators retain.
LOADING_BYTES = 64 << 20

# The workspace is an upper bound: the peak was measured at 0.4 to 0.65 of it (Qwen3-30B's shapes, steps of 512 and
# 2048 rows, contexts of 4096 to 32768, bfloat16 and float32).
# Bytes per vocabulary entry of one row being sampled: logits in the model's type, float32 copies for penalties and
# temperature, float64 probabilities and their cumulative sum, and buffers of the sort (sampling/sampler.py).
SAMPLED_LOGIT_BYTES = 48
# Rows whose logits exist at once when a request asks for a prompt's logprobs (engine/runner.py), and their bytes per
# entry: the model's type, float32, log-softmax.
SCORED_ROWS, SCORED_LOGIT_BYTES = 64, 12
# Bytes per (query, key) pair of the causal mask: up to three bools, and the mask in the widest type.
MASK_BYTES = 7


@dataclass(frozen=True)
class Demand:
    """The demand of a model on one memory, RAM or VRAM, in bytes: a function of context length and KV pages."""

    weights_bytes: int
    fixed_bytes: int  # independent of context and pages: processes, loading; CUDA, graphs
    workspace_base_bytes: int
    workspace_bytes_per_context_token: int
    page_bytes: int
    page_tokens: int
    states_bytes: int = 0  # recurrent states of all running requests
    copy_bytes: int = 0  # recurrent states of one sequence
    copies: int = 0  # copies of one sequence's states, from which prompts resume

    @property
    def slots_bytes(self) -> int:
        """Recurrent states of running requests, and copies."""
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
    """The demand on RAM of a model with `elem_bytes` per parameter, for steps of up to `batch_tokens` tokens."""
    activations = batch_tokens * row_bytes(spec)
    # For one layer and one sequence at a time: its pages, gathered into K and V, and its mask.
    gathered = max((cache.elems_per_token for cache in spec.caches), default=0)
    gathered *= elem_bytes if kv_elem_bytes == elem_bytes else kv_elem_bytes + elem_bytes  # as stored, then widened
    pair_bytes = MASK_BYTES + max((mixer.pair_bytes for mixer in spec.mixers), default=0)
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
    """Logits of a step's sampled rows and of a chunk of a scored prompt, with the sampler's buffers."""
    return spec.vocab * (max_running * SAMPLED_LOGIT_BYTES + SCORED_ROWS * SCORED_LOGIT_BYTES)


def row_bytes(spec: Model) -> int:
    """Activations of one row in the widest layer, all counted as float32: residual, norms and their squares (6 *
    hidden), the mixer's, gate, up and their product (4 * width)."""

    def values(block: Block) -> int:
        mixed = block.mixer.row_values if block.mixer else 0
        return 6 * spec.hidden + mixed + 4 * (block.ffn.widest if block.ffn else 0)

    return 4 * max(map(values, spec.blocks), default=0)
