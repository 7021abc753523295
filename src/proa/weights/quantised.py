"""Tensors of a quantised checkpoint -> one for each matrix, with its codes and scales. Never: reading them, torch.

The rest of loading sees matrices of a type, `FP8 block 128`, as it sees blocks of GGUF. What belongs to no matrix stays
in the index, where whoever resolves names refuses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from math import prod

from proa.errors import WeightsError
from proa.models.quantisation import Quantisation
from proa.native.formats import QUANTISED, Code
from proa.weights.index import Quantised, TensorInfo

_FLOATS = ("F32", "BF16", "F16")
_DAMAGED = "The checkpoint is damaged, or of a kind that Proa does not know; use another quantisation of the model."


Parts = Mapping[str, TensorInfo]  # of a module, by the last part of their names


def collapse(index: Mapping[str, TensorInfo], of: Quantisation) -> dict[str, TensorInfo]:
    """The index with one tensor for each quantised matrix. Raises WeightsError where parts do not fit each other."""
    modules: dict[str, dict[str, TensorInfo]] = defaultdict(dict)
    for name, tensor in index.items():
        module, _, part = name.rpartition(".")
        modules[module][part] = tensor
    found: dict[str, TensorInfo] = {}
    used: set[str] = set()
    for module, parts in modules.items():
        taken = _matrix(module, parts, of)
        if taken is not None:
            matrix, names = taken
            found[f"{module}.weight"] = matrix
            used |= {f"{module}.{name}" for name in names}
    if index and not found:
        raise WeightsError(
            f"The config says that weights are quantised ({of.method}), but no tensor is.",
            "If they are not, add --override-config quantization_config=null.",
        )
    return {name: tensor for name, tensor in index.items() if name not in used} | found


def _matrix(module: str, parts: Parts, of: Quantisation) -> tuple[TensorInfo, tuple[str, ...]] | None:
    """Of a module that is quantised, and the names of the parts that it is made of."""
    weight = parts.get("weight")
    if weight is not None and weight.dtype == "F8_E4M3":
        name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
        if name not in parts:
            raise WeightsError(f"{module}.weight is F8_E4M3, but it has no scale ({module}.{name}).", _DAMAGED)
        return _fp8(f"{module}.{name}", weight, parts[name], of), ("weight", name)
    return None


def _fp8(scale_name: str, weight: TensorInfo, scales: TensorInfo, of: Quantisation) -> TensorInfo:
    rows, columns = weight.shape[-2:]
    stacked = len(weight.shape) - 2
    one = scales.shape[stacked:]  # of one matrix
    quantised = Quantised(weight, Code.E4M3, scales, 0, 0)
    if scales.dtype not in _FLOATS or scales.shape[:stacked] != weight.shape[:stacked]:
        raise _misfit(scale_name, scales, weight)
    if of.block is not None and one == (-(-rows // of.block[0]), -(-columns // of.block[1])):
        if of.block[0] % 16:
            raise WeightsError(f"{scale_name}: a block has {of.block[0]} rows, not a multiple of 16.", _DAMAGED)
        matrix = replace(quantised, scale_rows=of.block[0], group=of.block[1])
        return _named(f"FP8 block {of.block[1]}", weight.shape, matrix)
    if prod(one) == 1:
        return _named("FP8 tensor", weight.shape, quantised)
    if one in ((rows,), (rows, 1)):
        return _named("FP8 channel", weight.shape, replace(quantised, scale_rows=1))
    raise _misfit(scale_name, scales, weight)


def _named(name: str, shape: tuple[int, ...], of: Quantised) -> TensorInfo:
    if name not in QUANTISED:
        raise WeightsError(f"{of.codes.file}: matrices of {name} are not implemented.", _DAMAGED)
    return TensorInfo(name, shape, of.codes.file, of.codes.offset, of.codes.nbytes + of.scales.nbytes, of)


def _misfit(name: str, part: TensorInfo, weight: TensorInfo) -> WeightsError:
    return WeightsError(
        f"{part.file}: {name} is {part.dtype} {list(part.shape)}, which does not fit codes {list(weight.shape)}.",
        _DAMAGED,
    )
