"""Where each parameter's bytes are. Never: I/O, torch, families.

The same model is published with one tensor per expert, or with stacked experts in either orientation, so the
layout is a fact about the files, not about the family. Every parameter gets exactly one source and every
tensor of the index is used, or known to be ignorable; otherwise loading stops before a byte is read.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain

from proa.errors import WeightsError
from proa.models.names import Declared, NameTable
from proa.models.spec import Shape
from proa.native.formats import PANEL_ROWS, Order
from proa.weights.index import TensorInfo
from proa.weights.joined import parts_of
from proa.weights.source import Source

Index = Mapping[str, TensorInfo]

_EXPERT = re.compile(
    r"(?P<stack>blocks\.\d+\.ffn\.experts)\.(?P<expert>\d+)\.(?P<part>gate|up|down)\.(?P<kind>weight|bias)"
)
_LISTED = 5  # problems that an error names; the rest is counted


@dataclass(frozen=True)
class Sources:
    """params: one source for every parameter but those in `joined`, whose rows come from several, one after the other.
    ignored: tensor -> why. tied_head: a stored copy of the embedding, which the loader compares with it. zeros: biases
    that the model does not have, which the loader looks at."""

    params: dict[str, Source]
    joined: dict[str, tuple[Source, ...]] = field(default_factory=dict)
    ignored: dict[str, str] = field(default_factory=dict)
    tied_head: Source | None = None
    zeros: tuple[str, ...] = ()

    @property
    def all(self) -> list[Source]:
        """Of all parameters."""
        return [*self.params.values(), *chain.from_iterable(self.joined.values())]


def resolve(declared: Declared, index: Index) -> Sources:
    """Raises WeightsError that lists tensors which are missing, misshapen or left over."""
    shapes = dict(declared.spec.params())
    stacks = _Stacks(declared.names, index, shapes)
    params: dict[str, Source] = {}
    joined: dict[str, tuple[Source, ...]] = {}
    problems: list[str] = []
    for name, shape in shapes.items():
        candidates = declared.names.candidates(name)
        tensor = next((c for c in candidates if c in index), None)
        if tensor is not None:
            params[name] = replace(_whole(tensor, index[tensor]), changed=declared.names.how_changed(tensor))
            if not _same(shape, index[tensor].shape):
                problems.append(f"{tensor}: the config says {list(shape)}, the file has {list(index[tensor].shape)}")
        elif source := stacks.find(name):
            params[name] = source
        elif parts := parts_of(name, declared, index, problems):
            joined[name] = parts
        else:
            problems.append(f"{candidates[0]}: not in the checkpoint")
    used = {source.tensor for source in Sources(params, joined).all}
    head = _tied_head(declared, index) if declared.spec.tied else None
    spare = [t for t in index if t not in used and (head is None or t != head.tensor)]
    ignored = {t: why for t in spare if (why := declared.names.why_ignored(t))}
    zeros = tuple(t for t in spare if _is_of_gptq(t, index))
    problems += [f"{t}: nothing in the model uses it" for t in sorted(set(spare) - set(ignored) - set(zeros))]
    if problems or stacks.problems:
        raise _error([*stacks.problems, *problems], declared, index)
    return Sources(params, joined, ignored, head, zeros)


def _is_of_gptq(tensor: str, index: Index) -> bool:
    """Some writers of GPTQ give each linear map a bias, zero where the model has none."""
    weight = index.get(tensor.removesuffix("bias") + "weight") if tensor.endswith(".bias") else None
    return weight is not None and weight.quantised is not None and weight.quantised.order is Order.WORDS


def _whole(tensor: str, info: TensorInfo) -> Source:
    return Source(tensor, 0, info.rows, 0, info.shape[-1] if info.shape else 1)


def _same(ours: Shape, stored: Shape) -> bool:
    """GGUF stores a [1, N] matrix as [N] and [C, 1, T] as [C, T], and ERNIE [N] numbers as [1, N]."""
    flat = (ours[0], ours[2]) if len(ours) == 3 and ours[1] == 1 else ours
    return stored in (ours, flat, ours[1:] if ours[0] == 1 else (1, *ours))


def _tied_head(declared: Declared, index: Index) -> Source | None:
    """Some tied checkpoints store the head all the same."""
    found = next((t for t in declared.names.candidates("head.weight") if t in index), None)
    return None if found is None else _whole(found, index[found])


class _Stacks:
    """Finds experts inside tensors that hold all experts of a layer."""

    def __init__(self, names: NameTable, index: Index, shapes: Mapping[str, Shape]) -> None:
        self.problems: list[str] = []
        self._names = names
        self._index = index
        self._shapes = shapes
        self._counts: dict[str, int] = {}
        for name in shapes:
            if (match := _EXPERT.fullmatch(name)) and match["part"] == "gate" and match["kind"] == "weight":
                self._counts[match["stack"]] = self._counts.get(match["stack"], 0) + 1
        self._transposed: dict[str, bool | None] = {}

    def find(self, name: str) -> Source | None:
        """Source of one expert's gate, up or down, or of its bias; None if the name is no expert's or nothing is
        stacked."""
        match = _EXPERT.fullmatch(name)
        if match is None:
            return None
        stack, expert, part, kind = match["stack"], int(match["expert"]), match["part"], match["kind"]
        tensor, fused = self._tensor(stack, part, kind)
        if tensor is None:
            return None
        out = self._shapes[name][0]
        step = 2 if fused and self._names.alternating else 1
        offset = (1 if step == 2 else out) if fused and part == "up" else 0
        stacked_out = 2 * out if fused else out
        if kind == "bias":
            self._check_bias(stack, tensor, stacked_out)
            return Source(tensor, expert, 1, offset, out, col_step=step)
        inp = self._shapes[name][1]
        if self._is_transposed(stack):
            return Source(tensor, expert * inp, inp, offset, out, transposed=True, col_step=step)
        return Source(tensor, expert * stacked_out + offset, out, 0, inp, row_step=step)

    def _check_bias(self, stack: str, tensor: str, stacked_out: int) -> None:
        wanted, stored = (self._counts[stack], stacked_out), self._index[tensor].shape
        problem = f"{tensor}: the config says {list(wanted)}, the file has {list(stored)}"
        if stored != wanted and problem not in self.problems:
            self.problems.append(problem)

    def _tensor(self, stack: str, part: str, kind: str = "weight") -> tuple[str | None, bool]:
        """The stacked tensor that holds this part, and whether gate and up share it."""
        groups = [(part, False)] if part == "down" else [(part, False), ("gate_up", True)]
        for group, fused in groups:
            for tensor in self._names.candidates(f"{stack}.{group}.{kind}"):
                if tensor in self._index:
                    return tensor, fused
        return None, False

    def _is_transposed(self, stack: str) -> bool:
        """One orientation for the layer: the one in which the shapes of gate, up and down all fit."""
        if stack not in self._transposed:
            self._transposed[stack] = self._orientation(stack)
        return bool(self._transposed[stack])

    def _orientation(self, stack: str) -> bool | None:
        fits = {False, True} if self._names.stacked_out_in is None else {not self._names.stacked_out_in}
        described = []
        for part in ("gate", "up", "down"):
            tensor, fused = self._tensor(stack, part)
            if tensor is None:
                continue  # reported as missing
            out, inp = self._shapes[f"{stack}.0.{part}.weight"]
            out *= 2 if fused else 1
            stored = self._index[tensor].shape
            wanted = {False: (self._counts[stack], out, inp), True: (self._counts[stack], inp, out)}
            fits &= {turned for turned, shape in wanted.items() if shape == stored}
            described.append(f"{tensor}: the config says {list(wanted[False])}, the file has {list(stored)}")
        if len(fits) == 1:
            return fits.pop()
        if fits:
            self.problems.append(
                f"{'; '.join(dict.fromkeys(described))}: [out, in] and [in, out] both fit, so Proa cannot know"
            )
        else:
            self.problems.extend(dict.fromkeys(described))
        return None


def _error(problems: list[str], declared: Declared, index: Index) -> WeightsError:
    shown = "; ".join(problems[:_LISTED])
    more = f"; and {len(problems) - _LISTED} more" if len(problems) > _LISTED else ""
    files = sorted({tensor.file.parent for tensor in index.values()})
    head = declared.names.candidates("head.weight")[0]
    remedy = "Check that config and weights belong together and that all files were downloaded."
    if problems == [f"{head}: not in the checkpoint"]:
        remedy = "If the head is the embedding, add --override-config tie_word_embeddings=true."
    where = ", ".join(map(str, files)) or "The checkpoint"
    return WeightsError(f"{where}: the tensors do not fit the config: {shown}{more}.", remedy)


def stored_types(sources: Sources, tensors: Mapping[str, TensorInfo]) -> dict[str, str]:
    """The type that each parameter has in the checkpoint; "F32" where its rows are not whole rows there, or of several
    types."""
    found = {name: _stored_type(source, tensors[source.tensor]) for name, source in sources.params.items()}
    for name, parts in sources.joined.items():
        types = {_stored_type(part, tensors[part.tensor]) for part in parts}
        whole_panels = all(part.height % PANEL_ROWS == 0 for part in parts[:-1])
        found[name] = types.pop() if len(types) == 1 and whole_panels else "F32"
    return found


def _stored_type(source: Source, info: TensorInfo) -> str:
    if source.cols != info.shape[-1] or source.transposed:
        return "F32"
    blocks = info.quantised is not None and info.quantised.scale_rows > 1
    if blocks and (source.row_step > 1 or source.first_row % info.shape[-2] % PANEL_ROWS):
        return f"{info.dtype} from within a panel"  # whose rows may have scales of two blocks: no format keeps that
    return info.dtype
