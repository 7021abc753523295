"""Random quantised matrices: values of the same magnitude as in bfloat16, and the same bytes on every device."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from proa.hybrid.layer_memory import LayerMemory
from proa.models import ranks
from proa.models.families import declare
from proa.models.spec import Model, Moe
from proa.native.formats import DUMMY, Form, Format, Layout, layout
from proa.native.pool import Pool
from proa.native.weights import Matrix, Piece, Rows, linear
from proa.ops.packed import Memory, RowSink, Stack
from proa.ops.staging import DevicePanels, Staging
from proa.ops.table import Target
from proa.weights.dummy import fill_dummy
from proa.weights.dummy_names import is_coded
from tiny import tiny_reference

FORMATS = [name.removeprefix("dummy ") for name in DUMMY]
CPU = torch.device("cpu")


def spec_of(name: str = "qwen3-moe", layers: int = 1) -> Model:
    model = tiny_reference(name, num_hidden_layers=layers, hidden_size=128, moe_intermediate_size=48)
    return declare(model.config.to_dict() | {"architectures": [type(model).__name__]}).spec


class Filled:
    """The experts of a model's only layer, those in `resident` in GPU slots, filled by `teams` teams of workers."""

    def __init__(self, form: str, seed: int = 1, resident: Sequence[int] = (), teams: int = 1, staging: int = 1 << 20):
        self.spec = spec_of()
        moe = self.spec.blocks[0].ffn
        assert isinstance(moe, Moe)
        owners = tuple(0 if e in resident else ranks.CPU for e in range(moe.experts))
        self.pool = Pool([[]] * teams, pin=False)
        stage, ram = Staging(self.pool, staging, pinned=False), Memory(self.pool, [None] * teams)
        self.memory = LayerMemory(moe.expert, owners, False, CPU, ram, stage)
        targets: dict[str, Target] = {name: torch.empty(shape) for name, shape in self.spec.params()}
        targets |= {f"blocks.0.ffn.experts.{name}": sink for name, sink in self.memory.parameters()}
        fill_dummy(self.spec, targets, seed, "uniform", self.pool, stage.flush, form)

    def packed(self, expert: int) -> tuple[bytes, bytes]:
        """Packed bytes of gate and up, and of down."""
        slots, stacks = self.memory.slots, self.memory.stacks
        if expert in slots.slot_of:
            slot = slots.slot_of[expert]
            return slots.up[slot].numpy().tobytes(), slots.down[slot].numpy().tobytes()
        assert stacks is not None
        number = self.memory.in_ram.index(expert)
        up, down = (
            b"".join(ctypes.string_at(piece.address, piece.nbytes) for piece in stack.pieces(number))
            for stack in (stacks.up, stacks.down)
        )
        return up, down

    def values(self, expert: int) -> tuple[Tensor, Tensor]:
        """[2 * 16-row panels, hidden], [hidden, width]: products of the identity, as native kernels make them."""
        shape = self.memory.shape
        return tuple(
            unpacked(self.pool, data, of) for data, of in zip(self.packed(expert), (shape.up, shape.down), strict=True)
        )  # type: ignore[return-value]


def unpacked(pool: Pool, data: bytes, of: Layout) -> Tensor:
    memory = torch.empty(len(data) + 64, dtype=torch.uint8)
    at = -(-memory.data_ptr() // 64) * 64
    ctypes.memmove(at, data, len(data))
    matrix = Matrix(of, [Piece(0, at, of.matrix_bytes, len(data))], 1)
    x, y = torch.eye(of.columns, dtype=torch.bfloat16), torch.full((of.columns, of.rows), torch.nan)
    linear(pool, matrix, Rows(x.data_ptr(), of.columns), Rows(y.data_ptr(), of.rows, True), of.columns, outputs=of.rows)
    return y.T


@pytest.mark.parametrize("form", FORMATS)
def test_as_large_as_in_bfloat16(form: str) -> None:
    filled = Filled(form)
    depth, up, down = 2, [], []
    for expert in range(filled.memory.experts):
        gate_up, out = filled.values(expert)
        assert torch.isfinite(gate_up).all()
        assert not out[0].any(), "channel 0 of the residual stream is not written"
        assert (out[1:] != 0).any(1).all()
        up.append(gate_up)
        down.append(out[1:])
    assert float(torch.cat(up).std()) == pytest.approx(1 / math.sqrt(128), rel=0.05)
    assert float(torch.cat(down).std()) == pytest.approx(0.5 / math.sqrt(depth) / math.sqrt(48), rel=0.05)
    assert abs(float(torch.cat(up).mean())) < 0.01 / math.sqrt(128)


@pytest.mark.parametrize("form", FORMATS)
def test_the_same_bytes_wherever_they_lie(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proa.weights.random_pool.POOL", 1 << 12)  # matrices of several copies
    plain = Filled(form)
    others = [
        Filled(form, resident=(0, 2, 5)),
        Filled(form, teams=3),
        Filled(form, resident=range(8), staging=24 << 10),
    ]
    for expert in range(plain.memory.experts):
        for other in others:
            assert other.packed(expert) == plain.packed(expert)
    assert Filled(form, seed=2).packed(0) != plain.packed(0)
    assert plain.packed(1) != plain.packed(0)


def test_a_sink_without_any_room_is_an_error() -> None:
    with pytest.raises(ValueError, match="no room"):
        Filled("int4", resident=[0], staging=1 << 10)


def test_of_linear_attention_the_large_projections_have_the_format() -> None:
    """Qwen3-Next's own FP8 checkpoint quantises the same projections."""
    names = [name for name, _ in spec_of("qwen3-next", layers=4).params() if name.startswith("blocks.0.mixer.")]
    coded = {name.removeprefix("blocks.0.mixer.") for name in names if is_coded(name)}
    assert coded == {"qkvz.weight", "out.weight"}


@pytest.mark.parametrize("form", FORMATS)
def test_linear_layers_have_the_format_too(form: str) -> None:
    """Packed bytes are equal in RAM and on a GPU, although the staging is too small for a whole matrix. The head is not
    quantised."""
    spec, kept, q = spec_of(), DUMMY[f"dummy {form}"], "blocks.0.mixer.q.weight"
    shape = dict(spec.params())[q]
    of = layout(kept.format, *shape, kept.group)
    with Pool([[]], pin=False) as pool:
        staging, memory = Staging(pool, of.matrix_bytes // 2, pinned=False), Memory(pool, [None])
        stack, head = Stack(memory, 1, *shape), Stack(memory, 1, spec.vocab, spec.hidden)
        panels = torch.full((of.panels, of.panel_bytes), 255, dtype=torch.uint8)
        sinks = [RowSink(*shape, stack.expect, lambda: (stack, 0))]
        told: list[str] = []
        sinks.append(DevicePanels(*shape, told.append, lambda: (panels, Form(kept.format, kept.group)), staging))
        for sink in sinks:
            targets: dict[str, Target] = {name: torch.empty(of_it) for name, of_it in spec.params()}
            targets |= {q: sink, "head.weight": RowSink(spec.vocab, spec.hidden, head.expect, lambda: (head, 0))}
            fill_dummy(spec, targets, 1, "uniform", pool, staging.flush, form)
        assert told == [f"dummy {form}"]
        assert (stack.format, head.format) == (kept.format, Format.BF16)
        (piece,) = stack.pieces(0)
        assert panels.numpy().tobytes() == ctypes.string_at(piece.address, piece.nbytes)
