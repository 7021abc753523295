"""Downloads from a hub on loopback, over real sockets."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from huggingface_hub._tree_cache import read_tree_cache

import programs
from fake_hub import COMMIT, FakeHub, serve_hub
from proa.config.options import ModelOptions
from proa.errors import ConfigError, HubError, ModelNotFound, ProaError, ResourceError, UsageError, WeightsError
from proa.hub.api import Hub
from proa.hub.cache import RepoCache, cached_references
from proa.hub.download import download
from proa.hub.locate import locate
from proa.hub.reference import HubReference
from proa.plan.headers import open_headers
from proa.weights.checkpoint import open_checkpoint
from tiny import make_tiny
from tiny_gguf import make_tiny_gguf

REPO = "org/tiny"
SHARDS = ".safetensors"


@pytest.fixture(scope="session")
def tiny_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sharded safetensors model, with duplicates of its weights in every other format."""
    folder = make_tiny("qwen3-moe", tmp_path_factory.mktemp("hub") / "tiny", max_shard_size="400KB")
    assert len(list(folder.glob("model-*.safetensors"))) > 2
    (folder / "tokenizer.json").write_text('{"made": "up"}')
    (folder / "README.md").write_text("not wanted")
    for copy in ("pytorch_model.bin", "consolidated.safetensors", "original/consolidated.00.pth", "onnx/model.onnx"):
        (folder / copy).parent.mkdir(exist_ok=True)
        (folder / copy).write_bytes(b"duplicate" * 1000)
    return folder


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    with serve_hub(FakeHub()) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
        monkeypatch.delenv("HF_TOKEN", raising=False)
        monkeypatch.setattr(Hub, "retry_delays_s", (0.0, 0.0))
        yield hub


def fetch(reference: str = REPO, **options: object) -> Path:
    repo, _, file = reference.partition(":")
    return download(HubReference(repo, file=file or None), **options)


def test_fetches_one_format_and_nothing_twice(hub: FakeHub, tiny_moe: Path) -> None:
    hub.add(REPO, tiny_moe)
    seen: list[tuple[str, int, int]] = []
    folder = fetch(progress=lambda *report: seen.append(report))
    wanted = {p.name for p in tiny_moe.glob("model*")} | {"config.json", "generation_config.json", "tokenizer.json"}
    assert {p.relative_to(folder).as_posix() for p in folder.rglob("*")} == wanted
    assert all((folder / name).read_bytes() == (tiny_moe / name).read_bytes() for name in wanted)
    assert open_checkpoint(folder).tensors.keys() == open_checkpoint(tiny_moe).tensors.keys()
    total = sum(p.stat().st_size for p in tiny_moe.glob("model-*.safetensors"))
    assert seen[-1] == (f"fetching {REPO}", total, total)
    assert [done for _, done, _ in seen] == sorted(done for _, done, _ in seen)
    assert list(cached_references()) == [HubReference(REPO)]
    assert not list((folder.parent.parent.parent).glob("proa-preview-*"))


@pytest.mark.parametrize("name", ["tiktoken.model", "tekken.json", "additional_chat_templates/tool_use.jinja"])
def test_all_files_that_the_tokenizer_reads_are_fetched(hub: FakeHub, tiny_moe: Path, name: str) -> None:
    hub.add(REPO, tiny_moe)
    hub.repos[REPO][name] = hub.repos[REPO]["additional_chat_templates/notes.md"] = b"{{ messages }}"
    folder = fetch()
    assert (folder / name).read_bytes() == b"{{ messages }}"
    assert not (folder / "additional_chat_templates/notes.md").exists()


def test_a_second_download_makes_no_requests(hub: FakeHub, tiny_moe: Path) -> None:
    hub.add(REPO, tiny_moe)
    first = fetch()
    hub.requests.clear()
    assert locate(REPO) == locate(f"{REPO}@{COMMIT}") == first
    assert hub.requests == []


def test_resumes_where_a_cut_connection_stopped(hub: FakeHub, tiny_moe: Path) -> None:
    hub.add(REPO, tiny_moe)
    shard = sorted(tiny_moe.glob("model-*.safetensors"))[0]
    size, header = shard.stat().st_size, min(shard.stat().st_size, 1 << 18)
    hub.cut_after[shard.name] = [header, size // 2, 1000]  # the header is read first
    fetch()
    assert hub.served[shard.name] == header + size


def test_a_later_run_fetches_only_the_rest(hub: FakeHub, tiny_moe: Path) -> None:
    hub.add(REPO, tiny_moe)
    shard = sorted(tiny_moe.glob("model-*.safetensors"))[0]
    size, header = shard.stat().st_size, min(shard.stat().st_size, 1 << 18)
    hub.cut_after[shard.name] = [header, size // 2, 0, 0, 0, 0]
    with pytest.raises(HubError, match="cannot be reached"):
        fetch()
    assert RepoCache(REPO).find(HubReference(REPO)) is None
    hub.cut_after.clear()
    hub.served.clear()
    seen: list[tuple[str, int, int]] = []
    folder = fetch(progress=lambda *report: seen.append(report))
    assert hub.served[shard.name] == header + size - size // 2
    assert (folder / shard.name).read_bytes() == shard.read_bytes()
    assert seen[-1][1] == seen[-1][2]


def test_a_server_without_ranges_starts_over(hub: FakeHub, tiny_moe: Path) -> None:
    hub.add(REPO, tiny_moe)
    shard = sorted(tiny_moe.glob("model-*.safetensors"))[0]
    hub.ignores_range = True
    hub.cut_after[shard.name] = [1 << 30, shard.stat().st_size // 2]
    seen: list[tuple[str, int, int]] = []
    folder = fetch(progress=lambda *report: seen.append(report))
    assert (folder / shard.name).read_bytes() == shard.read_bytes()
    assert seen[-1][1] == seen[-1][2]


def test_a_download_that_always_stops_early_fails(hub: FakeHub, tiny_moe: Path) -> None:
    hub.add(REPO, tiny_moe)
    shard = sorted(tiny_moe.glob("model-*.safetensors"))[0]
    hub.cut_after[shard.name] = [1 << 30, 1000]
    hub.ends_early = True
    with pytest.raises(HubError, match=f"{shard.name} of {REPO} stopped at"):
        fetch()


def test_damaged_content_is_deleted_and_named(hub: FakeHub, tiny_moe: Path) -> None:
    hub.add(REPO, tiny_moe)
    shard = sorted(tiny_moe.glob("model-*.safetensors"))[0]
    partial = RepoCache(REPO).blob(_sha256(shard)).with_name(f"{_sha256(shard)}.incomplete")
    partial.parent.mkdir(parents=True)
    partial.write_bytes(b"x" * 100)  # as after a disk error
    with pytest.raises(HubError, match="arrived damaged") as caught:
        fetch()
    assert shard.name in str(caught.value)
    assert not partial.exists()
    assert fetch().is_dir()


def test_an_unsupported_architecture_costs_no_weights(hub: FakeHub, tiny_moe: Path, tmp_path: Path) -> None:
    folder = _copy_with_config(tiny_moe, tmp_path / "odd", architectures=["MambaForCausalLM"])
    hub.add(REPO, folder)
    with pytest.raises(ConfigError, match=f"{REPO}/config.json.*MambaForCausalLM") as caught:
        fetch()
    assert "proa-preview" not in str(caught.value)
    shards = list(folder.glob("model-*.safetensors"))
    assert 0 < hub.served_bytes(SHARDS) <= sum(min(1 << 18, s.stat().st_size) for s in shards)
    assert not list(RepoCache(REPO).snapshot(COMMIT).glob("*.safetensors"))


def test_tensors_that_do_not_fit_the_config_cost_no_weights(hub: FakeHub, tiny_moe: Path, tmp_path: Path) -> None:
    hub.add(REPO, _copy_with_config(tiny_moe, tmp_path / "odd", vocab_size=300))
    with pytest.raises(WeightsError, match=r"\[300, 64\]"):
        fetch()
    assert not list(RepoCache(REPO).snapshot(COMMIT).glob("*.safetensors"))


def test_dummy_weights_need_no_download(hub: FakeHub, tiny_moe: Path) -> None:
    hub.add(REPO, tiny_moe)
    folder = locate(REPO, config_only=True)
    assert hub.served_bytes(SHARDS) == 0
    assert open_checkpoint(folder, "dummy").declare() == open_checkpoint(tiny_moe, "dummy").declare()
    assert (folder / "tokenizer.json").is_file()
    requests = len(hub.requests)
    assert locate(REPO, config_only=True) == folder
    assert len(hub.requests) == requests
    assert open_checkpoint(locate(REPO)).tensors, "without the switch the weights come after all"


def test_dummy_weights_need_a_config(hub: FakeHub) -> None:
    hub.repos[REPO] = {"model-Q8_0.gguf": b"GGUF"}
    with pytest.raises(ModelNotFound, match=r"no config\.json, from which dummy"):
        locate(REPO, config_only=True)


def test_too_little_disk_is_refused_before_the_download(
    hub: FakeHub, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add(REPO, tiny_moe)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    with pytest.raises(ResourceError, match=f"{REPO} needs .* where 1000 B are free"):
        fetch()
    assert hub.served_bytes(SHARDS) == 0


def test_cache_that_cannot_be_written(hub: FakeHub, tiny_moe: Path, tmp_path: Path) -> None:
    hub.add(REPO, tiny_moe)
    (tmp_path / "cache").write_text("a file in the way")
    with pytest.raises(ResourceError, match="Set HF_HUB_CACHE"):
        fetch()


def test_disk_that_fills_up_on_the_way(hub: FakeHub, tiny_moe: Path) -> None:
    hub.add(REPO, tiny_moe)
    shard = sorted(tiny_moe.glob("model-*.safetensors"))[0]
    partial = RepoCache(REPO).blob(f"{_sha256(shard)}.incomplete")
    partial.parent.mkdir(parents=True)
    partial.symlink_to("/dev/full")
    with pytest.raises(ResourceError, match=f"{shard.name} cannot be written .*No space left"):
        fetch()


def test_bin_when_there_is_nothing_better(hub: FakeHub, tiny_moe: Path, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    shutil.copy(tiny_moe / "config.json", folder)
    for name in ("pytorch_model-00001-of-00002.bin", "pytorch_model-00002-of-00002.bin", "training_args.bin"):
        (folder / name).write_bytes(name.encode())
    hub.add(REPO, folder)
    found = fetch()
    assert {p.name for p in found.iterdir()} == {p.name for p in folder.iterdir()} - {"training_args.bin"}


class TestGguf:
    """Repositories of GGUF files."""

    @pytest.fixture
    def repo(self, hub: FakeHub, tmp_path: Path) -> Path:
        folder = tmp_path / "gguf"
        make_tiny_gguf("llama2", folder / "tiny-Q8_0.gguf", quant="Q8_0", intermediate_size=128)
        make_tiny_gguf("llama2", folder / "sub" / "tiny-F16.gguf", quant="F16", intermediate_size=128)
        (folder / "mmproj-F16.gguf").write_bytes(b"a vision tower")
        hub.add(REPO, folder)
        return folder

    @pytest.mark.parametrize("wanted", ["Q8_0", "q8_0", "tiny-Q8_0.gguf"])
    def test_by_quantisation_or_name(self, hub: FakeHub, repo: Path, wanted: str) -> None:
        found = fetch(f"{REPO}:{wanted}")
        assert found.name == "tiny-Q8_0.gguf"
        assert found.read_bytes() == (repo / "tiny-Q8_0.gguf").read_bytes()
        assert hub.served_bytes("F16.gguf") == 0
        hub.requests.clear()
        assert locate(f"{REPO}:{wanted}") == found
        assert hub.requests == []
        assert [str(r) for r in cached_references()] == [f"{REPO}:Q8_0"]

    def test_in_a_subfolder(self, repo: Path) -> None:
        assert locate(f"{REPO}:sub/tiny-F16.gguf").read_bytes() == (repo / "sub" / "tiny-F16.gguf").read_bytes()

    @pytest.mark.parametrize("wanted", ["", ":Q4_K_M"])
    def test_several_gguf_models_need_a_choice(self, repo: Path, hub: FakeHub, wanted: str) -> None:
        with pytest.raises(UsageError) as caught:
            fetch(REPO + wanted)
        assert f"{REPO}:Q8_0 (" in str(caught.value)
        assert f"{REPO}:F16 (" in str(caught.value)
        assert "mmproj" not in str(caught.value)
        assert hub.served_bytes() == 0

    def test_only_one_needs_no_choice(self, hub: FakeHub, repo: Path) -> None:
        del hub.repos[REPO]["sub/tiny-F16.gguf"]
        assert fetch().name == "tiny-Q8_0.gguf"

    def test_the_only_one_is_found_in_the_cache_without_asking_the_hub(self, hub: FakeHub, repo: Path) -> None:
        del hub.repos[REPO]["sub/tiny-F16.gguf"]
        found = fetch()
        hub.requests.clear()
        assert locate(REPO) == locate(f"{REPO}@{COMMIT}") == found
        assert hub.requests == []
        assert [str(r) for r in cached_references()] == [f"{REPO}:Q8_0"]
        listed = read_tree_cache(str(found.parents[2]), COMMIT)
        assert listed is not None
        assert listed["tiny-Q8_0.gguf"].size == found.stat().st_size
        found.unlink()
        assert locate(REPO) == found
        assert hub.requests != []

    def test_safetensors_come_before_the_only_one_that_is_cached(self, hub: FakeHub, repo: Path) -> None:
        del hub.repos[REPO]["sub/tiny-F16.gguf"]
        hub.repos[REPO]["model.safetensors"] = b"weights"
        fetch(f"{REPO}:Q8_0")
        with pytest.raises(ModelNotFound, match=r"has weights but no config\.json"):
            locate(REPO)

    def test_the_only_one_that_is_cached_needs_no_choice_offline(
        self, hub: FakeHub, repo: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        found = fetch(f"{REPO}:Q8_0")
        with pytest.raises(UsageError, match="2 GGUF models"):
            locate(REPO)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        assert locate(REPO) == found
        (part := found.parent / "model.safetensors.index.json").write_text("{}")
        with pytest.raises(HubError, match="not complete in the cache"):
            locate(REPO)
        part.unlink()
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        fetch(f"{REPO}:F16")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with pytest.raises(HubError, match="not complete in the cache"):
            locate(REPO)

    def test_header_longer_than_the_first_guess(
        self, repo: Path, hub: FakeHub, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("proa.hub.preview._GGUF_FIRST_BYTES", (200, 1000, 1 << 20))
        judged: list[int] = []
        fetch(f"{REPO}:Q8_0", check=lambda preview, _: judged.append(len(open_checkpoint(preview).tensors)))
        assert judged == [len(open_checkpoint(repo / "tiny-Q8_0.gguf").tensors)]

    def test_not_a_gguf(self, hub: FakeHub, repo: Path) -> None:
        hub.repos[REPO]["tiny-Q8_0.gguf"] = b"<html>" * 1000
        with pytest.raises(WeightsError, match="not a GGUF file"):
            fetch(f"{REPO}:Q8_0")

    def test_no_gguf_there(self, hub: FakeHub, tiny_moe: Path) -> None:
        hub.add(REPO, tiny_moe)
        with pytest.raises(ModelNotFound, match="no GGUF files"):
            fetch(f"{REPO}:Q4_K_M")


def test_nothing_to_load(hub: FakeHub) -> None:
    hub.repos[REPO] = {"model.onnx": b"x", "README.md": b"y"}
    with pytest.raises(ModelNotFound, match="its files end with md, onnx"):
        fetch()


@pytest.mark.parametrize(
    ("status", "headers", "kind", "said"),
    [
        (401, {}, HubError, ["set HF_TOKEN", "licence at {endpoint}/org/tiny"]),
        (403, {"X-Error-Code": "GatedRepo"}, HubError, ["licence must be accepted", "{endpoint}/org/tiny", "HF_TOKEN"]),
        (404, {"X-Error-Code": "RepoNotFound"}, ModelNotFound, ["no model org/tiny", "proa models"]),
        (404, {"X-Error-Code": "RevisionNotFound"}, ModelNotFound, ["no revision main"]),
        (418, {}, HubError, ["answered 418"]),
    ],
)
def test_refusals(hub: FakeHub, status: int, headers: dict[str, str], kind: type[ProaError], said: list[str]) -> None:
    hub.repos[REPO] = {}
    hub.status[REPO] = [(status, headers)]
    with pytest.raises(kind) as caught:
        fetch()
    for part in said:
        assert part.format(endpoint=hub.endpoint) in str(caught.value)
    assert len(hub.requests) == 1, "trying again would not help"


@pytest.mark.parametrize(
    ("status", "headers", "said"),
    [(429, {"Retry-After": "0"}, "429: too many requests"), (503, {}, "503: an error on the hub's side")],
)
def test_transient_errors_are_retried(
    hub: FakeHub, tiny_moe: Path, status: int, headers: dict[str, str], said: str
) -> None:
    hub.add(REPO, tiny_moe)
    hub.status[REPO] = [(status, headers)] * 2
    assert fetch().is_dir()
    hub.status[REPO] = [(status, headers)] * 3
    with pytest.raises(HubError, match=said):
        fetch()


def test_unreachable(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(HubError, match=r"cannot be reached.*HF_ENDPOINT"):
        fetch()


@pytest.mark.parametrize("endpoint", ["", "huggingface.co", "ftp://x.y", "http://", "http://[::1", "http://a b"])
def test_an_endpoint_that_is_no_url(monkeypatch: pytest.MonkeyPatch, endpoint: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    with pytest.raises(HubError, match=f"HF_ENDPOINT is '{re.escape(endpoint)}'.* Set it to"):
        locate(REPO)


def test_an_endpoint_with_an_impossible_port(tmp_path: Path) -> None:
    """huggingface_hub cannot be imported with it, so another process does."""
    done = subprocess.run(
        programs.proa("plan", REPO), capture_output=True, text=True, check=False,
        env={**os.environ, "HF_ENDPOINT": "http://127.0.0.1:99999", "HF_HOME": str(tmp_path)},
    )  # fmt: skip
    assert done.returncode == HubError.exit_code
    assert "HF_ENDPOINT is 'http://127.0.0.1:99999'" in done.stderr


def test_not_a_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos[REPO] = {}
    hub.status[REPO] = [(200, {})]  # the body is no JSON, as of a log-in page
    with pytest.raises(HubError, match="not JSON"):
        fetch()


def test_offline_switch(hub: FakeHub, tiny_moe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add(REPO, tiny_moe)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError, match="HF_HUB_OFFLINE"):
        locate(REPO)
    assert hub.requests == []


def test_a_path_that_leaves_the_folder(hub: FakeHub) -> None:
    hub.repos[REPO] = {"../../evil.safetensors": b"x", "config.json": b"{}"}
    with pytest.raises(HubError, match="outside of the repository"):
        fetch()


def test_the_real_environment(hub: FakeHub, tiny_moe: Path, tmp_path: Path) -> None:
    """HF_ENDPOINT, HF_TOKEN and HF_HOME set as by a user; the token is not sent to the content servers."""
    hub.add(REPO, tiny_moe)
    hub.token = "hf_secret"
    code = f"from proa.hub.locate import locate; print(locate({REPO!r}))"
    env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "PYTHONPATH": ":".join(sys.path)}
    refused = _run(code, env)
    assert refused.returncode != 0
    assert "set HF_TOKEN" in refused.stderr
    done = _run(code, env | {"HF_TOKEN": "hf_secret"})
    assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.strip())
    assert folder.is_relative_to(tmp_path / "home")
    assert open_checkpoint(folder).config["architectures"] == ["Qwen3MoeForCausalLM"]
    assert hub.leaked_tokens == []


def _run(code: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)


def _sha256(path: Path) -> str:
    import hashlib

    return hashlib.sha256(path.read_bytes()).hexdigest()


def _copy_with_config(source: Path, folder: Path, **changes: object) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def test_a_plan_fetches_only_config_and_headers(hub: FakeHub, tiny_moe: Path, tmp_path: Path) -> None:
    hub.add(REPO, tiny_moe)
    opened = open_headers(REPO, ModelOptions())
    assert opened.checkpoint.load_format == "safetensors"
    assert opened.checkpoint.path == Path(REPO)
    assert opened.checkpoint.tensors.keys() == open_checkpoint(tiny_moe).tensors.keys()
    assert hub.served_bytes("tokenizer.json") == 0
    assert not list(tmp_path.rglob("*.safetensors"))
    assert not list(tmp_path.rglob("proa-preview-*"))


def test_a_plan_of_bin_files_is_by_the_config(hub: FakeHub, tiny_moe: Path) -> None:
    hub.add(REPO, tiny_moe)
    for name in [name for name in hub.repos[REPO] if "safetensors" in name]:
        del hub.repos[REPO][name]
    opened = open_headers(REPO, ModelOptions())
    assert opened.checkpoint.load_format == "config"
    assert hub.served_bytes(".bin") == 0


def test_a_plan_of_a_gguf_reads_its_header(hub: FakeHub, tmp_path: Path) -> None:
    folder = tmp_path / "gguf"
    folder.mkdir()
    make_tiny_gguf("qwen3-moe", folder / "tiny-Q4_0.gguf", "Q4_0")
    hub.add(REPO, folder)
    opened = open_headers(f"{REPO}:Q4_0", ModelOptions())
    assert opened.checkpoint.load_format == "gguf"
    assert any(tensor.dtype == "Q4_0" for tensor in opened.checkpoint.tensors.values())


def test_a_plan_of_a_wrong_model_names_the_repository(hub: FakeHub, tiny_moe: Path) -> None:
    hub.add(REPO, tiny_moe)
    text = json.loads(hub.repos[REPO]["config.json"]) | {"moe_intermediate_size": 5}
    hub.repos[REPO]["config.json"] = json.dumps(text).encode()
    with pytest.raises(WeightsError, match=REPO):
        open_headers(REPO, ModelOptions())
    with pytest.raises(ModelNotFound):
        open_headers("org/none", ModelOptions())
