"""Matchers for the engine's requests: grammars are compiled in threads and kept. Never: the scheduler."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from llguidance import LLMatcher

from proa.grammar.compile import compiled, follow
from proa.grammar.lexicon import Lexicon
from proa.grammar.matcher import Follower, Matcher
from proa.grammar.thinking import ThinkingMatcher
from proa.grammar.vocabulary import Vocabulary
from proa.types import Constraint, Sampling

MAX_THREADS = 4
KEPT_BYTES = 16 << 20  # of the texts of constraints whose grammars are kept
# Copies of a grammar inherit what it has compiled: 820 us per mask without this, 65 us with it (decision 047).
FOLLOWED_TOKENS = 64


class GrammarStore:
    """All methods are called from one thread."""

    def __init__(self, cpus: Collection[int] = ()) -> None:
        """cpus: CPUs of the compiling threads, which would inherit the caller's single one; empty: those inherited."""
        self._cpus = cpus
        self._threads = ThreadPoolExecutor(MAX_THREADS, "grammar", self._set_affinity)
        self._lexicon: Future[Lexicon] | None = None
        self._grammars: OrderedDict[Constraint, Future[LLMatcher]] = OrderedDict()  # least recently used first
        self._kept_bytes = 0

    def learn(self, vocabulary: Vocabulary) -> None:
        """Take the model's vocabulary. Must be called before the first `compiling`."""
        self._lexicon = self._lexicon or self._threads.submit(Lexicon, vocabulary)

    def compiling(self, constraint: Constraint) -> Future[LLMatcher]:
        """Start to compile a constraint, unless its grammar is kept. The future may raise RequestError."""
        grammar = self._grammars.get(constraint)
        if grammar is None:
            grammar = self._grammars[constraint] = self._threads.submit(self._compile, constraint, self._known())
            self._kept_bytes += len(constraint.text)
            while self._kept_bytes > KEPT_BYTES and len(self._grammars) > 1:
                oldest, _ = self._grammars.popitem(last=False)
                self._kept_bytes -= len(oldest.text)
        self._grammars.move_to_end(constraint)
        return grammar

    def preparing(self, sampling: Sampling) -> Future[Any] | None:
        """Start what a request's follower needs; None if the request has neither a constraint nor a budget. The future
        may raise RequestError."""
        if sampling.constraint is not None:
            return self.compiling(sampling.constraint)
        return None if sampling.thinking is None else self._known()

    def follower(self, sampling: Sampling, prepared: Future[Any]) -> Follower:
        """Make the follower of one request. prepared: from `preparing`, done. Raises what it raises."""
        lexicon = self._known().result()
        stops = {*sampling.eos_token_ids, *sampling.stop_token_ids}
        inner = None
        if sampling.constraint is not None:
            inner = Matcher(prepared.result().deep_copy(), lexicon, stops, sampling.min_tokens)
        if sampling.thinking is not None:
            return ThinkingMatcher(sampling.thinking, lexicon, stops, sampling.min_tokens, inner)
        if inner is None:
            raise ValueError("a request without a constraint and a budget has no follower")
        return inner

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _known(self) -> Future[Lexicon]:
        if self._lexicon is None:
            raise ValueError("a grammar needs the vocabulary first: call learn() before compiling()")
        return self._lexicon

    def _set_affinity(self) -> None:
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)

    @staticmethod
    def _compile(constraint: Constraint, lexicon: Future[Lexicon]) -> LLMatcher:
        known = lexicon.result()
        parser = compiled(constraint, known.tree, known.special)
        follow(parser, known.tree, FOLLOWED_TOKENS)
        if parser.is_error():  # this text exceeds the limits; others need not
            return compiled(constraint, known.tree, known.special)
        parser.reset()
        return parser
