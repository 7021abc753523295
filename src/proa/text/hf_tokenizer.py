"""Reads the tokenizer of a Hugging Face folder.

tokenizer.json is loaded with the `tokenizers` library: importing transformers takes a second and adds no information.
Only folders without tokenizer.json and tokenizer.model are converted by transformers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from proa.errors import TokenizerError
from proa.text import tiktoken_model
from proa.text.sentencepiece import build_backend, read_pieces
from proa.text.tokenizer_source import TokenizerSource, token_ids, wrap_in
from proa.weights.placeholder import placeholder

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_CONVERTIBLE = ("vocab.json", "tekken.json", "tiktoken.model")
# transformers' defaults for tokenizer.model, used for keys that tokenizer_config.json does not have.
_SENTENCEPIECE_DEFAULTS = {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True, "legacy": True}
_ADDS = ("add_bos_token", "add_eos_token")
_SWITCHES = ("legacy", *_ADDS)  # of tokenizer_config.json; null counts as absent
# Classes of transformers 4 that read the switches beside tokenizer.json; others leave it as it is. transformers 5 never
# reads them there, and so omits the begin token of models that were published with these classes (DeepSeek-V3).
_SWITCHED = frozenset(("LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer"))
_FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def read_folder(folder: Path) -> TokenizerSource:
    """Read the tokenizer (tokenizer.json, tokenizer.model, or a file that transformers converts), the chat templates
    and the special tokens of a folder. Raises TokenizerError."""
    found = _read_json(folder / "tokenizer_config.json").items()
    config = {key: value for key, value in found if value != "" and (value is not None or key not in _SWITCHES)}
    named_apart = _read_json(folder / "special_tokens_map.json")
    additional = _additional(named_apart, config)
    if (folder / "tokenizer.json").is_file():
        backend = _read_backend(folder / "tokenizer.json")
        if str(config.get("tokenizer_class")).removesuffix("Fast") not in _SWITCHED:
            config = {key: value for key, value in config.items() if key not in _ADDS}
    elif (folder / "tokenizer.model").is_file():
        config = {**_SENTENCEPIECE_DEFAULTS, **config}
        pieces = read_pieces(folder / "tokenizer.model", space_after_special=bool(config["legacy"]))
        if isinstance(space_first := config.get("add_prefix_space"), bool):
            pieces = replace(pieces, space_first=space_first)
        backend = build_backend(pieces)
        config.setdefault("added_tokens_decoder", _older_added_tokens(folder, additional))
    elif (folder / "tiktoken.model").is_file() and config.get("tokenizer_class") == tiktoken_model.CLASS:
        ranks = tiktoken_model.read_ranks(folder / "tiktoken.model")
        backend = tiktoken_model.build_backend(ranks)
        own = config.get("added_tokens_decoder") or {}
        config["added_tokens_decoder"] = tiktoken_model.special_tokens(len(ranks), own)
    elif any((folder / name).is_file() for name in _CONVERTIBLE):
        backend = _convert(folder)
    else:
        looked_for = ", ".join(("tokenizer.json", "tokenizer.model", *_CONVERTIBLE))
        raise TokenizerError(
            f"{folder} contains no tokenizer (looked for {looked_for}).",
            "Copy the original model's tokenizer files there, or give their folder with --tokenizer PATH.",
        )
    backend.no_truncation()
    backend.no_padding()
    special_tokens = _special_tokens({**named_apart, **config})
    named = set(special_tokens.values())
    _add_tokens(backend, config.get("added_tokens_decoder") or {}, named)
    marked = named - {special_tokens.get("pad_token")}  # in no prompt; may be an ordinary token
    _mark_special(backend, marked | additional)
    bos, eos = (special_tokens.get(name) for name in ("bos_token", "eos_token"))
    if any(key in config for key in _ADDS):
        now = backend.encode("a").tokens  # a key that is missing changes nothing
        adds_bos = config.get("add_bos_token", bos in now[:1])
        adds_eos = config.get("add_eos_token", eos in now[-1:])
        wrap_in(backend, bos=bos if adds_bos else None, eos=eos if adds_eos else None)
    return TokenizerSource(
        backend,
        _templates(folder, config.get("chat_template")),
        special_tokens,
        token_ids(
            backend.token_to_id(eos) if eos is not None else None,
            _read_json(folder / "config.json").get("eos_token_id"),
            _read_json(folder / "generation_config.json").get("eos_token_id"),
        ),
    )


def _read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object; {} if the file does not exist."""
    try:
        value = json.loads(path.read_bytes())  # with a byte order mark or without, as for weights
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(value, dict):
        raise _unreadable(path, "it is not a JSON object")
    return value


def _unreadable(path: Path, reason: object) -> TokenizerError:
    if missing := placeholder(path):
        return TokenizerError(*missing)
    return TokenizerError(
        f"{path} cannot be read: {reason}.",
        "Download it again, or give another tokenizer's folder with --tokenizer PATH.",
    )


def _read_backend(path: Path) -> tokenizers.Tokenizer:
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the tokenizers library raises plain Exception
        raise _unreadable(path, error) from error


def _convert(folder: Path) -> tokenizers.Tokenizer:
    """Convert another vocabulary format in memory with transformers (slow)."""
    from transformers import AutoTokenizer  # imported here: takes a second, and is rarely needed

    try:
        slow = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return tokenizers.Tokenizer.from_str(slow.backend_tokenizer.to_str())
    except Exception as error:  # of any type: ImportError, or errors of tokenizer classes that need custom code
        raise TokenizerError(
            f"The tokenizer in {folder} has no tokenizer.json and cannot be converted: {error}.",
            "Give a folder with a tokenizer.json with --tokenizer PATH, or install the package that the message names.",
        ) from error


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the special tokens' texts by name (bos_token, ...); the config has a text or {"content": text, ...}."""
    values = {name: config.get(name) for name in _NAMES}
    texts = {name: v.get("content") if isinstance(v, dict) else v for name, v in values.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _additional(*files: Mapping[str, Any]) -> set[str]:
    """Return the texts of additional_special_tokens, or extra_special_tokens (transformers 5), in these files."""
    values = [file.get(key) or () for file in files for key in ("additional_special_tokens", "extra_special_tokens")]
    listed = [token for value in values for token in (value.values() if isinstance(value, dict) else value)]
    return {token["content"] if isinstance(token, dict) else token for token in listed}


def _older_added_tokens(folder: Path, special: Collection[str]) -> dict[str, Any]:
    """Return the tokens of added_tokens.json, where older folders have them, in the form of added_tokens_decoder."""
    added = _read_json(folder / "added_tokens.json")
    return {str(i): {"content": text, "normalized": False, "special": text in special} for text, i in added.items()}


def _add_tokens(backend: tokenizers.Tokenizer, wanted: Mapping[str, Any], named: set[str]) -> None:
    """Add the tokens of tokenizer_config.json's added_tokens_decoder (or added_tokens.json) that the vocabulary lacks
    or defines differently. Raises TokenizerError if a token gets another id."""
    present = backend.get_added_tokens_decoder()
    for token_id, entry in sorted((int(key), entry) for key, entry in wanted.items()):
        flags = {flag: entry[flag] for flag in _FLAGS if flag in entry}
        token = AddedToken(entry["content"], **{**flags, "special": entry.get("special") or entry["content"] in named})
        if repr(present.get(token_id)) == repr(token):
            continue
        backend.add_tokens([token])
        if backend.token_to_id(token.content) != token_id:
            raise TokenizerError(
                f"The token {token.content!r} has id {token_id} in tokenizer_config.json or added_tokens.json, "
                f"but {backend.token_to_id(token.content)} in the vocabulary.",
                "The files belong to different versions: download the model again.",
            )


def _mark_special(backend: tokenizers.Tokenizer, texts: Collection[str]) -> None:
    """Have the tokens of the vocabulary with these texts, which the config names, matched as a whole and special."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    others = [text for text in sorted(texts) if text not in known and backend.token_to_id(text) is not None]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in others])


def _templates(folder: Path, in_config: Any) -> dict[str, str]:
    """Return the chat templates by name. tokenizer_config.json has a text or a list of {name, template}; template files
    take precedence."""
    templates: dict[str, str] = {}
    if isinstance(in_config, str):
        templates["default"] = in_config
    elif isinstance(in_config, list):
        templates.update((entry["name"], entry["template"]) for entry in in_config)
    if isinstance(text := _read_json(folder / "chat_template.json").get("chat_template"), str):
        templates["default"] = text
    files = {"default": folder / "chat_template.jinja"}
    files.update((path.stem, path) for path in sorted((folder / "additional_chat_templates").glob("*.jinja")))
    for name, path in files.items():
        if path.is_file():
            templates[name] = path.read_text(encoding="utf-8")
    return templates
