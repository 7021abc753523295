"""Divides a model over ranks: each rank's part is an ordinary model, smaller. Never: torch, devices, communication.

Tensor parallelism gives a rank fewer heads, narrower MLPs and a part of the vocabulary; expert parallelism fewer
experts; pipeline parallelism fewer blocks. In a stage, the output of every mixer and FFN is the sum of its ranks'
outputs (ops/table.py, Join), and the logits are its ranks' logits one after another (Gather). Where a mixer or an MLP
cannot be divided, every rank of the stage computes all of it, and all but the first multiply by a last matrix of zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import gcd, lcm
from typing import Any, Generic, NamedTuple, TypeVar

from proa.errors import UsageError
from proa.models.spec import Attention, Block, GatedDeltaNet, Held, LatentAttention, Mixer, Mlp, Model, Moe, Params

CPU = -1  # owner of an expert that no rank's GPU holds: the CPUs of the host compute it

# Parameter of the whole model -> the unit of its rows and of its columns. Cuts fall on multiples of these, so that no
# group or block of quantised weights is divided.
Units = Callable[[str], tuple[int, int]]


@dataclass(frozen=True)
class Mesh:
    """The ranks of a model: stages of a pipeline, in order, and the ranks of each.

    shares: per stage, the relative sizes of its ranks' parts (memory, or bandwidth); blocks are divided over stages by
    the sums. expert_groups: each stage's ranks form this many groups of equally many neighbours. Whole experts are
    divided over the groups, their width within a group. None: a group per rank.
    """

    shares: tuple[tuple[int, ...], ...] = ((1,),)
    expert_groups: int | None = None

    def __post_init__(self) -> None:
        if not self.shares or not all(of and min(of) > 0 for of in self.shares):
            raise UsageError(
                f"The shares of the ranks are {self.shares}; each stage needs ranks, and each share must be above 0.",
                "Give every rank a positive share, or leave the rank out.",
            )


@dataclass(frozen=True)
class Part:
    """The elements of a whole model's parameter that are one rank's parameter.

    rows: ranges of its first dimension, in order. columns: a range of its second; None: all. shared: why other ranks
    have elements of this part too; "": they have none.
    """

    name: str
    rows: tuple[range, ...]
    columns: range | None = None
    shared: str = ""


@dataclass(frozen=True)
class Rank:
    """One rank's model. parts: where each parameter of `spec` lies in the whole model; None: it is zero.

    A stage has one matrix of the vocabulary only, and its model is therefore `tied` if there are several stages: the
    first looks tokens up in it, the last multiplies by it, and those between have none (a vocabulary of 0).
    """

    stage: int
    spec: Model
    parts: Mapping[str, Part | None]
    blocks: range  # of the whole model
    vocabulary: range  # rows of embedding and head; a token that is not in it has an embedding of zeros here


def divide(model: Model, mesh: Mesh, units: Units = lambda name: (1, 1)) -> tuple[Rank, ...]:
    """Divide a model over all ranks of a mesh, in order.

    Raises UsageError if there are more stages than blocks, or more ranks in a stage than rows of vocabulary, experts or
    columns of experts to give to each.
    """
    blocks = _cut(len(model.blocks), [sum(of) for of in mesh.shares])
    if blocks is None:
        raise UsageError(
            f"{len(model.blocks)} blocks cannot be divided over {len(mesh.shares)} pipeline stages.",
            f"Use at most {len(model.blocks)} stages.",
        )
    return tuple(rank for s in range(len(mesh.shares)) for rank in _stage(model, mesh, s, blocks[s], units))


def _stage(model: Model, mesh: Mesh, stage: int, blocks: range, units: Units) -> Iterator[Rank]:
    shares, last = mesh.shares[stage], len(mesh.shares) - 1
    tied, kept = (model.tied, "embed") if not last else (True, "embed" if stage == 0 or model.tied else "head")
    names = [f"{kept}.weight"] if last or model.tied else ["embed.weight", "head.weight"]
    rows = range(model.vocab) if stage in (0, last) else range(0)
    vocabulary = _vocabulary(rows, shares, lcm(*(units(name)[0] for name in names)))
    divided = [_block(model, mesh, stage, b, units) for b in blocks]
    many = last > 0 or len(shares) > 1
    both_ends = "the first and the last stage have it" if last and model.tied else ""
    for r in range(len(shares)):
        parts: dict[str, Part | None] = {
            "embed.weight": Part(names[0], (vocabulary[r],), None, both_ends),
            "norm.weight": Part("norm.weight", (range(model.hidden),), None, _NORM if many else ""),
        }
        if not tied:
            parts["head.weight"] = Part("head.weight", (vocabulary[r],))
        for i, pieces in enumerate(divided):
            for name, part in pieces[r].parts.items():
                parts[f"blocks.{i}.{name}"] = part and replace(part, name=f"blocks.{blocks[i]}.{part.name}")
        of = tuple(pieces[r].spec for pieces in divided)
        spec = replace(model, vocab=len(vocabulary[r]), blocks=of, tied=tied)
        yield Rank(stage, spec, parts, blocks, vocabulary[r])


_NORM = "every rank normalises the residual stream"


def _vocabulary(rows: range, shares: Sequence[int], unit: int) -> list[range]:
    if not rows:
        return [rows] * len(shares)
    found = _cut(len(rows), shares, unit)
    if found is None:
        raise UsageError(
            f"A vocabulary of {len(rows)} rows, in units of {unit}, cannot be divided over {len(shares)} ranks.",
            f"Use at most {-(-len(rows) // unit)} ranks in a stage.",
        )
    return found


# --- Blocks ---


T = TypeVar("T", Block, Mixer, Mlp, Mlp | Moe, covariant=True)


@dataclass(frozen=True)
class _Piece(Generic[T]):
    """A rank's part of a block, a mixer or an FFN. parts: by names inside it, on both sides."""

    spec: T
    parts: Mapping[str, Part | None]

    def inside(self, name: str) -> dict[str, Part | None]:
        """The parts by their names outside."""
        return {f"{name}.{n}": part and replace(part, name=f"{name}.{part.name}") for n, part in self.parts.items()}


@dataclass(frozen=True)
class _Ranks:
    """The ranks that share a mixer or an FFN, and the units of its parameters."""

    shares: tuple[int, ...]
    units: Units
    expert_groups: int | None = None

    def inside(self, name: str) -> _Ranks:
        return replace(self, units=lambda inner: self.units(f"{name}.{inner}"))

    def rows(self, name: str, length: int) -> int:
        """How many pieces of `length` rows must stay together, so that cuts between them fall on units."""
        unit = self.units(name)[0]
        return unit // gcd(unit, length)

    def columns(self, name: str, length: int) -> int:
        unit = self.units(name)[1]
        return unit // gcd(unit, length)


def _block(model: Model, mesh: Mesh, stage: int, number: int, units: Units) -> list[_Piece[Block]]:
    block = model.blocks[number]
    ranks = _Ranks(mesh.shares[stage], units, mesh.expert_groups).inside(f"blocks.{number}")
    why = _NORM if len(ranks.shares) > 1 else ""
    norms = {
        name: Part(name, (range(model.hidden),), None, why) for name, _ in block.params() if name.startswith("norm")
    }
    none = [None] * len(ranks.shares)
    mixers = _DIVIDE[type(block.mixer)](block.mixer, ranks.inside("mixer")) if block.mixer else none
    ffns = _DIVIDE[type(block.ffn)](block.ffn, ranks.inside("ffn")) if block.ffn else none
    return [
        _Piece(
            Block(mixer.spec if mixer else None, ffn.spec if ffn else None),
            {**norms, **(mixer.inside("mixer") if mixer else {}), **(ffn.inside("ffn") if ffn else {})},
        )
        for mixer, ffn in zip(mixers, ffns, strict=True)
    ]


# --- Mixers: one function for each class ---


def _attention(s: Attention, ranks: _Ranks) -> Sequence[_Piece[Mixer]]:
    """Divide by KV heads, with the query heads that read them; with more ranks than KV heads, some ranks share one."""
    if s.qk_norm == "full" and len(ranks.shares) > 1:
        return _replicated(s, "o", ranks, "queries and keys are normalised over all heads together")
    each, rows, dim = s.heads // s.kv_heads, s.q_rows // s.heads, s.head_dim
    by_head = lcm(ranks.rows("q.weight", rows), ranks.rows("q.bias", rows), ranks.columns("o.weight", dim))
    names = [f"{part}.{kind}" for part in "kv" for kind in ("weight", "bias")]
    kv_units = lcm(*(ranks.rows(name, dim) for name in names))
    cuts = _heads(s.kv_heads, each, ranks.shares, lcm(kv_units, _whole_groups(by_head, each)), by_head)
    if cuts is None:
        return _replicated(s, "o", ranks, _not_divisible(f"{s.heads} heads", ranks, by_head))
    found: list[_Piece[Mixer]] = []
    for r, cut in enumerate(cuts):
        heads, kv = cut.heads(each), cut.groups
        spec = replace(s, heads=len(heads), kv_heads=len(kv), o_bias=s.o_bias and r == 0)
        places: dict[str, _Place] = {
            "q": _Place((_times(heads, rows),)),
            "k": _Place((_times(kv, dim),), shared=cut.shared),
            "v": _Place((_times(kv, dim),), shared=cut.shared),
            "o.weight": _Place((range(s.hidden),), _times(heads, dim)),
            "o.bias": _Place((range(s.hidden),)),
            "sinks": _Place((heads,)),
        }
        found.append(_Piece(spec, _placed(spec.params(), places, len(cuts), "all heads share the norm's weights")))
    return found


def _latent_attention(s: LatentAttention, ranks: _Ranks) -> Sequence[_Piece[Mixer]]:
    """Divide by heads. Every rank computes and caches the latents, which all heads share."""
    q, q_rows, kv_rows = "q" if s.q_rank is None else "q_b", s.q_rows // s.heads, s.key_dim + s.value_dim
    unit = lcm(
        ranks.rows(f"{q}.weight", q_rows), ranks.rows("kv_b.weight", kv_rows), ranks.columns("o.weight", s.value_dim)
    )
    cuts = _cut(s.heads, ranks.shares, unit)
    if cuts is None:
        return _replicated(s, "o", ranks, _not_divisible(f"{s.heads} heads", ranks, unit))
    found: list[_Piece[Mixer]] = []
    for heads in cuts:
        spec = replace(s, heads=len(heads))
        places: dict[str, _Place] = {
            q: _Place((_times(heads, q_rows),)),
            "kv_b": _Place((_times(heads, kv_rows),)),
            "o.weight": _Place((range(s.hidden),), _times(heads, s.value_dim)),
        }
        found.append(_Piece(spec, _placed(spec.params(), places, len(cuts), "all heads share the latents")))
    return found


def _gated_delta_net(s: GatedDeltaNet, ranks: _Ranks) -> Sequence[_Piece[Mixer]]:
    """Divide by key heads, with their value heads; with more ranks than key heads, some ranks share one."""
    each, dim = s.value_heads // s.key_heads, s.value_dim
    keys, wide, all_keys = 2 * s.key_dim, each * dim, s.key_heads * s.key_dim
    by_head = lcm(ranks.rows("qkvz.weight", dim), ranks.rows("ba.weight", 1), ranks.columns("out.weight", dim))
    within = lcm(*(ranks.rows("qkvz.weight", n) for n in (keys, wide)), ranks.rows("ba.weight", each))
    by_group = lcm(
        ranks.rows("qkvz.weight", keys + 2 * wide), ranks.rows("ba.weight", 2 * each),
        ranks.columns("out.weight", wide),
    )  # fmt: skip
    cuts = _heads(s.key_heads, each, ranks.shares, by_group, by_head if within == 1 else each)
    if cuts is None:
        return _replicated(s, "out", ranks, _not_divisible(f"{s.value_heads} value heads", ranks, by_head))
    found: list[_Piece[Mixer]] = []
    for cut in cuts:
        heads, groups = cut.heads(each), cut.groups
        spec = replace(s, key_heads=len(groups), value_heads=len(heads))
        channels = (*(_times(groups, s.key_dim, at) for at in (0, all_keys)), _times(heads, dim, 2 * all_keys))
        places: dict[str, _Place] = {
            "qkvz": _Place(_interleaved(cut, each, (keys,), (dim, dim)), shared=cut.shared),
            "ba": _Place(_interleaved(cut, each, (), (1, 1))),
            "conv": _Place(channels, shared=cut.shared),
            "a_log": _Place((heads,)),
            "dt_bias": _Place((heads,)),
            "out": _Place((range(s.hidden),), _times(heads, dim)),
        }
        found.append(_Piece(spec, _placed(spec.params(), places, len(cuts), "all heads share the norm's weights")))
    return found


def _interleaved(cut: _Heads, each: int, shared: Sequence[int], per_head: Sequence[int]) -> tuple[range, ...]:
    """Rows of a matrix that has, per group of heads, `shared` rows, then for each of `per_head` that many per head."""
    rows = sum(shared) + each * sum(per_head)
    if len(cut.inner) == each:
        return (_times(cut.groups, rows),)
    at = cut.groups.start * rows
    found = [range(at, at + sum(shared))] if shared else []
    at += sum(shared)
    for n in per_head:
        found.append(_times(cut.inner, n, at))
        at += each * n
    return tuple(found)


# --- FFNs ---


def _mlp(s: Mlp, ranks: _Ranks) -> Sequence[_Piece[Mlp | Moe]]:
    unit = _width_unit(ranks)
    cuts = _cut(s.width, ranks.shares, unit)
    if cuts is None:
        return _replicated(s, "down", ranks, _not_divisible(f"a width of {s.width}", ranks, unit))
    return [_narrow(s, width, r == 0) for r, width in enumerate(cuts)]


def _width_unit(ranks: _Ranks, prefix: str = "") -> int:
    names = [f"{prefix}{part}.{kind}" for part in ("gate", "up") for kind in ("weight", "bias")]
    return lcm(*(ranks.rows(name, 1) for name in names), ranks.columns(f"{prefix}down.weight", 1))


def _narrow(s: Mlp, width: range, adds_bias: bool) -> _Piece[Mlp]:
    """The MLP restricted to columns `width` of its inner activations; adds_bias: with the bias of its sum."""
    places: dict[str, _Place | None] = {
        "gate": _Place((width,)),
        "up": _Place((width,)),
        "down.weight": _Place((range(s.hidden),), width),
        "down.bias": _Place((range(s.hidden),)) if adds_bias else None,
    }
    spec = replace(s, width=len(width))
    return _Piece(spec, _placed(spec.params(), places, 1))


def _moe(s: Moe, ranks: _Ranks) -> Sequence[_Piece[Mlp | Moe]]:
    """Divide whole experts over groups of ranks, and their width within a group. Every rank routes over all experts."""
    count = len(ranks.shares)
    groups = ranks.expert_groups or count
    if count % groups:
        raise UsageError(
            f"{count} ranks of a pipeline stage cannot form {groups} expert groups of equal size.",
            f"Use a number of groups that divides {count}.",
        )
    size = count // groups
    grouped = [ranks.shares[at : at + size] for at in range(0, count, size)]
    experts = _cut(s.experts, [sum(of) for of in grouped])
    if experts is None:
        raise UsageError(
            f"{s.experts} experts cannot be divided over {groups} groups of ranks.",
            f"Use at most {s.experts} expert groups.",
        )
    unit = lcm(*(_width_unit(ranks, f"experts.{e}.") for e in range(s.experts))) if size > 1 else 1
    shared = _shared(s, ranks)
    found: list[_Piece[Mlp | Moe]] = []
    for ids, shares in zip(experts, grouped, strict=True):
        widths = _cut(s.width, shares, unit)
        if widths is None:
            raise UsageError(
                f"Experts of width {s.width}, in units of {unit}, cannot be divided over {size} ranks.",
                f"Use more expert groups than {groups}: whole experts are then divided.",
            )
        for i, width in enumerate(widths):
            found.append(_some_experts(s, ids, width, i == 0, shared[len(found)], count))
    return found


def _some_experts(
    s: Moe, ids: range, width: range, adds_bias: bool, shared: _Piece[Mlp] | None, ranks: int
) -> _Piece[Mlp | Moe]:
    """The layer with some experts, restricted to `width`, and with a part of the shared MLP, if any."""
    held = None if len(ids) == s.experts else Held(ids.start, len(ids), s.experts)
    spec = replace(
        s, experts=len(ids), width=len(width), router=replace(s.router, held=held),
        shared=shared.spec if shared else None, shared_gate=s.shared_gate and shared is not None,
    )  # fmt: skip
    routing = replace(spec, shared=None).params(routed=False)
    parts = _placed(routing, {}, ranks, "every rank routes over all experts")
    one = _narrow(s.expert, width, adds_bias)
    for here, e in enumerate(ids):
        for name, part in one.parts.items():
            parts[f"experts.{here}.{name}"] = part and replace(part, name=f"experts.{e}.{name}")
    return _Piece(spec, parts | shared.inside("shared") if shared else parts)


def _shared(s: Moe, ranks: _Ranks) -> list[_Piece[Mlp] | None]:
    """The parts of the shared MLP. With fewer units of its width than ranks, the last ranks have none."""
    count = len(ranks.shares)
    if s.shared is None:
        return [None] * count
    unit = _width_unit(ranks, "shared.")
    with_part = min(count, -(-s.shared.width // unit))
    widths = _cut(s.shared.width, ranks.shares[:with_part], unit) or []
    return [*(_narrow(s.shared, width, r == 0) for r, width in enumerate(widths)), *[None] * (count - with_part)]


_DIVIDE: dict[type[Mixer | Mlp | Moe], Callable[[Any, _Ranks], Sequence[_Piece[Any]]]] = {
    Attention: _attention,
    LatentAttention: _latent_attention,
    GatedDeltaNet: _gated_delta_net,
    Mlp: _mlp,
    Moe: _moe,
}


# --- Cuts ---


class _Place(NamedTuple):
    """A Part without its name."""

    rows: tuple[range, ...]
    columns: range | None = None
    shared: str = ""


def _placed(
    params: Params, places: Mapping[str, _Place | None], ranks: int, shared: str = ""
) -> dict[str, Part | None]:
    """Parts for parameters of a rank, by the longest key of `places` that their names begin with (None: zeros); those
    without a key are whole on each of `ranks` ranks, for the reason `shared`."""
    found: dict[str, Part | None] = {}
    for name, shape in params:
        key = max((key for key in places if name == key or name.startswith(f"{key}.")), key=len, default=None)
        if key is None:
            found[name] = Part(name, (range(shape[0]),), None, shared if ranks > 1 else "")
        elif place := places[key]:
            found[name] = Part(name, _merged(place.rows), place.columns, place.shared)
        else:
            found[name] = None
    return found


def _replicated(s: Mixer | Mlp, last: str, ranks: _Ranks, why: str) -> list[_Piece[Any]]:
    """The whole part on every rank, with zeros in place of its last projection on all but the first."""
    count = len(ranks.shares)
    whole = _placed(s.params(), {last: None}, count, why)
    summed = {name: Part(name, (range(shape[0]),)) for name, shape in s.params() if whole[name] is None}
    return [_Piece(s, whole if r else whole | summed) for r in range(count)]


def _merged(ranges: Sequence[range]) -> tuple[range, ...]:
    """The ranges, with neighbours that continue each other as one."""
    found: list[range] = []
    for of in ranges:
        if found and found[-1].stop == of.start:
            of = range(found.pop().start, of.stop)
        found.append(of)
    return tuple(found)


def _not_divisible(what: str, ranks: _Ranks, unit: int) -> str:
    units = f", in units of {unit}," if unit > 1 else ""
    return f"{what}{units} cannot be divided over {len(ranks.shares)} ranks"


def _times(of: range, count: int, at: int = 0) -> range:
    """`count` rows for each number of a range, the first of them at row `at`."""
    return range(at + of.start * count, at + of.stop * count)


def _whole_groups(heads: int, each: int) -> int:
    """The least number of groups of `each` heads that is a multiple of `heads`."""
    return heads // gcd(heads, each)


@dataclass(frozen=True)
class _Heads:
    """A rank's heads: whole groups, or some heads (`inner`) of one. shared: why other ranks have the group too."""

    groups: range
    inner: range
    shared: str = ""

    def heads(self, each: int) -> range:
        """Heads, counted over all groups of `each`."""
        return range(self.groups.start * each + self.inner.start, (self.groups.stop - 1) * each + self.inner.stop)


def _heads(groups: int, each: int, shares: Sequence[int], by_group: int, by_head: int) -> list[_Heads] | None:
    """Divide groups of `each` heads in units of `by_group` groups; with more ranks than groups, divide the heads of
    each group over some ranks, in units of `by_head`. None if some rank would have none."""
    cuts = _cut(groups, shares, by_group)
    if cuts is not None:
        return [_Heads(cut, range(each)) for cut in cuts]
    runs = _runs(shares, groups, -(-each // by_head)) if by_group == 1 else None
    if runs is None:
        return None
    found = []
    for group, run in enumerate(runs):
        for inner in _cut(each, run, by_head) or ():
            why = "with fewer groups of heads than ranks, some ranks share one" if len(run) > 1 else ""
            found.append(_Heads(range(group, group + 1), inner, why))
    return found


def _runs(shares: Sequence[int], count: int, most: int) -> list[Sequence[int]] | None:
    """Divide ranks into `count` runs of 1 to `most` neighbours with nearly equal sums of shares; None: impossible."""
    ranks, sums = len(shares), [0, *accumulate(shares)]
    if not count <= ranks <= count * most:
        return None
    ends = [0]
    for run in range(1, count + 1):
        left = count - run
        least, last = max(ends[-1] + 1, ranks - left * most), min(ends[-1] + most, ranks - left)
        ends.append(min(range(least, last + 1), key=lambda end: abs(sums[end] * count - sums[-1] * run)))
    return [shares[a:b] for a, b in pairwise(ends)]


def _cut(total: int, shares: Sequence[int], unit: int = 1) -> list[range] | None:
    """Divide `total` in units (the last may be smaller) in proportion to shares, at least one unit each; None if there
    are fewer units than shares."""
    units, ranks, ends = -(-total // unit), len(shares), [0]
    if units < ranks:
        return None
    for r, sum_ in enumerate(accumulate(shares)):
        wanted = (2 * units * sum_ + sum(shares)) // (2 * sum(shares))
        ends.append(max(ends[-1] + 1, min(wanted, units - (ranks - 1 - r))))
    return [range(a * unit, min(b * unit, total)) for a, b in pairwise(ends)]
