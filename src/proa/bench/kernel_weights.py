"""Makes random packed experts, many gigabytes in seconds.

A few dozen panels of random codes, with scales that give weights of variance 1 / columns, are packed like a
checkpoint's and repeated. Kernel times do not depend on the values, as long as none is subnormal, infinite or NaN.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from proa.bench.kernel_cases import ExpertShape, WeightFormat
from proa.machine.topology import UNBOUND, Team
from proa.native.arena import Arena
from proa.native.formats import PANEL_ROWS, FormatFacts, Layout, PackSource, facts, layout, pack
from proa.native.weights import Activation, Experts, Matrix, Piece

TEMPLATE_PANELS = 61  # a prime: neighbouring experts differ
# Number of codes of a type, and the root mean square of their values (of unsigned ones: minus the middle code).
_CODES = {
    "e4m3": (256, 99.7), "int8": (256, 73.9), "e2m1": (16, 2.93), "int6": (64, 18.5), "uint6": (32, 9.23),
    "int4": (16, 4.61), "uint4": (16, 4.61),
}  # fmt: skip
_E8M0_BIAS = 127

Array = npt.NDArray[np.generic]


def layouts(of: WeightFormat, shape: ExpertShape) -> tuple[Layout, Layout]:
    """Return the layouts of one expert's matrices: gate and up together, with alternating panels; and down."""
    panels = -(-shape.width // PANEL_ROWS)
    up = layout(of.form, 2 * panels * PANEL_ROWS, shape.hidden, of.group)
    return up, layout(of.form, shape.hidden, shape.width, of.group)


def expert_bytes(of: WeightFormat, shape: ExpertShape) -> int:
    """Return the packed bytes of one expert, including scales and padding."""
    return sum(one.matrix_bytes for one in layouts(of, shape))


class ExpertLayers:
    """`count` layers of experts in RAM; panels are divided over the teams in proportion to their CPUs.

    Raises ResourceError if there is not enough memory.
    """

    def __init__(self, of: WeightFormat, shape: ExpertShape, count: int, teams: Sequence[Team]) -> None:
        rng = np.random.default_rng(0)
        parts = [
            _Part(one, team_shares(one.panels, teams, unit), shape.experts, random_panels(of, one.columns, rng))
            for one, unit in zip(layouts(of, shape), (2, 1), strict=True)
        ]
        self.arenas = [_arena(team, count * sum(p.team_bytes(i) for p in parts)) for i, team in enumerate(teams)]
        self.nbytes = sum(arena.nbytes for arena in self.arenas)
        used = [0] * len(teams)
        self.layers: list[Experts] = []
        for _ in range(count):
            up, down = (part.place(self.arenas, used) for part in parts)
            self.layers.append(Experts(up, down, Activation.SILU))

    @property
    def pages(self) -> str:
        """Page types of the weights' memory: "hugetlb", "shmem-huge", ...; several if the teams' differ."""
        return ", ".join(sorted({arena.info.pages for arena in self.arenas}))

    def close(self) -> None:
        """Free the memory; the layers must not be used after this."""
        self.layers.clear()
        for arena in self.arenas:
            arena.close()


@dataclass(frozen=True)
class _Part:
    """One of the experts' two matrices; team i has panels [cuts[i], cuts[i + 1]) of each expert."""

    layout: Layout
    cuts: Sequence[int]
    experts: int
    template: npt.NDArray[np.uint8]

    def slice_bytes(self, team: int) -> int:
        return (self.cuts[team + 1] - self.cuts[team]) * self.layout.panel_bytes

    def team_bytes(self, team: int) -> int:
        return self.experts * self.slice_bytes(team)

    def place(self, arenas: Sequence[Arena], used: list[int]) -> Matrix:
        """Write the matrix into each team's arena from offset used[team], which is advanced in place."""
        pieces = []
        for team, arena in enumerate(arenas):
            nbytes = self.team_bytes(team)
            pieces.append(Piece(self.cuts[team], arena.data + used[team], self.slice_bytes(team), nbytes))
            if nbytes:
                self._fill(team, np.frombuffer(arena.view(used[team], nbytes), np.uint8))
            used[team] += nbytes
        return Matrix(self.layout, pieces, self.experts)

    def _fill(self, team: int, to: npt.NDArray[np.uint8]) -> None:
        """Fill a team's slices. A panel's contents depend only on its number and expert, not on the teams."""
        twice = np.concatenate([self.template, self.template])
        for expert, piece in enumerate(to.reshape(self.experts, -1)):
            panel = (expert * self.layout.panels + self.cuts[team]) % TEMPLATE_PANELS
            source = twice[panel * self.layout.panel_bytes :][: self.template.size]
            for begin in range(0, piece.size, source.size):
                piece[begin : begin + source.size] = source[: piece.size - begin]


def team_shares(panels: int, teams: Sequence[Team], unit: int) -> list[int]:
    """Divide panels over teams in proportion to their CPUs; return the boundaries, multiples of `unit`: team i has
    [result[i], result[i + 1])."""
    cpus, units = [len(team.cpus) for team in teams], panels // unit
    return [units * sum(cpus[:i]) // sum(cpus) * unit for i in range(len(teams))] + [panels]


def _arena(team: Team, nbytes: int) -> Arena:
    return Arena(max(nbytes, 1), None if team.node == UNBOUND else team.node)


# ---- random codes and scales


@dataclass
class _Rows:
    """The inputs of proa_pack; keeps its arrays alive."""

    arrays: dict[str, Array] = field(default_factory=dict)
    scale_rows: int = 1
    factor: float = 1.0

    def source(self) -> PackSource:
        def address(name: str) -> int | None:
            return self.arrays[name].ctypes.data if name in self.arrays else None

        def stride(name: str) -> int:
            return self.arrays[name].strides[0] if name in self.arrays else 0

        return PackSource(
            address("codes"), stride("codes"), address("scales"), stride("scales"), self.scale_rows,
            address("mins"), address("block_scales"), address("block_mins"), stride("block_scales"), self.factor,
        )  # fmt: skip


def random_panels(of: WeightFormat, columns: int, rng: np.random.Generator) -> npt.NDArray[np.uint8]:
    """Make TEMPLATE_PANELS packed panels, uint8, of weights with variance about 1 / columns."""
    rows = TEMPLATE_PANELS * PANEL_ROWS
    made = _random_rows(of, rows, columns, rng)
    to = layout(of.form, rows, columns, of.group)
    out = np.zeros(to.matrix_bytes, np.uint8)
    pack(to, made.source(), rows, 1, out.ctypes.data, out.nbytes)
    return out


def _random_rows(of: WeightFormat, rows: int, columns: int, rng: np.random.Generator) -> _Rows:
    made = _Rows()
    form = facts(of.form)
    if form.scale == "none":
        values = rng.standard_normal((rows, columns), np.float32) / np.float32(math.sqrt(columns))
        made.arrays["codes"] = bf16_bits(values) if form.code == "bf16" else values.astype(np.float16)
        return made
    count, root_mean_square = _CODES[form.code]
    codes = made.arrays["codes"] = rng.integers(0, count, (rows, columns), np.uint8)
    if form.code == "e4m3":
        codes[(codes & 0x7F) == 0x7F] = 0  # NaN
    blocks = form.block_groups
    groups = -(-columns // (of.group * blocks)) * blocks if of.group else 1
    _add_scales(form, made, 1 / (root_mean_square * math.sqrt(columns)), (rows, groups), rng)
    return made


def _add_scales(form: FormatFacts, to: _Rows, scale: float, size: tuple[int, int], rng: np.random.Generator) -> None:
    """Add random scales [rows, groups] around `scale`, and minimums that map the middle code to zero."""
    a = to.arrays
    values = scale * rng.uniform(0.75, 1.25, size)
    match form.scale:
        case "e8m0":
            a["scales"] = (_E8M0_BIAS + round(math.log2(scale)) + rng.integers(-1, 1, size)).astype(np.uint8)
        case "e4m3":
            a["scales"] = rng.integers(0x34, 0x3D, size, np.uint8)  # e4m3 from 0.75 to 1.5
            to.factor = scale
        case "f32_panel":
            to.scale_rows = 128
            a["scales"] = values[: -(-size[0] // 128)].astype(np.float32)
        case "block8":
            a["scales"] = a["mins"] = rng.integers(36, 61, size, np.uint8)
            blocks, middle = values[:, ::8] / 48, 7.5 if form.code == "uint4" else 15.5
            a["block_scales"], a["block_mins"] = blocks.astype(np.float16), (middle * blocks).astype(np.float16)
        case "block16":
            a["scales"] = rng.integers(48, 81, size, np.uint8)
            a["block_scales"] = (values[:, ::16] / 64).astype(np.float16)
        case _:
            a["scales"] = _stored(form.scale, values)
            if form.has_min:
                a["mins"] = _stored(form.scale, -7.5 * values)


def _stored(scale: str, values: npt.NDArray[np.float64]) -> Array:
    if scale == "f16":
        return values.astype(np.float16)
    return bf16_bits(values.astype(np.float32)) if scale == "bf16" else values.astype(np.float32)


def bf16_bits(values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """Round finite float32 to bfloat16 bits, to nearest, ties away from zero."""
    return ((np.ascontiguousarray(values).view(np.uint32) + np.uint32(0x8000)) >> np.uint32(16)).astype(np.uint16)
