"""Matchers for the engine's requests: grammars are compiled in threads and kept. Never: the scheduler."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Collection
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher

from proa.grammar.compile import compiled
from proa.grammar.matcher import Matcher
from proa.grammar.vocabulary import Lexicon, Vocabulary
from proa.types import Constraint, Sampling

MOST_AT_ONCE = 4
KEPT_BYTES = 16 << 20  # texts of constraints whose grammars are kept


class GrammarStore:
    """All methods are called from one thread."""

    def __init__(self, cpus: Collection[int] = ()) -> None:
        """cpus: CPUs of the compiling threads, which would inherit the caller's single one; empty: those inherited."""
        self._cpus = cpus
        self._threads = ThreadPoolExecutor(MOST_AT_ONCE, "grammar", self._spread)
        self._lexicon: Future[Lexicon] | None = None
        self._grammars: OrderedDict[Constraint, Future[LLMatcher]] = OrderedDict()  # least recently used first
        self._kept_bytes = 0

    def learn(self, vocabulary: Vocabulary) -> None:
        """Take the model's vocabulary. Must be called before the first `compiling`."""
        self._lexicon = self._lexicon or self._threads.submit(Lexicon, vocabulary)

    def compiling(self, constraint: Constraint) -> Future[LLMatcher]:
        """Start to compile a constraint, unless it was compiled lately. The future may raise RequestError."""
        grammar = self._grammars.get(constraint)
        if grammar is None:
            grammar = self._grammars[constraint] = self._threads.submit(self._compile, constraint, self._known())
            self._kept_bytes += len(constraint.text)
            while self._kept_bytes > KEPT_BYTES and len(self._grammars) > 1:
                oldest, _ = self._grammars.popitem(last=False)
                self._kept_bytes -= len(oldest.text)
        self._grammars.move_to_end(constraint)
        return grammar

    def matcher(self, grammar: LLMatcher, sampling: Sampling) -> Matcher:
        """Make the matcher of one request from its compiled grammar."""
        stops = {*sampling.eos_token_ids, *sampling.stop_token_ids}
        after, min_tokens = sampling.constraint_after, sampling.min_tokens
        return Matcher(grammar.deep_copy(), self._known().result(), stops, after, min_tokens)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _known(self) -> Future[Lexicon]:
        if self._lexicon is None:
            raise ValueError("a grammar needs the vocabulary first: call learn() before compiling()")
        return self._lexicon

    def _spread(self) -> None:
        if self._cpus:
            os.sched_setaffinity(0, self._cpus)

    @staticmethod
    def _compile(constraint: Constraint, lexicon: Future[Lexicon]) -> LLMatcher:
        known = lexicon.result()
        return compiled(constraint, known.tree, known.special)
