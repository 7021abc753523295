"""Prompts of an exact length that no prefix cache knows. Never: tokenizing."""

from __future__ import annotations

import random

from proa.errors import UsageError

# Plain prose, so that routing is that of real text. The beginning of H. Melville, Moby-Dick (1851).
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
    """`count` prompts of `length` tokens. Each has its own first two tokens, so that a cache of whole pages never
    matches.

    The first two tokens spell the prompt's number with the text's own vocabulary; the rest is the text, repeated.
    Raises UsageError if `length` is too short to tell them apart.
    """
    letters = sorted(set(text_tokens))
    if length < 2 or count > len(letters) ** 2:
        raise UsageError(f"{count} prompts of {length} tokens cannot differ.", "Use prompts of two tokens or more.")
    body = text_tokens * (-(-length // len(text_tokens)))
    return [[letters[i % len(letters)], letters[i // len(letters)], *body[: length - 2]] for i in range(count)]


def random_prompts(vocab: int, count: int, length: int, seed: int = 0) -> list[list[int]]:
    """`count` prompts of `length` random tokens, the same every time: for random weights, to which text is nothing
    else, and answers to prompts that end alike are alike. The first two tokens spell the prompt's number.

    Raises UsageError if `length` is too short to tell them apart.
    """
    draw = random.Random(seed)
    starts = distinct_prompts(list(range(vocab)), count, min(length, 2))
    return [[*start, *draw.choices(range(vocab), k=length - 2)] for start in starts]
