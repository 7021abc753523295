"""One rank's part of a checkpoint: the numbers of slices of the whole, bit for bit, in the checkpoint's own format.

Packed matrices are read by products with unit vectors, which round nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from gguf_blocks import HALVES, random_blocks
from proa.models.names import Declared
from proa.models.ranks import Mesh, Rank, divide
from proa.native.fill import Fill, StoredRows, fill
from proa.native.formats import BF16_FORM, PANEL_ROWS, Format, Layout, kept_form, layout
from proa.native.pool import Pool
from proa.native.weights import Matrix, Piece, Rows, linear
from proa.ops.staging import STORED
from proa.ops.table import Target
from proa.weights.checkpoint import Checkpoint, open_checkpoint
from proa.weights.gguf_header import blocks
from proa.weights.index import TensorInfo
from proa.weights.load import load_weights
from proa.weights.narrowed import narrow, units
from proa.weights.rows import open_rows
from proa.weights.source import Source
from proa.weights.sources import resolve, stored_types
from rank_runs import part_of
from tiny import make_tiny, tiny_reference
from tiny_gguf import make_tiny_gguf
from tiny_quantised import DECODED, OTHER_NAMES, SCHEMES, make_gpt_oss, make_quantised
from weights_cases import load

QUANTISED = SCHEMES | DECODED | OTHER_NAMES
SMALL = {"num_hidden_layers": 1, "num_experts": 4, "moe_intermediate_size": 160}
MESH = Mesh(((2, 1),), expert_groups=1)  # of experts the width, which cuts the columns of `down`
_AT_ONCE = 12


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    with Pool([[0]], pin=False) as made:
        yield made


class Panels:
    """Implements Sink: one matrix in the packed format of its type."""

    def __init__(self, shape: tuple[int, ...], pool: Pool) -> None:
        self.shape, self.row_unit, self._pool = shape, PANEL_ROWS, pool
        self.stored, self._memory = "", torch.empty(0, dtype=torch.uint8)

    @property
    def layout(self) -> Layout:
        form, group = kept_form({self.stored}, self.shape[1])
        return layout(form, *self.shape, group if form is not Format.BF16 else 0)

    @property
    def address(self) -> int:
        return -(-self._memory.data_ptr() // 64) * 64

    def expect(self, stored: str) -> None:
        self.stored = stored
        self._memory = torch.full((self.layout.matrix_bytes + 64,), 0xFF, dtype=torch.uint8)

    def fills(self, rows: StoredRows, first: int = 0, count: int | None = None) -> Sequence[Fill]:
        of, count = self.layout, self.shape[0] - first if count is None else count
        skipped = first // PANEL_ROWS * of.panel_bytes
        to = layout(of.format, count, of.columns, of.group)
        return [Fill(rows, to, self.address + skipped, of.matrix_bytes - skipped)]

    def write(self, first: int, rows: Tensor) -> None:
        rows = rows.contiguous()
        stored = StoredRows(STORED[rows.dtype], rows.data_ptr(), rows.stride(0) * rows.itemsize)
        fill(self._pool, self.fills(stored, first, len(rows)))

    @property
    def values(self) -> Tensor:
        """float32 [rows, columns]."""
        of = self.layout
        matrix = Matrix(of, [Piece(0, self.address, of.matrix_bytes, of.matrix_bytes)])
        identity, found = torch.eye(of.columns, dtype=torch.bfloat16), []
        for first in range(0, of.columns, _AT_ONCE):
            x = identity[first : first + _AT_ONCE]
            y = torch.full((len(x), of.rows), torch.nan)
            to = Rows(y.data_ptr(), of.rows, wide=True)
            linear(self._pool, matrix, Rows(x.data_ptr(), of.columns), to, len(x), outputs=of.rows)
            found.append(y.T)
        return torch.cat(found, 1)


def packed(checkpoint: Checkpoint, declared: Declared, pool: Pool, rank: Rank | None = None) -> dict[str, Target]:
    """The model or one rank's, its matrices in panels."""
    spec = rank.spec if rank else declared.spec
    targets: dict[str, Target] = {
        name: Panels(shape, pool) if len(shape) == 2 else torch.full(shape, torch.nan) for name, shape in spec.params()
    }
    load_weights(checkpoint, declared, targets, lambda done, total: None, pool, rank=rank)
    return targets


def numbers(target: Target) -> Tensor:
    return target.values if isinstance(target, Panels) else target


def check(path: Path, pool: Pool, mesh: Mesh = MESH) -> set[str]:
    """Compare all ranks with the whole; returns the types of matrices whose columns were cut."""
    checkpoint = open_checkpoint(path)
    declared = checkpoint.declare()
    sources = resolve(declared, checkpoint.tensors)
    plain, in_panels = load(path), packed(checkpoint, declared, pool)
    whole = {name: numbers(target) for name, target in in_panels.items()}
    types, cut = stored_types(sources, checkpoint.tensors), set()
    for rank in divide(declared.spec, mesh, units(sources, checkpoint.tensors)):
        mine = stored_types(narrow(sources, rank), checkpoint.tensors)
        floats = {name: torch.full(shape, torch.nan) for name, shape in rank.spec.params()}
        load_weights(checkpoint, declared, floats, lambda done, total: None, rank=rank)
        for name, target in packed(checkpoint, declared, pool, rank).items():
            part, shape = rank.parts[name], tuple(target.shape)
            assert torch.equal(floats[name], part_of(plain, part, shape)), name
            want = part_of(whole, part, shape)
            if part is not None and len(shape) == 2:
                same = kept_form({types[part.name]}, shape[1]) == kept_form({mine[name]}, shape[1])
                assert same or any(len(rows) % PANEL_ROWS for rows in part.rows[:-1]), f"{name} is {mine[name]}"
                want = want if same else want.bfloat16().float()
                if part.columns is not None and part.columns != range(whole[part.name].shape[-1]):
                    cut.add(mine[name])
            assert torch.equal(numbers(target), want), name
    return cut


@pytest.mark.parametrize("scheme", sorted(QUANTISED))
def test_codes_stay_as_they_are(scheme: str, pool: Pool, tmp_path: Path) -> None:
    path, _ = make_quantised(QUANTISED[scheme], "qwen3-moe", tmp_path / "m", **SMALL)
    assert check(path, pool) == {QUANTISED[scheme].kept}


@pytest.mark.parametrize("quant", ["F16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_blocks_stay_as_they_are(quant: str, pool: Pool, tmp_path: Path) -> None:
    assert quant in check(make_tiny_gguf("qwen3-moe", tmp_path / "m.gguf", quant, **SMALL), pool)


def transposed(folder: Path) -> Path:
    tensors = tiny_reference("qwen2-moe").state_dict()
    stacked = {name: t.mT.contiguous() if ".experts." in name else t for name, t in tensors.items()}
    save_file(stacked, make_tiny("qwen2-moe", folder) / "model.safetensors")
    return folder


def pickled(folder: Path) -> Path:
    torch.save(tiny_reference("qwen2-moe").state_dict(), make_tiny("qwen2-moe", folder) / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    return folder


def bfloat16(folder: Path) -> Path:
    file = make_tiny("qwen2-moe-mixed", folder) / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file)
    return folder


def gpt_oss(folder: Path) -> Path:
    make_gpt_oss(folder, folder.with_name("plain"))
    return folder


def gguf(name: str, quant: str, *, old: bool = False) -> Callable[[Path], Path]:
    return lambda folder: make_tiny_gguf(name, folder / "m.gguf", quant, old=old)


@pytest.mark.parametrize(
    "mesh", [MESH, Mesh(((1,) * 4,)), Mesh(((1, 1), (3, 1)), 1)], ids=["by width", "whole experts", "stages"]
)
@pytest.mark.parametrize(
    "make",
    [
        bfloat16, transposed, pickled, gpt_oss, *(lambda p, n=n: make_tiny(n, p) for n in ("gpt-oss", "llama-bias")),
        *(lambda p, n=n: make_tiny(n, p) for n in ("qwen3-next", "deepseek-v2", "smollm2", "olmoe", "mixtral")),
        gguf("qwen3-next", "Q8_0"), gguf("qwen3-next", "F16", old=True), gguf("deepseek-v2", "Q8_0"),
        gguf("deepseek-v3", "F16", old=True), gguf("gpt-oss", "F16"),
    ],
    ids=[
        "bfloat16", "transposed", "pickled", "gpt-oss mxfp4", "gpt-oss", "llama-bias", "qwen3-next", "deepseek-v2",
        "smollm2", "olmoe", "mixtral", "gguf qwen3-next", "gguf qwen3-next old", "gguf deepseek-v2",
        "gguf deepseek-v3 old", "gguf gpt-oss",
    ],
)  # fmt: skip
def test_every_layout(make: Callable[[Path], Path], mesh: Mesh, pool: Pool, tmp_path: Path) -> None:
    check(make(tmp_path / "m"), pool, mesh)


@pytest.mark.parametrize("kind", sorted(HALVES))
def test_columns_of_blocks(kind: str, pool: Pool, tmp_path: Path) -> None:
    """Every GGUF type, of which tiny models have few: whole blocks stay, and others are read as numbers."""
    elems = blocks()[kind][0]
    rows, columns = 48, 4 * elems
    raw = random_blocks(kind, rows, columns, np.random.default_rng(5))
    file = tmp_path / "m.gguf"
    file.write_bytes(b"head" + raw.tobytes())
    info = TensorInfo(kind, (rows, columns), file, 4, raw.nbytes, name="t")
    whole = Source("t", 0, rows, 0, columns)
    part, other = whole.part(range(16, 48), range(elems, 3 * elems)), whole.part(range(rows), range(elems // 2, elems))
    assert part.whole_units(info)
    assert not other.whole_units(info)
    with open_rows(file, {"t": info}) as opened:
        floats = opened.read("t", 0, rows).clone()
        target = Panels((part.rows, part.cols), pool)
        target.expect(kind)
        stored = opened.stored("t", part.first_row, part.first_col, transposed=False)
        assert stored is not None
        fill(pool, target.fills(stored))
    want = floats[16:48, elems : 3 * elems]
    got = target.values
    if kept_form({kind}, part.cols) == BF16_FORM:
        want = want.bfloat16().float()
    torch.testing.assert_close(got, want, rtol=2.0**-21, atol=2.0**-18)


def test_cuts_within_a_group_are_read_as_numbers(pool: Pool, tmp_path: Path) -> None:
    """Nothing forbids them: codes become numbers, and the type says so."""
    path, _ = make_quantised(SCHEMES["int4"], "qwen3-moe", tmp_path / "m", **SMALL)
    checkpoint = open_checkpoint(path)
    declared = checkpoint.declare()
    sources, plain = resolve(declared, checkpoint.tensors), load(path)
    rank = divide(declared.spec, replace(MESH, shares=((3, 5),)))[1]
    name = "blocks.0.ffn.experts.0.down.weight"
    part = rank.parts[name]
    assert part
    assert part.columns == range(60, 160)
    assert stored_types(narrow(sources, rank), checkpoint.tensors)[name] == "F32"
    target = packed(checkpoint, declared, pool, rank)[name]
    assert torch.equal(numbers(target), part_of(plain, part, tuple(target.shape)).bfloat16().float())


def test_units_are_those_of_the_file(tmp_path: Path) -> None:
    for scheme, down in (("int4", (1, 32)), ("awq", (8, 32)), ("fp8 block", (16, 128)), ("gptq 8", (1, 32))):
        path, _ = make_quantised(SCHEMES[scheme], "qwen3-moe", tmp_path / scheme, **SMALL)
        checkpoint = open_checkpoint(path)
        of = units(resolve(checkpoint.declare(), checkpoint.tensors), checkpoint.tensors)
        assert of("blocks.0.ffn.experts.0.down.weight") == down
        assert of("blocks.0.norm1.weight") == of("blocks.0.mixer.q.bias") == (1, 1)


def test_rows_of_awq_are_read_in_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A word has eight rows; pieces of the file need not."""
    path, _ = make_quantised(SCHEMES["awq"], "qwen3-moe", tmp_path / "m", **SMALL)
    want = load(path)
    monkeypatch.setattr("proa.weights.load._CHUNK_BYTES", 900)
    got = load(path)
    assert all(torch.equal(got[name], want[name]) for name in want)
