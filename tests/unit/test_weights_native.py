"""Loading into packed weights by all workers: the same values for any pool and any layout of the checkpoint."""

from __future__ import annotations

import ctypes
import errno
import os
import resource
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from demo_model import demo_gguf
from proa.errors import WeightsError
from proa.layers.decoder import Decoder
from proa.native.arena import Arena
from proa.native.fill import Fill, ReadError, StoredRows, fill, touch
from proa.native.formats import Format, Layout, Order, Stored, kept_form, layout
from proa.native.pool import Pool
from proa.ops.cpu import CpuOps, Recorder
from proa.ops.packed import Memory, RowSink
from proa.ops.staging import DeviceRows, Staging
from proa.weights import rows as weights_rows
from proa.weights.checkpoint import open_checkpoint
from proa.weights.load import load_weights
from tiny import make_tiny, reference_params, tiny_reference
from tiny_gguf import make_tiny_gguf
from tiny_quantised import SCHEMES, make_quantised
from weights_cases import assert_same, load

POOLS: list[list[list[int]]] = [[[]], [[0, 0]], [[], [0]], [[0], [0, 0], [0]]]  # of each node's workers
ZEROS = np.zeros(1 << 20, np.uint8)


def panels(pieces: Sequence[Fill]) -> torch.Tensor:
    """The packed bytes of a parameter, uint8 [panels, bytes], collected from its pieces."""
    found = []
    for piece in pieces:
        stride = piece.to.panel_bytes * piece.step
        for panel in range(piece.to.panels):
            raw = ctypes.string_at(piece.address + panel * stride, piece.to.panel_bytes)
            found.append(torch.frombuffer(bytearray(raw), dtype=torch.uint8))
    return torch.stack(found)


def unpacked(packed: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """Unpack bfloat16 panels to [rows, columns]; padding must be zero."""
    whole = packed.view(torch.bfloat16).view(len(packed), -1, 16, 2).transpose(1, 2).reshape(len(packed) * 16, -1)
    assert not whole[rows:].any()
    assert not whole[:, columns:].any()
    return whole[:rows, :columns]


class Loaded:
    """A model on native ops, and its parameters: bfloat16 tensors, or panels if they keep block formats."""

    def __init__(self, path: Path, pool: Pool) -> None:
        checkpoint = open_checkpoint(path)
        declared = checkpoint.declare()
        memory = Memory(pool, [None] * pool.nodes)
        model = Decoder(declared.spec, CpuOps(Recorder(pool, memory, 4, 1, 1)).table())
        self.progress: list[tuple[int, int]] = []
        targets = dict(model.parameters())
        load_weights(checkpoint, declared, targets, lambda *call: self.progress.append(call), pool)
        assert self.progress[-1][0] == checkpoint.tensor_bytes
        self.values, self.kept = {}, {}
        for name, target in targets.items():
            if isinstance(target, torch.Tensor):
                self.values[name] = target.to(torch.bfloat16)
            elif isinstance(target, RowSink):
                pieces = target.fills(StoredRows(Stored.BF16, 0, 0))
                if pieces[0].to.format is Format.BF16:
                    self.values[name] = unpacked(panels(pieces), *target.shape)
                else:
                    self.kept[name] = panels(pieces)
        self._keep = model


def transposed(folder: Path) -> Path:
    """The checkpoint with experts stacked as [experts, in, out]."""
    tensors = tiny_reference("qwen2-moe").state_dict()
    stacked = {name: t.mT.contiguous() if ".experts." in name else t for name, t in tensors.items()}
    save_file(stacked, folder / "model.safetensors")
    return folder


def stored_as(folder: Path, dtype: torch.dtype) -> Path:
    tensors = {name: tensor.to(dtype) for name, tensor in tiny_reference("qwen2-moe").state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("teams", POOLS, ids=str)
@pytest.mark.parametrize("layout_of_file", ["transposed", "per expert", "F64", "F32", "F16", "BF16"])
def test_every_layout_and_pool(layout_of_file: str, teams: list[list[int]], tmp_path: Path) -> None:
    """Packed weights equal plain tensors, rounded once."""
    if layout_of_file == "per expert":
        path = make_tiny("qwen3-moe", tmp_path)
    elif layout_of_file == "transposed":
        path = transposed(make_tiny("qwen2-moe", tmp_path))
    else:
        types = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
        path = stored_as(make_tiny("qwen2-moe", tmp_path), types[layout_of_file])
    with Pool(teams, pin=False) as pool:
        loaded = Loaded(path, pool)
    assert not loaded.kept
    assert_same(loaded.values, load(path, torch.bfloat16))


@pytest.mark.parametrize("chunk_bytes", [1 << 20, 1000])
@pytest.mark.parametrize("teams", POOLS, ids=str)
def test_transposed_experts_with_interleaved_gate_and_up(
    teams: list[list[int]], chunk_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proa.weights.load._CHUNK_BYTES", chunk_bytes)
    path = make_tiny("gpt-oss", tmp_path)
    with Pool(teams, pin=False) as pool:
        loaded = Loaded(path, pool)
    want = load(path, torch.bfloat16)
    assert_same(loaded.values, {name: want[name] for name in loaded.values})
    assert want.keys() - loaded.values.keys() == {n for n in want if ".experts." in n and n.endswith(".bias")}


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4"])
def test_blocks_on_every_pool(quant: str, tmp_path: Path) -> None:
    """Block formats have the same bytes on every pool; other parameters equal plain tensors."""
    path = make_tiny_gguf("qwen3-moe", tmp_path / "m.gguf", quant, intermediate_size=96, moe_intermediate_size=32)
    want = load(path, torch.bfloat16)
    first: dict[str, torch.Tensor] = {}
    for teams in POOLS:
        with Pool(teams, pin=False) as pool:
            loaded = Loaded(path, pool)
        assert bool(loaded.kept) == (quant != "Q5_1")
        assert_same(loaded.values, {name: want[name] for name in loaded.values})
        first = first or loaded.kept
        assert_same(loaded.kept, first)


@pytest.mark.parametrize("sizes", [{}, {"linear_key_head_dim": 8, "linear_value_head_dim": 12}], ids=["panels", "rows"])
@pytest.mark.parametrize("quant", ["Q8_0", "F16"])
def test_rows_from_several_tensors_on_every_pool(quant: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """Rows of several tensors give the packed bytes of one tensor with all rows; bfloat16 if heads split panels."""
    name, sizes = "blocks.0.mixer.qkvz.weight", {"moe_intermediate_size": 32, **sizes}
    parted, whole = (make_tiny_gguf("qwen3-next", tmp_path / f"{n}.gguf", quant, old=n, **sizes) for n in (False, True))
    want = load(parted, torch.bfloat16)[name]
    with Pool([[0]], pin=False) as pool:
        kept = Loaded(whole, pool).kept
    for teams in POOLS:
        with Pool(teams, pin=False) as pool:
            loaded = Loaded(parted, pool)
        assert (name in loaded.kept) == (quant == "Q8_0" and len(sizes) == 1)
        if name in loaded.kept:
            assert torch.equal(loaded.kept[name], kept[name])
        else:
            assert torch.equal(loaded.values[name], want)


@pytest.mark.parametrize("scheme", ["fp8 small blocks", "int4 zeros", "nvfp4", "gptq 8", "gptq zeros", "awq"])
def test_codes_on_every_pool(scheme: str, tmp_path: Path) -> None:
    """Codes with separate scales have the same packed bytes, wherever a node's rows begin."""
    path, _ = make_quantised(SCHEMES[scheme], "qwen3-moe", tmp_path / "m", moe_intermediate_size=160)
    first: dict[str, torch.Tensor] = {}
    for teams in POOLS:
        with Pool(teams, pin=False) as pool:
            loaded = Loaded(path, pool)
        assert len(loaded.kept) == 3 * (4 + 8 * 3)
        first = first or loaded.kept
        assert_same(loaded.kept, first)


def test_pickle_checkpoint(tmp_path: Path) -> None:
    folder = make_tiny("qwen2-moe", tmp_path)
    torch.save(tiny_reference("qwen2-moe").state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with Pool([[], [0]], pin=False) as pool:
        assert_same(Loaded(folder, pool).values, load(folder, torch.bfloat16))


def test_pickled_experts_that_are_transposed_views(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch saves views as views. Only pages of the file are dropped: dropping those of the heap loses memory of
    others."""
    folder = make_tiny("qwen2-moe", tmp_path)
    want = load(folder, torch.bfloat16)
    views = {
        name: tensor.mT.contiguous().mT if ".experts." in name else tensor
        for name, tensor in tiny_reference("qwen2-moe").state_dict().items()
    }
    torch.save(views, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    dropped: list[str] = []

    def drop(pages: torch.Tensor) -> None:
        dropped.append(mapped_at(pages.data_ptr()))

    monkeypatch.setattr(weights_rows, "_forget_pages", drop)
    assert_same(load(folder, torch.bfloat16), want)
    assert set(dropped) == {str(folder / "pytorch_model.bin")}


def mapped_at(address: int) -> str:
    """The file that this process has mapped at an address; "" for other memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= address < end:
            return line[73:]
    return ""


@pytest.mark.demo
def test_a_whole_model_by_one_thread_and_by_teams() -> None:
    with Pool([[]], pin=False) as one, Pool([[0], [0, 0]], pin=False) as teams:
        by_one, by_teams = Loaded(demo_gguf(), one), Loaded(demo_gguf(), teams)
    assert by_one.kept
    assert_same(by_teams.kept, by_one.kept)
    assert_same(by_teams.values, by_one.values)


def test_progress(tmp_path: Path) -> None:
    folder = make_tiny("llama2", tmp_path, max_shard_size="100KB")
    with Pool([[0]], pin=False) as pool:
        loaded = Loaded(folder, pool)
    done = [done for done, _ in loaded.progress]
    assert len(done) > 1
    assert done == sorted(done)
    assert {(done[-1], total) for _, total in loaded.progress} == {loaded.progress[-1]}


def test_file_cut_off_after_opening(tmp_path: Path) -> None:
    folder = make_tiny("llama2", tmp_path)
    checkpoint = open_checkpoint(folder)
    declared = checkpoint.declare()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with Pool([[0]], pin=False) as pool:
        recorder = Recorder(pool, Memory(pool, [None]), 4, 1, 1)
        targets = dict(Decoder(declared.spec, CpuOps(recorder).table()).parameters())
        with pytest.raises(WeightsError, match=r"model.safetensors ends too early"):
            load_weights(checkpoint, declared, targets, lambda done, total: None, pool)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    fd = os.open(tmp_path, os.O_RDONLY)
    to, out = layout(Format.BF16, 16, 32), np.zeros(2048, np.uint8)
    good = Fill(StoredRows(Stored.BF16, ZEROS.ctypes.data, 64), to, out.ctypes.data, 1024, plain=True)
    bad = Fill(StoredRows(Stored.BF16, 0, 64, fd), to, out.ctypes.data + 1024, 1024)
    try:
        with Pool([[0]], pin=False) as pool, pytest.raises(ReadError) as caught:
            fill(pool, [good, bad])
    finally:
        os.close(fd)
    assert (caught.value.job, caught.value.errno) == (1, errno.EISDIR)


def rows_of(stored: str, stride: int = 1024, transposed: bool = False) -> StoredRows:
    return StoredRows(Stored[stored], ZEROS.ctypes.data, stride, order=Order.TRANSPOSED if transposed else Order.ROWS)


def to_of(stored: str, columns: int = 256) -> Layout:
    form, group = kept_form([stored], columns)
    return layout(form, 16, columns, group)


@pytest.mark.parametrize(
    ("rows", "to", "change", "problem"),
    [
        (rows_of("BF16"), to_of("BF16"), {"nbytes": 8191}, "too small"),
        (rows_of("BF16"), to_of("BF16"), {"nbytes": 8191, "plain": True}, "too small"),
        (rows_of("BF16"), to_of("BF16"), {"team": 1}, "team"),
        (rows_of("BF16"), to_of("BF16"), {"step": 0}, "step"),
        (rows_of("BF16"), to_of("BF16"), {"address": 0}, "null pointer"),
        (rows_of("BF16", 510), to_of("BF16"), {}, "overlap"),
        (rows_of("Q8_0"), to_of("BF16", 255), {}, "whole blocks"),
        (rows_of("Q8_0"), to_of("Q4_0"), {}, "cannot hold the stored type"),
        (rows_of("BF16"), to_of("Q4_0"), {}, "No packed format holds"),
        (rows_of("Q8_0", transposed=True), to_of("BF16"), {}, "transposed"),
        (rows_of("BF16", transposed=True), to_of("BF16"), {"plain": True}, "transposed"),
    ],
)
def test_invalid_jobs_are_refused(rows: StoredRows, to: Layout, change: dict[str, int], problem: str) -> None:
    out = np.zeros(1 << 20, np.uint8)
    job = Fill(rows, to, **{"address": out.ctypes.data, "nbytes": 1 << 20, **change})
    with Pool([[0]], pin=False) as pool, pytest.raises(ValueError, match=problem):
        fill(pool, [job])
    assert not out.any()


def faults_here() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


def test_pages_are_touched_by_their_team() -> None:
    """If binding is refused, pages lie on the node of the thread that touches them first."""
    nbytes = 32 << 20
    with Pool([[], [0]], pin=False) as pool:
        for team, by_caller in ((0, True), (1, False)):
            with Arena(nbytes, huge=False) as arena:
                before = faults_here()
                touch(pool, [(team, arena, 0, nbytes)])
                assert arena.info.touched_bytes == nbytes
                assert (faults_here() - before) // (nbytes // os.sysconf("SC_PAGESIZE")) == by_caller


@pytest.mark.parametrize("threads", [[], [0]])
def test_parameters_of_a_gpu_keep_their_types(threads: list[int], tmp_path: Path) -> None:
    """bfloat16 matrices go through the staging, float32 parameters of one and three dimensions are written directly."""
    folder = make_tiny("qwen3-next", tmp_path / "m")
    checkpoint = open_checkpoint(folder)
    declared = checkpoint.declare()
    wide = {"conv.weight", "a_log", "dt_bias"}
    kinds = {name: torch.float32 if name.split("mixer.")[-1] in wide else torch.bfloat16
             for name, _ in declared.spec.params()}  # fmt: skip
    tensors = {name: torch.full(shape, torch.nan, dtype=kinds[name]) for name, shape in declared.spec.params()}
    with Pool([threads], pin=False) as pool:
        staging = Staging(pool, 1 << 16, pinned=False)
        targets = {name: DeviceRows(tensor, staging) for name, tensor in tensors.items()}
        load_weights(checkpoint, declared, targets, lambda done, total: None, pool, staging.flush)
    exact = reference_params(tiny_reference("qwen3-next"))
    assert_same(tensors, {name: tensor.to(kinds[name]) for name, tensor in exact.items()})
