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
    code. ordered: columns are in the order of their groups. zero_offset: what stored zero points lack. activations:
    what the checkpoint rounds them to; "": nothing.
    """

    method: str
    block: tuple[int, int] | None = None
    integers: tuple[tuple[str, int], ...] = ()
    group: int = 0
    symmetric: bool = True
    ordered: bool = True
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


def legacy_modelopt(found: Mapping[str, Any]) -> dict[str, Any]:
    """What older versions of modelopt wrote to hf_quant_config.json, as config.json has it now."""
    values = found.get("quantization")
    if not isinstance(values, dict):
        raise ConfigError("hf_quant_config.json has no object 'quantization'.", _OTHER)
    return {"quant_method": "modelopt", **values}


def _fp8(c: Reader, method: str) -> Quantisation:
    c.expect("fmt", "e4m3")
    c.expect("scale_fmt", "ue8m0", "float")
    c.expect("activation_scheme", "dynamic", "static")
    c.ignore("the tensors say it", "modules_to_not_convert", "ignored_layers")
    block = _pair(c, "weight_block_size")
    scheme = c.get("activation_scheme", str, "dynamic")
    return Quantisation(method, block=block, activations=f"{'MXFP8' if method == 'mxfp8' else 'FP8'}, {scheme}")


def _mxfp4(c: Reader, method: str) -> Quantisation:
    """Of gpt-oss."""
    c.expect("dequantize", False)
    c.ignore("the tensors say it", "modules_to_not_convert")
    return Quantisation(method)


def _pair(c: Reader, key: str) -> tuple[int, int] | None:
    found = c.get(key, list, None)
    if found is None:
        return None
    if len(found) != 2 or any(type(n) is not int or n < 1 for n in found):
        raise c.error(f"{key!r} must be two sizes, but it is {found!r}")
    return found[0], found[1]


def _compressed_tensors(c: Reader, method: str) -> Quantisation:
    c.expect("quantization_status", "compressed", "frozen")
    c.expect("transform_config", {})
    sparsity = c.sub("sparsity_config")
    sparsity.expect("format", "dense")
    sparsity.ignore("nothing is sparse", *sparsity.keys)
    c.ignore("the tensors say it", "format", "ignore")
    c.ignore("provenance", "global_compression_ratio", "version")
    groups = c.sub("config_groups")
    if not groups.keys:
        raise c.error("'config_groups' is empty")
    found = [_weights_group(groups.sub(name)) for name in groups.keys]
    targets = [(_pattern(c, target), group.bits) for group in found for target in group.targets]
    activations = {group.activations for group in found if group.activations}
    blocks = {group.block for group in found if group.block}
    if len(blocks) > 1:
        raise c.error(f"blocks of several sizes, {sorted(blocks)}, are not implemented")
    return Quantisation(
        method,
        block=next(iter(blocks), None),
        integers=tuple(sorted(targets, key=lambda of: of[0] == _ANY)),  # names come before the kind of layer
        ordered=all(group.ordered for group in found),
        activations=" and ".join(sorted(activations | _kv(c))),
    )


@dataclass(frozen=True)
class _Group:
    """Modules that are quantised alike. bits: of integers, 0: floats."""

    targets: list[object]
    bits: int
    block: tuple[int, int] | None
    ordered: bool
    activations: str


def _weights_group(c: Reader) -> _Group:
    c.ignore("the tensors say it", "format")
    c.expect("output_activations")
    targets = c.get("targets", list)
    weights = c.sub("weights")
    bits, kind = weights.size("num_bits"), weights.get("type", str)
    weights.expect("type", "int", "float")
    weights.expect("dynamic", False)
    weights.expect("actorder", "group", "weight", "static")
    ordered = not weights.has("actorder") or weights.get("actorder", str) != "group"
    strategy = weights.get("strategy", str)
    weights.expect("strategy", "tensor", "channel", "group", "block", "tensor_group")
    weights.ignore("the tensors say it", "group_size", "symmetric", "scale_dtype", "zp_dtype")
    weights.ignore("how scales were found", "observer", "observer_kwargs")
    block = _pair(weights, "block_structure") if strategy == "block" else None
    weights.ignore("only of blocks", "block_structure")
    activations = _activations(c.sub("input_activations"))
    return _Group(targets, bits if kind == "int" else 0, block, ordered, activations)


def _activations(c: Reader) -> str:
    if not c.keys:
        return ""
    name = f"{'FP' if c.get('type', str) == 'float' else 'INT'}{c.size('num_bits')}"
    c.ignore("activations stay bfloat16", *c.keys)
    return name


def _kv(c: Reader) -> set[str]:
    """What the KV cache was made for."""
    scheme = c.get("kv_cache_scheme", dict, {})
    return {f"a KV cache of {scheme.get('num_bits', 8)} bits"} if scheme else set()


_ANY = ".*"


def _pattern(c: Reader, target: object) -> str:
    """Regular expression over names of modules."""
    if not isinstance(target, str):
        raise c.error(f"a target is {target!r}, not a name")
    if target == "Linear":
        return _ANY
    return _checked(c, target[3:]) if target.startswith("re:") else re.escape(target) + "$"


def _checked(c: Reader, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise c.error(f"{pattern!r} is no regular expression ({error})") from error
    return pattern


def _modelopt(c: Reader, method: str) -> Quantisation:
    algo = c.get("quant_algo", str)
    c.expect("quant_algo", *_MODELOPT)
    c.expect("quant_method", "modelopt")
    c.ignore("the tensors say it", "config_groups", "ignore", "exclude_modules", "group_size", "quantized_layers")
    c.ignore("the tensors say it", "has_zero_point", "pre_quant_scale")
    c.ignore("provenance", "producer")
    kv = _kv(c)
    if name := c.get("kv_cache_quant_algo", str, None):
        kv.add(f"a KV cache of {name}")
    made_for = {_MODELOPT[algo]} - {""}
    return Quantisation(method, block=(128, 128), activations=" and ".join(sorted(made_for | kv)))


def _gptq(c: Reader, method: str) -> Quantisation:
    bits, symmetric = c.size("bits"), c.get("sym", bool)
    c.expect("bits", 4, 8)
    ordered = not c.get("desc_act", bool, False) or c.get("static_groups", bool, False)
    c.expect("checkpoint_format", "gptq", "gptq_v2")
    c.expect("format", "gptq", "gptq_v2")
    c.expect("pack_dtype", "int32")
    c.expect("is_marlin_format", False)
    c.ignore("the tensors say it", "group_size", "lm_head", "modules_in_block_to_quantize")
    c.ignore("how codes were found", "true_sequential", "damp_percent", "damp_auto_increment", "mse",
             "dataset", "batch_size", "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block",
             "cache_block_outputs", "pad_token_id", "tokenizer", "offload_to_disk", "offload_to_disk_path")  # fmt: skip
    c.ignore("of other engines", "backend", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config",
             "max_input_length")  # fmt: skip
    c.ignore("provenance", "model_name_or_path", "model_file_base_name", "meta", "uri", "version")
    dynamic = c.sub("dynamic")
    rules = [_dynamic(dynamic, name, bits) for name in dynamic.keys]
    c.ignore("how codes were found", "method", "act_group_aware", "gptaq", "gptaq_alpha", "v2", "v2_alpha", "hyb_act")
    offset = 0 if c.get_any(("checkpoint_format", "format"), str, "gptq") == "gptq_v2" else 1
    return Quantisation(method, integers=(*rules, (_ANY, bits)), symmetric=symmetric, zero_offset=offset,
                        ordered=ordered)  # fmt: skip


def _dynamic(c: Reader, name: str, bits: int) -> tuple[str, int]:
    """A module's own settings: "-:regex" is not quantised, "+:regex" and "regex" otherwise than the rest."""
    own = c.sub(name)
    own.ignore("the tensors say it", "group_size")
    if name.startswith("-:"):
        return _checked(c, name[2:]), 0
    return _checked(c, name.removeprefix("+:")), own.size("bits", bits)


def _awq(c: Reader, method: str) -> Quantisation:
    c.expect("version", "gemm", "GEMM")
    c.expect("zero_point", True)
    c.expect("bits", 4)
    for key in ("sym", "desc_act"):
        c.expect(key, False)
    c.expect("pack_dtype", "int32")
    for key in ("checkpoint_format", "format"):
        c.expect(key, "gemm")
    c.ignore("the tensors say it", "group_size", "modules_to_not_convert", "lm_head", "method", "meta")
    c.ignore("of other engines", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config")
    return Quantisation(method, integers=((_ANY, c.size("bits")),), symmetric=False)


# What activations were made for.
_MODELOPT = {
    "FP8": "FP8", "FP8_PER_CHANNEL_PER_TOKEN": "FP8", "FP8_PB_WO": "", "NVFP4": "NVFP4", "W4A16_NVFP4": "",
    "MXFP8": "MXFP8", "MIXED_PRECISION": "FP8 and NVFP4",
}  # fmt: skip

_METHODS: dict[str, Callable[[Reader, str], Quantisation]] = {
    "fp8": _fp8, "mxfp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt,
    "gptq": _gptq, "awq": _awq,
}  # fmt: skip
