"""Chat templates as published: those that llama.cpp keeps for its tests, from the sources of llama-cpp-python."""

from __future__ import annotations

from fetched import unpacked

_REQUIREMENT = "llama-cpp-python==0.3.36"
_SHA256 = "832db0699007f1be95a7e41ef12e88926b02ba836461e36a36372db2760c1a2e"


def published_templates() -> dict[str, str]:
    """Return the templates' source text by file name without its ending. Skips the test without a network."""
    folder = unpacked(_REQUIREMENT, _SHA256, source=True)
    return {
        path.stem: path.read_text(encoding="utf-8")
        for path in folder.glob("*/vendor/llama.cpp/models/templates/*.jinja")
    }
