"""How decode steps and prefill blocks divide the time of the device and the CPU: the longest gap between decode steps,
the blocks that fit into it, and the length of prefill steps (decisions 038, 060).

A turn is a slice of time in which either a decode step or some blocks of a prefill step compute; a turn of prefill ends
after a whole block. A block here is a layer for one chunk of a prefill step, or for one group of its experts.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec

MAX_ITL = 2.5  # times the undisturbed gap
LEAST_ALLOWANCE = 0.1  # of a decode step: so much time prompts get on average if an absolute limit leaves less
# A turn while nothing decodes. A cancelled prompt waits for up to three of them: everything was given back after 120 ms
# with turns of 30 ms, after 87 with 12 and 56 with 6 (docs/lab/prefill-h200.md).
ALONE_S = 0.006
ALONE_BLOCK_S = 0.05  # longest block while nothing decodes: a request that comes then waits for it
FIRST_TOKENS = 512  # size of the first prefill step while nothing decodes
# Least size of a prefill step beside decode. A block reads most experts however few its tokens, so prompts crawl in
# shorter steps: at 128 tokens an MoE layer of Qwen3-30B-A3B has 47 % (bf16) and 97 % (int4) of its speed at 1024 on two
# cores of a Zen 5, 19 and 42 % with AMX, at 16 tokens 10 and 31 % (docs/lab/cpu-zen5.md, cpu-amx.md).
LEAST_TOKENS = 128
SHORT_TOKENS = 1024  # prompts with at most so many tokens to compute may overtake a step of longer ones
LONG_TOKENS = 8 * SHORT_TOKENS  # prompts with so many do not share a step with short ones
LEAST_WAIT_S = 0.3  # a short prompt waits for a step that is expected to end sooner
BESIDE_SPEED = 0.7  # of its speed alone: what a prompt is expected to keep beside decode steps (decision 069)
AIMED_SHARE = 0.85  # of the time for prefill between two decode steps that a block should take: it varies
GRAIN_TOKENS = 64  # lengths of prefill steps beside decode are multiples of this

# Decode waits for a whole shared step, but only for a block of a step in turns. In turns, long steps pay off for the
# CPU's experts: on an Emerald Rapids, 4096 tokens took a third of the time in one step that they took in eight.
SHARED_TOKENS, TURN_TOKENS = 512, (8192, 4096, 2048, 1024)
# Longest chunks that others may decode beside or between. Longer ones only where prompts stream, and while nothing
# decodes: an expert has twice the rows then (docs/lab/prefill-h200.md).
DECODING_TOKENS = 4096
# With more positions chunks have at most DECODING_TOKENS too: attention takes most of a block's time then, and a long
# block ends late. A cancelled prompt of 65536 tokens kept an H200 for 94 ms with chunks of 8192 rows, 56 with 4096.
FAR_TOKENS = 32768
MOST_VRAM = 0.02  # share of free VRAM that the rows of a step in turns may take


class GapLimit(msgspec.Struct, frozen=True):
    """Longest gap between two decode steps while a prompt is computed: `factor` times the undisturbed gap or, if that
    is 0, `seconds`."""

    factor: float = 0.0
    seconds: float = 0.0

    def longest_s(self, step_s: float) -> float:
        """The longest gap if the undisturbed one is step_s seconds."""
        return self.factor * step_s if self.factor else self.seconds

    def allowance_s(self, step_s: float) -> float:
        """Time for prefill after a decode step of step_s seconds. An absolute limit that leaves hardly any is exceeded,
        so that prompts advance."""
        if self.factor:
            return (self.factor - 1) * step_s
        return max(self.seconds - step_s, LEAST_ALLOWANCE * step_s)


def default_limit(*, gpu_only: bool, deterministic: bool) -> GapLimit | None:
    """The default of --max-itl. None: prefill and decode share steps, which --deterministic rules out. Steps without
    experts on the CPU are short: they are shared."""
    return None if gpu_only and not deterministic else GapLimit(factor=MAX_ITL)


def blocks_due(allowance_s: float, owed: float, block_s: float) -> tuple[int, float]:
    """Prefill blocks due after a decode step, and the blocks still owed, for the next call. allowance_s: time for them;
    block_s: duration of one, 0: not measured yet, one block is due.

    As many as fit. A block that does not fit is due after as many steps as keep the mean of the gaps within the limit;
    one that was computed before it was measured counts as paid in advance, so `owed` may be negative."""
    if not block_s:
        return 1, owed - 1
    if block_s <= allowance_s:
        return int(allowance_s / block_s), 0.0
    owed += allowance_s / block_s
    return (1, owed - 1) if owed >= 1 else (0, owed)


def blocks_alone(block_s: float) -> int:
    """Prefill blocks that are computed at a time while nothing decodes. block_s: duration of one, 0: not measured."""
    return max(1, int(ALONE_S / block_s)) if block_s else 1


def beside_pays(copied_s: float, divided_s: float, share: float) -> bool:
    """True if a prompt ends sooner beside decode steps, with all its experts copied, than in turns with them.
    copied_s, divided_s: its time alone with all experts copied, and as divided with the CPU; share: of the time, in
    turns."""
    return copied_s * share <= divided_s * BESIDE_SPEED


def left_s(age_s: float, done_share: float, num_tokens: int) -> float:
    """Expected time until a step that has been computed for age_s seconds ends. done_share: the fraction of it that is
    computed; before the first part is, only a long step is expected to take long."""
    if done_share:
        return age_s * (1 - done_share) / done_share
    return float("inf") if num_tokens >= LONG_TOKENS else 0.0


def over_tokens(batch_tokens: int) -> int:
    """Most tokens of a prefill step that overtakes another one. batch_tokens: most tokens that are computed at once."""
    return min(SHORT_TOKENS, batch_tokens)


def overtaking_tokens(most: int, left_s: float, token_s: float) -> int:
    """How many tokens, at most `most`, may overtake a step that needs left_s more. token_s: time per token of prompts
    that overtake, 0: not measured yet. They do not if they would be done later than that step."""
    if left_s < LEAST_WAIT_S:
        return 0
    return int(min(most, left_s / token_s)) if token_s else most


def fitting_tokens(tokens: int, block_s: float, most_s: float, least: int) -> int:
    """The number of tokens, at least `least`, at which a block takes most_s, given that `tokens` took block_s."""
    fitting = int(tokens * most_s / block_s)
    return max(least, fitting - fitting % GRAIN_TOKENS)


def turn_tokens(rows_bytes: Callable[[int], int], free_bytes: int, least: int) -> tuple[int, ...]:
    """Candidate lengths of prefill steps in turns, above `least` tokens, the longest first. rows_bytes(tokens): VRAM of
    a step's rows; free_bytes: of VRAM."""
    room_bytes = MOST_VRAM * free_bytes
    return tuple(tokens for tokens in TURN_TOKENS if tokens > least and rows_bytes(tokens) <= room_bytes)
