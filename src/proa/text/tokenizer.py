"""Text, conversations and tokens of one checkpoint. Belongs here: encode, decode, render. Never: files, torch."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from proa.errors import RequestError, TokenizerError
from proa.text.detokenize import Detokenizer
from proa.text.gguf_tokenizer import read_gguf
from proa.text.hf_tokenizer import read_folder
from proa.text.template import ChatTemplate
from proa.text.token_bytes import TokenBytes
from proa.text.tokenizer_source import TokenizerSource
from proa.types import Chat

_SURROGATE = re.compile("[\ud800-\udfff]")  # JSON can smuggle one in; no encoding of text has it


class Tokenizer:
    """A checkpoint's tokenizer and chat template.

    `eos_token_ids` are those of the tokenizer's own files. Encoding is thread-safe and releases the GIL.
    """

    def __init__(self, source: TokenizerSource) -> None:
        self._backend = source.backend
        self._template = ChatTemplate(source.templates, source.special_tokens) if source.templates else None
        self.token_bytes = TokenBytes(source.backend)
        self.eos_token_ids = source.eos_token_ids
        added = source.backend.get_added_tokens_decoder()
        self._special_ids = frozenset(i for i, token in added.items() if token.special)

    @classmethod
    def load(cls, path: Path, chat_template: str | None = None) -> Tokenizer:
        """Load from a Hugging Face folder or a GGUF file, without network and without code from the checkpoint.

        `chat_template` is a file with a Jinja template to use instead. Raises TokenizerError.
        """
        source = read_gguf(path) if path.is_file() else read_folder(path)
        if chat_template is None:
            return cls(source)
        try:
            text = Path(chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise TokenizerError(
                f"The chat template {chat_template} cannot be read: {error}.", "Name a file with --chat-template."
            ) from error
        return cls(replace(source, templates={"default": text}))

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest token id."""
        return 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokens of `text`; `add_special_tokens` puts in what the checkpoint wants around a text (often a bos)."""
        if wrong := _SURROGATE.search(text):
            raise RequestError(
                f"The text has U+{ord(wrong[0]):04X} at {wrong.start()}, half of a surrogate pair.",
                "Send valid Unicode.",
                param="prompt",
            )
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def render(self, chat: Chat) -> str:
        """The prompt text that the checkpoint's chat template makes. Raises RequestError."""
        if self._template is None:
            raise RequestError(
                "The model has no chat template.",
                "Give one with --chat-template FILE, or use /v1/completions.",
                param="messages",
            )
        return self._template.render(chat)

    def encode_chat(self, chat: Chat) -> list[int]:
        """Tokens of the rendered conversation; the template writes its special tokens itself, none are added."""
        return self.encode(self.render(chat), add_special_tokens=False)

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `tokens` from its beginning: what one Detokenizer says of them, all together."""
        pieces = self.detokenizer(skip_special_tokens, from_start=True)
        return "".join(map(pieces.feed, tokens)) + pieces.flush()

    def detokenizer(self, skip_special_tokens: bool = True, *, from_start: bool = False) -> Detokenizer:
        """A fresh incremental decoder; `from_start` for a whole text, without it for an answer to a prompt."""
        return Detokenizer(
            self.token_bytes,
            self._special_ids if skip_special_tokens else frozenset(),
            from_start=from_start and self.token_bytes.strips_leading_space,
        )

    def token_text(self, token: int) -> str:
        """One token alone as text; bytes that are no whole character show as U+FFFD."""
        return self.token_bytes(token).decode("utf-8", "replace")
