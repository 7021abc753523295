"""Architecture -> family function. Never: maths. Values are strings, so that nothing is imported early."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Collection, Mapping
from typing import Any

from proa.errors import ConfigError
from proa.models.config_reader import Reader
from proa.models.names import Declared

REGISTRY = {
    "LlamaForCausalLM": "llama:llama",
    "LLaMAForCausalLM": "llama:llama",  # conversions of Llama 1 from before the class was renamed
    "Qwen2ForCausalLM": "llama:qwen2",
    "Qwen3ForCausalLM": "llama:qwen3",
    "Qwen2MoeForCausalLM": "moe:qwen2_moe",
    "Qwen3MoeForCausalLM": "moe:qwen3_moe",
    "MixtralForCausalLM": "moe:mixtral",
}


def declare(config: Mapping[str, Any], ignore_keys: Collection[str] = (), where: str = "config.json") -> Declared:
    """Read a Hugging Face style config into the model's shapes and tensor names; `where` it is from.

    Raises ConfigError if the architecture, a key or a value is not implemented, or the weights are quantised.
    """
    architecture = _architecture(config, where)
    _refuse_quantised(config, where)
    module, function = REGISTRY[architecture].split(":")
    family = getattr(importlib.import_module(f"{__name__}.{module}"), function)
    spec, names = family(Reader(config, where, ignore_keys))
    return Declared(spec, names)


def _architecture(config: Mapping[str, Any], where: str) -> str:
    listed = config.get("architectures")
    if not isinstance(listed, list) or not listed or not isinstance(listed[0], str):
        raise ConfigError(
            f"{where}: 'architectures' must be a list with one name, but it is {listed!r}.",
            f"Proa knows {', '.join(REGISTRY)}; name one with --override-config 'architectures=[\"NAME\"]'.",
        )
    name = listed[0]
    if name not in REGISTRY:
        close = difflib.get_close_matches(name, REGISTRY, n=1, cutoff=0.8)
        hint = f" Did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"{where}: the architecture {name!r} is not implemented.{hint}",
            f"Proa knows {', '.join(REGISTRY)}.",
        )
    return name


def _refuse_quantised(config: Mapping[str, Any], where: str) -> None:
    for key in ("quantization_config", "compression_config"):
        if config.get(key):
            found = config[key]
            method = found.get("quant_method", "unknown") if isinstance(found, dict) else found
            raise ConfigError(
                f"{where}: the weights are quantised ({key} says {method!r}), which Proa cannot load yet.",
                "Use the model's unquantised repository, or a GGUF file of it.",
            )
