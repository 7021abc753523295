"""Formats of strings in plain text are those that llguidance enforces in JSON strings."""

from __future__ import annotations

import json
import random
import re

import pytest

from grammars import EOS, allowed, matcher, random_answer, text_of
from proa.grammar.text_formats import TEXT_FORMATS
from proa.types import Constraint

UUID = "123e4567-e89b-12d3-a456-426614174000"
TEXTS = {
    "date": "2024-02-29 2024-02-30 2024-13-01 2024-04-31 2024-04-30 2024-4-1 24-01-01",
    "time": "12:00:00Z 12:00:00 24:00:00Z 12:00:60Z 12:00:00.5+01:00 12:00:00z 12:00:00+0100 12:60:00Z",
    "date-time": "2024-01-31T12:00:00Z 2024-01-31t12:00:00Z 2024-01-31 2024-01-31T12:00:00.123-08:00",
    "duration": "P P1D PT PT1H30M P1Y2M3DT4H5M6S P2W P1WT1H P1Y3D PT1.5S PT1H5S 1D",
    "email": "a@b.c a.b+c@ex-ample.org a@b @b.c a@ a@-b.c a..b@c.d a",
    "hostname": f"a a.b -a a- a_b 1.2 a..b a. {'a' * 63} {'a' * 64}",
    "ipv4": "1.2.3.4 256.1.1.1 1.2.3 01.2.3.4 0.0.0.0 255.255.255.255 1.2.3.4.5",
    "ipv6": ":: ::1 1:: 1::8 fe80::a 1:2:3:4:5:6:7:8 1:2:3:4:5:6:7 1:2:3:4:5:6:7:: ::2:3:4:5:6:7:8 1::2::3 12345:: "
    "1:2:3:4:5:6:7:8:9 1:2:3:4::5:6:7:8 1:2:3::5:6:7:8 1:2::3:4:5:6:7:8 1:2:3:4:5:6:7::8 fe80::1%eth0 : g::",
    "uuid": f"{UUID} {UUID.upper()} {UUID.replace('-', '')} {UUID[1:]} {UUID}0",
    "uri": "http://a.b/c?d=e#f a:b a /x http://[::1]/ mailto:x@y.z http://a/%zz http://a/%20 a:b#c#d 1a:b http:// "
    "http://u:p@a.b:80 a:[] a://[x] a:///b a:/b//c a:?[ a:b]",
}


@pytest.mark.parametrize("name", TEXT_FORMATS)
def test_the_same_texts_as_in_json(name: str) -> None:
    held = Constraint.json({"type": "string", "format": name})
    texts = ["", *TEXTS[name].split(" ")]
    found = [text for text in texts if re.fullmatch(TEXT_FORMATS[name], text)]
    assert found == [text for text in texts if accepts(held, json.dumps(text))]
    assert 0 < len(found) < len(texts)


@pytest.mark.parametrize("name", sorted(TEXT_FORMATS.keys() - {"ipv6"}))  # which in JSON may have no IPv4 address
def test_random_texts_are_the_same(name: str) -> None:
    of_json = Constraint.json({"type": "string", "format": name})
    of_text = Constraint.regex(TEXT_FORMATS[name].replace(r"\/", "/"))
    for seed in range(8):
        written = random_answer(matcher(of_json), random.Random(seed))
        assert written is None or re.fullmatch(TEXT_FORMATS[name], json.loads(text_of(written)))
        plain = random_answer(matcher(of_text), random.Random(seed))
        assert plain is None or accepts(of_json, json.dumps(text_of(plain)))


def accepts(constraint: Constraint, text: str) -> bool:
    """Whether a constraint allows the text, byte by byte, and then its end."""
    follower, tokens = matcher(constraint), [*text.encode(), EOS]
    return all(token in allowed(follower.mask(tokens[:at], 0)) for at, token in enumerate(tokens))
