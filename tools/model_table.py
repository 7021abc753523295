"""Print the README's table of models: bytes by Proa's own pure functions of the spec, tokens/s measured or predicted.

Run: python tools/model_table.py. Published configs come from tests/families/hub_configs.json.

VRAM is the least that a model needs with every routed expert in RAM: dense weights, KV of one context of CONTEXT
tokens, workspace, CUDA. RAM is the routed experts, the process and the workspace. A predicted rate is the roof: dense
weights and KV from VRAM, then the chosen experts from RAM, at the bandwidths below; nothing else costs time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proa.models.families import declare
from proa.models.spec import Model
from proa.plan.packed_size import dummy_types
from proa.plan.placement import moe_layers
from proa.plan.plan import step_seconds
from proa.plan.roof import past_bytes
from proa.plan.vram import dense_read_bytes, host_workspace_bytes, loading_bytes, process_bytes, vram_demand

CONFIGS = Path(__file__).resolve().parents[1] / "tests" / "families" / "hub_configs.json"

# The bandwidths of the run that measured Qwen3-30B-A3B whole in bf16: docs/lab/hybrid-h200.md, 2026-11-27.
RAM_BYTES_PER_S, VRAM_BYTES_PER_S = 154e9, 4.42e12
CONTEXT, PAGE_TOKENS, RUNNING, BATCH_TOKENS = 8192, 16, 4, 512
ROOF_CONTEXT = 1024  # as the measured runs

GIB = 1 << 30


@dataclass(frozen=True)
class Row:
    """A published config, in one format. `measured`: tokens/s of a whole model with its experts in RAM, if any."""

    config: str
    form: str
    measured: float | None = None


ROWS = (
    Row("openai/gpt-oss-20b", "mxfp4"),
    Row("deepseek-ai/DeepSeek-V2-Lite-Chat", "bf16"),
    Row("mistralai/Mixtral-8x7B-v0.1", "int4"),
    Row("Qwen/Qwen3-30B-A3B", "int4", measured=91.8),
    Row("Qwen/Qwen3-30B-A3B", "fp8", measured=52.7),
    Row("Qwen/Qwen3-30B-A3B", "bf16", measured=33.5),
    Row("Qwen/Qwen3-Next-80B-A3B-Instruct", "int4"),
    Row("zai-org/GLM-4.5-Air", "int4"),
    Row("openai/gpt-oss-120b", "mxfp4"),
    Row("MiniMaxAI/MiniMax-M2.5", "fp8"),
    Row("Qwen/Qwen3-235B-A22B", "int4"),
    Row("deepseek-ai/DeepSeek-V3", "fp8"),
    Row("moonshotai/Kimi-K2-Instruct", "fp8"),
)


def kept(spec: Model, form: str) -> dict[str, str]:
    """The stored type of each parameter. MXFP4 is gpt-oss': its experts alone."""
    types = dummy_types(spec, form)
    if form != "mxfp4":
        return types
    return {name: kind if ".ffn.experts." in name else "BF16" for name, kind in types.items()}


def vram_bytes(spec: Model, stored: dict[str, str]) -> int:
    need = vram_demand(spec, PAGE_TOKENS, RUNNING, BATCH_TOKENS, False, stored)
    return need.total_bytes(CONTEXT, need.pages(CONTEXT))


def ram_bytes(spec: Model, stored: dict[str, str]) -> int:
    layers = moe_layers(spec, stored)
    experts = sum(layer.total_bytes for layer in layers)
    return (
        experts
        + process_bytes(simulated=False)
        + loading_bytes(layers, inclusive=True)
        + host_workspace_bytes(spec, RUNNING, BATCH_TOKENS)
    )


def roof_tokens_per_s(spec: Model, stored: dict[str, str]) -> float:
    """Roof of decode, tokens/s: one request, uniform routing, no expert in VRAM, no prefetch of the next layer."""
    from_ram = sum(layer.top_k * layer.expert_bytes for layer in moe_layers(spec, stored))
    from_vram = dense_read_bytes(spec, stored) + past_bytes(spec, ROOF_CONTEXT, 2, 2)
    return 1 / step_seconds(from_vram / VRAM_BYTES_PER_S, 0, from_ram / RAM_BYTES_PER_S, read_ahead=False)


def lines() -> Iterator[str]:
    """One Markdown line for each of ROWS."""
    entries: dict[str, dict[str, Any]] = json.loads(CONFIGS.read_bytes())
    for row in ROWS:
        entry = entries[row.config]
        spec = declare(entry["config"]).spec
        stored = kept(spec, row.form)
        rate = row.measured or roof_tokens_per_s(spec, stored)
        said = "measured" if row.measured else "predicted"
        sizes = f"{vram_bytes(spec, stored) / GIB:.1f} | {ram_bytes(spec, stored) / GIB:.0f}"
        yield f"| {entry['documented']} | {row.form} | {sizes} | {rate:.0f} | {said} |"


if __name__ == "__main__":
    print("\n".join(lines()))
