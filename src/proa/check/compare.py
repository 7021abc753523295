"""Compares what paths have noted with the reference, block by block, op by op. Never: running paths, printing.

Each op gets the inputs that it had on the path, so an error shows where it arises and nowhere else. Beside that, the
whole model is computed from the tokens, with the path's expert ids: its logits are compared too.

Weights of one block, and of one expert, are in memory at a time, for all paths. Between ops the time limit is checked:
an op that runs when it is reached is finished.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from proa.cache.pool import KvStorage
from proa.check.blame import name_experts
from proa.check.blocks import BlockReference, Both
from proa.check.drive import LOGITS, STEP
from proa.check.notes import END, FINAL, IDS, IN, MID, MIXED, NORM1, NORM2, WEIGHTS, place
from proa.check.routing import compare as compare_routing
from proa.check.routing import weights_at
from proa.check.truth import Truth
from proa.check.verdict import Observed, finite_rows, finite_so_far
from proa.models.mixers import GatedDeltaNet, LatentAttention, Mixer
from proa.models.spec import Model, Moe
from proa.ops.reference import rms_norm
from proa.ops.table import Norm

_HEAD_ROWS = 8192  # of the head's matrix, in memory at a time
_OPS: dict[type[Mixer], str] = {GatedDeltaNet: "linear attention", LatentAttention: "latent attention"}


@dataclass
class _Run:
    """A path, and the reference's own hidden states for its tokens."""

    path: Observed
    hidden: Both
    routed: list[_Routed] = field(default_factory=list)  # of the block that is compared


@dataclass
class _Routed:
    """Rows for the routed experts, weights in both types; then their weighted sums, and each choice's contribution,
    float32 [T, k, H]."""

    x: Both
    ids: Tensor
    weights: Both
    sums: Both | None = None
    parts: Tensor = field(default_factory=lambda: torch.empty(0))


class Comparison:
    """Paths of one model. layers: the number of each block in the whole model. dtype: the reference's second type.
    check_time: called between ops; what it raises ends the call, and what was found so far stays with the paths."""

    def __init__(
        self, spec: Model, layers: Sequence[int], truth: Truth, dtype: torch.dtype, paths: Sequence[Observed],
        check_time: Callable[[], None],
    ) -> None:  # fmt: skip
        self._spec, self._layers, self._truth, self._dtype = spec, layers, truth, dtype
        self._check_time = check_time
        check_time()
        tokens = {token for path in paths for token in path.tokens.tolist()}
        table = {token: truth.rows("embed.weight", token, 1) for token in sorted(tokens)}
        self._runs = [
            _Run(path, self._embedded(path, torch.cat([table[token] for token in path.tokens.tolist()])))
            for path in paths
        ]

    def _both(self, rows: Tensor) -> Both:
        """Rows of a path as inputs of the reference, without what is not finite."""
        clean = rows.float().nan_to_num(0.0, 0.0, 0.0)
        return Both(clean, clean.to(self._dtype))

    def _embedded(self, path: Observed, rows: Tensor) -> Both:
        factor = self._spec.embedding_factor
        of = Both(rows * factor, rows.to(self._dtype) * factor)
        sound = torch.ones(len(rows), dtype=torch.bool)
        path.judge(None, "embedding", path.rows(self._stream(0)), of.exact, of.rough, sound)
        return of

    def _stream(self, block: int) -> str:
        """The place where the residual stream before a block is noted; that after the last block: END."""
        if block == len(self._spec.blocks):
            return END
        return place(IN if self._spec.blocks[block].mixer is not None else MID, block)

    @torch.inference_mode()
    def block(self, number: int) -> None:
        """Compare all paths in one block."""
        reference = BlockReference(self._spec, number, self._dtype, self._truth.read)
        if reference.spec.mixer is not None:
            for run in self._runs:
                self._check_time()
                self._mixer(run, reference, number)
        if reference.spec.ffn is not None:
            self._ffn(reference, number)

    def _mixer(self, run: _Run, reference: BlockReference, number: int) -> None:
        path, layer, mixer = run.path, self._layers[number], reference.spec.mixer
        assert mixer is not None
        x, normed, mixed = (path.rows(place(what, number)) for what in (IN, NORM1, MIXED))
        after = path.rows(place(MID, number) if reference.spec.ffn is not None else self._stream(number + 1))
        want = reference.norm("norm1", self._both(x))
        path.judge(layer, "norm before attention", normed, want.exact, want.rough, finite_rows(x))
        kv = _of_block(path.kv, number)
        want = reference.mixed(self._both(normed), path.lengths, kv)
        sound = finite_so_far(finite_rows(normed), path.lengths.rows)
        path.judge(layer, _OPS.get(type(mixer), "attention"), mixed, want.exact, want.rough, sound)
        want = reference.added(self._both(x), self._both(mixed))
        path.judge(layer, "sum after attention", after, want.exact, want.rough, finite_rows(x, mixed))
        own = reference.mixed(reference.norm("norm1", run.hidden), path.lengths, kv)
        run.hidden = reference.added(run.hidden, own)

    def _ffn(self, reference: BlockReference, number: int) -> None:
        layer = self._layers[number]
        for run in self._runs:
            path = run.path
            x, normed = (path.rows(place(what, number)) for what in (MID, NORM2))
            want = reference.norm("norm2", self._both(x))
            path.judge(layer, "norm before FFN", normed, want.exact, want.rough, finite_rows(x))
            self._check_time()
            if isinstance(reference.spec.ffn, Moe):
                run.routed = self._chosen(run, reference, number)
        if isinstance(reference.spec.ffn, Moe):
            self._experts(reference)
        for run in self._runs:
            self._check_time()
            self._ffn_output(run, reference, number)

    def _chosen(self, run: _Run, reference: BlockReference, number: int) -> list[_Routed]:
        """Compare the router; the experts' inputs on the path, and in the reference's own run with the same ids."""
        path, rule, router = run.path, reference.rule, reference.router
        assert rule is not None
        assert router is not None
        normed, ids, weights = (path.rows(place(what, number)) for what in (NORM2, IDS, WEIGHTS))
        ids, sound = ids.long(), finite_rows(normed)
        of = compare_routing(self._both(normed).exact, router, reference.router_bias, rule, ids, weights)

        def expert(bad: Tensor) -> str:
            return ", ".join(f"expert {e}" for e in sorted(set(of.experts[bad].tolist()))[:8])

        path.judge_rows(
            self._layers[number], "router", of.excess, lambda over: over, of.excess > 1, sound, expert
        )  # fmt: skip
        ids = ids.clamp(0, len(router) - 1)
        theirs = weights.float().nan_to_num(0.0, 0.0, 0.0)
        own = reference.norm("norm2", run.hidden)
        bias = reference.router_bias
        ours = own.map(
            lambda t: weights_at(functional.linear(t, router, bias), ids, rule),
            lambda t: weights_at(functional.linear(t.float(), router.to(self._dtype).float(), bias), ids, rule),
        )
        given = self._both(normed)
        return [_Routed(given, ids, Both(theirs, theirs)), _Routed(own, ids, ours)]

    def _experts(self, reference: BlockReference) -> None:
        """Compute every expert that some path chose, on all rows that chose it."""
        every = [routed for run in self._runs for routed in run.routed]
        ids = torch.cat([of.ids for of in every])
        x, weights = (_joined([getattr(of, name) for of in every]) for name in ("x", "weights"))
        parts = torch.zeros(*ids.shape, self._spec.hidden)
        sums = torch.zeros_like(x.exact)
        for number in sorted(set(ids.flatten().tolist())):
            self._check_time()
            exact, rough = reference.expert(number)
            rows, choice = torch.where(ids == number)
            parts[rows, choice] = weights.exact[rows, choice, None] * exact(x.exact[rows])
            sums.index_add_(0, rows, weights.rough[rows, choice, None] * rough(x.rough[rows]).float())
        sizes = [len(of.ids) for of in every]
        for of, mine, rounded in zip(every, torch.split(parts, sizes), torch.split(sums, sizes), strict=True):
            of.parts, of.sums = mine, Both(mine.sum(1), rounded)

    def _ffn_output(self, run: _Run, reference: BlockReference, number: int) -> None:
        path, layer = run.path, self._layers[number]
        mid, normed = (path.rows(place(what, number)) for what in (MID, NORM2))
        got = path.rows(self._stream(number + 1))
        sound = finite_rows(mid, normed)
        if run.routed:
            given, own = run.routed
            run.routed = []
            shared = reference.dense(given.x)
            want = reference.added(self._both(mid), self._sum(reference, given, shared))
            factor = self._spec.residual_factor
            of_shared = None if shared is None else reference.with_shared(_none(shared), given.x, shared).exact
            blame = partial(
                name_experts, got.float() - want.exact, given.parts * factor,
                None if of_shared is None else of_shared * factor, given.ids, path.copies(number), path.rows(STEP),
            )  # fmt: skip
            path.judge(layer, "experts", got, want.exact, want.rough, sound, blame)
            output = self._sum(reference, own, reference.dense(own.x))
        else:
            dense = reference.dense(self._both(normed))
            assert dense is not None
            want = reference.added(self._both(mid), dense)
            path.judge(layer, "MLP", got, want.exact, want.rough, sound)
            mine = reference.dense(reference.norm("norm2", run.hidden))
            assert mine is not None
            output = mine
        run.hidden = reference.added(run.hidden, output)

    def _sum(self, reference: BlockReference, routed: _Routed, shared: Both | None) -> Both:
        assert routed.sums is not None
        sums = Both(routed.sums.exact, routed.sums.rough.to(self._dtype))
        return reference.with_shared(sums, routed.x, shared)

    @torch.inference_mode()
    def head(self) -> None:
        """Compare the final norm, the logits, the sampled tokens, and the logits of the whole model."""
        spec = self._spec
        exact = Norm(self._truth.read("norm.weight"), spec.norm_eps, spec.norm_offset)
        rough = replace(exact, weight=exact.weight.to(self._dtype))

        def normed(x: Both) -> Both:
            return x.map(lambda t: rms_norm(t, exact), lambda t: rms_norm(t, rough))

        scaled = partial(_scaled, factor=spec.logits_factor)
        rows = []
        for run in self._runs:
            end, final = run.path.rows(END), run.path.rows(FINAL)
            want = normed(self._both(end))
            run.path.judge(None, "final norm", final, want.exact, want.rough, finite_rows(end))
            at = run.path.scored
            rows += [scaled(self._both(final[at])), scaled(normed(Both(run.hidden.exact[at], run.hidden.rough[at])))]
        logits = self._logits(rows)
        for run, given, whole in zip(self._runs, logits[::2], logits[1::2], strict=True):
            got = run.path.rows(LOGITS)
            sound = finite_rows(run.path.rows(FINAL)[run.path.scored])
            run.path.judge(None, "head", got, given.exact, given.rough, sound, rows=run.path.scored)
            run.path.judge(
                None, "logits of the whole model", got, whole.exact, whole.rough, sound, rows=run.path.scored
            )
            _sampled(run.path, got)

    def _logits(self, rows: Sequence[Both]) -> list[Both]:
        name = "embed.weight" if self._spec.tied else "head.weight"
        found: list[list[Both]] = [[] for _ in rows]
        for first in range(0, self._spec.vocab, _HEAD_ROWS):
            self._check_time()
            weight = self._truth.rows(name, first, min(_HEAD_ROWS, self._spec.vocab - first))
            narrow = weight.to(self._dtype)
            product: Callable[[Tensor], Tensor] = lambda t, w=weight: functional.linear(t, w)  # type: ignore[misc] # noqa: E731
            rough: Callable[[Tensor], Tensor] = lambda t, w=narrow: functional.linear(t, w)  # type: ignore[misc] # noqa: E731
            for parts, of in zip(found, rows, strict=True):
                parts.append(of.map(product, rough))
        return [Both(torch.cat([p.exact for p in of], 1), torch.cat([p.rough for p in of], 1)) for of in found]


def _joined(of: Sequence[Both]) -> Both:
    return Both(torch.cat([each.exact for each in of]), torch.cat([each.rough for each in of]))


def _none(like: Both) -> Both:
    return like.map(torch.zeros_like, torch.zeros_like)


def _scaled(x: Both, factor: float) -> Both:
    return x.map(lambda t: t * factor, lambda t: t * factor)


def _of_block(kv: KvStorage, number: int) -> KvStorage:
    return replace(kv, scales=kv.scales[number : number + 1])


def _sampled(path: Observed, logits: Tensor) -> None:
    """Compare greedy tokens with the path's own logits."""
    place_of = {row: at for at, row in enumerate(path.scored.tolist())}
    over, begin = torch.zeros(len(logits)), 0
    for noted in path.sequences:
        for position, token in noted.sampled.items():
            at = place_of[begin + position]
            over[at] = 0.0 if float(logits[at, token]) == float(logits[at].max()) else 2.0
        begin += len(noted.tokens)
    sound = finite_rows(logits)
    path.judge_rows(None, "argmax", over, lambda found: found, over > 1, sound, rows=path.scored)
