"""Configs with absurd numbers of layers or experts are refused at once, before an object is made for each of them."""

from __future__ import annotations

import json
import re
import resource
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from proa.errors import ConfigError, ModelError, ProaError, WeightsError
from proa.weights.checkpoint import open_checkpoint
from proa.weights.sources import resolve
from tiny import TINY, make_tiny
from tiny_gguf import SAID, make_tiny_gguf

HUGE = 10**8
AT_MOST_CPU_S = 2.0  # of what takes 10 to 20 ms: a hang is minutes
AT_MOST_MORE_BYTES = 64 << 20


def settle(path: Path, **options: Any) -> None:
    """Resolve all that headers and config determine."""
    checkpoint = open_checkpoint(path, **options)
    declared = checkpoint.declare()
    if checkpoint.tensors:
        resolve(declared, checkpoint.tensors)


def quickly(work: Callable[[], None], kind: type[ProaError], message: str) -> None:
    begin, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(kind, match=message) as caught:
        work()
    assert time.process_time() - begin < AT_MOST_CPU_S
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < AT_MOST_MORE_BYTES
    assert caught.value.remedy


def changed(folder: Path, **keys: Any) -> Path:
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | keys))
    return folder


@pytest.mark.parametrize("name", [*TINY][::4])
def test_layers(name: str, tmp_path: Path) -> None:
    folder = changed(make_tiny(name, tmp_path / "m"), num_hidden_layers=HUGE, layer_types=None)
    layers = TINY[name].config["num_hidden_layers"]
    message = re.escape(f"{folder / 'config.json'}: num_hidden_layers is {HUGE}, but the weight files hold ")
    quickly(lambda: settle(folder), ConfigError, rf"{message}{layers} layers\.")
    changed(folder, num_hidden_layers=layers + 1)
    quickly(lambda: settle(folder), ConfigError, f"num_hidden_layers is {layers + 1}")


def test_one_layer_too_many_without_an_index(tmp_path: Path) -> None:
    """A download without its index and its last shard."""
    folder = make_tiny("qwen3", tmp_path / "m", max_shard_size="200KB")
    (folder / "model.safetensors.index.json").unlink()
    sorted(folder.glob("*.safetensors"))[-1].unlink()
    quickly(lambda: settle(folder), ModelError, "not in the checkpoint|the weight files hold")


@pytest.mark.parametrize(
    ("name", "key", "message"),
    [
        ("deepseek-v3", "num_nextn_predict_layers", "num_nextn_predict_layers is"),
        (
            "qwen3-moe",
            "num_experts",
            rf"mlp.gate.weight: the config says \[{HUGE}, 64\], model.safetensors has \[8, 64\]",
        ),
        ("deepseek-v3", "n_routed_experts", rf"mlp.gate.weight: the config says \[{HUGE}, 64\]"),
        ("mixtral", "num_local_experts", rf"block_sparse_moe.gate.weight: the config says \[{HUGE}, 64\]"),
        ("qwen3-moe", "vocab_size", rf"embed_tokens.weight: the config says \[{HUGE}, 64\]"),
        ("qwen3-moe", "hidden_size", rf"embed_tokens.weight: the config says \[256, {HUGE}\]"),
        ("qwen3-moe", "moe_intermediate_size", rf"gate_proj.weight: the config says \[{HUGE}, 64\]"),
        ("llama2", "intermediate_size", rf"gate_proj.weight: the config says \[{HUGE}, 64\]"),
    ],
)
def test_other_sizes(name: str, key: str, message: str, tmp_path: Path) -> None:
    more = {"num_local_experts": None} if key == "num_experts" else {}  # two names of one number
    folder = changed(make_tiny(name, tmp_path / "m"), **more, **{key: HUGE})
    quickly(lambda: settle(folder), ModelError, message)


@pytest.mark.parametrize("name", ["llama2", "qwen3-moe", "qwen3-next", "ernie", "deepseek-v3"])
def test_layers_of_gguf(name: str, tmp_path: Path) -> None:
    file = make_tiny_gguf(name, tmp_path / "m.gguf")
    reader = gguf.GGUFReader(file, "r+")
    field = next(field for key, field in reader.fields.items() if key.endswith(".block_count"))
    field.parts[field.data[0]][0] = HUGE
    del reader
    message = rf"m.gguf \(GGUF metadata\): .*block_count is {HUGE}, but the weight files hold "
    quickly(lambda: settle(file), ConfigError, message)


def test_experts_of_gguf(tmp_path: Path) -> None:
    file = make_tiny_gguf("qwen3-moe", tmp_path / "m.gguf")
    reader = gguf.GGUFReader(file, "r+")
    field = reader.fields["qwen3moe.expert_count"]
    field.parts[field.data[0]][0] = HUGE
    del reader
    quickly(lambda: settle(file), WeightsError, rf"ffn_gate_inp.weight: the config says \[{HUGE}, 64\]")


@pytest.mark.parametrize("keys", [{"num_hidden_layers": HUGE}, {"num_experts": HUGE, "num_local_experts": None}])
def test_random_weights(keys: dict[str, Any], tmp_path: Path) -> None:
    folder = changed(make_tiny("qwen3-moe", tmp_path / "m"), **keys)
    quickly(lambda: settle(folder, load_format="dummy"), ConfigError, "config.json: .* at most")


VALUES = (0, -1, 1, 3, 2**31, 2**62, 1.5, -0.0, "3", [], {}, True, None)


def refused_or_not(settle_it: Callable[[], None], what: str) -> None:
    try:
        settle_it()
    except ProaError as error:
        assert error.message, what  # noqa: PT017 - some values are right
        assert error.remedy, what  # noqa: PT017
    except Exception as error:
        raise AssertionError(f"{what}: {error!r}") from error


@pytest.mark.parametrize("name", ["qwen2-moe-mixed", "qwen3-next", "deepseek-v2", "gpt-oss", "ernie", "llama3.1"])
def test_any_key_may_have_any_value(name: str, tmp_path: Path) -> None:
    """Every key is set to every kind of value: the model is refused with a message, or still works."""
    folder = make_tiny(name, tmp_path / "m")
    config = json.loads((folder / "config.json").read_bytes())
    rope = config["rope_parameters"]
    begin = time.process_time()
    for value in VALUES:
        for key in config:
            changed(folder, **(config | {key: value}))
            refused_or_not(lambda: settle(folder), f"{key} = {value!r}")
        for key in rope:
            changed(folder, **(config | {"rope_parameters": rope | {key: value}}))
            refused_or_not(lambda: settle(folder), f"rope_parameters: {key} = {value!r}")
    assert time.process_time() - begin < 60


@pytest.mark.parametrize("name", ["qwen2-moe-mixed", "qwen3-next", "deepseek-v2", "gpt-oss", "ernie", "llama-yarn"])
def test_any_number_of_gguf_metadata_may_be_another(name: str, tmp_path: Path) -> None:
    file = make_tiny_gguf(name, tmp_path / "m.gguf", **SAID[name])
    whole = file.read_bytes()
    fields = [field for field in gguf.GGUFReader(file).fields.values() if len(field.types) == 1]
    begin = time.process_time()
    for field in fields:
        kind = field.parts[field.data[0]].dtype
        if field.name.startswith("GGUF.") or kind.itemsize == 1:
            continue
        at = field.offset + sum(part.nbytes for part in field.parts[: field.data[0]])
        for value in VALUES[:7] if kind.kind == "f" else (0, 1, 3, 2**31 - 1, 2 ** (8 * kind.itemsize - 1) - 1):
            file.write_bytes(whole[:at] + np.array(value, kind).tobytes() + whole[at + kind.itemsize :])
            refused_or_not(lambda: settle(file), f"{field.name} = {value!r}")
    assert time.process_time() - begin < 60
