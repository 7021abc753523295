"""Opening a checkpoint: reading a folder, and every way in which it can be damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from examples import examples
from proa.errors import ConfigError, ModelError, ModelNotFound, WeightsError
from proa.weights.checkpoint import open_checkpoint
from proa.weights.index import safetensors_index
from tiny import make_tiny
from weights_cases import load


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny("qwen3", tmp_path / "model", max_shard_size="300KB")


def shards(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def test_what_is_found(folder: Path) -> None:
    checkpoint = open_checkpoint(folder)
    assert checkpoint.load_format == "safetensors"
    assert checkpoint.dtype == "float32"
    assert checkpoint.path == folder
    assert checkpoint.generation_config["eos_token_id"] == 2
    assert checkpoint.tensor_bytes == 4 * checkpoint.declare().spec.num_params
    embed = checkpoint.tensors["model.embed_tokens.weight"]
    assert (embed.dtype, embed.shape, embed.nbytes) == ("F32", (256, 64), 65536)


def test_overridden_config(folder: Path) -> None:
    checkpoint = open_checkpoint(folder, override_config={"max_position_embeddings": 64})
    assert checkpoint.declare().spec.max_positions == 64


def test_dummy_needs_only_the_config(folder: Path) -> None:
    for file in shards(folder):
        file.unlink()
    (folder / "model.safetensors.index.json").unlink()
    checkpoint = open_checkpoint(folder, "dummy")
    assert (checkpoint.load_format, checkpoint.tensors) == ("dummy", {})
    assert checkpoint.declare().spec.num_params > 0


def test_without_an_index_all_shards_are_read(folder: Path) -> None:
    want = load(folder)
    (folder / "model.safetensors.index.json").unlink()
    save_file({"adapter": torch.ones(1)}, folder / "adapter_model.safetensors")
    save_file({"other": torch.ones(1)}, folder / "consolidated.00.safetensors")
    got = load(folder)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("config", "stored", "want"),
    [
        ({"torch_dtype": "float16"}, torch.float32, "float16"),
        ({"dtype": "torch.bfloat16"}, torch.float32, "bfloat16"),
        ({}, torch.bfloat16, "bfloat16"),
        ({}, torch.float16, "float16"),
    ],
)
def test_dtype(tmp_path: Path, config: dict[str, Any], stored: torch.dtype, want: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"big": torch.ones(8, dtype=stored), "scale": torch.ones(1)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).dtype == want


def test_no_torch_before_loading(folder: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from proa.weights.checkpoint import open_checkpoint;"
        "open_checkpoint(Path(sys.argv[1])).declare(); print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "False"


def write_config(folder: Path, text: str | bytes) -> None:
    (folder / "config.json").write_bytes(text if isinstance(text, bytes) else text.encode())


def cut(file: Path, size: int) -> None:
    file.write_bytes(file.read_bytes()[:size])


def edit_header(file: Path, **changes: Any) -> None:
    """Replace fields of the first tensor's entry."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    name = next(key for key in header if key != "__metadata__")
    header[name] = {**header[name], **changes}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


def spoil_header(file: Path) -> None:
    raw = file.read_bytes()
    file.write_bytes(raw[:20] + b"\xff" + raw[21:])


LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935c943f9e0ff69d22e\n"


BROKEN: list[tuple[str, Any, type[ModelError], str]] = [
    ("config missing", lambda f: (f / "config.json").unlink(), ModelNotFound, "has no config.json"),
    ("config cut off", lambda f: write_config(f, '{"a": '), ConfigError, "is not valid JSON"),
    ("config nested too deep", lambda f: write_config(f, "[" * 100_000), ConfigError, "is not valid JSON"),
    ("config not UTF-8", lambda f: write_config(f, b'{"a": "\xff"}'), ConfigError, "is not valid JSON"),
    ("config a list", lambda f: write_config(f, "[]"), ConfigError, "must hold a JSON object"),
    ("bad dtype", lambda f: write_config(f, '{"dtype": "int3"}'), ConfigError, "'int3' is not implemented"),
    (
        "generation config broken",
        lambda f: (f / "generation_config.json").write_text("{"),
        ConfigError,
        "generation_config.json is not valid JSON",
    ),
    ("shard missing", lambda f: shards(f)[1].unlink(), WeightsError, "1 of 3 weight files are missing"),
    (
        "index broken",
        lambda f: (f / "model.safetensors.index.json").write_text('{"weight_map": 3}'),
        WeightsError,
        "index.json: cannot be read",
    ),
    ("shard empty", lambda f: cut(shards(f)[0], 0), WeightsError, r"00001-of-00003.safetensors is empty \(0 bytes\)"),
    ("header cut off", lambda f: cut(shards(f)[0], 100), WeightsError, "the file has only 100"),
    ("data cut off", lambda f: cut(shards(f)[0], 90000), WeightsError, "but the file has 90000"),
    (
        "header is not a JSON",
        lambda f: shards(f)[0].write_bytes((16).to_bytes(8, "little") + b"x" * 32),
        WeightsError,
        "header is not a JSON object",
    ),
    (
        "header not UTF-8",  # the whole header, megabytes of a large model, was in the message
        lambda f: spoil_header(shards(f)[0]),
        WeightsError,
        r"header is not a JSON object .{,160}\. The file is damaged",
    ),
    (
        "index not UTF-8",
        lambda f: (f / "model.safetensors.index.json").write_bytes(b'{"weight_map": "\xff' + b"x" * 4096 + b'"}'),
        WeightsError,
        r"index.json: cannot be read .{,160}\. The file is damaged",
    ),
    (
        "shape and bytes differ",
        lambda f: edit_header(shards(f)[0], shape=[3, 3]),
        WeightsError,
        r"00001-of-00003.safetensors: model.embed_tokens.weight is F32 \[3, 3\], which takes 36 bytes, but the header "
        r"gives it 65536",
    ),
    (
        "negative shape",
        lambda f: edit_header(shards(f)[0], shape=[-1, -64]),
        WeightsError,
        "entry for model.embed_tokens.weight .* sizes being integers",
    ),
    (
        "shape is no list",
        lambda f: edit_header(shards(f)[0], shape=None),
        WeightsError,
        "entry for model.embed_tokens.weight",
    ),
    (
        "bytes of another tensor",
        lambda f: edit_header(shards(f)[0], data_offsets=[256, 65792]),
        WeightsError,
        "should begin at byte",
    ),
    (
        "overlong file",
        lambda f: shards(f)[0].write_bytes(shards(f)[0].read_bytes() + b"more"),
        WeightsError,
        "the header describes",
    ),
    (
        "tensor twice",
        lambda f: shards(f)[0].write_bytes(shards(f)[1].read_bytes()),
        WeightsError,
        "is both in",
    ),
]


@pytest.mark.parametrize(("what", "damage", "kind", "message"), BROKEN, ids=[case[0] for case in BROKEN])
def test_damage_is_named(folder: Path, what: str, damage: Any, kind: type[ModelError], message: str) -> None:
    damage(folder)
    with pytest.raises(kind, match=message) as caught:
        open_checkpoint(folder)
    assert caught.value.remedy


@settings(max_examples=examples(150), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), min_size=1, max_size=4))
def test_flipped_bytes_of_a_header_never_crash(folder: Path, flips: list[tuple[int, int]]) -> None:
    data = bytearray(shards(folder)[0].read_bytes())
    for at, value in flips:
        data[at] = value
    copy = folder.parent / "flipped.safetensors"
    copy.write_bytes(data)
    try:
        safetensors_index([copy])
    except WeightsError as error:
        assert str(copy) in error.message  # noqa: PT017 - some flips change a name, which is no error here
        assert error.remedy  # noqa: PT017


@pytest.mark.parametrize("real", [b"size 4976698672\n", b""])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("config.json", ConfigError),
        ("generation_config.json", ConfigError),
        ("model.safetensors.index.json", WeightsError),
        ("model-00002-of-00003.safetensors", WeightsError),
    ],
)
def test_a_git_lfs_pointer_is_called_that(folder: Path, name: str, kind: type[ModelError], real: bytes) -> None:
    (folder / name).write_bytes(LFS_POINTER + real)
    with pytest.raises(kind, match=rf"{name} is a Git LFS pointer: the real file.* was not downloaded") as caught:
        open_checkpoint(folder)
    assert ("4976698672 bytes" in caught.value.message) == bool(real)
    assert f"git lfs pull` in {folder}" in caught.value.remedy
    (folder / name).write_bytes(b"")
    with pytest.raises(kind, match=rf"{name} is empty \(0 bytes\)"):
        open_checkpoint(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.gguf"])
def test_pointers_of_other_formats(tmp_path: Path, name: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    for content, message in ((LFS_POINTER, "is a Git LFS pointer"), (b"", "is empty")):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WeightsError, match=f"{name} {message}"):
            open_checkpoint(tmp_path)


def test_a_file_that_only_begins_like_a_pointer(folder: Path) -> None:
    (folder / "config.json").write_bytes(LFS_POINTER + b"x" * 2000)
    with pytest.raises(ConfigError, match="is not valid JSON"):
        open_checkpoint(folder)


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="There is no model at"):
        open_checkpoint(tmp_path / "nowhere")
    with pytest.raises(WeightsError, match="has no weights"):
        open_checkpoint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(WeightsError, match="has no weights"):
        open_checkpoint(tmp_path)
    with pytest.raises(WeightsError, match="has no bin files"):
        open_checkpoint(tmp_path, "bin")
    with pytest.raises(ModelNotFound, match="there are 0: none"):
        open_checkpoint(tmp_path, "gguf")


@pytest.mark.parametrize(("name", "load_format"), [("notes.txt", "auto"), ("model.gguf", "safetensors")])
def test_file_of_another_kind(tmp_path: Path, name: str, load_format: str) -> None:
    (tmp_path / name).write_bytes(b"something")
    with pytest.raises(ModelNotFound, match=r"is not a \w+ model"):
        open_checkpoint(tmp_path / name, load_format)


class Trap:
    """Unpickled, it would call print."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("the pickle ran",)


def test_pickled_code_does_not_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    torch.save({"weight": Trap()}, tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match="does not unpickle"):
        open_checkpoint(tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda file: file.write_bytes(b"x" * 100), "not a PyTorch file: it begins with b'xxxxxxxx'"),
        (
            lambda file: torch.save({"a": torch.ones(1)}, file, _use_new_zipfile_serialization=False),
            "the file format of PyTorch before 1.6 is not implemented",
        ),
        (lambda file: torch.save([torch.ones(1)], file), "not a dictionary of tensors"),
        (lambda file: torch.save({"epoch": 3}, file), "not a dictionary of tensors"),
    ],
)
def test_bin_of_another_kind(tmp_path: Path, write: Any, message: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    write(tmp_path / "pytorch_model.bin")
    with pytest.raises(WeightsError, match=message):
        open_checkpoint(tmp_path)


def test_damaged_bin(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    file = tmp_path / "pytorch_model.bin"
    torch.save({"weight": torch.ones(1000)}, file)
    cut(file, file.stat().st_size // 2)
    with pytest.raises(WeightsError, match=r"a PyTorch archive that is cut off"):
        open_checkpoint(tmp_path)
