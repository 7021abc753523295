"""Dense models of Llama's architecture: Llama 1 to 3, SmolLM2, Yi; Qwen2 and Qwen2.5; Qwen3.

Belongs here too: the readers shared by every family with grouped-query attention. Sources: modeling_llama.py,
modeling_qwen2.py and modeling_qwen3.py in Hugging Face transformers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from proa.models.config_reader import Reader
from proa.models.names import NameTable
from proa.models.rope_reader import context_tokens, rope
from proa.models.spec import Attention, Block, Mlp, Model, Moe, Rope

_FULL, _SLIDING = "full_attention", "sliding_attention"


def llama(c: Reader) -> tuple[Model, NameTable]:
    return _dense(c, attention(c, **biases(c)), mlp_bias=c.get("mlp_bias", bool, False))


def qwen2(c: Reader) -> tuple[Model, NameTable]:
    c.assume("max_position_embeddings", 32768)
    c.expect("use_mrope", False)  # multimodal rotary embedding (M-RoPE) of Qwen2-VL
    mixer = attention(c, qkv_bias=True)
    c.expect("rotary_emb_base", mixer.rope.base)  # CodeQwen1.5's config.json has both keys
    c.ignore("max_position_embeddings says the context", "seq_length")
    return _dense(c, mixer, windows=qwen_windows(c))


def qwen3(c: Reader) -> tuple[Model, NameTable]:
    c.assume("max_position_embeddings", 32768)
    return _dense(c, attention(c, qk_norm="head", **biases(c)), windows=qwen_windows(c))


def _dense(
    c: Reader, mixer: Attention, *, mlp_bias: bool = False, windows: Sequence[int | None] = ()
) -> tuple[Model, NameTable]:
    layers = c.size("num_hidden_layers")
    ffn = Mlp(mixer.hidden, c.size("intermediate_size"), mlp_bias)
    return model(c, mixer, [ffn] * layers, windows), NameTable()


def attention(c: Reader, *, theta: float = 10000.0, partial: float | None = None, **kinds: Any) -> Attention:
    """Read grouped-query attention. `theta` and `partial` are the family's defaults for rope(); `kinds` are fields of
    spec.Attention (norms, gate, biases, sinks) that the family fixes. Raises ConfigError."""
    hidden, heads = c.size("hidden_size"), c.size("num_attention_heads")
    kv_heads = c.size("num_key_value_heads", heads)
    if heads % kv_heads or (hidden % heads and not c.has("head_dim")):
        raise c.error(
            f"num_attention_heads {heads} must be a multiple of num_key_value_heads {kv_heads}, and without head_dim "
            f"divide hidden_size {hidden}"
        )
    head_dim = c.size("head_dim", hidden // heads)
    if head_dim % 2:
        raise c.error(f"rotary embeddings need an even head_dim, but it is {head_dim}")
    return Attention(hidden, heads, kv_heads, head_dim, rope(c, head_dim, theta, partial), **kinds)


def biases(c: Reader, default: bool = False) -> dict[str, bool]:
    """Read attention_bias: q, k, v and o all have biases, or none has. The result is for `attention`."""
    has = c.get("attention_bias", bool, default)
    return {"qkv_bias": has, "o_bias": has}


def model(
    c: Reader, mixer: Attention, ffns: Sequence[Mlp | Moe], windows: Sequence[int | None] = (), *, tied: bool = False
) -> Model:
    """Build a model with one block per FFN, each with `mixer` and its own window; `tied` as in model_of. Reads the last
    keys: raises ConfigError if any is left unread."""
    by_layer = windows or [None] * len(ffns)
    blocks = [Block(replace(mixer, window=w), f) for w, f in zip(by_layer, ffns, strict=True)]
    return model_of(c, mixer.rope, blocks, tied=tied)


def model_of(c: Reader, rope: Rope, blocks: Sequence[Block], *, norm_offset: float = 0.0, tied: bool = False) -> Model:
    """Build a model of these blocks. `tied`: default of tie_word_embeddings. Reads the last keys: raises ConfigError if
    any is left unread."""
    c.expect("hidden_act", "silu", "swish")  # two names of one function
    spec = Model(
        hidden=c.size("hidden_size"),
        vocab=c.size("vocab_size"),
        blocks=tuple(blocks),
        norm_eps=c.get("rms_norm_eps", float),
        max_positions=context_tokens(c, rope),
        tied=c.get("tie_word_embeddings", bool, tied),
        norm_offset=norm_offset,
    )
    c.refuse_unread()
    return spec


def qwen_windows(c: Reader) -> list[int | None]:
    """Sliding window of each layer of Qwen2 and Qwen3, in tokens; None: full attention. From `layer_types`, else all
    layers from max_window_layers on have the window."""
    layers = c.size("num_hidden_layers")
    width, first = c.get("sliding_window", int, 0), c.get("max_window_layers", int, layers)
    if not c.get("use_sliding_window", bool, False):
        c.expect("layer_types", [_FULL] * layers)
        return [None] * layers
    if width < 1:
        raise c.error(f"use_sliding_window is true, but sliding_window is {width}")
    return layer_windows(c, width, [i >= first for i in range(layers)])


def layer_windows(c: Reader, width: int, sliding: Sequence[bool]) -> list[int | None]:
    """Sliding window of each layer, in tokens; None: full attention. From `layer_types`; without that key, the layers
    marked in `sliding` have the window."""
    kinds = layer_types(c, [_SLIDING if of else _FULL for of in sliding], _FULL, _SLIDING)
    return [width if kind == _SLIDING else None for kind in kinds]


def layer_types(c: Reader, default: list[str], *known: str) -> list[str]:
    """Read `layer_types`, one of `known` per layer; without the key it is `default`. Raises ConfigError."""
    kinds: list[str] = c.get("layer_types", list, default)
    layers = c.size("num_hidden_layers")
    if len(kinds) != layers or not {*kinds} <= {*known}:
        raise c.error(f"layer_types must have {layers} entries, each {' or '.join(known)}, but it is {kinds}")
    return kinds


ARCHITECTURES = {
    "LlamaForCausalLM": llama,
    "LLaMAForCausalLM": llama,  # the old name of the class, in conversions of Llama 1
    "Qwen2ForCausalLM": qwen2,
    "Qwen3ForCausalLM": qwen3,
}
