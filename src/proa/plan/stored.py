"""The stored types of matrices, and the start-up row about weights. Never: sizes, reading weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from proa.config.options import ModelOptions
from proa.models.names import Declared
from proa.models.spec import Model
from proa.native.formats import QUANTISED, gguf_kept
from proa.plan.packed_size import dummy_types, mixed_stacks
from proa.plan.plan import GpuPlan
from proa.types import Decision
from proa.weights import sources
from proa.weights.checkpoint import Checkpoint
from proa.weights.dummy_names import is_coded
from proa.weights.expected_types import expected_types
from proa.weights.index import PLAIN_BYTES


def kept_types(asked: ModelOptions, declared: Declared, checkpoint: Checkpoint) -> dict[str, str]:
    """The stored type of each parameter, by name; empty if the checkpoint has no quantised types."""
    if checkpoint.load_format == "dummy":
        return dummy_types(declared.spec, asked.dummy_format)
    if checkpoint.load_format != "gguf" and checkpoint.quantisation is None:
        return {}
    if checkpoint.load_format == "config" and checkpoint.quantisation is not None:
        return expected_types(declared, checkpoint.config, checkpoint.quantisation, checkpoint.tensor_names)
    return sources.stored_types(sources.resolve(declared, checkpoint.tensors), checkpoint.tensors)


def weights_row(
    asked: ModelOptions, checkpoint: Checkpoint, spec: Model, stored: Mapping[str, str], gpu: GpuPlan | None
) -> Decision:
    """The start-up row. stored: of kept_types; empty without native kernels."""
    got, why = checkpoint.load_format, "the files found" if asked.load_format == "auto" else "as asked"
    dequantised = "dequantised while loading, each weight rounded once"
    if got == "dummy":
        why = "random weights of the model's shapes: answers are meaningless"
        if asked.dummy_format != "bf16":
            why += f"; experts and linear layers in {asked.dummy_format}"
    elif got == "gguf":
        *first, last = gguf_kept()
        kept = f"{', '.join(first)} and {last} stay quantised, widened losslessly if no packed format has the type; "
        kept += "others are rounded once to bfloat16"
        why = _with_gpu(kept, gpu) if stored else dequantised
    elif checkpoint.quantisation is not None:
        names = {tensor.dtype for tensor in checkpoint.tensors.values() if tensor.quantised}
        if got == "config":
            names = {stored[name] for name in stored if is_coded(name)} - PLAIN_BYTES.keys()
        got += f", {' and '.join(sorted(names))}"
        why = _with_gpu(_quantised(spec, stored, names), gpu) if stored else dequantised
        made_for = checkpoint.quantisation.activations
        if gpu is not None and gpu.fp8_activations:
            but = "except for experts of many tokens"
            why += f"; activations stay bfloat16 {but} (made for {made_for or 'bfloat16'})"
        elif made_for:
            why += f"; activations stay bfloat16 (made for {made_for})"
    if checkpoint.load_format == "config":
        source = "config.json and the index" if checkpoint.tensor_names else "config.json"
        why = f"by {source} alone, as there are no weight files here" + (f": {why}" if checkpoint.quantisation else "")
    return Decision("weights", asked.load_format, got, why)


def _quantised(spec: Model, stored: Mapping[str, str], names: Collection[str]) -> str:
    """Say which matrices stay quantised. A stack does only if all its matrices have one type."""
    kept = "codes and scales are kept unchanged"
    if others := sorted(set(names) - QUANTISED.keys()):
        kept += f", but {' and '.join(others)} become bfloat16: no packed format supports them"
    mixed = mixed_stacks(spec, stored)
    if not mixed:
        return kept
    name, types = next(iter(mixed.items()))
    more = f" and {len(mixed) - 1} more" if len(mixed) > 1 else ""
    return f"{kept}, but {name}{more} become bfloat16: mixed types {' and '.join(sorted(types))}"


def _with_gpu(kept: str, gpu: GpuPlan | None) -> str:
    if gpu is None:
        return kept
    where = (
        "on a simulated GPU all but routed experts is bfloat16"
        if gpu.simulated
        else "on the GPU the embedding is bfloat16"
    )
    return f"{kept}; {where}"
