"""Finds the tensors that hold each parameter. Never: I/O, torch, families.

The same model is published with one tensor per expert, or with stacked experts in either orientation, so the
layout is read from the files, not from the family. Every parameter must have a source, and every tensor of the index
must be used or ignored by a rule; otherwise loading stops before a byte is read.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from proa.errors import WeightsError
from proa.models.names import Declared
from proa.models.spec import Shape
from proa.native.formats import PANEL_ROWS, Order, Stored
from proa.weights.index import TensorInfo, misfit
from proa.weights.joined import parts_of
from proa.weights.source import Source

Index = Mapping[str, TensorInfo]
_READABLE = tuple(Stored.__members__)  # dtypes of parameters that are a single tensor

_EXPERT = re.compile(
    r"(?P<stack>blocks\.\d+\.ffn\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)\.(?P<kind>weight|bias)"
)
_LISTED = 5  # problems that an error names; the rest is counted


@dataclass(frozen=True)
class Sources:
    """The sources of all parameters. params: those with one source. joined: those whose rows come from several, in
    order. ignored: tensor -> why it is not loaded. tied_head: a stored head of a tied model; the loader checks that it
    equals the embedding. zeros: bias tensors that the model does not have; the loader checks that they are zero. blank:
    parameters without a source, which are zero (one rank's: models/ranks.py)."""

    params: dict[str, Source]
    joined: dict[str, tuple[Source, ...]] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    tied_head: Source | None = None
    zeros: tuple[str, ...] = ()
    blank: tuple[str, ...] = ()

    def of(self, name: str) -> tuple[Source, ...]:
        """The sources of a parameter, in the order of its rows; () if there is no such parameter."""
        return (self.params[name],) if name in self.params else self.joined.get(name, ())

    @property
    def all(self) -> list[Source]:
        """The sources of all parameters."""
        return [*self.params.values(), *chain.from_iterable(self.joined.values())]


def resolve(declared: Declared, index: Index) -> Sources:
    """Find the sources of all parameters. Raises a WeightsError that lists tensors which are missing, unused, or of
    wrong shape, or names one whose type is not implemented."""
    search = _Search(declared, index)
    search.find(declared.spec.params(routed=False))
    if search.problems:  # routers are checked by now, so the config's number of experts below is that of the files
        raise _error(search.problems, declared, index)
    search.find((name, shape) for name, shape in declared.spec.params() if not search.has(name))
    head = _tied_head(declared, index) if declared.spec.tied else None
    found = replace(search.found(), tied_head=head)
    used = {source.tensor for source in found.all}
    spare = [t for t in index if t not in used and (head is None or t != head.tensor)]
    ignored = {t: why for t in spare if (why := declared.names.why_ignored(t))}
    zeros = tuple(t for t in spare if _is_of_gptq(t, index))
    left = sorted(set(spare) - set(ignored) - set(zeros))
    problems = [*search.problems, *(f"{t}: nothing in the model uses it ({index[t].file.name})" for t in left)]
    if problems:
        raise _error(problems, declared, index)
    _check_types(found, index)
    return replace(found, ignored=ignored, zeros=zeros)


class _Search:
    """Finds the tensors of parameters, and collects problems."""

    def __init__(self, declared: Declared, index: Index) -> None:
        self._declared, self._index = declared, index
        self._params: dict[str, Source] = {}
        self._joined: dict[str, tuple[Source, ...]] = {}
        self._problems: list[str] = []
        self._stacks = _Stacks(declared, index)

    @property
    def problems(self) -> list[str]:
        return [*self._stacks.problems, *self._problems]

    def has(self, name: str) -> bool:
        return name in self._params or name in self._joined

    def found(self) -> Sources:
        return Sources(self._params, self._joined)

    def find(self, params: Iterable[tuple[str, Shape]]) -> None:
        names, index = self._declared.names, self._index
        for name, shape in params:
            candidates = names.candidates(name)
            tensor = next((c for c in candidates if c in index), None)
            if tensor is not None:
                self._params[name] = _whole(tensor, index[tensor], names.how_changed(tensor))
                if not _same(shape, index[tensor].shape):
                    self._problems.append(misfit(tensor, shape, index[tensor]))
            elif source := self._stacks.find(name, shape):
                self._params[name] = source
            elif (parts := parts_of(name, self._declared, index, self._problems)) is not None:
                self._joined[name] = parts
            else:
                self._problems.append(_missing(candidates[0], shape))


def _missing(tensor: str, shape: Shape) -> str:
    return f"{tensor}: not in the checkpoint; the config says {list(shape)}"


def _check_types(sources: Sources, index: Index) -> None:
    for source in sources.all:
        info = index[source.tensor]
        if info.quantised and source.transposed:
            raise WeightsError(
                f"{info.file}: {source.tensor} stacks quantised experts as [in, out], which is not implemented.",
                "Use another quantisation of the model.",
            )
        if info.quantised is None and info.dtype not in _READABLE:
            raise WeightsError(
                f"{info.file}: the tensor {source.tensor} is stored as {info.dtype}, which is not implemented.",
                f"Use a checkpoint whose tensors are {', '.join(_READABLE)}.",
            )


def _is_of_gptq(tensor: str, index: Index) -> bool:
    """True for the bias of a GPTQ matrix: some writers give every linear layer one, zero if the model has none."""
    weight = index.get(tensor.removesuffix("bias") + "weight") if tensor.endswith(".bias") else None
    return weight is not None and weight.quantised is not None and weight.quantised.order is Order.WORDS


def _whole(tensor: str, info: TensorInfo, changed: str = "") -> Source:
    return Source(tensor, 0, info.rows, 0, info.shape[-1] if info.shape else 1, changed=changed)


def _same(ours: Shape, stored: Shape) -> bool:
    """True if the shapes are equal up to dimensions of 1: GGUF stores [1, N] as [N] and [C, 1, T] as [C, T], and ERNIE
    stores [N] as [1, N]."""
    flat = (ours[0], ours[2]) if len(ours) == 3 and ours[1] == 1 else ours
    return stored in (ours, flat, (1, *ours)) or (ours[0] == 1 and stored == ours[1:])


def _tied_head(declared: Declared, index: Index) -> Source | None:
    """The stored head of a tied checkpoint; None if there is none, as usual."""
    found = next((t for t in declared.names.candidates("head.weight") if t in index), None)
    return None if found is None else _whole(found, index[found])


class _Stacks:
    """Finds experts in tensors that stack all experts of a layer."""

    def __init__(self, declared: Declared, index: Index) -> None:
        self.problems: list[str] = []
        self._names = declared.names
        self._index = index
        self._moes = {f"blocks.{i}.ffn.experts": ffn for i, ffn in declared.spec.routed.items()}
        self._transposed: dict[str, bool] = {}

    def find(self, name: str, shape: Shape) -> Source | None:
        """Source of one expert's gate, up or down weight or bias; None for other parameters, or if experts are not
        stacked."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None
        stack, expert, part, kind = match["stack"], int(match["expert"]), match["part"], match["kind"]
        tensor, fused = self._tensor(stack, part, kind)
        if tensor is None:
            return None
        out = shape[0]
        step = 2 if fused and self._names.alternating else 1
        offset = (1 if step == 2 else out) if fused and part == "up" else 0
        stacked_out = 2 * out if fused else out
        if kind == "bias":
            self._check_bias(stack, tensor, stacked_out)
            return Source(tensor, expert, 1, offset, out, col_step=step)
        inp = shape[1]
        if self._is_transposed(stack):
            return Source(tensor, expert * inp, inp, offset, out, transposed=True, col_step=step)
        return Source(tensor, expert * stacked_out + offset, out, 0, inp, row_step=step)

    def _check_bias(self, stack: str, tensor: str, stacked_out: int) -> None:
        wanted, stored = (self._moes[stack].experts, stacked_out), self._index[tensor]
        problem = misfit(tensor, wanted, stored)
        if stored.shape != wanted and problem not in self.problems:
            self.problems.append(problem)

    def _tensor(self, stack: str, part: str, kind: str = "weight") -> tuple[str | None, bool]:
        """The stacked tensor that holds this part (None: there is none), and True if gate and up are fused in it."""
        groups = [(part, False)] if part == "down" else [(part, False), ("gate_up", True)]
        for group, fused in groups:
            for tensor in self._names.candidates(f"{stack}.{group}.{kind}"):
                if tensor in self._index:
                    return tensor, fused
        return None, False

    def _is_transposed(self, stack: str) -> bool:
        """True if the layer's stacks are [E, in, out]: the one orientation in which gate, up and down all fit."""
        if stack not in self._transposed:
            self._transposed[stack] = self._orientation(stack)
        return self._transposed[stack]

    def _orientation(self, stack: str) -> bool:
        """See _is_transposed; if not exactly one orientation fits, adds to `problems`."""
        fits = {False, True} if self._names.stacked_out_in is None else {not self._names.stacked_out_in}
        described, moe = [], self._moes[stack]
        shapes = dict(moe.expert.params())
        for part in ("gate", "up", "down"):
            tensor, fused = self._tensor(stack, part)
            if tensor is None:
                continue  # reported as missing
            out, inp = shapes[f"{part}.weight"]
            out *= 2 if fused else 1
            stored = self._index[tensor]
            wanted = {False: (moe.experts, out, inp), True: (moe.experts, inp, out)}
            fits &= {transposed for transposed, shape in wanted.items() if shape == stored.shape}
            described.append(misfit(tensor, wanted[False], stored))
        if len(fits) == 1:
            return fits.pop()
        if fits:
            self.problems.append(
                f"{'; '.join(dict.fromkeys(described))}: [out, in] and [in, out] both fit, so the layout is ambiguous"
            )
        else:
            self.problems.extend(dict.fromkeys(described))
        return False


def _error(problems: list[str], declared: Declared, index: Index) -> WeightsError:
    shown = "; ".join(problems[:_LISTED])
    more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    files = sorted({tensor.file.parent for tensor in index.values()})
    head = declared.names.candidates("head.weight")[0]
    remedy = "Check that config and weights belong together and that all files were downloaded."
    if problems == [_missing(head, (declared.spec.vocab, declared.spec.hidden))]:
        remedy = "If the head is tied to the embedding, add --override-config tie_word_embeddings=true."
    where = ", ".join(map(str, files)) or "The checkpoint"
    return WeightsError(f"{where}: the tensors do not fit the config: {shown}{more}.", remedy)


def stored_types(sources: Sources, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """Parameter -> its type in the checkpoint; "F32" if it has several, or divides groups of quantised values."""
    found = {name: _stored_type(source, tensors[source.tensor]) for name, source in sources.params.items()}
    for name, parts in sources.joined.items():
        types = {_stored_type(part, tensors[part.tensor]) for part in parts}
        whole_panels = all(part.height % PANEL_ROWS == 0 for part in parts[:-1])
        found[name] = types.pop() if len(types) == 1 and whole_panels else "F32"
    return found | dict.fromkeys(sources.blank, "F32")


def _stored_type(source: Source, info: TensorInfo) -> str:
    if source.transposed or source.col_step > 1 or not source.whole_units(info):
        return "F32"
    blocks = info.quantised is not None and info.quantised.scale_rows > 1
    if blocks and (source.row_step > 1 or source.first_row % info.shape[-2] % PANEL_ROWS):
        return f"{info.dtype} from within a panel"  # rows of one panel may have scales of two blocks: no packed format
    return info.dtype
