"""The types that a checkpoint's parameters have by its quantisation config, for a model whose weight files are not
here. Never: reading tensors, which say it exactly (quantised.py).

Quantised are the matrices of attention, MLPs and experts, without those that the config excludes. With the names of
the tensors, from an index, they are those that have scales.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from proa.errors import ConfigError
from proa.models.names import Declared
from proa.models.quantisation import Quantisation
from proa.weights.dummy_names import is_coded
from proa.weights.quantised import DEFAULT_BLOCK, block_type, integer_type

_EXCLUDED = ("ignore", "ignored_layers", "modules_to_not_convert", "exclude_modules", "exclude")
_SCALES = (".weight_scale_inv", ".weight_scale", ".scale", ".weight_packed", ".qweight", "_blocks", "_scale_inv")
_EXPERT = re.compile(r"(blocks\.\d+\.ffn\.experts)\.\d+\.")
_HEADERS = "Plan from the weight files' headers: give their folder, or the hub id."
_MODELOPT = {
    "FP8": "FP8 tensor", "FP8_PER_CHANNEL_PER_TOKEN": "FP8 channel", "FP8_PB_WO": "FP8 block 128", "NVFP4": "NVFP4",
    "W4A16_NVFP4": "NVFP4", "MXFP4": "MXFP4", "MXFP8": "MXFP8",
}  # fmt: skip


@dataclass(frozen=True)
class _Config:
    """A quantisation config: as published, and as models/quantisation.py reads it. plain: the type of parameters that
    are not quantised."""

    values: Mapping[str, Any]
    read: Quantisation
    plain: str

    def unclear(self, why: str) -> ConfigError:
        return ConfigError(f"config.json alone does not say the types of the weights: {why}.", _HEADERS)

    def group(self) -> int:
        """Columns per group; 0: the whole row."""
        found = self.values.get("group_size", 128)
        if type(found) is not int:
            raise self.unclear(f"group_size is {found!r}")
        return max(found, 0)  # tools write -1 for the whole row


def expected_types(
    declared: Declared, config: Mapping[str, Any], read: Quantisation, tensor_names: Collection[str] = ()
) -> dict[str, str]:
    """Parameter -> its type, as weights/sources.py finds it in the files. tensor_names: of the index; empty: unknown.

    Raises ConfigError if the config leaves the type open, as mixed precision does.
    """
    values = config.get("quantization_config") or config.get("compression_config") or {}
    stated = str(config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    plain = {"float16": "F16", "float32": "F32"}.get(stated, "BF16")
    of = _Config(values, read, plain)
    type_of = _METHODS.get(read.method)
    if type_of is None:
        raise of.unclear(f"{read.method} says it only in the tensors")
    excluded = [str(name) for key in _EXCLUDED for name in values.get(key) or ()]
    found: dict[str, str] = {}
    by_stack: dict[tuple[str, str], str] = {}  # a layer's experts have one type for each part
    for name, shape in declared.spec.params():
        if len(shape) != 2 or not is_coded(name):
            found[name] = plain
            continue
        match = _EXPERT.match(name)
        key = (match[1], name[match.end() :]) if match else (name, "")
        if key not in by_stack:
            modules = _modules(declared, name, match)
            by_stack[key] = type_of(of, modules[0], name) if _is_quantised(modules, excluded, tensor_names) else plain
        found[name] = by_stack[key]
    return found


def _modules(declared: Declared, name: str, expert: re.Match[str] | None) -> tuple[str, ...]:
    """The modules that may hold a matrix, in order of precedence; of an expert also the stacks of its layer."""
    names = [name]
    if expert is not None:
        part = name[expert.end() :].partition(".")[0]
        groups = (part,) if part == "down" else (part, "gate_up")
        names += [f"{expert[1]}.{group}.weight" for group in groups]
    return tuple(c.removesuffix(".weight") for one in names for c in declared.names.candidates(one))


def _is_quantised(modules: tuple[str, ...], excluded: Collection[str], tensor_names: Collection[str]) -> bool:
    """True if the module, under any of its names, has scales in the index, or without one is not excluded."""
    if tensor_names:
        return any(f"{module}{suffix}" in tensor_names for module in modules for suffix in _SCALES)
    return not any(_matches(pattern, module) for pattern in excluded for module in modules)


def _matches(pattern: str, module: str) -> bool:
    """True if an exclusion applies: "re:" and a regular expression, a pattern with *, or a name: the module's, that of
    a module around it, or its last part."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], module) is not None
    if "*" in pattern:
        return fnmatchcase(module, pattern) or fnmatchcase(module, f"{pattern}.*")
    return module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}")


def _eight_bit_floats(of: _Config, module: str, name: str) -> str:
    if of.values.get("expert_dtype") == "fp4" and ".ffn.experts." in name:
        return "MXFP4"
    if of.read.block is None:
        return "FP8 tensor"
    return block_type(*of.read.block)


def _compressed_tensors(of: _Config, module: str, name: str) -> str:
    """The type by the first config group whose target is the module, or all linear layers."""
    groups = list(of.values.get("config_groups", {}).values())
    named = [g for g in groups if any(t != "Linear" and _targets(t, module) for t in g.get("targets", ()))]
    group = next(iter([*named, *(g for g in groups if "Linear" in g.get("targets", ()))]), None)
    if group is None:
        return of.plain
    weights = group["weights"]
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    if kind == "float" and bits == 8:
        if strategy == "block":
            return block_type(*(of.read.block or DEFAULT_BLOCK))
        return {"channel": "FP8 channel", "group": "MXFP8"}.get(strategy, "FP8 tensor")
    if kind == "float":
        return "NVFP4" if strategy == "tensor_group" or weights.get("group_size") == 16 else "MXFP4"
    size = weights.get("group_size") if strategy == "group" else 0
    symmetric = weights.get("symmetric", True)
    ordered = weights.get("actorder") != "group" or not size
    if (group.get("format") or of.values.get("format")) == "int-quantized":
        bits = 8  # a byte for each integer
    return integer_type(bits, symmetric, size or 0, of.plain, ordered)


def _targets(target: object, module: str) -> bool:
    text = str(target)
    return re.match(text[3:], module) is not None if text.startswith("re:") else text == module


def _gptq(of: _Config, module: str, name: str) -> str:
    """GPTQ, AWQ and AutoRound: integers in groups, by the first rule that matches the module."""
    rule = of.read.integers(module)
    if not rule.bits:
        return of.plain
    return integer_type(rule.bits, rule.symmetric, of.group(), "F16", rule.ordered)


def _modelopt(of: _Config, module: str, name: str) -> str:
    algo = str(of.values.get("quant_algo")).upper()
    if algo not in _MODELOPT:
        raise of.unclear(f"quant_algo {algo} has several")
    return _MODELOPT[algo]


def _quark(of: _Config, module: str, name: str) -> str:
    if of.values.get("layer_quant_config") or of.values.get("layer_type_quant_config"):
        raise of.unclear("quark has a config for single layers")
    weight = (of.values.get("global_quant_config") or {}).get("weight") or {}
    types = {"per_tensor": "FP8 tensor", "per_channel": "FP8 channel", "per_group": "MXFP4"}
    if weight.get("qscheme") not in types:
        raise of.unclear(f"the global_quant_config of quark has the qscheme {weight.get('qscheme')!r}")
    return types[weight["qscheme"]]


def _mxfp4(of: _Config, module: str, name: str) -> str:
    return "MXFP4" if ".ffn.experts." in name else of.plain


_METHODS: Mapping[str, Callable[[_Config, str, str], str]] = {
    "fp8": _eight_bit_floats, "mxfp8": lambda of, module, name: "MXFP8", "mxfp4": _mxfp4,
    "compressed-tensors": _compressed_tensors, "modelopt": _modelopt, "gptq": _gptq, "awq": _gptq, "auto-round": _gptq,
    "quark": _quark,
}  # fmt: skip
