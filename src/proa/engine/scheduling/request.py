"""One sequence inside the engine: its tokens, its place in the cache, its state. Never: tensors, text, policy."""

from __future__ import annotations

import enum
from collections.abc import Hashable

from proa.cache.radix import PrefixNode
from proa.grammar.matcher import Follower
from proa.sampling.rows import Row
from proa.types import EngineRequest, FinishReason, PromptExperts

NO_SLOT = -1


class State(enum.Enum):
    WAITING = "waiting"  # holds no pages; also after a preemption
    RUNNING = "running"
    FINISHED = "finished"


_LEGAL = {
    (State.WAITING, State.RUNNING),  # admitted
    (State.RUNNING, State.WAITING),  # preempted
    (State.WAITING, State.FINISHED),  # aborted
    (State.RUNNING, State.FINISHED),
}


class Request:
    """Mutable; owned by the Scheduler, read by the runner.

    `tokens` is prompt plus answer. The KV of the first `num_computed` of them lies in `pages`, token i in slot
    i % page_tokens of pages[i // page_tokens]. Normally all but the last token of a decoding request are computed.
    The list `pages` is only appended to, so page tables copy only its new entries (see PageTable); any other change
    replaces the list.
    """

    __slots__ = (
        "arrival", "branch_tokens", "copied_tokens", "copy_from", "expert_tokens", "group", "id",
        "keys", "max_length", "min_length", "node", "num_cached", "num_computed", "num_prompt", "num_stored",
        "page_tokens", "pages", "passing", "priority", "restorable", "row", "run_keys", "salt", "sampling", "state",
        "state_slot", "stop_ids", "stop_token", "streamed_tokens", "tokens",
    )  # fmt: skip

    def __init__(
        self, source: EngineRequest, *, arrival: int = 0, context_tokens: int, page_tokens: int,
        matcher: Follower | None = None,
    ) -> None:  # fmt: skip
        self.id = source.id
        self.sampling = source.sampling
        self.priority = source.priority
        self.group = source.group
        self.salt = source.salt
        self.page_tokens = page_tokens
        self.arrival = arrival  # counts submissions; ties within a priority are served in this order
        self.tokens = list(source.tokens)
        self.num_prompt = len(source.tokens)
        self.row = Row(self.sampling, self.tokens, self.num_prompt, self.id, matcher)  # the sampler's view
        self.min_length = self.num_prompt + source.sampling.min_tokens  # shorter: eos and stop tokens do not end it
        self.max_length = min(self.num_prompt + source.sampling.max_tokens, context_tokens)
        self.stop_ids = frozenset(source.sampling.eos_token_ids + source.sampling.stop_token_ids)
        self.state = State.WAITING
        self.num_computed = 0
        self.num_cached: int | None = None  # prompt tokens from the prefix cache at the first admission
        self.expert_tokens = 0  # prompt tokens computed on a GPU that has experts in RAM, and of these those whose
        self.streamed_tokens = 0.0  # experts were copied to the GPU; see PromptExperts
        self.pages: list[int] = []
        self.state_slot = NO_SLOT  # of its recurrent states, while it runs
        self.copy_from = NO_SLOT  # slot of the states it was admitted with, until its first step is committed
        self.copied_tokens = 0  # number of tokens before its last copy of recurrent states, taken or planned
        self.branch_tokens = 0  # number of leading tokens whose KV the prefix cache had at admission
        self.passing: PrefixNode | None = None  # node of its last copy, if neither at a branch nor at its prompt's end
        self.keys: list[Hashable] = []  # prefix-cache keys of the first full pages, made when first needed
        self.run_keys: list[bytes] = []  # keys of its first runs of pages in the tiers behind the prefix cache
        self.num_stored = 0  # of these, the runs that were given to the tiers, or were there
        self.restorable = self.max_length  # tokens of its prefix that may still be restored for its next admission
        self.node: PrefixNode | None = None  # the locked path: pages[:node.depth] are those of the prefix tree
        self.stop_token: int | None = None

    def __repr__(self) -> str:
        return (
            f"Request({self.id!r}, {self.state.value}, {self.num_computed} of {len(self.tokens)} tokens computed, "
            f"{self.num_prompt} prompt, priority {self.priority})"
        )

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of the order of service: smaller priority first, then earlier arrival."""
        return (self.priority, self.arrival)

    @property
    def num_generated(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def num_left(self) -> int:
        """Tokens whose KV must be computed before the next one can be sampled; 1 while decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def num_shared(self) -> int:
        """Number of tokens whose KV lies in pages of the prefix cache, which are never written again."""
        return self.node.depth * self.page_tokens if self.node is not None else 0

    @property
    def num_shareable(self) -> int:
        """Prompt tokens that a request with the same prompt could take from the prefix cache: full pages, without the
        last token."""
        return (self.num_prompt - 1) // self.page_tokens * self.page_tokens

    def admit(self, pages: list[int], node: PrefixNode | None, state_slot: int) -> None:
        """Start (again) from `pages`, whose KV is computed already; node: the locked end of that cached prefix."""
        self._move(State.RUNNING)
        self.pages, self.node, self.state_slot = pages, node, state_slot
        self.restorable = self.max_length
        self.num_computed = len(pages) * self.page_tokens

    def preempt(self) -> None:
        """Back to waiting: the tokens stay, their KV will be computed again."""
        self._move(State.WAITING)

    def finish(self) -> None:
        self._move(State.FINISHED)

    def forget_pages(self) -> None:
        """Drop page table, state slot and computed tokens; the scheduler has released them."""
        self.pages, self.num_computed, self.node, self.state_slot = [], 0, None, NO_SLOT
        self.copied_tokens, self.branch_tokens, self.copy_from, self.passing = 0, 0, NO_SLOT, None
        self.expert_tokens, self.streamed_tokens = 0, 0.0

    def count_experts(self, num_tokens: int, streamed: float) -> None:
        """Count computed prompt tokens, for which this fraction of the experts in RAM was copied to the GPU."""
        self.expert_tokens += num_tokens
        self.streamed_tokens += num_tokens * streamed

    @property
    def prompt_experts(self) -> PromptExperts | None:
        if not self.expert_tokens:
            return None
        streamed = round(self.streamed_tokens)
        return PromptExperts(streamed, self.expert_tokens - streamed)

    def append(self, token: int) -> FinishReason | None:
        """Take a sampled token; return how the answer ends, or None if it goes on.

        An eos or stop token ends it with "stop", is kept in `stop_token` and is not part of the answer. Before
        min_tokens it is an ordinary token (the sampler forbids it there), unless a grammar allows nothing else.
        "length": max_tokens or context reached.
        """
        if token in self.stop_ids and (len(self.tokens) >= self.min_length or self.row.matcher is not None):
            self.stop_token = token
            return "stop"
        self.tokens.append(token)
        return "length" if len(self.tokens) >= self.max_length else None

    def truncate(self, num_tokens: int) -> None:
        """Forget computed KV from token `num_tokens` on (rejected drafts, or drafts beyond the end).

        Raises ValueError if that reaches into pages of the prefix cache, which other requests may use.
        """
        if num_tokens < self.num_shared:
            raise ValueError(
                f"{self!r} cannot be truncated to {num_tokens} tokens: the prefix cache shares its first "
                f"{self.num_shared}"
            )
        self.num_computed = min(self.num_computed, num_tokens)

    def _move(self, state: State) -> None:
        if (self.state, state) not in _LEGAL:
            raise RuntimeError(f"request {self.id!r} cannot go from {self.state.value} to {state.value}")
        self.state = state
