"""SamplingParams from Python: every invalid value raises a RequestError that names the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from proa.errors import RequestError
from proa.types import SamplingParams

WRONG: list[tuple[str, Any]] = [
    ("max_tokens", 2.5), ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", "5"), ("n", 2.5), ("n", 0),
    ("seed", 1.5), ("seed", 2**64), ("logprobs", True), ("logprobs", 2.5), ("temperature", float("nan")),
    ("temperature", -0.1), ("temperature", "warm"), ("top_p", 0.0), ("top_p", 1.1), ("min_p", 2), ("top_k", -1),
    ("repetition_penalty", 1e-38), ("stop", [""]), ("stop", [5]), ("stop", 5), ("stop_token_ids", 5),
    ("stop_token_ids", ["a"]), ("logit_bias", {"5": 1.0}), ("logit_bias", {5: 101.0}), ("ignore_eos", "yes"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_wrong_values_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name.removesuffix("_ids") if name != "stop" else "(?i)stop") as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name


def test_a_string_is_one_stop_string_and_lists_become_tuples() -> None:
    assert SamplingParams(stop="END 1").stop == ("END 1",)  # type: ignore[arg-type]
    params = SamplingParams(stop=["a", "b"], stop_token_ids=[1], temperature=1)  # type: ignore[arg-type]
    assert (params.stop, params.stop_token_ids, params.temperature) == (("a", "b"), (1,), 1.0)


def test_what_is_accepted_survives_the_wire() -> None:
    params = SamplingParams(n=3, seed=2**64 - 1, logit_bias={5: -1}, stop=("x",), top_p=0.5)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(params), type=SamplingParams) == params
