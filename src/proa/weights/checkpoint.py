"""A checkpoint on disk: its config, where its tensors and tokenizer are. Never: tensor data, torch, the hub."""

from __future__ import annotations

import json
import math
import struct
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proa.errors import ConfigError, ModelNotFound, WeightsError
from proa.models import families
from proa.models.gguf import config_from_metadata, generation_from_metadata, gguf_names
from proa.models.names import Declared
from proa.models.quantisation import Quantisation, legacy_modelopt, quantisation
from proa.weights.counts import GGUF_LAYER_COUNTS, LAYER_COUNTS, refuse_many_experts, refuse_more_layers
from proa.weights.gguf_header import gguf_index, is_later_part
from proa.weights.index import FETCH_AGAIN, TensorInfo, bin_index, listed_files, safetensors_index, shard_files
from proa.weights.placeholder import placeholder
from proa.weights.quantised import collapse

# load format -> (index of sharded files, name of a single file, pattern of files without an index).
_LAYOUTS = {
    "safetensors": ("model.safetensors.index.json", "model.safetensors", "*.safetensors"),
    "bin": ("pytorch_model.bin.index.json", "pytorch_model.bin", "pytorch_model*.bin"),
}
# Files that repeat the weights in another layout, or hold something else.
_NOT_WEIGHTS = ("consolidated", "adapter_model", "optimizer", "training_args")
_OTHER_FILES = "Use --load-format safetensors, or the model's unquantised repository."
_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint's headers and configs, without tensor data.

    path: folder or GGUF file, which holds the tokenizer too. load_format: safetensors, bin, gguf, dummy, or "config":
    only for a plan, without weight files. config: in Hugging Face's form, for GGUF translated from the metadata.
    tensors: by the file's names; empty for dummy and config. generation_config: empty if there is none. dtype: of
    activations: bfloat16, float16 or float32. quantisation: read from the config; None: not quantised, or GGUF.
    tensor_names: of the index, for config; empty: there is none.
    """

    path: Path
    load_format: str
    config: dict[str, Any]
    dtype: str
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    quantisation: Quantisation | None = None
    tensor_names: frozenset[str] = frozenset()

    @property
    def tensor_bytes(self) -> int:
        """Bytes of all tensors as they are stored."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def declare(self, ignore_keys: Collection[str] = ()) -> Declared:
        """The model's shapes and the names of its tensors. Raises ConfigError."""
        where = str(self.path / "config.json") if self.path.is_dir() else f"{self.path} (GGUF metadata)"
        refuse_more_layers(self.config, LAYER_COUNTS, self.tensors or self.tensor_names, where)
        declared = families.declare(self.config, ignore_keys, where)
        if not self.tensors:
            refuse_many_experts(declared.spec, where)
        return declared if self.path.is_dir() else Declared(declared.spec, gguf_names(self.config))


def open_checkpoint(
    path: Path, load_format: str = "auto", override_config: Mapping[str, Any] | None = None
) -> Checkpoint:
    """Read the headers of a model folder or a GGUF file.

    load_format "auto" takes safetensors, then bin, then gguf; "dummy" and "config" need only the config.
    `override_config` replaces config keys. Raises ModelNotFound, ConfigError, WeightsError.
    """
    if not path.exists():
        raise ModelNotFound(f"There is no model at {path}.", "Give a model folder with a config.json, or a .gguf file.")
    override = dict(override_config or {})
    if path.is_file():
        if path.suffix != ".gguf" or load_format not in ("auto", "gguf", "dummy"):
            wanted = "gguf" if load_format == "auto" else load_format
            raise ModelNotFound(
                f"{path} is not a {wanted} model.", "Give a model folder with a config.json, or a .gguf file."
            )
        return _open_gguf(path, load_format, override)
    chosen = _found_format(path) if load_format == "auto" else load_format
    if chosen == "gguf":
        return _open_gguf(_only_gguf(path), chosen, override)
    return _open_folder(path, chosen, override)


def needs_torch(path: Path, load_format: str = "auto") -> bool:
    """True if only torch can read the headers (.bin files); importing it takes seconds. Raises WeightsError for a
    folder without weights."""
    if path.is_file():
        return False
    return (_found_format(path) if load_format == "auto" else load_format) == "bin"


def _found_format(folder: Path) -> str:
    for layout in _LAYOUTS:
        if _weight_files(folder, layout):
            return layout
    if any(folder.glob("*.gguf")):
        return "gguf"
    raise WeightsError(
        f"{folder} has no weights: no *.safetensors, pytorch_model*.bin or *.gguf file.",
        "Download the model completely, or use --load-format dummy for random weights.",
    )


def _weight_files(folder: Path, layout: str) -> list[Path]:
    index, single, pattern = _LAYOUTS[layout]
    if (folder / index).is_file():
        return shard_files(folder / index)
    if (folder / single).is_file():
        return [folder / single]
    return sorted(f for f in folder.glob(pattern) if not f.name.startswith(_NOT_WEIGHTS))


def _only_gguf(folder: Path) -> Path:
    """The only GGUF model of a folder; the first part if it is split. mmproj files (vision projectors) do not count.
    Raises ModelNotFound for none or several."""
    found = sorted(f for f in folder.glob("*.gguf") if not f.name.startswith("mmproj"))
    models = [f for f in found if not is_later_part(f)]
    if len(models) != 1:
        names = ", ".join(f.name for f in models) or "none"
        raise ModelNotFound(
            f"{folder} must have one GGUF model, but there are {len(models)}: {names}.",
            "Give the path of the .gguf file to load.",
        )
    return models[0]


def _open_gguf(file: Path, load_format: str, override: dict[str, Any]) -> Checkpoint:
    header = gguf_index(file)
    shapes = {name: tensor.shape for name, tensor in header.tensors.items()}
    factors = _rope_factors(header.tensors.get("rope_freqs.weight"))
    where = f"{file} (GGUF metadata)"
    keys = [f"{header.metadata.get('general.architecture')}.{key}" for key in GGUF_LAYER_COUNTS]
    refuse_more_layers(header.metadata, keys, header.tensors, where)
    config = config_from_metadata(header.metadata, shapes, factors, where) | override
    return Checkpoint(
        path=file,
        load_format="dummy" if load_format == "dummy" else "gguf",
        config=config,
        dtype="bfloat16",  # rounds far less than any quantised type
        tensors={} if load_format == "dummy" else header.tensors,
        generation_config=generation_from_metadata(header.metadata),
    )


def _rope_factors(tensor: TensorInfo | None) -> tuple[float, ...]:
    """Read the divisors of the rotary frequencies, which GGUF stores as a tensor. Raises WeightsError."""
    if tensor is None:
        return ()
    if tensor.dtype != "F32":
        raise WeightsError(f"{tensor.file}: {tensor.name} is {tensor.dtype}; F32 was expected.", "Convert it again.")
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        found = struct.unpack(f"<{tensor.nbytes // 4}f", stream.read(tensor.nbytes))
    for i, factor in enumerate(found):
        if not 0 < factor < math.inf:
            raise WeightsError(
                f"{tensor.file}: {tensor.name} is {factor} at [{i}]; finite numbers above 0 were expected.", FETCH_AGAIN
            )
    return found


def _open_folder(folder: Path, load_format: str, override: dict[str, Any]) -> Checkpoint:
    config = _config(folder) | override
    tensors: dict[str, TensorInfo] = {}
    if load_format not in ("dummy", "config"):
        files = _weight_files(folder, load_format)
        if not files:
            raise WeightsError(f"{folder} has no {load_format} files.", "Use --load-format auto.")
        tensors = safetensors_index(files) if load_format == "safetensors" else bin_index(files)
    where = str(folder / "config.json")
    quantised = quantisation(config, where=where, strict=False)  # `declare` is strict
    if quantised and tensors:
        if load_format != "safetensors":
            raise WeightsError(f"{folder}: quantised weights are loaded from safetensors files only.", _OTHER_FILES)
        tensors = collapse(tensors, quantised)
    generation = folder / "generation_config.json"
    return Checkpoint(
        path=folder,
        load_format=load_format,
        config=config,
        dtype="bfloat16" if quantised else _dtype(config, tensors),  # of activations
        tensors=tensors,
        generation_config=_json(generation) if generation.exists() else {},
        quantisation=quantised,
        tensor_names=_index_names(folder) if load_format == "config" else frozenset(),
    )


def has_weights(path: Path) -> bool:
    """True if a folder has all weight files that its index lists, or some without an index; a file is one itself."""
    if path.is_file():
        return True
    for index, single, pattern in _LAYOUTS.values():
        if (path / index).is_file():
            return all((path / file).is_file() for file in listed_files(path / index).values())
        if (path / single).is_file() or any(path.glob(pattern)):
            return True
    return any(path.glob("*.gguf"))


def _index_names(folder: Path) -> frozenset[str]:
    """The tensor names of a folder's index; empty if there is none."""
    indices = (folder / index for index, _, _ in _LAYOUTS.values())
    return next((frozenset(listed_files(file)) for file in indices if file.is_file()), frozenset())


def _config(folder: Path) -> dict[str, Any]:
    config, legacy = _json(folder / "config.json"), folder / "hf_quant_config.json"
    if not config.get("quantization_config") and legacy.is_file():
        config["quantization_config"] = legacy_modelopt(_json(legacy))
    return config


def _json(file: Path) -> dict[str, Any]:
    if not file.is_file():
        raise ModelNotFound(f"{file.parent} has no {file.name}.", "Give a Hugging Face model folder or a .gguf file.")
    if missing := placeholder(file):
        raise ConfigError(*missing)
    try:
        found = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:  # invalid UTF-8 is a ValueError
        raise ConfigError(f"{file} is not valid JSON: {error}.", "Fetch the file again.") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{file} must hold a JSON object.", "Fetch the file again.")
    return found


def _dtype(config: Mapping[str, Any], tensors: Mapping[str, TensorInfo]) -> str:
    """The config's dtype, else the type of most bytes of the tensors. Raises ConfigError."""
    stated = config.get("dtype") or config.get("torch_dtype")
    if stated is not None:
        name = str(stated).removeprefix("torch.")
        if name not in _DTYPES.values():
            raise ConfigError(
                f"config.json: the dtype {stated!r} is not implemented, only {', '.join(_DTYPES.values())}.",
                "Replace it with --override-config 'dtype=\"bfloat16\"'.",
            )
        return name
    sizes: Counter[str] = Counter()
    for tensor in tensors.values():
        sizes[tensor.dtype] += tensor.nbytes
    most = sizes.most_common(1)
    return _DTYPES.get(most[0][0], "bfloat16") if most else "bfloat16"
