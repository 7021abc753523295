"""What matrices are stored as, and what becomes of them, for the plan and its table. Never: sizes, reading weights."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from proa.config.options import ModelOptions
from proa.models.names import Declared
from proa.models.spec import Model
from proa.native.formats import KEPT, QUANTISED
from proa.plan.packed_size import dummy_types, mixed_stacks
from proa.plan.plan import GpuPlan
from proa.types import Decision
from proa.weights import sources
from proa.weights.checkpoint import Checkpoint


def kept_types(asked: ModelOptions, declared: Declared, checkpoint: Checkpoint) -> dict[str, str]:
    """The stored type of each parameter; empty where nothing can be kept as it is stored."""
    if checkpoint.load_format == "dummy":
        return dummy_types(declared.spec, asked.dummy_format)
    if checkpoint.load_format != "gguf" and checkpoint.quantisation is None:
        return {}
    return sources.stored_types(sources.resolve(declared, checkpoint.tensors), checkpoint.tensors)


def weights_row(
    asked: ModelOptions, checkpoint: Checkpoint, spec: Model, stored: Mapping[str, str], gpu: GpuPlan | None
) -> Decision:
    """`stored`: kept_types; empty without native kernels."""
    got, why = checkpoint.load_format, "the files found" if asked.load_format == "auto" else "as asked"
    dequantised = "dequantised while loading, each weight rounded once"
    if got == "dummy":
        why = "random weights of the true shapes: answers mean nothing"
        if asked.dummy_format != "bf16":
            why += f"; experts and linear layers in {asked.dummy_format}"
    elif got == "gguf":
        kept = f"blocks of {', '.join(KEPT)} and MXFP4 keep their values, those that no format has in a wider one; "
        kept += "others are rounded once to bfloat16"
        why = _with_gpu(kept, gpu) if stored else dequantised
    elif checkpoint.quantisation is not None:
        names = {tensor.dtype for tensor in checkpoint.tensors.values() if tensor.quantised}
        got += f", {' and '.join(sorted(names))}"
        why = _with_gpu(_quantised(spec, stored, names), gpu) if stored else dequantised
        made_for = checkpoint.quantisation.activations
        if gpu is not None and gpu.fp8_activations:
            but = "but for experts of many tokens"
            why += f"; activations stay bfloat16 {but} (made for {made_for or 'bfloat16'})"
        elif made_for:
            why += f"; activations stay bfloat16 (made for {made_for})"
    return Decision("weights", asked.load_format, got, why)


def _quantised(spec: Model, stored: Mapping[str, str], names: Collection[str]) -> str:
    """Matrices that share memory are kept if all have one type."""
    kept = "codes and scales are kept as they are"
    if others := sorted(set(names) - QUANTISED.keys()):
        kept += f", but {' and '.join(others)} become bfloat16: no packed format has such codes and scales"
    mixed = mixed_stacks(spec, stored)
    if not mixed:
        return kept
    name, types = next(iter(mixed.items()))
    more = f" and {len(mixed) - 1} more" if len(mixed) > 1 else ""
    return f"{kept}, but {name}{more} become bfloat16: {' and '.join(sorted(types))} lie in one"


def _with_gpu(kept: str, gpu: GpuPlan | None) -> str:
    if gpu is None:
        return kept
    where = (
        "all but routed experts becomes bfloat16 on a simulated GPU"
        if gpu.simulated
        else "the embedding is bfloat16 there"
    )
    return f"{kept}; {where}"
