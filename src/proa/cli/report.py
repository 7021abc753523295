"""The start-up report as text and as JSON: options, decisions with reasons, memory, ops, roof.

The JSON is printed twice, before loading (`ready` is null) and when the model is loaded:

    proa         version
    url, port    of the server; null without a server
    model        {asked, path, format, dtype, parameters, active_parameters, layers, experts, experts_per_token}
    context_tokens, max_running
    memory       {free_bytes, reserve_bytes, usable_bytes, weights_bytes, kv_bytes, workspace_bytes,
                  loading_bytes, process_bytes, states_bytes, simulated_vram_bytes, prefix_cache_bytes, kv_pages,
                  page_tokens, state_copies} of RAM; kv_pages and state_copies count those in VRAM too
    gpus         of each rank {rank, host, index, name, uuid, capability, numa_node, pcie_bytes_per_s, vram, placement,
                  blocks, experts, expert_bytes, owners, resident, spare, vram_moves, co_fetch, co_fetch_half,
                  read_ahead, ring_bytes, prefill, doorbell, fp8_activations, deferred, inclusive, prompt_graphs,
                  block_graphs, device, gpu_only};
                  none without a GPU; vram: {total_bytes, free_bytes, reserve_bytes, usable_bytes, context_bytes,
                  dense_bytes, dense_read_bytes, kv_bytes, workspace_bytes, graphs_bytes, experts_bytes, spare_bytes,
                  states_bytes, ring_bytes}; blocks, experts, expert_bytes, owners and resident have one entry per MoE
                  layer; owners: each expert's rank, -1 for the CPU
                  gpus also have save_counts and trace: paths of output files, or null
    options      [{name, value, source}]       those that differ from their defaults
    decisions    [{name, asked, got, why}]
    roof         {bytes_per_token, bandwidth_bytes_per_s, vram, bound_by, tokens_per_s}; vram: of each
                 pipeline stage's ranks {dense_bytes_per_token, expert_bytes_per_token, bandwidth_bytes_per_s, source,
                 read_ahead}; empty without a GPU
    ready        {load_seconds, weights_bytes, peak_rss_bytes, decode_threads, prefill_threads,
                 ops: {op: implementation}, formats: {weight format: bytes}, pages: {kind of page: bytes},
                 decisions: [{name, asked, got, why}], caller_cpus, round_trip_us, timeline} or null
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import msgspec
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from proa.config.parse import GivenOption
from proa.engine.ipc import Ready
from proa.models.spec import Model
from proa.obs.units import format_bytes, format_count, format_duration, format_rate
from proa.plan.plan import GpuPlan, Plan, Roof, VramRoof
from proa.types import Decision


@dataclass(frozen=True)
class Report:
    """The report's contents; `ready` and `url` are None until known."""

    version: str
    plan: Plan
    spec: Model
    asked: Sequence[GivenOption] = ()
    ready: Ready | None = None
    url: str | None = None
    port: int | None = None


def report_json(report: Report) -> dict[str, Any]:
    """Build the JSON object described at the top of this file."""
    plan, memory = report.plan, report.plan.memory
    experts = _experts(report.spec)
    described = {
        "proa": report.version,
        "url": report.url,
        "port": report.port,
        "model": {
            "asked": plan.model,
            "path": plan.path,
            "format": plan.load_format,
            "dtype": plan.dtype,
            "parameters": report.spec.num_params,
            "active_parameters": report.spec.num_active_params,
            "layers": len(report.spec.blocks),
            "experts": experts[0],
            "experts_per_token": experts[1],
        },
        "context_tokens": plan.context_tokens,
        "max_running": plan.max_running,
        "memory": {
            **msgspec.structs.asdict(memory),
            "usable_bytes": memory.usable_bytes,
            "kv_pages": plan.num_pages,
            "state_copies": plan.state_copies,
            "page_tokens": plan.page_tokens,
        },
        "gpus": [_gpu_fields(gpu) for gpu in plan.gpus],
        "options": report.asked,
        "decisions": plan.decisions,
        "roof": {
            **msgspec.structs.asdict(plan.roof),
            "bound_by": plan.roof.bound_by,
            "tokens_per_s": plan.roof.tokens_per_s,
        },
        "ready": None if report.ready is None else msgspec.structs.asdict(report.ready),
    }
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(described))
    return plain


def render_plan(report: Report) -> RenderableType:
    """Build the tables printed before loading: model, memory, roof, decisions, options."""
    return Group(
        Text(f"Proa {report.version}: {report.plan.model}", style="bold"),
        facts_table(report),
        decisions_table(report.plan.decisions),
        *([options_table(report.asked)] if report.asked else []),
    )


def render_ready(ready: Ready) -> RenderableType:
    """Build the tables printed when the model is loaded: time, memory, each op's implementation, further decisions."""
    by_choice: dict[str, list[str]] = {}
    for op, implementation in ready.ops.items():
        by_choice.setdefault(implementation, []).append(op)
    ops = "; ".join(f"{choice}: {', '.join(names)}" for choice, names in by_choice.items())
    rate = f" ({format_rate(ready.weights_bytes / ready.load_seconds)})" if ready.load_seconds > 0 else ""
    table = grid()
    table.add_row("loaded", f"{format_bytes(ready.weights_bytes)} in {format_duration(ready.load_seconds)}{rate}, "
                  f"peak memory {format_bytes(ready.peak_rss_bytes)}")  # fmt: skip
    table.add_row("threads", f"{ready.decode_threads} for decode, {ready.prefill_threads} for prefill")
    for row, sizes in (("weights", ready.formats), ("on pages", ready.pages)):
        if sizes:
            table.add_row(row, ", ".join(f"{format_bytes(n)} {name}" for name, n in sizes.items()))
    table.add_row("ops", ops)
    return Group(table, *([decisions_table(ready.decisions)] if ready.decisions else []))


def facts_table(report: Report) -> Table:
    plan, roof = report.plan, report.plan.roof
    table = grid()
    table.add_row("model", f"{_model_line(report.spec)}; {plan.load_format}, computed in {plan.dtype}")
    table.add_row("from", plan.path)
    for gpu in plan.gpus:
        table.add_row("VRAM", _vram_line(gpu))
    table.add_row("RAM" if plan.gpus else "memory", _memory_line(plan))
    table.add_row("roof", _roof_line(roof))
    return table


def _memory_line(plan: Plan) -> str:
    memory = plan.memory
    kept = "experts" if plan.gpus else "weights"
    parts = {
        f"{kept} {format_bytes(memory.weights_bytes)}": memory.weights_bytes,
        f"KV cache {format_bytes(memory.kv_bytes)}": memory.kv_bytes,
        f"recurrent states {format_bytes(memory.states_bytes)}": memory.states_bytes,
        f"workspace {format_bytes(memory.workspace_bytes)}": memory.workspace_bytes,
        f"simulated VRAM {format_bytes(memory.simulated_vram_bytes)}": memory.simulated_vram_bytes,
        f"prefix cache {format_bytes(memory.prefix_cache_bytes)}": memory.prefix_cache_bytes,
    }
    return (
        f"{' + '.join(part for part, size in parts.items() if size)} of {format_bytes(memory.usable_bytes)} usable "
        f"({format_bytes(memory.free_bytes)} free - {format_bytes(memory.reserve_bytes)} reserve)"
    )


def _vram_line(gpu: GpuPlan) -> str:
    vram = gpu.vram
    parts = {
        "dense weights": vram.dense_bytes,
        "KV cache": vram.kv_bytes,
        "recurrent states": vram.states_bytes,
        "experts": vram.experts_bytes + vram.spare_bytes,
        "ring for prompts": vram.ring_bytes,
        "workspace": vram.workspace_bytes,
        "CUDA": vram.context_bytes + vram.graphs_bytes,
    }
    return (
        f"{' + '.join(f'{name} {format_bytes(size)}' for name, size in parts.items() if size)} of "
        f"{format_bytes(vram.usable_bytes)} usable on {gpu.device}, {gpu.name}"
    )


def _roof_line(roof: Roof) -> str:
    start = f"{roof.tokens_per_s:.0f} tokens/s for one request: "
    from_ram = f"{format_bytes(roof.bytes_per_token)} read per token, {format_rate(roof.bandwidth_bytes_per_s)}"
    if not roof.vram:
        return f"{start}{from_ram} measured from RAM"
    in_vram = "; ".join(map(_vram_roof, chain.from_iterable(roof.vram)))
    beside = f"; {from_ram} measured from RAM" if roof.bytes_per_token else ""
    return f"{start}{in_vram}{beside}; limited by {roof.bound_by}"


def _vram_roof(of: VramRoof) -> str:
    read_bytes, rate = of.dense_bytes_per_token + of.expert_bytes_per_token, format_rate(of.bandwidth_bytes_per_s)
    return f"{format_bytes(read_bytes)} read per token from VRAM, {rate} ({of.source})"


def decisions_table(rows: Sequence[Decision]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title, style in (("decision", "bold"), ("asked", ""), ("got", "bold"), ("why", "")):
        table.add_column(title, style=style, overflow="fold")
    for row in rows:
        table.add_row(Text(row.name), Text(row.asked), Text(row.got), Text(row.why))
    return table


def options_table(asked: Sequence[GivenOption]) -> Table:
    table = grid()
    table.add_row("options", ", ".join(f"{a.name} = {a.value} ({a.source})" for a in asked))
    return table


def grid() -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _model_line(spec: Model) -> str:
    experts, per_token = _experts(spec)
    size = f"{format_count(spec.num_params)} parameters"
    if not experts:
        return f"{size}, {len(spec.blocks)} layers"
    active = format_count(spec.num_active_params)
    return f"{size}, {active} active, {len(spec.blocks)} layers, {per_token} of {experts} experts per token"


def _experts(spec: Model) -> tuple[int, int]:
    """Return (experts, experts per token) of the first MoE layer; (0, 0) for a dense model."""
    return next(((ffn.experts, ffn.top_k) for ffn in spec.routed.values()), (0, 0))


def _gpu_fields(gpu: GpuPlan) -> dict[str, Any]:
    return {
        **msgspec.structs.asdict(gpu),
        "vram": {**msgspec.structs.asdict(gpu.vram), "usable_bytes": gpu.vram.usable_bytes},
        "device": gpu.device,
        "gpu_only": gpu.gpu_only,
        "experts": gpu.experts,
        "resident": gpu.resident,
    }
