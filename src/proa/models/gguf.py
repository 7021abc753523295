"""GGUF metadata -> a config in Hugging Face's form, and the names of GGUF tensors. Never: file access, torch, keys of a
single architecture (gguf_architectures.py).

Sources: the GGUF specification and the key and tensor names of the gguf package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from proa.errors import ConfigError
from proa.models.config_reader import Reader
from proa.models.gguf_architectures import ARCHITECTURES, CHANGED, Architecture, Shapes, shape_of
from proa.models.names import NameTable, ignored_mtp

GGUF_NAMES = NameTable(
    defaults=(
        ("embed.weight", "token_embd.weight"),
        ("norm.weight", "output_norm.weight"),
        ("head.weight", "output.weight"),
        ("blocks.{i}.norm1.weight", "blk.{i}.attn_norm.weight"),
        ("blocks.{i}.norm2.weight", "blk.{i}.ffn_norm.weight"),
        ("blocks.{i}.norm2.weight", "blk.{i}.post_attention_norm.weight"),
        ("blocks.{i}.mixer.sinks", "blk.{i}.attn_sinks.weight"),
        ("blocks.{i}.mixer.kv_a.weight", "blk.{i}.attn_kv_a_mqa.weight"),
        ("blocks.{i}.mixer.qkvz.weight", "blk.{i}.ssm_in.weight"),  # older files
        ("blocks.{i}.mixer.z.weight", "blk.{i}.attn_gate.weight"),
        ("blocks.{i}.mixer.ba.weight", "blk.{i}.ssm_ba.weight"),
        ("blocks.{i}.mixer.conv.weight", "blk.{i}.ssm_conv1d.weight"),
        ("blocks.{i}.mixer.a_log", "blk.{i}.ssm_a"),
        ("blocks.{i}.mixer.dt_bias", "blk.{i}.ssm_dt.bias"),
        ("blocks.{i}.mixer.norm.weight", "blk.{i}.ssm_norm.weight"),
        ("blocks.{i}.mixer.out.weight", "blk.{i}.ssm_out.weight"),
        ("blocks.{i}.mixer.o.{w}", "blk.{i}.attn_output.{w}"),
        ("blocks.{i}.mixer.{p}.{w}", "blk.{i}.attn_{p}.{w}"),
        ("blocks.{i}.ffn.router.correction", "blk.{i}.exp_probs_b.bias"),
        ("blocks.{i}.ffn.router.{w}", "blk.{i}.ffn_gate_inp.{w}"),
        ("blocks.{i}.ffn.experts.{e}.{p}.weight", "blk.{i}.ffn_{p}.{e}.weight"),
        ("blocks.{i}.ffn.experts.{p}.{w}", "blk.{i}.ffn_{p}_exps.{w}"),
        ("blocks.{i}.ffn.shared.{p}.weight", "blk.{i}.ffn_{p}_shexp.weight"),
        ("blocks.{i}.ffn.shared_gate.weight", "blk.{i}.ffn_gate_inp_shexp.weight"),
        ("blocks.{i}.ffn.{p}.{w}", "blk.{i}.ffn_{p}.{w}"),
    ),
    ignored=(
        (r"rope_freqs\.weight", "read into the config as rope factors"),
        (r"blk\.\d+\.attn_[kv]_b\.weight", "attn_kv_b.weight holds the same values"),  # without it, they are loaded
    ),
    stacked_out_in=True,
)


def gguf_names(config: Mapping[str, Any]) -> NameTable:
    """The tensor names of a GGUF file, given the config made from its metadata."""
    mtp = ignored_mtp(r"blk\.", config["num_hidden_layers"], config.get("num_nextn_predict_layers", 0))
    changed = CHANGED.get(config["architectures"][0], ())
    return replace(GGUF_NAMES, ignored=GGUF_NAMES.ignored + mtp, changed=changed)


def config_from_metadata(
    metadata: Mapping[str, Any], shapes: Shapes, rope_factors: Sequence[float] = (), where: str = "GGUF metadata"
) -> dict[str, Any]:
    """Translate GGUF metadata to the config.json of the same model.

    `shapes` are the tensors' shapes, outermost dimension first; `rope_factors` the values of rope_freqs.weight. Keys of
    the architecture that its reader does not know are passed on under their GGUF names, so that `declare` refuses them.
    `where` names the file in errors. Raises ConfigError.
    """
    arch = str(metadata.get("general.architecture"))
    if arch not in ARCHITECTURES:
        raise ConfigError(
            f"{where}: the architecture {arch!r} is not implemented.",
            f"Proa knows {', '.join(ARCHITECTURES)}.",
        )
    prefix = f"{arch}."
    own = {key.removeprefix(prefix): value for key, value in metadata.items() if key.startswith(prefix)}
    reader = Reader(own, f"{where} of {arch}")
    config = _common(reader, shapes, rope_factors, ARCHITECTURES[arch]) | ARCHITECTURES[arch].read(reader, shapes)
    config |= {f"{name}_token_id": value for name, value in _special_tokens(metadata).items()}
    return config | {prefix + key: value for key, value in reader.rest().items()}


def generation_from_metadata(metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Translate GGUF metadata to generation_config.json: sampling defaults and EOS tokens."""
    names = {"temp": "temperature", "penalty_repeat": "repetition_penalty"}
    keys = ("temp", "top_k", "top_p", "min_p", "penalty_repeat")
    found = {names.get(key, key): metadata.get(f"general.sampling.{key}") for key in keys}
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    eos = list(dict.fromkeys(token for token in ends if token is not None))
    return {k: v for k, v in found.items() if v is not None} | ({"eos_token_id": eos} if eos else {})


def _special_tokens(metadata: Mapping[str, Any]) -> dict[str, Any]:
    keys = {"bos": "bos", "eos": "eos", "pad": "padding"}
    found = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: value for name, value in found.items() if value is not None}


def _common(c: Reader, shapes: Shapes, rope_factors: Sequence[float], arch: Architecture) -> dict[str, Any]:
    hidden, heads = c.size("embedding_length"), c.size("attention.head_count")
    c.expect("attention.causal", True)
    c.ignore("read from the embedding's shape", "vocab_size")
    c.ignore("provenance", "tensor_data_layout", "rope.scaling.finetuned")
    return {
        "vocab_size": shape_of(c, shapes, "token_embd.weight")[0],
        "hidden_size": hidden,
        "num_hidden_layers": c.size("block_count"),
        "num_attention_heads": heads,
        "intermediate_size": c.size("feed_forward_length", None),
        "max_position_embeddings": c.size("context_length"),
        "rms_norm_eps": c.get("attention.layer_norm_rms_epsilon", float),
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_parameters": _rope(c, rope_factors, arch),
        **({} if arch.latent else _heads(c, hidden, heads, arch)),
    }


def _heads(c: Reader, hidden: int, heads: int, arch: Architecture) -> dict[str, Any]:
    """The config's keys for grouped-query attention."""
    head_dim = c.size("attention.key_length", hidden // heads)
    c.expect("attention.value_length", head_dim)
    rotary_dim = c.size("rope.dimension_count", head_dim)
    if not arch.partial_rotary:
        c.expect("rope.dimension_count", head_dim)
    return {
        "num_key_value_heads": c.size("attention.head_count_kv", heads),
        "head_dim": head_dim,
        **({"partial_rotary_factor": rotary_dim / head_dim} if arch.partial_rotary else {}),
    }


def _rope(c: Reader, factors: Sequence[float], arch: Architecture) -> dict[str, Any]:
    theta = {"rope_theta": c.get("rope.freq_base", float, 10000.0)}
    kind = c.get("rope.scaling.type", str, "none")
    factor = c.get_any(("rope.scaling.factor", "rope.scale_linear"), float, 1.0)
    original = c.get("rope.scaling.original_context_length", int, None)
    c.expect("rope.scaling.attn_factor", 1.0)
    if factors:
        if kind != "none":
            raise c.error(f"rope_freqs.weight together with rope scaling {kind!r} is not implemented")
        return theta | {"rope_type": "factors", "factors": list(factors)}
    if kind == "yarn":
        return theta | {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
            "beta_fast": c.get("rope.scaling.yarn_beta_fast", float, None),
            "beta_slow": c.get("rope.scaling.yarn_beta_slow", float, None),
            **arch.yarn(c),
        }
    if kind not in ("none", "linear"):
        raise c.error(f"rope scaling {kind!r} is not implemented, only none, linear and yarn")
    return theta | ({"rope_type": "linear", "factor": factor} if factor != 1.0 else {"rope_type": "default"})
