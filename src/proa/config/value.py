"""Converts and checks one value of one option: from text (flags) or typed data (YAML, Python), and back to text.

All sources use this module, so ranges and error messages are the same for all.
"""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Any
from urllib.parse import urlsplit

from proa.config.field import Declaration
from proa.config.suggest import did_you_mean
from proa.errors import UsageError
from proa.obs.units import format_bytes

_SIZE = re.compile(r"(-?\d+(?:\.\d+)?)\s*([kmgtp]?)(i?b)?", re.IGNORECASE)
_COUNT = re.compile(r"(-?\d+(?:\.\d+)?)\s*([km])", re.IGNORECASE)
_LARGEST = 2**63 - 1  # largest integer in a message to the engine


def parse_size(text: str) -> int:
    """Parse a size such as "24GiB", "512M" or "1.5G" to bytes: K, M, G, T, P and KiB, ... are powers of 1024, KB, ...
    of 1000. Raises ValueError.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None or (not match[2] and (match[3] or "").lower() == "ib"):
        raise ValueError(text)
    step = 1000 if (match[3] or "").lower() == "b" and match[2] else 1024
    exponent = "kmgtp".index(match[2].lower()) + 1 if match[2] else 0
    return int(Decimal(match[1]) * step**exponent)


def parse_tokens(text: str) -> int:
    """Parse a number of tokens such as "32768", "32k" or "1M": k is 1024 and M 1024 x 1024, in upper or lower case.
    Raises ValueError."""
    match = _COUNT.fullmatch(text.strip())
    if match is None:
        return int(text)
    count = Decimal(match[1]) * 1024 ** ("km".index(match[2].lower()) + 1)
    if count != int(count):
        raise ValueError(text)
    return int(count)


def from_text(option: Declaration, text: str, where: str) -> Any:
    """Convert a flag's text to a checked value. `where` names the option in errors ("--port"). Not for repeatable
    options. Raises UsageError."""
    try:
        if option.info.kind == "size":
            value: Any = parse_size(text)
        elif option.info.kind == "tokens":
            value = parse_tokens(text)
        elif option.type is bool:
            raise ValueError(text)  # a bool flag takes no text
        else:
            value = option.type(text)
    except ValueError:
        raise _wrong(option, repr(text), where) from None
    return check(option, value, where)


def from_data(option: Declaration, value: Any, where: str) -> Any:
    """Convert typed data (YAML, Python) to a checked value. Text is not accepted for a number, nor a number for text.

    None means not given, if the option's default is None. Raises UsageError.
    """
    if value is None and option.default is None:
        return None
    if option.repeatable:
        if not isinstance(value, list | tuple) or not all(isinstance(v, str) for v in value):
            raise _wrong(option, _shown(value), where)
        return check(option, tuple(value), where)
    if option.info.kind == "size" and isinstance(value, str):
        return from_text(option, value, where)
    if option.info.kind == "tokens" and isinstance(value, str) and _COUNT.fullmatch(value):
        return from_text(option, value, where)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if option.info.kind == "word":
            value = str(value)
        elif option.type is float:
            value = float(value)
    if type(value) is not option.type:
        raise _wrong(option, _shown(value), where)
    return check(option, value, where)


def check(option: Declaration, value: Any, where: str) -> Any:
    """Return the value if it is one of the choices and in range. Raises UsageError that names both."""
    info = option.info
    if option.type is str:
        texts = value if option.repeatable else (value,)
        if "" in texts:
            raise _wrong(option, "empty", where)  # for example --api-key=$KEY with KEY unset
        if not all(is_utf8(text) for text in texts):
            raise UsageError(
                f"{where} is not UTF-8.", "Give text in UTF-8; rename a file or folder.", param=option.name
            )
    if info.choices and value not in info.choices:
        raise _wrong(option, repr(value), where, did_you_mean(str(value), info.choices))
    if option.type in (int, float):
        low, high = _bounds(option)
        if not low <= value <= high:  # NaN fails here too
            raise _wrong(option, to_text(option, value), where)
    return value


def is_utf8(text: str) -> bool:
    """False for a command line's bytes that are not UTF-8, which Python keeps as surrogates (PEP 383)."""
    return not any("\ud800" <= character <= "\udfff" for character in text)


def is_http_url(text: str) -> bool:
    """True for a URL of a server: http or https, a host, and no impossible port."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0 and " " not in text
    except ValueError:  # of a port or an IPv6 address
        return False


def expects(option: Declaration) -> str:
    """Describe the allowed values, such as "an integer from 0 to 65535" or "auto, bfloat16 or float16"."""
    info = option.info
    if info.choices:
        return " or ".join(filter(None, (", ".join(info.choices[:-1]), info.choices[-1])))
    if option.repeatable:
        return "a list of strings"
    if option.type is bool:
        return "true or false"
    if option.type is str:
        return "text or a number" if option.info.kind == "word" else "text"
    low, high = _bounds(option)
    if info.kind == "size":
        return "a size such as 24GiB, 512M or 1.5G" + (f", at least {low:.0f} B" if low > 0 else "")
    noun = "an integer" if option.type is int else "a number"
    noun += " (32k is 32768)" if info.kind == "tokens" else ""
    if info.high is not None:
        return f"{noun} from {_plain(low)} to {_plain(high)}"
    return f"{noun} of at least {_plain(low)}" if info.low is not None else noun


def to_text(option: Declaration, value: Any) -> str:
    """Format a value for the start-up report and the docs; secrets are hidden."""
    if value is None:
        return "not set"
    if option.info.secret:
        return "(hidden)" if value else "none"
    if option.repeatable:
        return ", ".join(value) or "none"
    if option.type is bool:
        return "on" if value else "off"
    if option.info.kind == "size":
        return format_bytes(value)
    return str(value)


def _bounds(option: Declaration) -> tuple[float, float]:
    low, high = option.info.low, option.info.high
    return -_LARGEST if low is None else low, _LARGEST if high is None else high


def _wrong(option: Declaration, shown: str, where: str, hint: str = "") -> UsageError:
    return UsageError(f"{where} is {shown}.", f"{hint} Give {expects(option)}.".strip(), param=option.name)


def _shown(value: Any) -> str:
    kinds = {str: "text", bool: "true or false", int: "a number", float: "a number", list: "a list"}
    shown = str(value).lower() if isinstance(value, bool) or value is None else repr(value)
    kind = kinds.get(type(value), f"of type {type(value).__name__}" if value is not None else "no value")
    return f"{shown if len(shown) <= 60 else shown[:57] + '...'} ({kind})"


def _plain(number: float) -> str:
    return f"{number:.0f}" if math.isfinite(number) and number == int(number) else f"{number:g}"
