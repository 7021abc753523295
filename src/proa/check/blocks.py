"""One block in plain torch, in two types: float32, which is the truth, and that of activations, which measures what
rounding does. Never: comparing, experts' weights in memory.

Weights come from check/truth.py; in the second type they are rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from proa.cache.pool import KvStorage, allocate_pool
from proa.layers.build import Mixer, build_mixer
from proa.layers.rope import cos_sin
from proa.layers.step import Step
from proa.models.spec import Block, Model, Moe
from proa.ops.reference import add, gated_add, reference, rms_norm
from proa.ops.table import Mlp, Norm, Parameters, RouterRule, Target, batch_of

Read = Callable[[str], Tensor]  # parameter -> float32
_PAGE_TOKENS = 16


@dataclass(frozen=True)
class Both:
    """Rows that were computed twice: in float32, and in the dtype of activations."""

    exact: Tensor
    rough: Tensor

    def map(self, exact: Callable[[Tensor], Tensor], rough: Callable[[Tensor], Tensor]) -> Both:
        return Both(exact(self.exact), rough(self.rough))


@dataclass(frozen=True)
class Lengths:
    """A path's sequences, whose rows are concatenated. prompts: tokens of each prompt, for dynamic rotary angles."""

    rows: tuple[int, ...]
    prompts: tuple[int, ...]


class BlockReference:
    """Block `number` of the model, without its routed experts."""

    def __init__(self, model: Model, number: int, dtype: torch.dtype, read: Read) -> None:
        block = model.blocks[number]
        self.spec, self._model, self._dtype = block, model, dtype
        self._read = read
        self._prefix = f"blocks.{number}"
        self._norms = {name: read(f"{self._prefix}.{name}.weight") for name in _norms(block)}
        self._mixers = [self._mixer(of) for of in (torch.float32, dtype)] if block.mixer is not None else []
        ffn = block.ffn
        self.router = self.router_bias = self.rule = None
        self._shared: list[Mlp] = []
        self._shared_gate: Tensor | None = None
        if isinstance(ffn, Moe):
            self.router = read(f"{self._prefix}.ffn.router.weight")
            self.router_bias = read(f"{self._prefix}.ffn.router.bias") if ffn.router.linear_bias else None
            correction = read(f"{self._prefix}.ffn.router.correction") if ffn.router.correction else None
            self.rule = RouterRule(ffn.top_k, ffn.router, correction)
            self._shared = self.mlps("ffn.shared") if ffn.shared else []
            self._shared_gate = read(f"{self._prefix}.ffn.shared_gate.weight") if ffn.shared_gate else None
        elif ffn is not None:
            self._shared = self.mlps("ffn")

    def _mixer(self, dtype: torch.dtype) -> Mixer:
        assert self.spec.mixer is not None
        made = build_mixer(self.spec.mixer, self._model, reference(dtype))
        fill(made.parameters(), self._read, f"{self._prefix}.mixer")
        return made

    def norm(self, name: str, x: Both) -> Both:
        exact = Norm(self._norms[name], self._model.norm_eps, self._model.norm_offset)
        rough = replace(exact, weight=exact.weight.to(self._dtype))
        return x.map(lambda t: rms_norm(t, exact), lambda t: rms_norm(t, rough))

    def mixed(self, x: Both, lengths: Lengths, kv: KvStorage) -> Both:
        """The mixer's output for whole sequences. kv: the path's storage of this block's K and V; a type narrower than
        that of activations is kept in both types."""
        wide = KvStorage(torch.float32) if kv.dtype != torch.float8_e4m3fn else kv
        assert self.spec.mixer is not None
        of_activations = any(c.elems_per_token and not c.has_kv_dtype for c in self.spec.mixer.caches)
        narrow = KvStorage(self._dtype) if of_activations else kv
        exact, rough = self._mixers
        return x.map(
            lambda t: self._of_sequences(exact, t, lengths, wide, torch.float32),
            lambda t: self._of_sequences(rough, t, lengths, narrow, self._dtype),
        )

    @torch.inference_mode()
    def _of_sequences(
        self, mixer: Mixer, x: Tensor, lengths: Lengths, kv: KvStorage, dtype: torch.dtype
    ) -> Tensor:  # fmt: skip
        found, begin = [], 0
        alone = replace(self._model, blocks=(Block(self.spec.mixer, None),))
        for rows, prompt in zip(lengths.rows, lengths.prompts, strict=True):
            pages = -(-rows // _PAGE_TOKENS)
            caches = allocate_pool(alone, pages, _PAGE_TOKENS, dtype, sequences=1, kv=kv)
            positions = torch.arange(rows)
            angles = {rope: cos_sin(rope, positions, (positions + 1).clamp(min=prompt)) for rope in alone.ropes}
            step = Step(batch_of([rows], [rows], [range(pages)], _PAGE_TOKENS, [0]), angles, caches)
            found.append(mixer(x[begin : begin + rows], step, caches[0]))
            begin += rows
        return torch.cat(found)

    def added(self, x: Both, y: Both) -> Both:
        """The residual stream x plus y times the model's factor."""
        factor = self._model.residual_factor
        return Both(x.exact + factor * y.exact, add(x.rough, y.rough * factor))

    @torch.inference_mode()
    def dense(self, x: Both) -> Both | None:
        """The output of a dense FFN, or of the shared expert without its gate; None if there is neither."""
        return x.map(*self._shared) if self._shared else None

    @torch.inference_mode()
    def with_shared(self, routed: Both, x: Both, shared: Both | None) -> Both:
        """Routed experts' sum plus that of the shared expert, times its gate."""
        if shared is None:
            return routed
        if self._shared_gate is None:
            return Both(routed.exact + shared.exact, add(routed.rough, shared.rough))
        gate = Both(x.exact @ self._shared_gate.T, x.rough @ self._shared_gate.to(self._dtype).T)
        return Both(
            gated_add(routed.exact, gate.exact, shared.exact), gated_add(routed.rough, gate.rough, shared.rough)
        )

    def expert(self, number: int) -> list[Mlp]:
        """A routed expert in both types."""
        return self.mlps(f"ffn.experts.{number}")

    def mlps(self, name: str) -> list[Mlp]:
        ffn = self.spec.ffn
        assert ffn is not None
        of = ffn
        if isinstance(ffn, Moe):
            of = ffn.expert if ".experts." in name else ffn.shared  # type: ignore[assignment]
        values = {part: self._read(f"{self._prefix}.{name}.{part}") for part, _ in of.params()}
        made = []
        for dtype in (torch.float32, self._dtype):
            mlp = reference(dtype).maps.mlp(of.hidden, of.width, of.bias, of.gating)
            fill(mlp.parameters(), values.__getitem__, "")
            made.append(mlp)
        return made


def _norms(block: Block) -> Sequence[str]:
    return [name for name, part in (("norm1", block.mixer), ("norm2", block.ffn)) if part is not None]


def fill(parameters: Parameters, read: Read, prefix: str) -> None:
    """Copy parameters into the reference's tensors."""
    for name, target in parameters:
        _tensor(target).copy_(read(f"{prefix}.{name}" if prefix else name))


def _tensor(target: Target) -> Tensor:
    if not isinstance(target, Tensor):
        raise TypeError("the reference ops keep their weights in tensors")
    return target
