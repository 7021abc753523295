"""The config reader itself: types, aliases, unread keys."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.errors import ConfigError
from proa.models.config_reader import BOOKKEEPING, Reader

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()


@given(st.dictionaries(st.text(min_size=1), SCALARS))
def test_unread_keys_are_errors(values: dict[str, Any]) -> None:
    unknown = sorted(key for key, value in values.items() if value is not None and key not in BOOKKEEPING)
    if not unknown:
        return Reader(values).refuse_unread()
    with pytest.raises(ConfigError) as caught:
        Reader(values).refuse_unread()
    for key in unknown:
        assert f"--ignore-config-key {key}" in str(caught.value)
    Reader(values, ignore_keys=unknown).refuse_unread()
    return None


@given(SCALARS, st.sampled_from([int, float, bool, str]))
def test_get_returns_the_type_or_refuses(value: object, kind: type[Any]) -> None:
    reader = Reader({"key": value})
    accepted = type(value) is kind or (kind is float and type(value) is int)
    if value is None:
        assert reader.get("key", kind, None) is None
    elif accepted:
        assert reader.get("key", kind) == kind(value)  # beyond 2**53 a float is not the int it came from
        assert type(reader.get("key", kind)) is kind
    else:
        with pytest.raises(ConfigError, match="'key' must be"):
            reader.get("key", kind)


def test_null_is_absent() -> None:
    reader = Reader({"a": None})
    assert not reader.has("a")
    assert reader.get("a", int, 7) == 7
    with pytest.raises(ConfigError, match="'a' is missing"):
        reader.get("a", int)
    assert reader.keys == ()
    outer = Reader({"unknown": None, "inner": {"unknown": None}})
    outer.sub("inner")
    outer.refuse_unread()


def test_get_any() -> None:
    assert Reader({"a": 1, "b": 1}).get_any(("a", "b"), int) == 1
    assert Reader({"b": 2}).get_any(("a", "b"), int) == 2
    assert Reader({}).get_any(("a", "b"), int, 3) == 3
    with pytest.raises(ConfigError, match="must agree"):
        Reader({"a": 1, "b": 2}).get_any(("a", "b"), int)
    with pytest.raises(ConfigError, match="'a' is missing"):
        Reader({}).get_any(("a", "b"), int)


def test_expect() -> None:
    Reader({}).expect("a", 1)
    Reader({"a": None}).expect("a")
    Reader({"a": [1]}).expect("a", [1])
    with pytest.raises(ConfigError, match="a = 2 is not implemented, only 1"):
        Reader({"a": 2}).expect("a", 1)
    with pytest.raises(ConfigError, match="only null"):
        Reader({"a": 2}).expect("a")


def test_unread_keys_of_inner_objects_are_reported() -> None:
    reader = Reader({"inner": {"a": 1, "b": 2}}, "some/config.json")
    assert reader.sub("inner").get("a", int) == 1
    with pytest.raises(ConfigError, match=r"some/config.json: inner: 1 key.*b = 2"):
        reader.refuse_unread()


def test_ignored_and_bookkeeping_keys_are_no_leftovers() -> None:
    reader = Reader({"a": 1, "model_type": "x", "torch_dtype": "float16", "use_cache": True})
    reader.ignore("training only", "a")
    reader.refuse_unread()


@pytest.mark.parametrize("key", ["name_or_path", "_name_or_path"])
def test_the_name_that_a_quantiser_writes_is_bookkeeping(key: str) -> None:
    """QuantTrio's published files, AWQ of MiniMax-M2.1 among them, have it without transformers' underscore."""
    Reader({key: "tclf90/MiniMax-M2.1-AWQ"}).refuse_unread()
