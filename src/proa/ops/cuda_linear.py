"""Linear layers on an NVIDIA GPU. Weights keep the checkpoint's format if a packed format holds it exactly, else they
are bfloat16 rows. Belongs here: which parts are fused to one matrix, which kernel multiplies with it. Never: kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor

from proa.native.formats import BF16_FORM, PANEL_ROWS, Form, Layout, kept_form, layout
from proa.ops import products
from proa.ops.parts import named_parts
from proa.ops.sizes import FEW_ROWS, LINEAR_ROWS, UNPACKED_BYTES
from proa.ops.staging import DecidedLater, DevicePanels, DeviceRows, Staging
from proa.ops.table import LinearMap, Parameters, Sink
from proa.ops.triton import linear, linear_packed
from proa.ops.triton.choose import RouterRows
from proa.ops.triton.unpack import unpack

# From this many tokens on, dequantising to bfloat16 rows and multiplying with cuBLAS is faster than the packed kernel:
# on an H200, FP8 of 1536 x 2048 takes 21 us at 128 tokens packed, 10 at 256 by rows; of 7168 x 4096, 60 and 48.
UNPACKED_TOKENS = 128


class _Matrix(Protocol):
    def product(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor: ...

    def into(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """`product` into rows of `out`, which may be strided."""


@dataclass(frozen=True)
class PlainMatrix:
    """An unpacked matrix; weight: bfloat16 [rows, inputs]. least_rows: see CudaOps."""

    weight: Tensor
    least_rows: int = 1

    def product(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        if len(x) > LINEAR_ROWS and dtype == x.dtype:
            return products.linear(x, self.weight, bias)
        if len(x) > LINEAR_ROWS:  # a head or router, whose sums stay float32
            return products.wide_linear(x, self.weight, bias, dtype)
        out = torch.empty(len(x), len(self.weight), dtype=dtype, device=x.device)
        self.into(x, bias, out)
        return out

    def into(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if len(x) > LINEAR_ROWS:
            out.copy_(self.product(x, bias, out.dtype))
        else:
            linear.linear(x, self.weight, bias, out, self.least_rows)


class PackedMatrix:
    """A packed matrix with layout `of`; panels: uint8 [panels, panel bytes]. least_rows: see CudaOps."""

    def __init__(self, of: Layout, device: torch.device, least_rows: int = 1) -> None:
        self.of, self._least_rows = of, least_rows
        self.panels = torch.empty(of.panels, of.panel_bytes, dtype=torch.uint8, device=device)
        # Counters of arrived programs: for launches with few rows, and for all others.
        self._arrived = torch.zeros(2, linear_packed.MOST_PROGRAMS, dtype=torch.int32, device=device)

    def product(self, x: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        out = torch.empty(len(x), self.of.rows, dtype=dtype, device=x.device)
        self.into(x, bias, out)
        return out

    def into(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        if len(x) >= UNPACKED_TOKENS and out.dtype == x.dtype:
            self._unpacked(x, bias, out)
            return
        floats = linear_packed.partial_floats(max(len(x), self._least_rows), self.of)
        partial = torch.empty(floats, dtype=torch.float32, device=x.device)
        arrived = self._arrived[int(len(x) >= FEW_ROWS)]
        linear_packed.linear_packed(x, self.panels, self.of, bias, out, partial, arrived, self._least_rows)

    def _unpacked(self, x: Tensor, bias: Tensor | None, out: Tensor) -> None:
        """Multiply with cuBLAS after dequantising to bfloat16 rows, UNPACKED_BYTES at a time."""
        panels = max(1, UNPACKED_BYTES // (PANEL_ROWS * self.of.columns * 2))
        for first in range(0, self.of.panels, panels):
            some = slice(first * PANEL_ROWS, min((first + panels) * PANEL_ROWS, self.of.rows))
            rows = torch.empty(some.stop - some.start, self.of.columns, dtype=torch.bfloat16, device=x.device)
            unpack(self.panels[first : first + panels], self.of, rows)
            products.linear_into(x, rows, None if bias is None else bias[some], out[:, some])


@dataclass(frozen=True)
class _Piece:
    """Consecutive parts of a layer fused to one matrix; rows [first, end) of the layer's outputs."""

    matrix: _Matrix
    first: int
    end: int
    sinks: Mapping[str, Sink]


class CudaLinear:
    """Fused linear layers: neighbouring parts share a matrix if they have one form and, if packed, begin at whole
    panels.

    Memory is allocated when the first row arrives, or at the first product.
    """

    def __init__(
        self, outs: Mapping[str, int], inputs: int, bias: bool, device: torch.device, staging: Staging,
        out: torch.dtype = torch.bfloat16, least_rows: int = 1,
    ) -> None:  # fmt: skip
        """least_rows: see CudaOps."""
        self._outs, self._inputs, self._out = dict(outs), inputs, out
        self._device, self._staging, self._least_rows = device, staging, least_rows
        self._stored: dict[str, str] = {}
        rows = sum(outs.values())
        self.bias = torch.empty(rows, dtype=torch.bfloat16, device=device) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        if len(self._pieces) == 1:
            return self._pieces[0].matrix.product(x, self.bias, self._out)
        out = torch.empty(len(x), sum(self._outs.values()), dtype=self._out, device=x.device)
        for piece in self._pieces:
            bias = None if self.bias is None else self.bias[piece.first : piece.end]
            piece.matrix.into(x, bias, out[:, piece.first : piece.end])
        return out

    @property
    def weight(self) -> Tensor | None:
        """The bfloat16 weight [rows, inputs] if all parts are one unpacked matrix, else None."""
        matrices = [piece.matrix for piece in self._pieces]
        return matrices[0].weight if len(matrices) == 1 and isinstance(matrices[0], PlainMatrix) else None

    @property
    def forms(self) -> tuple[Form, ...]:
        """Forms of the matrices, in order."""
        matrices = [piece.matrix for piece in self._pieces]
        return tuple(Form(m.of.format, m.of.group) if isinstance(m, PackedMatrix) else BF16_FORM for m in matrices)

    @cached_property
    def _pieces(self) -> tuple[_Piece, ...]:
        pieces: list[_Piece] = []
        first = 0
        for form, outs in self._groups():
            pieces.append(self._piece(form, outs, first))
            first += sum(outs.values())
        return tuple(pieces)

    def _groups(self) -> list[tuple[Form, dict[str, int]]]:
        """Group consecutive parts into matrices: (form, part -> rows)."""
        groups: list[tuple[Form, dict[str, int]]] = []
        for name, rows in self._outs.items():
            form = kept_form({self._stored.get(name, "BF16")}, self._inputs)
            fits = form == BF16_FORM or (groups and sum(groups[-1][1].values()) % PANEL_ROWS == 0)
            if groups and groups[-1][0] == form and fits:
                groups[-1][1][name] = rows
            else:
                groups.append((form, {name: rows}))
        return groups

    def _piece(self, form: Form, outs: Mapping[str, int], first: int) -> _Piece:
        rows, sinks = sum(outs.values()), dict[str, Sink]()
        if form == BF16_FORM:
            weight = torch.empty(rows, self._inputs, dtype=torch.bfloat16, device=self._device)
            for (name, _), part in zip(outs.items(), torch.split(weight, list(outs.values())), strict=True):
                sinks[name] = DeviceRows(part, self._staging)
            return _Piece(PlainMatrix(weight, self._least_rows), first, first + rows, sinks)
        of = layout(form.format, rows, self._inputs, form.group)
        matrix = PackedMatrix(of, self._device, self._least_rows)
        panels = [-(-count // PANEL_ROWS) for count in outs.values()]
        for (name, count), part in zip(outs.items(), torch.split(matrix.panels, panels), strict=True):
            sinks[name] = DevicePanels(count, self._inputs, self._ignore_type, self._at(part, form), self._staging)
        return _Piece(matrix, first, first + rows, sinks)

    @staticmethod
    def _ignore_type(stored: str) -> None:
        """Do nothing: the sinks of a piece are made after all types were announced."""

    @staticmethod
    def _at(panels: Tensor, form: Form) -> Callable[[], tuple[Tensor, Form]]:
        return lambda: (panels, form)

    def _sink(self, name: str) -> Sink:
        def expect(stored: str) -> None:
            self._stored[name] = stored

        def where() -> Sink:
            return next(piece.sinks[name] for piece in self._pieces if name in piece.sinks)

        return DecidedLater((self._outs[name], self._inputs), expect, where)

    def parameters(self) -> Parameters:
        for name in self._outs:
            yield f"{name}.weight", self._sink(name)
        yield from named_parts(self._outs, "bias", self.bias)


def router_rows(router: LinearMap) -> RouterRows | None:
    """A router's weight and bias for the fused kernels; None if its weight is not one unpacked matrix."""
    if not isinstance(router, CudaLinear) or (weight := router.weight) is None:
        return None
    return RouterRows(weight, router.bias)
