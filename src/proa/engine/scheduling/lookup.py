"""Finds the prefix of a request in the prefix cache. Never: taking pages."""

from __future__ import annotations

from collections.abc import Hashable

from proa.cache.radix import PrefixCache, PrefixMatch
from proa.engine.scheduling.phases import Phases
from proa.engine.scheduling.request import Request, State


class PrefixLookup:
    def __init__(self, cache: PrefixCache | None, phases: Phases, page_tokens: int) -> None:
        self._cache, self._phases, self._page_tokens = cache, phases, page_tokens

    def may_match(self, request: Request) -> bool:
        """Whether a cached prefix may be used: logprobs of prompt tokens need these tokens to be computed."""
        return request.sampling.prompt_logprobs is None or request.num_generated > 0

    def matchable_tokens(self, request: Request) -> int:
        """Most tokens of a cached prefix that the request may use."""
        return self._phases.matched_tokens(request) if self.may_match(request) else 0

    def match(self, request: Request) -> PrefixMatch | None:
        """The longest cached prefix that the request may use. None: there is no cache."""
        if self._cache is None:
            return None
        num_pages = self.matchable_tokens(request) // self._page_tokens
        match = self._cache.match(self.keys(self._cache, request, num_pages))
        num_matched = len(match.pages) * self._page_tokens
        if (num_whole := self._phases.whole_tokens(num_matched)) == num_matched:
            return match
        return self._cache.match(self.keys(self._cache, request, num_whole // self._page_tokens))

    def num_left(self, request: Request) -> int:
        """Tokens that the request has to compute, if it is admitted now."""
        match = self.match(request) if request.state is State.WAITING else None
        return request.num_left - len(match.pages if match else ()) * self._page_tokens

    def num_again(self, request: Request, end: int) -> int:
        """Number of tokens to compute anew, of the first `end`, if a running request is preempted: all but those whose
        pages are in the prefix cache."""
        return end - (request.num_shared if self.may_match(request) else 0)

    def keys(self, cache: PrefixCache, request: Request, num_pages: int) -> list[Hashable]:
        """Prefix-cache keys of the request's first `num_pages` pages, computed once and kept."""
        if len(request.keys) < num_pages:
            request.keys += cache.page_keys(request.tokens, request.salt, len(request.keys), self._phases.cell_tokens)
        return request.keys[:num_pages]
