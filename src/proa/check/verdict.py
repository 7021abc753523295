"""What was found about a path: its worst difference in each phase, and every op that is wrong. Never: computing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from proa.cache.pool import KvStorage
from proa.check.blocks import Lengths
from proa.check.bounds import SUSPECT, over_bound, row_errors
from proa.check.drive import Noted
from proa.check.notes import IDS, NUMBERS, place

NON_FINITE = "NaN or infinity"


@dataclass(frozen=True)
class Problem:
    """An op that is wrong. layer: its block in the model; None: outside the blocks. over: difference / bound. rows: how
    many of the phase's rows. detail: experts, for ops that have any."""

    layer: int | None
    op: str
    phase: str
    over: float
    rows: int
    detail: str = ""

    def __str__(self) -> str:
        where = "" if self.layer is None else f"layer {self.layer}, "
        by = NON_FINITE if self.over == float("inf") else f"{self.over:.3g} times the bound"
        named = f", {self.detail}" if self.detail else ""
        return f"{where}{self.op}{named}: {by} in {self.rows} rows ({self.phase})"


@dataclass
class Observed:
    """What a path computed. dtype: of activations. graphs: decode steps were CUDA graphs, others launched eagerly.
    left_out: phases of this path that could not be checked, and why."""

    name: str
    sequences: list[Noted]
    kv: KvStorage
    dtype: torch.dtype
    graphs: bool = False
    left_out: dict[str, str] = field(default_factory=dict)
    worst: dict[str, float] = field(default_factory=dict)  # by phase: difference / bound
    problems: list[Problem] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.phases: list[str | None] = [phase for noted in self.sequences for phase in noted.phases()]
        self.lengths = Lengths(
            tuple(len(noted.tokens) for noted in self.sequences), tuple(noted.num_prompt for noted in self.sequences)
        )
        for phase in self.phases:
            if phase is not None:
                self.worst.setdefault(phase, 0.0)

    def rows(self, name: str) -> Tensor:
        """The rows noted at a place, of all sequences. LOGITS: of the `scored` rows alone."""
        return torch.cat([noted.rows[name] for noted in self.sequences])

    def copies(self, block: int) -> Tensor:
        """int [T, top_k]: which copy of each chosen expert was read: 1 in RAM, by the CPU; 0 another one. If that was
        not noted, 0 for all."""
        noted = place(NUMBERS, block)
        if noted not in self.sequences[0].rows:
            return torch.zeros_like(self.rows(place(IDS, block)))
        return (self.rows(noted) >= 0).int()

    @property
    def scored(self) -> Tensor:
        """int64 [R]: the rows with logits."""
        found, begin = [], 0
        for noted in self.sequences:
            found += [begin + position for position in noted.scored]
            begin += len(noted.tokens)
        return torch.tensor(found)

    @property
    def tokens(self) -> Tensor:
        return torch.tensor([token for noted in self.sequences for token in noted.tokens])

    def judge(
        self, layer: int | None, op: str, got: Tensor, exact: Tensor, rough: Tensor, sound: Tensor,
        detail: Callable[[Tensor], str] | None = None, *, rows: Tensor | None = None,
    ) -> None:  # fmt: skip
        """Compare an op's result [T, N]. sound: bool [T], rows with finite inputs; others are not judged. detail: names
        the experts that explain these wrong rows, bool [T]. rows: int64 [T], which of the path's rows these are; None:
        all of them."""
        errors = torch.zeros(len(sound))
        if bool(sound.any()):
            errors[sound] = row_errors(got[sound], exact[sound], rough[sound])
        self.judge_rows(layer, op, errors, over_bound, errors > SUSPECT, sound, detail, rows=rows)

    def judge_rows(
        self, layer: int | None, op: str, errors: Tensor, rule: Callable[[Tensor], Tensor], suspect: Tensor,
        sound: Tensor, detail: Callable[[Tensor], str] | None = None, *, rows: Tensor | None = None,
    ) -> None:  # fmt: skip
        """errors: of each row, [T]. rule: turns those of a phase into difference / bound. suspect: bool [T], rows that
        count as wrong if the phase is."""
        phases = self.phases if rows is None else [self.phases[row] for row in rows.tolist()]
        for phase in self.worst:
            mine = sound & torch.tensor([of == phase for of in phases])
            if not bool(mine.any()):
                continue
            over = torch.zeros_like(errors)
            over[mine] = rule(errors[mine])
            worst = float(over.max())
            self.worst[phase] = max(self.worst[phase], worst)
            if worst > 1:
                why = detail(sound & suspect) if detail is not None else ""
                self.problems.append(Problem(layer, op, phase, worst, int((mine & suspect).sum()), why))


def finite_rows(*tensors: Tensor) -> Tensor:
    """bool [T]: rows without NaN and infinity in any of the tensors [T, ...]."""
    found = [tensor.float().flatten(1).isfinite().all(1) for tensor in tensors]
    return torch.stack(found).all(0)


def finite_so_far(rows: Tensor, lengths: Sequence[int]) -> Tensor:
    """bool [T]: rows of sequences up to their first False."""
    return torch.cat([part.long().cumprod(0).bool() for part in torch.split(rows, list(lengths))])
