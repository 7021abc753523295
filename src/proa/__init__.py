"""Proa runs Mixture-of-Experts language models. This package exports the public names, imported on first use.

Importing `proa` loads no other module, so that `proa --help` is fast and the API process does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from proa import errors
    from proa.blocking import LLM
    from proa.config.options import EngineOptions
    from proa.llm import AsyncLLM
    from proa.text.answer import Answer
    from proa.types import Chat, Constraint, SamplingParams, Tag, Tags

__all__ = [
    "LLM",
    "Answer",
    "AsyncLLM",
    "Chat",
    "Constraint",
    "EngineOptions",
    "SamplingParams",
    "Tag",
    "Tags",
    "errors",
]

_HOME = {
    "LLM": "proa.blocking",
    "AsyncLLM": "proa.llm",
    "Answer": "proa.text.answer",
    "Chat": "proa.types",
    "Constraint": "proa.types",
    "EngineOptions": "proa.config.options",
    "SamplingParams": "proa.types",
    "Tag": "proa.types",
    "Tags": "proa.types",
}


def __getattr__(name: str) -> Any:
    if name == "errors":
        return importlib.import_module("proa.errors")
    if name not in _HOME:
        raise AttributeError(f"module 'proa' has no attribute {name!r}")
    return vars(importlib.import_module(_HOME[name]))[name]


def __dir__() -> list[str]:
    return __all__
