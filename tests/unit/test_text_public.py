"""The public names exist, and importing them imports no heavy packages."""

from __future__ import annotations

import subprocess
import sys

import pytest

import proa


@pytest.mark.parametrize("name", proa.__all__)
def test_every_public_name_exists(name: str) -> None:
    value = getattr(proa, name)
    assert value is getattr(proa, name)
    assert value.__doc__
    assert name in dir(proa)


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'LMM'"):
        _ = proa.LMM  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("code", "absent"),
    [
        ("import proa", {"torch", "transformers", "tokenizers", "msgspec", "proa.errors"}),
        ("from proa import SamplingParams, Chat, EngineOptions, errors", {"torch", "transformers", "tokenizers"}),
        ("from proa import LLM, AsyncLLM", {"torch", "transformers"}),
    ],
)
def test_imports_stay_light(code: str, absent: set[str]) -> None:
    check = f"{code}; import sys; sys.exit(', '.join({absent!r} & set(sys.modules)) or 0)"
    done = subprocess.run(
        [sys.executable, "-c", check],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
