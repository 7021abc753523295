"""A checkpoint's tokenizer: encodes and decodes text, renders conversations with the chat template."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from proa.errors import RequestError, TokenizerError
from proa.grammar.vocabulary import Vocabulary
from proa.text.detokenize import Detokenizer
from proa.text.gguf_tokenizer import read_gguf
from proa.text.hf_tokenizer import read_folder
from proa.text.template import ChatTemplate
from proa.text.token_bytes import TokenBytes
from proa.text.tokenizer_source import TokenizerSource
from proa.types import Chat

_SURROGATE = re.compile("[\ud800-\udfff]")  # possible through JSON escapes, but not encodable as UTF-8


class Tokenizer:
    """A checkpoint's tokenizer and its chat template (None if it has none).

    `eos_token_ids`: from the tokenizer's files; generation_config.json may add more. Encoding is thread-safe and
    releases the GIL.
    """

    def __init__(self, source: TokenizerSource) -> None:
        self._backend = source.backend
        self.template = ChatTemplate(source.templates, source.special_tokens) if source.templates else None
        self.token_bytes = TokenBytes(source.backend)
        self.eos_token_ids = source.eos_token_ids
        added = source.backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def load(cls, path: Path, chat_template: str | None = None) -> Tokenizer:
        """Load from a Hugging Face folder, one of its .json or .model files, or a GGUF file, without network access or
        code from the checkpoint.

        `chat_template`: path of a Jinja template that replaces the checkpoint's. Raises TokenizerError.
        """
        if path.suffix in (".json", ".model") and path.is_file():
            path = path.parent
        source = read_gguf(path) if path.is_file() else read_folder(path)
        if chat_template is None:
            return cls(source)
        try:
            text = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(
                f"The chat template {chat_template} cannot be read: {error}.",
                "Give a UTF-8 text file with --chat-template.",
            ) from error
        return cls(replace(source, templates={"default": text}))

    @cached_property
    def vocab_size(self) -> int:
        """Largest token id plus 1."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Encode `text` to token ids; `add_special_tokens` adds the checkpoint's tokens around a text (usually bos).
        Raises RequestError for a surrogate code point."""
        if wrong := _SURROGATE.search(text):
            raise RequestError(
                f"The text has the lone surrogate U+{ord(wrong[0]):04X} at character {wrong.start()}.",
                "Send valid Unicode.",
                param="prompt",
            )
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def render(self, chat: Chat) -> str:
        """Render a conversation to prompt text with the chat template. Raises RequestError."""
        if self.template is None:
            raise RequestError(
                "The model has no chat template.",
                "Give a template with --chat-template FILE, or use /v1/completions.",
                param="messages",
            )
        return self.template.render(chat)

    @cached_property
    def added_tokens(self) -> dict[int, str]:
        """Text of the tokens that were added to the vocabulary, special or not, by id."""
        added = self._backend.get_added_tokens_decoder()
        return {token: self.token_bytes(token).decode("utf-8", "replace") for token in added}

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Decode `tokens` as a complete text; equals the concatenated output of `detokenizer(from_start=True)`."""
        pieces = self.detokenizer(skip_special_tokens, from_start=True)
        return "".join(map(pieces.feed, tokens)) + pieces.flush()

    def detokenizer(
        self, skip_special_tokens: bool = True, *, from_start: bool = False, kept: Collection[int] = ()
    ) -> Detokenizer:
        """Make an incremental detokeniser; `from_start`: for a complete text, not for one that continues a prompt;
        `kept`: special tokens that are not skipped."""
        skipped = self.special_ids if skip_special_tokens else frozenset[int]()
        return Detokenizer(
            self.token_bytes,
            skipped.difference(kept) if kept else skipped,
            from_start=from_start and self.token_bytes.strips_leading_space,
        )

    def vocabulary(self, num_tokens: int) -> Vocabulary:
        """Return the bytes of the tokens 0 to num_tokens - 1, for grammars. Takes about a second per 500 000 tokens."""
        special = [token for token in sorted(self.special_ids) if token < num_tokens]
        return Vocabulary([self.token_bytes(token) for token in range(num_tokens)], special, self._backend.to_str())

    def token_text(self, token: int) -> str:
        """Decode one token by itself; bytes of an incomplete character become U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")
