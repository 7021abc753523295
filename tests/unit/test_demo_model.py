"""The built demo model, from the real source, compared with transformers."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from demo_model import demo_gguf, demo_moe
from proa.demo.assemble import assemble
from proa.demo.made import STAMP_NAME
from proa.hub.listing import list_models
from proa.weights import sources
from proa.weights.checkpoint import open_checkpoint

pytestmark = pytest.mark.demo

TEXTS = (
    "",
    " ",
    "Hello, world!",
    "I'm sure they'll say WE'VE don't",
    "1234567 and 3.14159, 0x7f",
    "    indented\n\n\n\tdeeper\r\n   ",
    "naïve café, Straße, Привет, 日本語, العربية, हिन्दी",
    "🙂 🏳️‍🌈 👩‍👩‍👧‍👦 \u200b \ufeff",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "a<|endoftext|>b <repo_name>x",
    "x" * 300,
    "def f(x: int) -> int:\n    return x**2  # squares\n",
)


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A temporary folder that is deleted after the tests: pytest would keep hundreds of megabytes of three runs."""
    with TemporaryDirectory(prefix="proa-demo-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(demo_moe())


def load(folder: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def test_tokens_are_those_of_transformers_own_gguf_loading(tokenizer: PreTrainedTokenizerBase) -> None:
    reference = AutoTokenizer.from_pretrained(demo_gguf().parent, gguf_file=demo_gguf().name)
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        assert ids == reference(text)["input_ids"], text
        assert tokenizer.decode(ids) == reference.decode(ids) == text
    assert tokenizer.special_tokens_map == reference.special_tokens_map
    assert tokenizer.eos_token == "<|im_end|>"
    chat = [{"role": "user", "content": "Hi"}]
    ours, theirs = (
        t.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for t in (tokenizer, reference)
    )
    assert ours == theirs
    assert ours.startswith("<|im_start|>system\nYou are a helpful AI assistant")


def test_digits_are_split_off_singly(tokenizer: PreTrainedTokenizerBase) -> None:
    """Unlike transformers' GGUF loader, which splits "  12" into " " and " 12", digits are split off first."""
    assert tokenizer.tokenize("  12") == ["ĠĠ", "1", "2"]
    assert tokenizer.tokenize("\n    12") == ["ĊĠĠĠĠ", "1", "2"]


def test_folder_is_an_ordinary_checkpoint(tokenizer: PreTrainedTokenizerBase) -> None:
    checkpoint = open_checkpoint(demo_moe())
    declared = checkpoint.declare()
    sources.resolve(declared, checkpoint.tensors)
    rows = {row.name: row for row in list_models()}
    assert checkpoint.dtype == "bfloat16"
    assert checkpoint.generation_config["eos_token_id"] == tokenizer.eos_token_id
    assert (rows["demo"].num_params, rows["demo"].num_active_params) == (
        declared.spec.num_params,
        declared.spec.num_active_params,
    )
    assert rows["demo"].size_bytes == checkpoint.tensor_bytes
    assert rows["demo"].path == demo_moe()
    assert rows["demo-dense"].path == demo_gguf()


class TestBuild:
    """The folder is built once, appears complete, and concurrent builds are safe."""

    def test_second_time_is_instant(self) -> None:
        folder = demo_moe()
        before = (folder / "model.safetensors").stat().st_mtime_ns
        started = time.perf_counter()
        assert assemble(demo_gguf(), folder) == folder
        assert time.perf_counter() - started < 2  # making it takes longer
        assert (folder / "model.safetensors").stat().st_mtime_ns == before

    @pytest.mark.seldom
    def test_an_older_version_is_replaced_and_leftovers_go(self, scratch: Path) -> None:
        folder, leftover = scratch / "moe", scratch / "moe.partial"
        folder.mkdir()
        (folder / STAMP_NAME).write_text(json.dumps({"version": 0}))
        leftover.mkdir()
        (leftover / "model.safetensors").write_text("half")
        seen: list[tuple[str, int, int]] = []
        assemble(demo_gguf(), folder, progress=lambda *report: seen.append(report))
        assert (folder / "model.safetensors").read_bytes() == (demo_moe() / "model.safetensors").read_bytes()
        assert not leftover.exists()
        assert seen[-1][1] == seen[-1][2] == (demo_moe() / "model.safetensors").stat().st_size - _header_bytes()

    @pytest.mark.seldom
    def test_two_processes_at_once(self, scratch: Path) -> None:
        folder = scratch / "moe"
        with ProcessPoolExecutor(2, mp_context=get_context("spawn")) as pool:
            made = list(pool.map(assemble, [demo_gguf()] * 2, [folder] * 2))
        assert made == [folder, folder]
        assert {p.name for p in scratch.iterdir()} <= {"moe", "moe.lock"}
        assert (folder / "config.json").read_bytes() == (demo_moe() / "config.json").read_bytes()


def _header_bytes() -> int:
    with (demo_moe() / "model.safetensors").open("rb") as file:
        return 8 + int.from_bytes(file.read(8), "little")
