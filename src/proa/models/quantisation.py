"""`quantization_config` of a checkpoint -> what of it matters, read strictly. Never: tensors, files, torch.

Which matrices are quantised, and how, the tensors say themselves (weights/quantised.py); here stands what they cannot
say.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from proa.errors import ConfigError
from proa.models.config_reader import Reader

_KEYS = ("quantization_config", "compression_config")
_OTHER = "Use another quantisation of the model, its unquantised repository, or a GGUF file of it."


@dataclass(frozen=True)
class Quantisation:
    """method: as the config names it. block: rows and columns of a scale of FP8. integers: (regular expression over
    module names, bits); the first that matches counts, 0 bits are an unquantised module. symmetric: zero is the middle
    code. zero_offset: what stored zero points lack. activations: what the checkpoint rounds them to; "": nothing.
    """

    method: str
    block: tuple[int, int] | None = None
    integers: tuple[tuple[str, int], ...] = ()
    group: int = 0
    symmetric: bool = True
    zero_offset: int = 0
    activations: str = ""

    def bits(self, module: str) -> int:
        """Of a module's integers; 0 if the config does not have it quantised."""
        return next((bits for pattern, bits in self.integers if re.match(pattern, module)), 0)


def quantisation(
    config: Mapping[str, Any], ignore_keys: Collection[str] = (), where: str = "config.json", *, strict: bool = True
) -> Quantisation | None:
    """None for weights that are not quantised. strict: refuse keys that nobody reads. Raises ConfigError."""
    found = {key: config[key] for key in _KEYS if config.get(key)}
    if not found:
        return None
    key, values = next(iter(found.items()))
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: {key!r} must be an object, but it is {values!r}.", _OTHER)
    reader = Reader(values, f"{where}: {key}", ignore_keys)
    method = reader.get("quant_method", str, "compressed-tensors" if key == "compression_config" else "none")
    if method not in _METHODS:
        raise ConfigError(
            f"{where}: the weights are quantised by {method!r}, which Proa cannot load.",
            f"It loads {', '.join(_METHODS)}. {_OTHER}",
        )
    read = _METHODS[method](reader, method)
    if strict:
        reader.finish()
    return read


def _fp8(c: Reader, method: str) -> Quantisation:
    c.expect("fmt", "e4m3")
    c.expect("scale_fmt", "ue8m0", "float")
    c.expect("activation_scheme", "dynamic", "static")
    c.ignore("the tensors say it", "modules_to_not_convert", "ignored_layers")
    block = _pair(c, "weight_block_size")
    scheme = c.get("activation_scheme", str, "dynamic")
    return Quantisation(method, block=block, activations=f"{'MXFP8' if method == 'mxfp8' else 'FP8'}, {scheme}")


def _pair(c: Reader, key: str) -> tuple[int, int] | None:
    found = c.get(key, list, None)
    if found is None:
        return None
    if len(found) != 2 or any(type(n) is not int or n < 1 for n in found):
        raise c.error(f"{key!r} must be two sizes, but it is {found!r}")
    return found[0], found[1]


_METHODS: dict[str, Callable[[Reader, str], Quantisation]] = {"fp8": _fp8}
