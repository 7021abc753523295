"""How decode steps and prefill blocks divide the time of the device and the CPU: the share, the blocks that are due,
and the length of prefill steps (decision 038).

A turn is a slice of time in which either a decode step or some blocks of a prefill step compute; a turn of prefill ends
after a whole block.
"""

from __future__ import annotations

from collections.abc import Callable

PREFILL_SHARE = 0.5
MOST_BLOCK_S = 0.05  # longest stall of decode: one prefill block
ALONE_S = 0.1  # a cancelled prompt computes on for so long, and a new request waits for it
LEAST_TOKENS = 512  # least size of a prefill step beside decode
SHORT_TOKENS = 1024  # prompts with at most so many tokens to compute may overtake a step of longer ones
LONG_TOKENS = 8 * SHORT_TOKENS  # prompts with so many do not share a step with short ones
LEAST_WAIT_S = 0.3  # a short prompt waits for a step that is expected to end sooner
GRAIN_TOKENS = 256  # steps of fewer tokens are not used to estimate speed: reading weights takes all their time

# Decode waits for a whole shared step, but only for a block of a step in turns. In turns, long steps pay off for the
# CPU's experts: on an Emerald Rapids, 4096 tokens took a third of the time in one step that they took in eight.
SHARED_TOKENS, TURN_TOKENS = 512, (4096, 2048, 1024)
MOST_VRAM = 0.02  # share of free VRAM that the rows of a step in turns may take


def prefill_share(*, gpu_only: bool, deterministic: bool) -> float:
    """Fraction of time for prefill while requests decode; 0: they share steps, which --deterministic rules out. Steps
    without experts on the CPU are short: they are shared."""
    return 0.0 if gpu_only and not deterministic else PREFILL_SHARE


def blocks_due(share: float, owed: float, step_s: float, block_s: float) -> tuple[int, float]:
    """Prefill blocks due after a decode step, so that they take the fraction `share` of the time, and the blocks still
    owed, a fraction below 1, for the next call. step_s, block_s: durations of both, 0: not measured yet, one block is
    due. A block that takes longer than its share of one step is due after several steps."""
    if not step_s or not block_s:
        return 1, owed
    owed += share / (1 - share) * step_s / block_s
    return int(owed), owed - int(owed)


def blocks_alone(block_s: float) -> int:
    """Prefill blocks that are computed at a time while nothing decodes. block_s: duration of one, 0: not measured."""
    return max(1, int(ALONE_S / block_s)) if block_s else 1


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


def fitting_tokens(tokens: int, block_s: float) -> int:
    """The number of tokens at which a block takes MOST_BLOCK_S, given that `tokens` took block_s."""
    fitting = int(tokens * MOST_BLOCK_S / block_s)
    return max(LEAST_TOKENS, fitting - fitting % GRAIN_TOKENS)


def turn_tokens(rows_bytes: Callable[[int], int], free_bytes: int, least: int) -> tuple[int, ...]:
    """Candidate lengths of prefill steps in turns, above `least` tokens, the longest first. rows_bytes(tokens): VRAM of
    a step's rows; free_bytes: of VRAM."""
    room_bytes = MOST_VRAM * free_bytes
    return tuple(tokens for tokens in TURN_TOKENS if tokens > least and rows_bytes(tokens) <= room_bytes)
