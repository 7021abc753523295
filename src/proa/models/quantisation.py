"""Strict reading of a checkpoint's `quantization_config`. Never: tensors, files, torch.

Which matrices are quantised, and how, follows from the tensors (weights/quantised.py); this module reads only what the
tensors do not show.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from proa.errors import ConfigError
from proa.models.config_reader import Reader

_KEYS = ("quantization_config", "compression_config")
_OTHER = "Use another quantisation of the model, its unquantised repository, or a GGUF file of it."
_SHOWN = "shown by the tensors"


@dataclass(frozen=True)
class Integers:
    """Integer quantisation of the modules that `pattern` matches.

    pattern: a regular expression for the beginning of a module's name. bits: of a quantised value; 0: not quantised.
    symmetric: the zero point is the middle of the integer range. ordered: columns are sorted by group (no act-order).
    group: columns that share a scale, except for fewer in the last group; 0 or less: all columns, or not declared.
    """

    pattern: str
    bits: int
    symmetric: bool = True
    ordered: bool = True
    group: int = 0


@dataclass(frozen=True)
class Quantisation:
    """The part of `quantization_config` that the tensors do not show.

    method: quant_method. block: (rows, columns) that share a scale in block-scaled FP8 matrices; None: 128 x 128.
    rules: integer quantisation by module name; the first match counts. zero_offset: added to stored zero points.
    awq: `qweight` is packed in AWQ's order, not GPTQ's. paired: a byte of an int8 tensor holds two 4-bit values, not
    one 8-bit value. activations: the formats that the checkpoint quantises activations and the KV cache to, in words;
    "": none.
    """

    method: str
    block: tuple[int, int] | None = None
    rules: tuple[Integers, ...] = ()
    zero_offset: int = 0
    awq: bool = False
    paired: bool = False
    activations: str = ""

    def integers(self, module: str) -> Integers:
        """Integer quantisation of a module; bits = 0 if the config does not quantise it."""
        return next((rule for rule in self.rules if re.match(rule.pattern, module)), _NO_INTEGERS)


_NO_INTEGERS = Integers("", 0)


def quantisation(
    config: Mapping[str, Any], ignore_keys: Collection[str] = (), where: str = "config.json", *, strict: bool = True
) -> Quantisation | None:
    """Read the quantisation of a config; None: not quantised. strict: refuse unknown keys. Raises ConfigError."""
    found = {key: config[key] for key in _KEYS if config.get(key)}
    if not found:
        return None
    key, values = next(iter(found.items()))
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: {key!r} must be an object, but it is {values!r}.", _OTHER)
    reader = Reader(values, f"{where}: {key}", ignore_keys)
    method = reader.get("quant_method", str, _unnamed(reader, key))
    if method not in _METHODS:
        raise ConfigError(
            f"{where}: the quantisation {method!r} is not implemented.",
            f"Proa loads {', '.join(_METHODS)}. {_OTHER}",
        )
    read = _METHODS[method](reader, method)
    if strict:
        reader.refuse_unread()
    return read


def _unnamed(c: Reader, key: str) -> str:
    """The quant_method of a config that lacks the key, as ModelOpt's did until version 0.33."""
    if key == "compression_config":
        return "compressed-tensors"
    return "modelopt" if c.has("quant_algo") else "none"


def legacy_modelopt(found: Mapping[str, Any]) -> dict[str, Any]:
    """Translate hf_quant_config.json of older ModelOpt versions to today's `quantization_config`."""
    values = found.get("quantization")
    if not isinstance(values, dict):
        raise ConfigError("hf_quant_config.json has no object 'quantization'.", _OTHER)
    return {"quant_method": "modelopt", **values}


def _fp8(c: Reader, method: str) -> Quantisation:
    c.expect("fmt", "e4m3", "float8_e4m3fn")
    c.expect("scale_fmt", "ue8m0", "float")
    c.expect("activation_scheme", "dynamic", "static")
    c.expect("dequantize", False)
    c.ignore(_SHOWN, "modules_to_not_convert", "ignored_layers", "modules_to_convert", "expert_dtype")
    _quark_export(c)
    block = _pair(c, "weight_block_size")
    made_for = f"{'MXFP8' if method == 'mxfp8' else 'FP8'}, {c.get('activation_scheme', str, 'dynamic')}"
    return Quantisation(method, block=block, activations=_listed({made_for} | _kv(c)))


def _linear_fp8(c: Reader) -> tuple[int, int] | None:
    """The block size of FP8 matrices beside integer ones, from `linear_fp8_config` (SGLang)."""
    own = c.sub("linear_fp8_config")
    own.expect("quant_method", "fp8")
    own.expect("is_checkpoint_fp8_serialized", True)
    return _fp8(own, "fp8").block


def _w4afp8(c: Reader, method: str) -> Quantisation:
    """W4AFP8 (SGLang): experts in 4 bits, other matrices in FP8."""
    for key in ("weight_format", "moe_weight_format"):
        c.expect(key, "int4", "fp4", "mxfp4")  # the dtype of the scales tells which
    c.expect("linear_weight_format", "fp8")
    c.expect("moe_input_scale_policy", "fixed_unit")
    c.ignore("activations stay bfloat16", "moe_activation_scheme", "linear_activation_scheme")
    c.ignore(_SHOWN, "group_size", "ignore")
    return replace(_fp8(c, method), rules=(Integers(_ANY, 4),), paired=True)


def _mxfp4(c: Reader, method: str) -> Quantisation:
    """MXFP4 (gpt-oss)."""
    c.expect("dequantize", False)
    c.ignore(_SHOWN, "modules_to_not_convert")
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
    c.ignore(_SHOWN, "format", "ignore")
    c.ignore("provenance", "global_compression_ratio", "version")
    linear = _linear_fp8(c)
    groups = c.sub("config_groups")
    if not groups.keys:
        raise c.error("'config_groups' is empty")
    found = [_weights_group(groups.sub(name)) for name in groups.keys]
    rules = [
        Integers(_pattern(c, target), group.bits, ordered=group.ordered) for group in found for target in group.targets
    ]
    blocks = {block for block in (linear, *(group.block for group in found)) if block}
    if len(blocks) > 1:
        raise c.error(f"blocks of several sizes, {sorted(blocks)}, are not implemented")
    return Quantisation(
        method,
        block=next(iter(blocks), None),
        rules=tuple(sorted(rules, key=lambda rule: rule.pattern == _ANY)),  # names take precedence over "Linear"
        activations=_listed({group.activations for group in found} | _kv(c)),
    )


@dataclass(frozen=True)
class _Group:
    """One group of compressed-tensors' config_groups. bits: of integers; 0: floats."""

    targets: list[object]
    bits: int
    block: tuple[int, int] | None
    ordered: bool
    activations: str


def _weights_group(c: Reader) -> _Group:
    c.ignore(_SHOWN, "format")
    c.expect("output_activations")
    targets = c.get("targets", list)
    weights = c.sub("weights")
    bits, kind = weights.size("num_bits"), weights.get("type", str)
    weights.expect("num_bits", 4, 8)
    weights.expect("type", "int", "float")
    weights.expect("dynamic", False)
    weights.expect("actorder", "group", "weight", "static")
    ordered = weights.value("actorder") != "group"
    strategy = weights.get("strategy", str)
    weights.expect("strategy", "tensor", "channel", "group", "block", "tensor_group")
    weights.ignore(_SHOWN, "group_size", "symmetric", "scale_dtype", "zp_dtype")
    weights.ignore("how scales were found", "observer", "observer_kwargs")
    block = _pair(weights, "block_structure") if strategy == "block" else None
    weights.ignore("only used by the block strategy", "block_structure")
    activations = _activations(c.sub("input_activations"))
    return _Group(targets, bits if kind == "int" else 0, block, ordered, activations)


def _activations(c: Reader) -> str:
    if not c.keys:
        return ""
    name = f"{'FP' if c.get('type', str) == 'float' else 'INT'}{c.size('num_bits')}"
    c.ignore("activations stay bfloat16", *c.keys)
    return name


def _kv(c: Reader) -> set[str]:
    """KV-cache quantisation of the checkpoint, in words. Tools write an object, a type or a scheme."""
    if not c.has("kv_cache_scheme"):
        return set()
    scheme = c.value("kv_cache_scheme")
    if isinstance(scheme, str):
        return {"a KV cache of 8 bits" if scheme in ("static", "dynamic") else f"a KV cache of {scheme}"}
    if not isinstance(scheme, dict):
        raise c.error(f"'kv_cache_scheme' must be an object or a name, but it is {scheme!r}")
    bits = scheme.get("num_bits", 8)
    floats = scheme.get("type") == "float" and bits == 8
    return {f"a KV cache of {'FP8' if floats else f'{bits} bits'}"} if scheme else set()


def _listed(formats: Collection[str]) -> str:
    """Formats as a phrase; "" stands for none."""
    return " and ".join(sorted({*formats} - {""}))


_ANY = ".*"


def _pattern(c: Reader, target: object) -> str:
    """Translate a target of compressed-tensors to a regular expression over module names."""
    if not isinstance(target, str):
        raise c.error(f"a target is {target!r}, not a name")
    if target == "Linear":
        return _ANY
    return _checked(c, target[3:]) if target.startswith("re:") else re.escape(target) + "$"


def _checked(c: Reader, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise c.error(f"{pattern!r} is not a valid regular expression ({error})") from error
    return pattern


def _modelopt(c: Reader, method: str) -> Quantisation:
    written = c.get("quant_algo", str)
    algo = written.upper()  # some algorithms are written in lower case
    if algo not in _MODELOPT:
        raise c.error(f"quant_algo = {written!r} is not implemented, only {', '.join(_MODELOPT)}")
    c.expect("quant_method", "modelopt")
    c.ignore(_SHOWN, "config_groups", "ignore", "exclude_modules", "group_size", "quantized_layers")
    c.ignore(_SHOWN, "has_zero_point", "pre_quant_scale")
    c.ignore("provenance", "producer")
    kv = _kv(c)
    if name := c.get("kv_cache_quant_algo", str, None):
        kv.add(f"a KV cache of {name}")
    mixed = algo == "MIXED_PRECISION"  # 4-bit experts, if any, are stored as in _w4afp8 (TensorRT-LLM)
    return Quantisation(
        method,
        block=(128, 128) if algo == "FP8_PB_WO" else None,
        rules=(Integers(_ANY, 4),) if mixed else (),
        paired=mixed,
        activations=_listed({_MODELOPT[algo]} | kv),
    )


def _gptq(c: Reader, method: str) -> Quantisation:
    bits = c.size("bits")
    c.expect("bits", 4, 8)
    static_groups = c.get("static_groups", bool, False)
    c.expect("checkpoint_format", "gptq", "gptq_v2")
    c.expect("format", "gptq", "gptq_v2")
    c.expect("pack_dtype", "int32")
    c.expect("is_marlin_format", False)
    c.ignore(_SHOWN, "lm_head", "modules_in_block_to_quantize")
    c.ignore("how codes were found", "true_sequential", "damp_percent", "damp_auto_increment", "mse",
             "dataset", "batch_size", "model_seqlen", "block_name_to_quantize", "module_name_preceding_first_block",
             "cache_block_outputs", "pad_token_id", "tokenizer", "offload_to_disk", "offload_to_disk_path")  # fmt: skip
    c.ignore("for other engines", "backend", "use_cuda_fp16", "use_exllama", "disable_exllama", "exllama_config",
             "max_input_length")  # fmt: skip
    c.ignore("provenance", "model_name_or_path", "model_file_base_name", "meta", "uri", "version")
    dynamic = c.sub("dynamic")
    c.ignore("how codes were found", "method", "act_group_aware", "gptaq", "gptaq_alpha", "v2", "v2_alpha", "hyb_act")
    desc_act = c.get("desc_act", bool, False)
    rest = Integers(_ANY, bits, c.get("sym", bool), static_groups or not desc_act, c.get("group_size", int, 0))
    return Quantisation(
        method,
        block=_linear_fp8(c),
        rules=(*(_dynamic(dynamic, name, rest) for name in dynamic.keys), rest),
        zero_offset=0 if c.get_any(("checkpoint_format", "format"), str, "gptq") == "gptq_v2" else 1,
    )


def _own(c: Reader, pattern: str, rest: Integers) -> Integers:
    """Per-module overrides of `rest`; more than 8 bits means not quantised."""
    bits, group = c.size("bits", rest.bits), c.get("group_size", int, rest.group)
    ordered = not c.get("desc_act", bool, not rest.ordered)
    return Integers(pattern, bits if bits <= 8 else 0, c.get("sym", bool, rest.symmetric), ordered, group)


def _dynamic(c: Reader, name: str, rest: Integers) -> Integers:
    """One rule of GPTQModel's `dynamic`: "-:regex" excludes modules, "+:regex" or "regex" overrides settings."""
    own = _own(c.sub(name), _checked(c, name.removeprefix("-:").removeprefix("+:")), rest)
    return replace(own, bits=0) if name.startswith("-:") else own


# packing_format of AutoRound -> (packed in AWQ's order, zero_offset).
_PACKED_BY_AUTO_ROUND = {
    "auto_round:auto_gptq": (False, 1), "auto_round:gptq": (False, 1), "auto_round:gptqmodel": (False, 0),
    "auto_round": (False, 0), "auto_round:auto_awq": (True, 0), "auto_round:awq": (True, 0),
}  # fmt: skip
_AUTO_ROUND_ACTIVATIONS = ("act_bits", "act_data_type", "act_dynamic", "act_group_size", "act_sym")


def _auto_round(c: Reader, method: str) -> Quantisation:
    """AutoRound: tensors in the layout of GPTQ or AWQ."""
    form, bits = c.get("packing_format", str), c.size("bits")
    c.expect("packing_format", *_PACKED_BY_AUTO_ROUND)
    awq, zero_offset = _PACKED_BY_AUTO_ROUND[form]
    c.expect("bits", *((4,) if awq else (4, 8)))
    c.expect("data_type", "int")
    c.expect("act_bits", 16, 32)  # with up to 8 bits the tensors have another layout
    c.ignore(_SHOWN, "block_name_to_quantize", "to_quant_block_names", "quant_lm_head", "modules_to_not_convert")
    c.ignore("activations stay bfloat16", *_AUTO_ROUND_ACTIVATIONS)
    c.ignore("how codes were found", "amp", "batch_size", "dataset", "enable_minmax_tuning", "enable_norm_bias_tuning",
             "enable_quanted_input", "gradient_accumulate_steps", "iters", "low_gpu_mem_usage", "lr", "minmax_lr",
             "nsamples", "scale_dtype", "seqlen", "train_bs")  # fmt: skip
    c.ignore("for other engines", "backend")
    c.ignore("provenance", "autoround_version")
    extra = c.sub("extra_config")
    rest = Integers(_ANY, bits, c.get("sym", bool), group=c.get("group_size", int, 0))
    own = [_own_of_auto_round(extra, name, rest) for name in extra.keys]
    own.sort(key=lambda rule: not rule.pattern.endswith("$"))  # names come before regular expressions
    return Quantisation(method, block=_linear_fp8(c), rules=(*own, rest), zero_offset=zero_offset, awq=awq)


def _own_of_auto_round(c: Reader, name: str, rest: Integers) -> Integers:
    """One rule of AutoRound's extra_config. A key of only word characters and dots is a module's name; any other is a
    regular expression that may match anywhere in a name."""
    own, plain = c.sub(name), re.fullmatch(r"[\w.]+", name)
    own.expect("data_type", "int", "float")
    own.ignore("activations stay bfloat16", *_AUTO_ROUND_ACTIVATIONS)
    return _own(own, re.escape(name) + "$" if plain else f".*?(?:{_checked(c, name)})", rest)


def _awq(c: Reader, method: str) -> Quantisation:
    c.expect("version", "gemm", "GEMM")
    c.expect("zero_point", True)
    c.expect("bits", 4)
    c.expect("sym", False)
    c.expect("desc_act", False)
    c.expect("pack_dtype", "int32")
    c.expect("pack_method", "reorder")
    _quark_export(c)
    c.expect("checkpoint_format", "gemm")
    c.expect("format", "gemm")
    c.ignore(_SHOWN, "modules_to_not_convert", "lm_head", "method", "meta")
    c.ignore("for other engines", "backend", "do_fuse", "fuse_max_seq_len", "modules_to_fuse", "exllama_config")
    rules = (Integers(_ANY, c.size("bits"), symmetric=False, group=c.get("group_size", int, 0)),)
    return Quantisation(method, block=_linear_fp8(c), rules=rules, awq=True)


def _quark(c: Reader, method: str) -> Quantisation:
    """AMD Quark: FP8 with a scale per tensor or row, MXFP4."""
    c.ignore(_SHOWN, "exclude")
    c.ignore("activations stay bfloat16", "softmax_quant_spec", "kv_cache_post_rope")
    c.ignore("provenance", "version", "quant_mode")
    c.expect("algo_config", *_without_runtime_work(c))
    _quark_export(c)
    layers = [c.sub("global_quant_config")]
    for key in ("layer_quant_config", "layer_type_quant_config"):
        of = c.sub(key)
        layers += [of.sub(name) for name in of.keys]
    activations = {_quark_layer(layer) for layer in layers}
    kv = c.sub("kv_cache_quant_config")
    kv.ignore("--kv-dtype decides", *kv.keys)
    if kv.keys:
        activations.add("a KV cache of 8 bits")
    return Quantisation(method, activations=_listed(activations))


def _without_runtime_work(c: Reader) -> list[object]:
    """The only accepted value of algo_config: its own, if all its algorithms are folded into the weights."""
    found = c.get("algo_config", list, [])
    folded = ("smooth", "autosmoothquant", "awq", "gptq", "gptaq", "autoround", "qronos")
    return [found] if all(isinstance(of, dict) and of.get("name") in folded for of in found) else []


def _quark_layer(c: Reader) -> str:
    """Check one layer's config; returns the format of its activations, "" if not quantised."""
    weight, inputs = c.sub("weight"), c.sub("input_tensors")
    if weight.keys:
        form = (weight.get("dtype", str), weight.get("qscheme", str))
        if form not in (("fp8_e4m3", "per_tensor"), ("fp8_e4m3", "per_channel"), ("fp4", "per_group")):
            raise weight.error(f"{form[0]} {form[1]} is not implemented, only fp8_e4m3 and MXFP4")
        weight.expect("scale_format", *(("e8m0",) if form[0] == "fp4" else ("float", "float32")))
        weight.expect("ch_axis", *((0,) if form[1] == "per_channel" else (-1, 1)))
        weight.expect("is_dynamic", False)
        weight.expect("is_scale_quant", False)
        weight.ignore("shown by the tensors, or only used to find scales", *weight.keys)
    c.expect("bias")
    c.ignore("activations stay bfloat16", "output_tensors", "target_device")
    name = inputs.get("dtype", str, "")
    inputs.ignore("activations stay bfloat16", *inputs.keys)
    return {"fp8_e4m3": "FP8", "fp4": "MXFP4"}.get(name, name)


def _quark_export(c: Reader) -> None:
    """Check Quark's export settings, which configs of other methods may have too."""
    export = c.sub("export")
    export.expect("weight_format", "real_quantized")
    export.expect("pack_method", "reorder")
    export.ignore(_SHOWN, "weight_merge_groups", "kv_cache_group", "min_kv_scale")


# quant_algo -> format of activations.
_MODELOPT = {
    "FP8": "FP8", "FP8_PER_CHANNEL_PER_TOKEN": "FP8", "FP8_PB_WO": "", "NVFP4": "NVFP4", "W4A16_NVFP4": "",
    "MXFP4": "MXFP4", "MXFP8": "MXFP8", "MIXED_PRECISION": "FP8 and NVFP4",
}  # fmt: skip

_METHODS: dict[str, Callable[[Reader, str], Quantisation]] = {
    "fp8": _fp8, "mxfp8": _fp8, "mxfp4": _mxfp4, "compressed-tensors": _compressed_tensors, "modelopt": _modelopt,
    "gptq": _gptq, "awq": _awq, "auto-round": _auto_round, "quark": _quark, "w4afp8": _w4afp8,
}  # fmt: skip
