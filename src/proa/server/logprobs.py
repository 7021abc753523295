"""Logprobs in the response formats of chat, of completions, and of vLLM's prompt_logprobs."""

from __future__ import annotations

from collections.abc import Sequence

from proa.server.replies import ChatLogprob, ChatLogprobs, CompletionLogprobs, PromptLogprobs, TopLogprob
from proa.text.detokenize import Detokenizer
from proa.text.tokenizer import Tokenizer
from proa.types import TokenLogprob

LOWEST = -9999.0  # stands for -inf, which JSON lacks; OpenAI writes the same


def chat_logprobs(tokenizer: Tokenizer, logprobs: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Build one entry per token. An incomplete UTF-8 sequence is U+FFFD in `token`; `bytes` is exact."""
    content = []
    for entry in logprobs:
        top = [
            TopLogprob(tokenizer.token_text(token), _finite(logprob), list(tokenizer.token_bytes(token)))
            for token, logprob in entry.top
        ]
        text, raw = tokenizer.token_text(entry.token), tokenizer.token_bytes(entry.token)
        content.append(ChatLogprob(text, _finite(entry.logprob), list(raw), top))
    return ChatLogprobs(content)


class CompletionLogprobsWriter:
    """Writes one choice's logprobs in the format of /v1/completions.

    text_offset is the token's position in characters within the choice's text (echoed prompt included); skipped
    special tokens have length 0. `top`: number of alternatives requested. `detokenizer`: a new one, configured like the
    one that produces the choice's text.
    """

    def __init__(self, tokenizer: Tokenizer, detokenizer: Detokenizer, top: int) -> None:
        self._tokenizer = tokenizer
        self._detokenizer = detokenizer
        self._top = top
        self._offset = 0

    def write(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprob | None], text: str | None = None
    ) -> CompletionLogprobs:
        """Write the entries of the next tokens; None is the prompt's first token, which has no logprob. text: that the
        tokens were made from, if it is echoed: it has the special tokens that the client wrote, whatever is skipped."""
        written = CompletionLogprobs([], [], [] if self._top else None, [])
        for token, entry in zip(tokens, logprobs, strict=True):
            written.tokens.append(self._spell(token))
            written.token_logprobs.append(None if entry is None else _finite(entry.logprob))
            written.text_offset.append(self._offset)
            if written.top_logprobs is not None:
                written.top_logprobs.append(None if entry is None else self._alternatives(entry))
            self._offset += self._length(token, text)
        return written

    def _length(self, token: int, text: str | None) -> int:
        """Return how many characters a token completes."""
        if text is None or token not in self._tokenizer.special_ids:
            return len(self._detokenizer.feed(token))
        spelt = self._tokenizer.token_text(token)
        return len(spelt) if text.startswith(spelt, self._offset) else 0  # else added by the tokenizer, as bos is

    def _alternatives(self, entry: TokenLogprob) -> dict[str, float]:
        best: dict[str, float] = {}
        for token, logprob in [*entry.top, (entry.token, entry.logprob)]:
            best.setdefault(self._spell(token), _finite(logprob))  # of tokens with equal text, the most likely
        return best

    def _spell(self, token: int) -> str:
        """Return the token's text; bytes that are not valid UTF-8 in OpenAI's form, bytes:\\xf0\\x9f."""
        raw = self._tokenizer.token_bytes(token)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob | None]) -> PromptLogprobs:
    """Build vLLM's format: per prompt token a dict by token id of the token and its alternatives; null for the first.
    `rank` counts from 1; null if the token is not among the alternatives."""
    return [None if entry is None else _by_id(tokenizer, entry) for entry in entries]


def _by_id(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, dict[str, object]]:
    ranks = {token: rank for rank, (token, _) in enumerate(entry.top, start=1)}
    return {
        str(token): {
            "logprob": _finite(logprob),
            "rank": ranks.get(token),
            "decoded_token": tokenizer.token_text(token),
        }
        for token, logprob in [(entry.token, entry.logprob), *entry.top]
    }


def join_completion_logprobs(parts: Sequence[CompletionLogprobs]) -> CompletionLogprobs | None:
    """Concatenate the streamed logprobs of one choice; None if there are none."""
    if not parts:
        return None
    has_top = any(part.top_logprobs is not None for part in parts)
    return CompletionLogprobs(
        tokens=[t for part in parts for t in part.tokens],
        token_logprobs=[p for part in parts for p in part.token_logprobs],
        top_logprobs=[t for part in parts for t in part.top_logprobs or ()] if has_top else None,
        text_offset=[o for part in parts for o in part.text_offset],
    )


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST)
