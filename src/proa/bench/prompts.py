"""Makes prompts of an exact length that share no cached prefix."""

from __future__ import annotations

import random

from proa.errors import UsageError

# English prose, for realistic expert routing: the beginning of H. Melville, Moby-Dick (1851).
TEXT = """\
Call me Ishmael. Some years ago, never mind how long precisely, having little or no money in my purse, and nothing
particular to interest me on shore, I thought I would sail about a little and see the watery part of the world. It is
a way I have of driving off the spleen and regulating the circulation. Whenever I find myself growing grim about the
mouth; whenever it is a damp, drizzly November in my soul; whenever I find myself involuntarily pausing before coffin
warehouses, and bringing up the rear of every funeral I meet; and especially whenever my hypos get such an upper hand
of me, that it requires a strong moral principle to prevent me from deliberately stepping into the street, and
methodically knocking people's hats off, then, I account it high time to get to sea as soon as I can. This is my
substitute for pistol and ball. With a philosophical flourish Cato throws himself upon his sword; I quietly take to
the ship. There is nothing surprising in this. If they but knew it, almost all men in their degree, some time or
other, cherish very nearly the same feelings towards the ocean with me. There now is your insular city of the
Manhattoes, belted round by wharves as Indian isles by coral reefs, commerce surrounds it with her surf. Right and
left, the streets take you waterward. Its extreme downtown is the battery, where that noble mole is washed by waves,
and cooled by breezes, which a few hours previous were out of sight of land. Look at the crowds of water-gazers there.
Circumambulate the city of a dreamy Sabbath afternoon. Go from Corlears Hook to Coenties Slip, and from thence, by
Whitehall, northward. What do you see? Posted like silent sentinels all around the town, stand thousands upon
thousands of mortal men fixed in ocean reveries.
"""


def distinct_prompts(text_tokens: list[int], count: int, length: int) -> list[list[int]]:
    """Make `count` prompts of `length` tokens, each with different first two tokens, so that the prefix cache, which
    works on whole pages, never matches.

    The first two tokens encode the prompt's number in tokens of the text; the rest is the text, repeated. Raises
    UsageError if `length` is below 2, or `count` is too large.
    """
    letters = sorted(set(text_tokens))
    if length < 2 or count > len(letters) ** 2:
        raise UsageError(
            f"{count} different prompts of {length} tokens are impossible.",
            f"Use prompts of at least 2 tokens, and at most {len(letters) ** 2} prompts.",
        )
    body = text_tokens * (-(-length // len(text_tokens)))
    return [[letters[i % len(letters)], letters[i // len(letters)], *body[: length - 2]] for i in range(count)]


def random_prompts(vocab: int, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """Make `count` prompts of `length` random tokens, equal in every run. For random weights: these do not need text,
    and give equal answers to prompts with equal endings. The first two tokens encode the prompt's number.

    Raises UsageError if `length` is below 2, or `count` is too large.
    """
    draw = random.Random(seed)
    starts = distinct_prompts(list(range(vocab)), count, min(length, 2))
    return [[*start, *draw.choices(range(vocab), k=length - 2)] for start in starts]
