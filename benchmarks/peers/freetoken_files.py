"""What FreeToken needs on disk: its wheels unpacked, a folder that it takes for a checkpoint. Never: its API, torch.

The folder holds no weights: FreeToken makes random ones in memory (its `use_dummy_weight`), as Proa's bench does.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import sys
import zipfile
from pathlib import Path

from packaging.tags import sys_tags
from packaging.utils import InvalidWheelFilename, parse_wheel_filename
from tokenizers import Tokenizer, models

from proa.bench.hybrid_shapes import ModelShape
from proa.errors import UsageError

PACKAGE = "freetoken"
REMEDY = "See FreeToken in benchmarks/peers/README.md for how to install it."
FP8_BLOCK = 128  # rows and columns that share a scale
FORMATS = ("bf16", "fp8")
POSITIONS = 1 << 17  # it keeps a table of all of them


def provide(wheels: str | None, keep: Path) -> list[str]:
    """Make the package importable here and in child processes: from `wheels`, None for what is installed.

    Of the wheels, those are left out whose package is installed already, FreeToken excepted. What is built and
    measured once goes to `keep`. Gives back notes. Raises UsageError.
    """
    os.environ["XDG_CACHE_HOME"] = str(keep / "cache")  # its bandwidth profile
    os.environ["TVM_FFI_CACHE_DIR"] = str(keep / "kernels")  # what it compiles with nvcc
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "GLOO_SOCKET_IFNAME": "lo"}
    notes = unpack_all(Path(wheels), keep / "site") if wheels else []
    if importlib.util.find_spec(PACKAGE) is None:
        raise UsageError("FreeToken is not installed here.", REMEDY)
    return notes


def unpack_all(wheels: Path, site: Path) -> list[str]:
    """Into `site`, which becomes importable. Gives back notes. Raises UsageError."""
    found = sorted(wheels.glob("*.whl"))
    if not any(path.name.startswith(f"{PACKAGE}-") for path in found):
        raise UsageError(f"There is no wheel of FreeToken in {wheels}.", REMEDY)
    left_out = [name for path in found if (name := _unpack(path, site))]
    sys.path.insert(0, str(site))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    importlib.invalidate_caches()
    return [f"not taken from {wheels}, for it is installed: {', '.join(left_out)}"] if left_out else []


def _unpack(wheel: Path, site: Path) -> str:
    """Gives back the package's name and installed version if it stays as it is, else ""."""
    try:
        name, version, _, tags = parse_wheel_filename(wheel.name)
    except InvalidWheelFilename as error:
        raise UsageError(f"{wheel} is no wheel ({error}).", REMEDY) from None
    if tags.isdisjoint(sys_tags()):
        python = ".".join(map(str, sys.version_info[:2]))
        raise UsageError(f"{wheel.name} is not for this Python ({python}) or machine.", REMEDY)
    done = site / f".{name}-{version}"
    if done.exists():
        return ""
    if name != PACKAGE:
        try:
            return f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            pass
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    done.touch()
    return ""


def write_model(folder: Path, shape: ModelShape, weights: str) -> Path:
    """config.json, generation_config.json and a tokenizer of three words, for prompts are token ids.

    `weights` is one of FORMATS: all linear layers have it, but routers and the head.
    """
    config = shape.config() | {"max_position_embeddings": POSITIONS}
    if weights == "fp8":
        config["quantization_config"] = {
            "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
            "weight_block_size": [FP8_BLOCK, FP8_BLOCK],
            "modules_to_not_convert": ["lm_head", *(f"model.layers.{i}.mlp.gate" for i in range(shape.layers))],
        }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    ends = {"bos_token_id": 0, "eos_token_id": 1}
    for name, values in (
        ("config.json", config | ends),
        ("generation_config.json", ends),
        ("tokenizer_config.json", {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
            "chat_template": "{{ messages[0]['content'] }}",  # without one it asks the hub
        }),
    ):  # fmt: skip
        (folder / name).write_text(json.dumps(values, indent=1))
    words = {"<s>": 0, "</s>": 1, "<unk>": 2}
    Tokenizer(models.WordLevel(words, unk_token="<unk>")).save(str(folder / "tokenizer.json"))
    return folder
