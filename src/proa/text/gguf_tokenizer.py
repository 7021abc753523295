"""Reads the tokenizer from GGUF metadata (tokenizer.ggml.*) into the `tokenizers` library.

GGUF stores the vocabulary, merges or scores, and the name of a pre-tokenizer. A name that gguf_pre_tokenizers.py does
not list is refused: text that is split differently than in training gives plausible but worse answers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from proa.errors import TokenizerError
from proa.text.gguf_pre_tokenizers import IGNORE_MERGES, LLAMA3, NFC, PRE_TOKENIZERS
from proa.text.sentencepiece import CONTROL, NORMAL, UNKNOWN, Pieces, add_special, build_backend
from proa.text.tokenizer_source import TokenizerSource, token_ids, wrap_in
from proa.weights.gguf_header import gguf_metadata

_REMEDY = "Give the folder of the original tokenizer.json with --tokenizer PATH."
_SPECIAL = ("bos", "eos", "eot", "eom", "unknown", "padding")
# Tokens that end an answer, found by their text as llama.cpp does (special_eog_ids in llama-vocab.cpp): most files have
# only the eos_token of tokenizer_config.json, which does not end Kimi-K2's turns, and is one of several of Llama 3.
_ENDS = frozenset((
    "<|return|>", "<|call|>", "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<|endoftext|>", "<|end|>",
))  # fmt: skip


def read_gguf(path: Path) -> TokenizerSource:
    """Read the tokenizer and chat templates from a GGUF file's metadata. Raises TokenizerError; WeightsError if the
    file is damaged."""
    metadata = gguf_metadata(path)
    ggml = {k.removeprefix("tokenizer.ggml."): v for k, v in metadata.items() if k.startswith("tokenizer.ggml.")}
    kind = ggml.get("model")
    if kind is None or "tokens" not in ggml:
        raise TokenizerError(
            f"{path} contains no tokenizer (tokenizer.ggml.model and tokenizer.ggml.tokens are missing).",
            "Give a folder with a tokenizer with --tokenizer PATH.",
        )
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(
            f"The tokenizer in {path} has tokenizer.ggml.model {kind!r}; Proa reads 'gpt2' and 'llama'.",
            _REMEDY,
        )
    _check_lengths(ggml, ("token_type",) if kind == "gpt2" else ("token_type", "scores"), path)
    ids = _special_ids(ggml, path)
    backend = _byte_level(ggml, _types(ggml, ids)) if kind == "gpt2" else _sentencepiece(ggml, _types(ggml, ids))
    names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special_tokens = {names[key]: ggml["tokens"][i] for key, i in ids.items() if key in names}
    bos_by_default = kind == "llama" or ggml.get("pre") in LLAMA3  # llama.cpp's default for files without the flag
    wrap_in(
        backend,
        bos=special_tokens.get("bos_token") if ggml.get("add_bos_token", bos_by_default) else None,
        eos=special_tokens.get("eos_token") if ggml.get("add_eos_token", False) else None,
    )
    known = _ENDS - {"<|end|>"} if "<|return|>" in ggml["tokens"] else _ENDS  # of gpt-oss it ends only a message
    ends = [i for i, token in enumerate(ggml["tokens"]) if token in known]
    eos_ids = token_ids(ids.get("eos"), ids.get("eot"), ids.get("eom"), ends)
    return TokenizerSource(backend, _templates(metadata), special_tokens, eos_ids)


def _check_lengths(ggml: Mapping[str, Any], keys: Sequence[str], path: Path) -> None:
    """Raise TokenizerError if one of these arrays, which have a number for each token, has more or fewer."""
    count = len(ggml["tokens"])
    for key in keys:
        found = ggml.get(key, [] if key == "scores" else ggml["tokens"])
        if len(found) != count:
            raise TokenizerError(
                f"The tokenizer in {path} has {count} tokens, but tokenizer.ggml.{key} has {len(found)} entries.",
                _REMEDY,
            )


def _special_ids(ggml: Mapping[str, Any], path: Path) -> dict[str, int]:
    """The ids of the special tokens by their GGUF names. Raises TokenizerError for an id that is no token's, except
    those that no text needs: converters write the id of a padding token that was added without an embedding."""
    count, found = len(ggml["tokens"]), {}
    for key in _SPECIAL:
        token = ggml.get(f"{key}_token_id")
        if token is None or (token >= count and key in ("padding", "unknown")):
            continue
        if token >= count:
            raise TokenizerError(
                f"The tokenizer in {path} has {count} tokens, but tokenizer.ggml.{key}_token_id is {token}.", _REMEDY
            )
        found[key] = token
    return found


def _byte_level(ggml: Mapping[str, Any], types: list[int]) -> tokenizers.Tokenizer:
    """Build byte-level BPE from the file's vocabulary, merges and pre-tokenizer name."""
    pre = str(ggml.get("pre"))
    if pre not in PRE_TOKENIZERS:
        raise TokenizerError(
            f"The GGUF file's pre-tokenizer is {pre!r}; Proa supports {', '.join(sorted(PRE_TOKENIZERS))}.",
            _REMEDY,
        )
    if "merges" not in ggml:
        raise TokenizerError(
            "The GGUF file's tokenizer has no merges (tokenizer.ggml.merges is missing).",
            _REMEDY,
        )
    vocabulary = {token: i for i, token in enumerate(ggml["tokens"])}
    merges = [tuple(merge.split(" ", 1)) for merge in ggml["merges"]]
    try:
        model = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=pre in IGNORE_MERGES)
    except Exception as error:  # the library raises no narrower type
        raise TokenizerError(
            f"The GGUF file's tokenizer {_wrong_merge(vocabulary, merges) or error}.", _REMEDY
        ) from error
    backend = tokenizers.Tokenizer(model)
    if pre in NFC:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[pre]()
    backend.decoder = decoders.ByteLevel()
    add_special(backend, ggml["tokens"], types)
    return backend


def _wrong_merge(vocabulary: Mapping[str, int], merges: Sequence[tuple[str, ...]]) -> str | None:
    """Say which merge is not two tokens that form a third one; None if there is none."""
    for i, parts in enumerate(merges):
        if len(parts) != 2:
            return f"has the merge {parts[0]!r} (number {i}), which is not two tokens with a space between"
        for token in (*parts, "".join(parts)):
            if token not in vocabulary:
                return f"has the merge {' '.join(parts)!r} (number {i}), but no token {token!r}"
    return None


def _sentencepiece(ggml: Mapping[str, Any], types: list[int]) -> tokenizers.Tokenizer:
    """Build sentencepiece BPE; GGUF stores scores instead of merges, which give their order."""
    return build_backend(Pieces(ggml["tokens"], ggml["scores"], types, ggml.get("add_space_prefix", True)))


def _types(ggml: Mapping[str, Any], special: Mapping[str, int]) -> list[int]:
    """Return every token's type; in files without types, only the named special tokens differ from NORMAL."""
    if "token_type" in ggml:
        return list(ggml["token_type"])
    types = [NORMAL] * len(ggml["tokens"])
    for name, kind in (("bos", CONTROL), ("eos", CONTROL), ("padding", CONTROL), ("unknown", UNKNOWN)):
        if name in special:
            types[special[name]] = kind
    return types


def _templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates by name, from the keys tokenizer.chat_template and tokenizer.chat_template.NAME."""
    prefix = "tokenizer.chat_template."
    named = {key.removeprefix(prefix): text for key, text in metadata.items() if key.startswith(prefix)}
    default = metadata.get("tokenizer.chat_template")
    return named if default is None else {**named, "default": default}
