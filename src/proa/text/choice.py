"""Converts one sequence's engine events to chunks of text, with tokens and logprobs aligned to the text."""

from __future__ import annotations

from collections import deque
from collections.abc import Container, Mapping
from types import MappingProxyType

from proa.text.detokenize import Detokenizer
from proa.text.stop import StopMatcher
from proa.types import Chunk, EngineRequest, FinishReason, SamplingParams, TokenEvent, TokenLogprob


class ChoiceStream:
    """Converts the token events of choice `index` to chunks; `finished` is set with the last chunk.

    A token is emitted together with its text: it is held back while its text is an incomplete UTF-8 character or a
    possible start of a stop string, and dropped if all its text is cut off by a stop string.

    markers: text of the tokens whose offsets the chunks report, by id. hidden: those of them that a client does not
    see; no stop string matches a hidden marker's text, or continues behind it.
    """

    def __init__(
        self, index: int, request: EngineRequest, params: SamplingParams, detokenizer: Detokenizer, *,
        markers: Mapping[int, str] = MappingProxyType({}), hidden: Container[int] = (),
    ) -> None:  # fmt: skip
        self._index = index
        self._request = request
        self._detokenizer = detokenizer
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output)
        self._markers = markers
        self._hidden = hidden
        self._marks: deque[int] = deque()  # positions of markers that were not shown yet
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._made_chars = 0  # characters that came out of the detokeniser
        self._shown_chars = 0  # characters that passed the stop matcher
        # Tokens held back: (token, its logprob, position of its first character, position after its last).
        self._held: deque[tuple[int, TokenLogprob | None, int, int]] = deque()
        self._stop_string: str | None = None
        self._is_first = True
        self.finished = False

    def feed(self, event: TokenEvent) -> Chunk | None:
        """Process one event; return its chunk, or None if everything is held back."""
        if event.progress is not None:
            return Chunk(index=self._index, progress=event.progress)
        logprobs: list[TokenLogprob] | list[None] = event.logprobs or [None] * len(event.tokens)
        pieces = []
        for token, logprob in zip(event.tokens, logprobs, strict=True):
            pieces.append(self._token(token, logprob))
            if self._stop_string is not None:
                break
        finish: FinishReason | None = event.finish
        stop_reason: str | int | None = self._stop_token(event)
        if finish is not None and self._stop_string is None:
            pieces.append(self._show(self._detokenizer.flush()))
        if self._stop_string is not None:
            finish, stop_reason = "stop", self._stop_string
        elif finish is not None:
            pieces.append(self._matcher.close())
        self.finished = finish is not None
        text = "".join(pieces)
        marks = self._shown_marks(len(text))
        before, self._shown_chars = self._shown_chars, self._shown_chars + len(text)
        tokens, token_logprobs, ends = self._release()
        tells_of_prompt = self._is_first or event.prompt_logprobs is not None or event.cached_tokens is not None
        if not (text or tokens or tells_of_prompt or self.finished):
            return None
        is_first, self._is_first = self._is_first, False
        return Chunk(
            index=self._index,
            text=text,
            markers=marks,
            tokens=tokens,
            ends=[max(0, min(end - before, len(text))) for end in ends],
            logprobs=None if self._request.sampling.logprobs is None else token_logprobs,
            finish=finish,
            error=event.error,
            stop_reason=stop_reason,
            prompt_tokens=self._request.tokens if is_first else None,
            prompt_logprobs=event.prompt_logprobs,
            cached_tokens=event.cached_tokens,
            prompt_experts=event.prompt_experts,
        )

    def _token(self, token: int, logprob: TokenLogprob | None) -> str:
        """Add one token; return the text that may now be emitted."""
        start = self._made_chars
        text = self._detokenizer.feed(token)
        self._num_tokens += 1
        self._made_chars += len(text)
        end = self._made_chars + int(self._detokenizer.has_partial)
        self._held.append((token, logprob, start, end))
        marker = self._markers.get(token)
        if marker is None:
            return self._show(text)
        self._marks.append(self._made_chars - len(marker))
        if token not in self._hidden:
            return self._show(text)
        shown = self._show(text.removesuffix(marker))
        return shown if self._stop_string is not None else shown + self._matcher.close() + marker

    def _shown_marks(self, length: int) -> list[int]:
        """Return the offsets of markers in the next `length` characters that are shown."""
        marks = []
        while self._marks and self._marks[0] < self._shown_chars + length:
            marks.append(self._marks.popleft() - self._shown_chars)
        return marks

    def _show(self, text: str) -> str:
        if self._num_tokens <= self._min_tokens:  # stop strings count only after min_tokens
            return text
        shown, self._stop_string = self._matcher.feed(text)
        return shown

    def _stop_token(self, event: TokenEvent) -> int | None:
        """Return the request's stop token that ended the sequence; None for an eos token."""
        return None if event.stop_token in self._request.sampling.eos_token_ids else event.stop_token

    def _release(self) -> tuple[list[int], list[TokenLogprob], list[int]]:
        """Remove and return the held tokens whose text has been emitted, at the end also those whose text was only
        partly emitted: tokens, their logprobs, and the position after each."""
        tokens: list[int] = []
        logprobs: list[TokenLogprob] = []
        ends: list[int] = []
        while self._held:
            token, logprob, start, end = self._held[0]
            is_shown = end <= self._shown_chars
            if self.finished:
                is_shown = is_shown or self._stop_string is None or start < self._shown_chars
            if not is_shown:
                break
            self._held.popleft()
            tokens.append(token)
            ends.append(end)
            if logprob is not None:
                logprobs.append(logprob)
        return tokens, logprobs, ends
