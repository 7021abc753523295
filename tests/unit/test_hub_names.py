"""Resolution of model names: paths, aliases, hub ids, GGUF files. No network: opening a socket raises an error."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import NoReturn

import pytest
from huggingface_hub import constants

from proa.errors import ModelNotFound, UsageError, WeightsError
from proa.hub.aliases import load_aliases
from proa.hub.cache import RepoCache, cached_references
from proa.hub.files import choose_format, choose_gguf, choose_weights, gguf_groups, named_group
from proa.hub.listing import list_models
from proa.hub.locate import locate
from proa.hub.reference import HubReference, parse_reference
from proa.hub.repository import HubFile, Repository

COMMIT = "a" * 40


class NetworkTouchedError(BaseException):
    """A BaseException, so that no `except Exception` catches it."""


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        raise NetworkTouchedError(args)

    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf-cache"))
    monkeypatch.setenv("PROA_CACHE", str(tmp_path / "proa-cache"))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with some models, which is both the working folder and the user's home."""
    home = tmp_path / "home"
    for folder in ("llama", "org/name", "demo", "qwen3-30b", "quants"):
        (home / folder).mkdir(parents=True)
    for folder in ("llama", "org/name", "qwen3-30b"):
        (home / folder / "config.json").write_text("{}")
    for file in ("tiny.gguf", "quants/a.gguf", "quants/b.gguf", "llama/model.safetensors"):
        (home / file).write_bytes(b"GGUF")
    monkeypatch.chdir(home)
    monkeypatch.setenv("HOME", str(home))
    return home


@pytest.mark.parametrize(
    ("model", "found"),
    [
        ("llama", "llama"),
        ("./llama", "llama"),
        ("llama/", "llama"),
        ("~/llama", "llama"),
        ("../home/llama", "llama"),
        ("org/name", "org/name"),  # a folder of that name comes before the hub
        ("./demo", "demo"),  # written as a path, so not the demo model
        ("qwen3-30b", "qwen3-30b"),  # holds a model, so it comes before the alias
        ("tiny.gguf", "tiny.gguf"),
        ("quants/a.gguf", "quants/a.gguf"),
        ("quants", "quants"),
    ],
)
def test_local_paths_never_touch_the_network(home: Path, model: str, found: str) -> None:
    path = locate(model)
    assert path.is_absolute()
    assert path.resolve() == home / found


def test_absolute_path(home: Path) -> None:
    assert locate(str(home / "llama")) == home / "llama"


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("./lama", "Did you mean llama?"),
        ("~/lama/", "Did you mean llama?"),
        ("tinny.gguf", "Did you mean tiny.gguf?"),
        ("quants/c.gguf", "Did you mean"),
        ("qwen3-30", "Did you mean qwen3-30b?"),
        ("demo-dens", "Did you mean demo-dense?"),
        ("/nowhere/at/all", "org/name"),
        ("no such thing", "proa models"),
        ("Why is the sky blue? " * 20, "proa models"),  # longer than any file's name
        ("~no-such-user/model", "proa models"),
    ],
)
def test_unknown_models(home: Path, model: str, said: str) -> None:
    with pytest.raises(ModelNotFound) as caught:
        locate(model)
    assert model in str(caught.value)
    assert said in str(caught.value)


def test_a_folder_that_holds_no_model_is_named(home: Path) -> None:
    (home / "empty").mkdir()
    with pytest.raises(ModelNotFound, match=r"There is no model empty: the folder .*/empty has no config"):
        locate("empty")


def test_a_folder_whose_name_is_not_utf8_is_refused(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = (home / "llama").rename(home / os.fsdecode(b"m\xffodel"))
    monkeypatch.chdir(odd)
    for model in (".", f"../{odd.name}"):
        with pytest.raises(UsageError, match=r"The path .*odel is not UTF-8\. Rename"):
            locate(model)


@pytest.mark.parametrize(
    ("model", "revision", "said"),
    [
        ("llama/model.safetensors", None, "Give the model's folder"),
        ("llama", "main", "--revision main is given, but llama is not a hub"),
        ("demo-dense", "v2", "--revision v2 is given, but demo-dense is not a hub"),
        ("org/other@v1", "v2", "Give the revision only once"),
        ("", None, "'' is not a model name"),
        ("a\0b", None, "is not a model name"),
    ],
)
def test_contradicting_names_are_refused(home: Path, model: str, revision: str | None, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        locate(model, revision)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("Qwen/Qwen3-8B", HubReference("Qwen/Qwen3-8B")),
        ("Qwen/Qwen3-8B@v1.0", HubReference("Qwen/Qwen3-8B", "v1.0")),
        ("a/b@refs/pr/1", HubReference("a/b", "refs/pr/1")),
        ("a/b-GGUF:Q4_K_M", HubReference("a/b-GGUF", file="Q4_K_M")),
        ("a/b@main:sub/x-00001-of-00002.gguf", HubReference("a/b", file="sub/x-00001-of-00002.gguf")),
        ("qwen3-30b", None),
        ("a/b/c", None),
        ("../b", None),
        ("a/..", None),
        ("a/b@", None),
        ("a/b:", None),
        ("https://huggingface.co/a/b", None),
        ("a /b", None),
        ("ä/b", None),
    ],
)
def test_references(text: str, parsed: HubReference | None) -> None:
    assert parse_reference(text) == parsed
    if parsed and parsed.revision != "main":
        assert parse_reference(str(parsed)) == parsed


def test_a_revision_from_the_flag() -> None:
    assert HubReference("a/b").at("v1") == HubReference("a/b", "v1")
    assert HubReference("a/b", "v1").at("v1") == HubReference("a/b", "v1").at(None) == HubReference("a/b", "v1")


def test_aliases() -> None:
    aliases = load_aliases()
    moe = aliases["qwen3-30b"]
    assert (moe.reference.repo, moe.num_params, moe.num_active_params) == ("Qwen/Qwen3-30B-A3B", 30.53e9, 3.35e9)
    assert moe.download_bytes == 61.06e9
    assert aliases["gpt-oss-120b"].download_bytes < aliases["gpt-oss-120b"].num_params, "most of it has four bits"
    for alias in aliases.values():
        assert parse_reference(alias.name) is None, "an alias must not look like a hub id"
        assert parse_reference(str(alias.reference)) == alias.reference
        assert 0 < alias.num_active_params <= alias.num_params
        assert alias.notes


def test_gguf_files_by_model() -> None:
    paths = [
        "m-Q4_K_M.gguf",
        "m-UD-Q4_K_M.gguf",
        "big/m-Q8_0-00002-of-00002.gguf",
        "big/m-Q8_0-00001-of-00002.gguf",
        "m-BF16-00001-of-00003.gguf",
        "m.f16.gguf",
        "plain.gguf",
        "mmproj-m.gguf",
        "README.md",
    ]
    groups = gguf_groups(paths)
    assert {g.label: (g.first, len(g.paths), g.is_complete) for g in groups} == {
        "Q4_K_M": ("m-Q4_K_M.gguf", 1, True),
        "UD-Q4_K_M": ("m-UD-Q4_K_M.gguf", 1, True),
        "Q8_0": ("big/m-Q8_0-00001-of-00002.gguf", 2, True),
        "BF16": ("m-BF16-00001-of-00003.gguf", 1, False),
        "F16": ("m.f16.gguf", 1, True),
        "": ("plain.gguf", 1, True),
    }
    for wanted, first in (
        ("q4_k_m", "m-Q4_K_M.gguf"),
        ("big/m-Q8_0-00002-of-00002.gguf", "big/m-Q8_0-00001-of-00002.gguf"),
        ("plain.gguf", "plain.gguf"),
    ):
        group = named_group(groups, wanted)
        assert group is not None
        assert group.first == first
    assert named_group(groups, "Q4") is None
    assert named_group(gguf_groups(["a-Q8_0.gguf", "b-Q8_0.gguf"]), "Q8_0") is None


def repository(*paths: str, wanted: str | None = None) -> Repository:
    files = tuple(HubFile(path, 10, path, None) for path in paths)
    return Repository(HubReference("org/name", file=wanted), COMMIT, files)


INDEX = b'{"weight_map": {"a": "odd-1.safetensors", "b": "odd-2.safetensors", "c": "odd-1.safetensors"}}'


@pytest.mark.parametrize(
    ("paths", "format_", "chosen"),
    [
        (["model.safetensors", "pytorch_model.bin", "x.gguf"], "safetensors", ["model.safetensors"]),
        (["model.safetensors", "model-00001-of-00002.safetensors"], "safetensors", ["model.safetensors"]),
        (
            ["model.safetensors.index.json", "odd-1.safetensors", "odd-2.safetensors", "odd-3.safetensors"],
            "safetensors",
            ["odd-1.safetensors", "odd-2.safetensors"],
        ),
        (["w.safetensors", "consolidated.safetensors", "sub/w.safetensors"], "safetensors", ["w.safetensors"]),
        (["pytorch_model.bin", "adapter_model.safetensors", "x.gguf"], "bin", ["pytorch_model.bin"]),
    ],
)
def test_one_format(paths: list[str], format_: str, chosen: list[str]) -> None:
    repo = repository("config.json", *paths)
    assert choose_format(repo) == format_
    assert [f.path for f in choose_weights(repo, choose_format(repo), lambda _: INDEX)] == chosen


def test_gguf_only_when_it_is_all_there_is_or_named() -> None:
    assert choose_format(repository("config.json", "x.gguf")) == "gguf"
    assert choose_format(repository("config.json", "model.safetensors", "x.gguf", wanted="x.gguf")) == "gguf"


@pytest.mark.parametrize("index", [b"{}", b"[]", b"not json", b'{"weight_map": 3}'])
def test_a_damaged_index(index: bytes) -> None:
    with pytest.raises(WeightsError, match="is not a valid index"):
        choose_weights(repository("model.safetensors.index.json"), "safetensors", lambda _: index)


def test_an_index_that_lists_a_missing_file() -> None:
    with pytest.raises(WeightsError, match=r"lists odd-2\.safetensors"):
        choose_weights(repository("model.safetensors.index.json", "odd-1.safetensors"), "safetensors", lambda _: INDEX)


def test_a_split_gguf_with_a_part_missing() -> None:
    with pytest.raises(WeightsError, match="has only 1 of its 2 parts"):
        choose_gguf(repository("x-Q8_0-00001-of-00002.gguf", wanted="Q8_0"))


def test_weights_without_a_config() -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        choose_format(repository("model.safetensors"))


class TestCache:
    """Models in huggingface_hub's cache, also those that other programs downloaded."""

    @pytest.fixture
    def snapshot(self) -> Path:
        cache = RepoCache("Qwen/Qwen3-30B-A3B")
        cache.set_ref(HubReference("Qwen/Qwen3-30B-A3B"), COMMIT)
        folder = cache.snapshot(COMMIT)
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors.index.json").write_bytes(INDEX)
        (folder / "odd-1.safetensors").write_bytes(b"1")
        return folder

    def test_only_a_complete_model_is_used(self, snapshot: Path) -> None:
        with pytest.raises(NetworkTouchedError):
            locate("qwen3-30b")
        assert list(cached_references()) == []
        (snapshot / "odd-2.safetensors").write_bytes(b"2")
        assert locate("qwen3-30b") == locate("Qwen/Qwen3-30B-A3B") == locate("qwen3-30b", COMMIT) == snapshot
        with pytest.raises(NetworkTouchedError):
            locate("qwen3-30b", "another-branch")

    @pytest.mark.parametrize("kind", ["model-{:05}-of-00002.safetensors", "pytorch_model-{:05}-of-00002.bin"])
    def test_numbered_files_without_an_index(self, snapshot: Path, kind: str) -> None:
        for file in snapshot.glob("*.safetensors*"):
            file.unlink()
        (snapshot / kind.format(2)).write_bytes(b"2")
        with pytest.raises(NetworkTouchedError):
            locate("qwen3-30b")
        (snapshot / kind.format(1)).write_bytes(b"1")
        assert locate("qwen3-30b") == snapshot

    @pytest.mark.parametrize("missing", ["tokenizer.json", "generation_config.json", "model.safetensors.index.json"])
    def test_a_cut_download_of_another_program_is_not_complete(self, snapshot: Path, missing: str) -> None:
        """huggingface_hub writes the list of all files first, and fetches several at once."""
        small = {"config.json", "generation_config.json", "tokenizer.json", "model.safetensors.index.json"}
        shards = [f"model-{i:05}-of-00002.safetensors" for i in (1, 2)]
        for name in (*small, *shards):
            (snapshot / name).write_bytes(json.dumps({"weight_map": dict(enumerate(shards))}).encode())
        unused = ["README.md", "pytorch_model.bin.index.json", "original/tokenizer.model"]
        listed = {"format_version": 1, "files": {path: {"size": 1} for path in (*small, *shards, *unused)}}
        (trees := snapshot.parent.parent / "trees").mkdir()
        (trees / f"{COMMIT}.json").write_text(json.dumps(listed))
        assert locate("qwen3-30b") == locate("qwen3-30b", config_only=True) == snapshot
        (snapshot / missing).unlink()
        for config_only in (False, True):
            with pytest.raises(NetworkTouchedError):
                locate("qwen3-30b", config_only=config_only)
        assert list(cached_references()) == []

    def test_listing(self, snapshot: Path) -> None:
        (snapshot / "odd-2.safetensors").write_bytes(b"2")
        other = RepoCache("org/quants")
        other.set_ref(HubReference("org/quants"), COMMIT)
        for name in ("m-Q8_0-00001-of-00002.gguf", "m-Q8_0-00002-of-00002.gguf", "m-F16-00001-of-00002.gguf"):
            (other.snapshot(COMMIT) / name).parent.mkdir(parents=True, exist_ok=True)
            (other.snapshot(COMMIT) / name).write_bytes(b"12345")
        rows = {row.name: row for row in list_models()}
        assert list(rows)[:2] == ["demo", "demo-dense"]
        assert rows["demo"].path is None
        assert rows["qwen3-30b"].path == snapshot
        assert rows["qwen3-30b"].size_bytes == sum(p.stat().st_size for p in snapshot.iterdir())
        assert rows["mixtral-8x7b"].path is None
        assert "Qwen/Qwen3-30B-A3B" not in rows
        assert rows["org/quants:Q8_0"].size_bytes == 10
        assert rows["org/quants:Q8_0"].path == other.snapshot(COMMIT) / "m-Q8_0-00001-of-00002.gguf"
        assert not any(name.startswith("org/quants") and "F16" in name for name in rows)
