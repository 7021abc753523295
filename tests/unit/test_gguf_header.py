"""GGUF headers against the gguf package's reader, and every way in which a file can be damaged."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from examples import examples
from proa.errors import ConfigError, WeightsError
from proa.weights.checkpoint import open_checkpoint
from proa.weights.gguf_header import gguf_index
from tiny_gguf import make_tiny_gguf


def write(file: Path, fill: Callable[[gguf.GGUFWriter], None], arch: str = "llama") -> Path:
    writer = gguf.GGUFWriter(file, arch)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def everything(writer: gguf.GGUFWriter) -> None:
    writer.add_uint8("a.u8", 200)
    writer.add_int8("a.i8", -3)
    writer.add_uint16("a.u16", 60000)
    writer.add_int16("a.i16", -300)
    writer.add_uint32("a.u32", 4_000_000_000)
    writer.add_int32("a.i32", -70000)
    writer.add_uint64("a.u64", 2**60)
    writer.add_int64("a.i64", -(2**60))
    writer.add_float32("a.f32", 1e-6)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.string", "grüß")
    writer.add_array("a.numbers", [1, 2, 3])
    writer.add_array("a.strings", ["x", "yy", ""])
    writer.add_array("a.long", list(range(5000)))
    for i, shape in enumerate([(3,), (5, 32), (2, 7, 64)]):
        writer.add_tensor(f"t{i}", np.arange(np.prod(shape), dtype=np.float32).reshape(shape))
    raw = gguf.quantize(np.ones((4, 64), dtype=np.float32), gguf.GGMLQuantizationType.Q4_1)
    writer.add_tensor("q", raw, raw_dtype=gguf.GGMLQuantizationType.Q4_1)


def test_metadata(tmp_path: Path) -> None:
    metadata = gguf_index(write(tmp_path / "a.gguf", everything)).metadata
    assert {key.removeprefix("a."): value for key, value in metadata.items() if key.startswith("a.")} == {
        "u8": 200,
        "i8": -3,
        "u16": 60000,
        "i16": -300,
        "u32": 4_000_000_000,
        "i32": -70000,
        "u64": 2**60,
        "i64": -(2**60),
        "f32": 1e-6,  # not 9.99999997e-07
        "f64": 0.1,
        "bool": True,
        "string": "grüß",
        "numbers": [1, 2, 3],
        "strings": None,
        "long": None,
    }
    assert metadata["general.architecture"] == "llama"


def test_places_of_tensors(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", everything)
    found = gguf_index(file).tensors
    reader = gguf.GGUFReader(file)
    assert found.keys() == {tensor.name for tensor in reader.tensors}
    for want in reader.tensors:
        got = found[want.name]
        assert got.dtype == want.tensor_type.name
        assert got.shape == tuple(want.shape.tolist())[::-1]
        assert (got.offset, got.nbytes) == (want.data_offset, want.n_bytes)


def test_other_alignment(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_custom_alignment(256)
        everything(writer)

    file = write(tmp_path / "a.gguf", fill)
    want = {tensor.name: tensor.data_offset for tensor in gguf.GGUFReader(file).tensors}
    assert {name: tensor.offset for name, tensor in gguf_index(file).tensors.items()} == want


def test_vocabulary_costs_little(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        writer.add_token_list([f"token{i}" for i in range(150_000)])
        writer.add_token_types([1] * 150_000)

    file = write(tmp_path / "a.gguf", fill)
    begin = time.process_time()
    gguf_index(file)
    assert time.process_time() - begin < 1.5  # 0.07 s here; the gguf package's reader needs 6


def split(folder: Path) -> list[Path]:
    names = [folder / f"m-{i + 1:05}-of-00003.gguf" for i in range(3)]
    for i, file in enumerate(names):
        write(file, lambda w, i=i: w.add_tensor(f"t{i}", np.ones(4, dtype=np.float32)))
    return names


def test_split_files(tmp_path: Path) -> None:
    names = split(tmp_path)
    for file in names:
        assert {name: t.file for name, t in gguf_index(file).tensors.items()} == {
            f"t{i}": name for i, name in enumerate(names)
        }
    names[1].unlink()
    with pytest.raises(WeightsError, match=r"1 of the 3 parts .* the first is m-00002-of-00003.gguf"):
        gguf_index(names[0])


def test_a_tensor_in_two_parts(tmp_path: Path) -> None:
    """Parts of two downloads that were split at other tensors: which one is right is unknown."""
    names = split(tmp_path)
    write(names[2], lambda w: w.add_tensor("t0", np.zeros(4, dtype=np.float32)))
    with pytest.raises(WeightsError, match=r"The tensor t0 is both in .*m-00001-of-00003.gguf and in .*m-00003-of-"):
        gguf_index(names[0])


def patched(file: Path, at: int, raw: bytes) -> Path:
    data = bytearray(file.read_bytes())
    data[at : at + len(raw)] = raw
    file.write_bytes(data)
    return file


@pytest.mark.parametrize(
    ("at", "raw", "message"),
    [
        (0, b"GGML", "not a GGUF file"),
        (4, struct.pack("<I", 1), "version 1 .* is not implemented"),
        (4, struct.pack(">I", 3), "big-endian"),
        (8, struct.pack("<Q", 2**60), "says 1152921504606846976 tensors, but the file has only"),
        (8, struct.pack("<Q", 5), "a.gguf: the tensor  has 0 dimensions; 1 to 4 were expected"),
        (16, struct.pack("<Q", 2**60), "says 1152921504606846976 metadata keys, but the file has only"),
        (16, struct.pack("<Q", 40), "is cut off: metadata key 19 of 40 needs"),
        (24, struct.pack("<Q", 2**60), "cut off: metadata key 1 of 16 needs 1152921504606846976 bytes from byte 32 on"),
        (32, b"\xff\xff", "metadata key 1 of 16 has a text that is not UTF-8, at byte 32"),
    ],
)
def test_damaged_header(tmp_path: Path, at: int, raw: bytes, message: str) -> None:
    with pytest.raises(WeightsError, match=message):
        gguf_index(patched(write(tmp_path / "a.gguf", everything), at, raw))


def test_truncated_anywhere(tmp_path: Path) -> None:
    whole = write(tmp_path / "a.gguf", everything).read_bytes()
    end = max(t.offset + t.nbytes for t in gguf_index(tmp_path / "a.gguf").tensors.values())
    for size in [*range(0, 1500, 7), *range(1500, end, 611), end - 1]:
        file = tmp_path / "cut.gguf"
        file.write_bytes(whole[:size])
        with pytest.raises(WeightsError, match=r"is empty|only \d+ bytes long|is cut off|but the file has (only )?"):
            gguf_index(file)


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 1200), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_never_crash(tmp_path: Path, flips: list[tuple[int, int]]) -> None:
    data = bytearray(write(tmp_path / "a.gguf", everything).read_bytes())
    for at, value in flips:
        data[at] = value
    (tmp_path / "b.gguf").write_bytes(data)
    try:
        gguf_index(tmp_path / "b.gguf")
    except WeightsError as error:
        assert error.remedy  # noqa: PT017 - most flips are not errors at all


def test_unsupported_type_is_named(tmp_path: Path) -> None:
    def fill(writer: gguf.GGUFWriter) -> None:
        raw = np.zeros((2, 66), dtype=np.uint8)
        writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=gguf.GGMLQuantizationType.IQ2_XXS)

    with pytest.raises(WeightsError, match=r"blk.0.ffn_up.weight is stored as IQ2_XXS.*Q4_K"):
        gguf_index(write(tmp_path / "a.gguf", fill))


def test_unknown_architecture(tmp_path: Path) -> None:
    file = write(tmp_path / "a.gguf", lambda writer: None, arch="mamba")
    with pytest.raises(ConfigError, match=r"'mamba' is not implemented. Proa knows llama, qwen2"):
        open_checkpoint(file)


def test_folder_with_gguf_files(tmp_path: Path) -> None:
    make_tiny_gguf("llama2", tmp_path / "one.gguf")
    (tmp_path / "mmproj-vision.gguf").write_bytes(b"not read")
    assert open_checkpoint(tmp_path).path == tmp_path / "one.gguf"
    make_tiny_gguf("qwen2", tmp_path / "two.gguf")
    with pytest.raises(Exception, match=r"there are 2: one.gguf, two.gguf") as caught:
        open_checkpoint(tmp_path)
    assert "Give the path" in str(caught.value)


@pytest.mark.parametrize("name", ["tower-of-babel.gguf", "m-00002-of-16.gguf"])
def test_a_name_that_only_looks_like_that_of_a_part(tmp_path: Path, name: str) -> None:
    make_tiny_gguf("llama2", tmp_path / name)
    assert open_checkpoint(tmp_path).path == tmp_path / name


def keys_of(file: Path) -> dict[str, Any]:
    return {k: v for k, v in gguf_index(file).metadata.items() if v is not None}


def test_metadata_agrees_with_the_package(tmp_path: Path) -> None:
    file = make_tiny_gguf("qwen3-moe", tmp_path / "m.gguf")
    reader = gguf.GGUFReader(file)
    for key, value in keys_of(file).items():
        want = reader.fields[key].contents()
        assert value == (pytest.approx(want, rel=1e-7) if isinstance(want, float) else want)
