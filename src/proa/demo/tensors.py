"""Converts the tensors of the Llama GGUF to those of the Qwen2-MoE checkpoint.

With all experts selected the result equals the dense model (x: the MLP's input):
- Qwen2-MoE scales the shared expert by sigmoid(g x); with g = 0 that is 1/2, so its down-projection is doubled;
- it weights the routed experts by a softmax over the selected logits (`norm_topk_prob`). The logits are so small that
  each weight is 1/k up to bfloat16's rounding, so the down-projections are multiplied by k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize

from proa.demo.safetensors_writer import Array, Pending
from proa.demo.split import Split

LOGIT_RMS = 2.0**-10  # with much smaller logits, rounding in a float32 softmax would change the top-k experts
SHARED_FACTOR = 2.0

Change = Callable[[Array], Array]


def moe_tensors(reader: GGUFReader, config: Mapping[str, Any], split: Split) -> Iterator[Pending]:
    """Yield all tensors of the checkpoint described by `config` (config.json)."""
    source = _Source(reader)
    yield source.pending("model.embed_tokens.weight", "token_embd.weight")
    yield source.pending("model.norm.weight", "output_norm.weight")
    for layer in range(config["num_hidden_layers"]):
        ours, theirs = f"model.layers.{layer}", f"blk.{layer}"
        for name, stored in (
            ("input_layernorm", "attn_norm"),
            ("post_attention_layernorm", "ffn_norm"),
            ("self_attn.v_proj", "attn_v"),
            ("self_attn.o_proj", "attn_output"),
        ):
            yield source.pending(f"{ours}.{name}.weight", f"{theirs}.{stored}.weight")
        for name, heads in (("q", config["num_attention_heads"]), ("k", config["num_key_value_heads"])):
            stored = f"{theirs}.attn_{name}.weight"
            yield source.pending(f"{ours}.self_attn.{name}_proj.weight", stored, change=_half_split_rows(heads))
        shared, experts = split.parts(layer, config["shared_expert_intermediate_size"])
        yield from _router(f"{ours}.mlp", split.router[layer])
        yield from _experts(source, f"{ours}.mlp", f"{theirs}.ffn", shared, experts, config["num_experts_per_tok"])


class _Source:
    """Dequantised tensors of the GGUF, float32 [out, in]. Caches the last one: an MLP matrix is sliced 17 times."""

    def __init__(self, reader: GGUFReader) -> None:
        self._tensors = {t.name: t for t in reader.tensors}
        self._last: tuple[str, Array] | None = None

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self._tensors[name].shape))

    def read(self, name: str) -> Array:
        if self._last is None or self._last[0] != name:
            tensor = self._tensors[name]
            self._last = (name, dequantize(tensor.data, tensor.tensor_type).reshape(self.shape(name)))
        return self._last[1]

    def pending(
        self, target: str, name: str, shape: tuple[int, ...] | None = None, change: Change | None = None
    ) -> Pending:
        """Declare the tensor `target`: the GGUF's tensor `name`, transformed by `change` to `shape`, if given."""
        return Pending(
            target, shape or self.shape(name), lambda: change(self.read(name)) if change else self.read(name)
        )


def _half_split_rows(heads: int) -> Change:
    """Return a function that reorders the rows of q or k: GGUF stores a head's rotary pairs as (0,1)(2,3)..., Hugging
    Face as (0,d/2)(1,d/2+1)..."""

    def change(matrix: Array) -> Array:
        num_in = matrix.shape[1]
        return matrix.reshape(heads, -1, 2, num_in).swapaxes(1, 2).reshape(-1, num_in)

    return change


def _router(ours: str, logits: Array) -> Iterator[Pending]:
    weight = logits.astype(np.float32) * np.float32(LOGIT_RMS)
    no_gate = np.zeros((1, weight.shape[1]), np.float32)
    yield Pending(f"{ours}.gate.weight", weight.shape, lambda: weight)
    yield Pending(f"{ours}.shared_expert_gate.weight", no_gate.shape, lambda: no_gate)


def _experts(
    source: _Source, ours: str, theirs: str, shared: Array, experts: list[Array], top_k: int
) -> Iterator[Pending]:
    """Yield the experts' matrices: slices of the MLP's gate and up by rows, of down by columns. Ordered by source
    matrix, which _Source caches."""
    parts = [("shared_expert", shared, SHARED_FACTOR)]
    parts += [(f"experts.{e}", neurons, float(top_k)) for e, neurons in enumerate(experts)]
    hidden = source.shape(f"{theirs}_down.weight")[0]
    for kind in ("gate", "up"):
        for part, neurons, _ in parts:
            name, shape = f"{ours}.{part}.{kind}_proj.weight", (len(neurons), hidden)
            yield source.pending(name, f"{theirs}_{kind}.weight", shape, _rows(neurons))
    for part, neurons, factor in parts:
        name, shape = f"{ours}.{part}.down_proj.weight", (hidden, len(neurons))
        yield source.pending(name, f"{theirs}_down.weight", shape, _columns(neurons, factor))


def _rows(numbers: Array) -> Change:
    return lambda matrix: matrix[numbers]


def _columns(numbers: Array, factor: float) -> Change:
    return lambda matrix: matrix[:, numbers] * np.float32(factor)
