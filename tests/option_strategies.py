"""A hypothesis strategy for instances of any option group."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from proa.config.field import Declaration, build, declarations

TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), min_size=1, max_size=8)


def value_for(declared: Declaration) -> st.SearchStrategy[Any]:
    info = declared.info
    if info.choices:
        values: st.SearchStrategy[Any] = st.sampled_from(info.choices)
    elif declared.repeatable:
        return st.lists(TEXTS, max_size=3).map(tuple)
    elif declared.type is bool:
        values = st.booleans()
    elif declared.type is int:
        values = st.integers(int(info.low or 0), int(info.high or 2**63 - 1))
    elif declared.type is float:
        values = st.floats(info.low, info.high)
    else:
        values = TEXTS
    return values | st.none() if declared.default is None else values


def instances(group: type) -> st.SearchStrategy[Any]:
    values = {name: value_for(declared) for name, declared in declarations(group).items()}
    return st.fixed_dictionaries({}, optional=values).map(lambda given: build(group, given))
