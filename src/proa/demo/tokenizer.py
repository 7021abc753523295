"""Writes the demo's tokenizer files from the GGUF's metadata: SmolLM2's byte-level BPE."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGUFReader, TokenType
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from proa.errors import TokenizerError


def write_tokenizer(folder: Path, reader: GGUFReader) -> None:
    """Write tokenizer.json and tokenizer_config.json (with the chat template) into `folder`. Raises TokenizerError if
    the GGUF's tokenizer is of another kind."""

    def read(key: str) -> Any:
        field = reader.get_field(f"tokenizer.{key}")
        if field is None:
            raise TokenizerError(f"The GGUF has no tokenizer.{key}.", "Use the file that `proa serve demo` fetches.")
        return field.contents()

    kind = (read("ggml.model"), read("ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise TokenizerError(
            f"The GGUF's tokenizer is {kind}; the demo needs ('gpt2', 'smollm').",
            "Use the file that `proa serve demo` downloads.",
        )
    tokens: list[str] = read("ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in read("ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    # "smollm": single digits are split off first. transformers' GGUF loader does not do that, which changes how spaces
    # before indented numbers are tokenised.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, read("ggml.token_type"), strict=True) if kind == TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))

    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[read("ggml.bos_token_id")],
        "eos_token": tokens[read("ggml.eos_token_id")],
        "pad_token": tokens[read("ggml.padding_token_id")],
        "unk_token": tokens[read("ggml.unknown_token_id")],
        "model_max_length": reader.get_field("llama.context_length").contents(),
        "clean_up_tokenization_spaces": False,
        "chat_template": read("chat_template"),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
