"""Combines the tensors of a quantised checkpoint into one entry per matrix, with its codes (quantised values) and
scales. Never: reading them, torch.

The rest of loading sees a matrix of a type such as `FP8 block 128`, as it sees a GGUF type. A tensor that belongs to no
matrix stays in the index, where sources.resolve refuses it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path

from proa.errors import WeightsError
from proa.models.quantisation import Quantisation
from proa.native.formats import PANEL_ROWS, Code, Order
from proa.weights.index import Quantised, Shape, TensorInfo

_FLOATS = ("F32", "BF16", "F16")
_POWERS = ("U8", "F8_E8M0")  # scales that are powers of two
_SCALES = ("weight_scale_inv", "weight_scale", "scale")  # DeepSeek-V4 has the last one
DEFAULT_BLOCK = (128, 128)  # of block-scaled FP8
_OTHER = "Fetch the files again if some may be incomplete; else use another quantisation of the model."


class Module:
    """The tensors of one module, by the last part of their names, and the names that have been taken.

    matrix: name of the combined matrix in the index. tensors: last part -> (name, tensor). method: quant_method of the
    config.
    """

    def __init__(self, name: str, matrix: str, tensors: Mapping[str, tuple[str, TensorInfo]], method: str) -> None:
        self.name, self.matrix, self._method = name, matrix, method
        self.taken: set[str] = set()
        self._names = {part: name for part, (name, _) in tensors.items()}
        self._parts = {part: tensor for part, (_, tensor) in tensors.items()}

    def dtype(self, part: str) -> str:
        """The dtype of a tensor; "" if there is no such tensor."""
        return self._parts[part].dtype if part in self._parts else ""

    def take(self, *names: str) -> TensorInfo:
        """Take the first of these tensors that exists. Raises WeightsError if none does."""
        name = next((name for name in names if name in self._parts), None)
        if name is None:
            has = ", ".join(f"{part} {of.dtype} {list(of.shape)}" for part, of in self._parts.items())
            raise WeightsError(
                f"{self.file}: {self.name} has {has}, but no {' or '.join(names)}, which {self._method} needs.", _OTHER
            )
        self.taken.add(self._names[name])
        return self._parts[name]

    def maybe(self, name: str) -> TensorInfo | None:
        return self.take(name) if name in self._parts else None

    @property
    def file(self) -> Path:
        """The file of its first tensor."""
        return next(iter(self._parts.values())).file

    @property
    def codes(self) -> TensorInfo:
        return next(of for name, of in self._parts.items() if name in _READERS)

    def misfit(self, part: TensorInfo, expected: str) -> WeightsError:
        """Make the error for a tensor of unexpected type or shape, for the caller to raise. expected: those it may
        have."""
        name = next(self._names[name] for name, of in self._parts.items() if of is part)
        codes = self.codes
        return WeightsError(
            f"{part.file}: {name} is {part.dtype} {list(part.shape)} beside codes {codes.dtype} {list(codes.shape)}; "
            f"{expected} was expected. Another layout of {self._method} is not implemented.",
            _OTHER,
        )


def collapse(index: Mapping[str, TensorInfo], of: Quantisation) -> dict[str, TensorInfo]:
    """The index with one entry for each quantised matrix in place of its tensors. Raises WeightsError if those do not
    fit each other."""
    found: dict[str, TensorInfo] = {}
    used: set[str] = set()
    for module in (*_modules(index, of.method), *_stacks(index, of.method)):
        if read := _reader(module):
            if len(module.codes.shape) < 2:
                raise module.misfit(module.codes, "a matrix [rows, columns], or several,")
            found[module.matrix] = read(module, of)
            used |= module.taken
    if index and not found:
        folder = next(iter(index.values())).file.parent
        raise WeightsError(
            f"{folder}: the config says that weights are quantised ({of.method}), but no tensor is.",
            "If the tensors are right, add --override-config quantization_config=null.",
        )
    return {name: tensor for name, tensor in index.items() if name not in used} | found


def _modules(index: Mapping[str, TensorInfo], method: str) -> Iterator[Module]:
    found: dict[str, dict[str, tuple[str, TensorInfo]]] = defaultdict(dict)
    for path, tensor in index.items():
        name, _, part = path.rpartition(".")
        found[name][part] = path, tensor
    return (Module(name, f"{name}.weight", tensors, method) for name, tensors in found.items())


def _stacks(index: Mapping[str, TensorInfo], method: str) -> Iterator[Module]:
    """Modules of stacked experts, whose tensors do not end in `.weight`: `experts.gate_up_proj` with
    `experts.gate_up_proj_scale_inv`, or `.._blocks` with `.._scales`."""
    for path, tensor in index.items():
        scales = f"{path}_scale_inv"
        if not path.endswith(".weight") and scales in index:
            parts = {"weight": (path, tensor), "weight_scale_inv": (scales, index[scales])}
            yield Module(path, path, parts, method)
        name = path.removesuffix("_blocks")
        scales = f"{name}_scales"
        if name != path and scales in index:
            yield Module(name, name, {"blocks": (path, tensor), "scales": (scales, index[scales])}, method)


def _reader(module: Module) -> Callable[[Module, Quantisation], TensorInfo] | None:
    """The function that reads the module, by the dtype of its codes; None if it is not quantised."""
    for part, dtypes in _READERS.items():
        if read := dtypes.get(module.dtype(part)):
            return read
    return None


def _matrix(type_name: str, shape: Shape, parts: Quantised) -> TensorInfo:
    """A quantised module as one matrix. type_name: a key of native/formats.py's QUANTISED, or a type that no packed
    format keeps."""
    return TensorInfo(type_name, shape, parts.codes.file, parts.codes.offset, parts.nbytes, parts)


def _mxfp4(module: Module, codes: TensorInfo, scales: TensorInfo) -> TensorInfo:
    """Two E2M1 values per byte; a scale that is a power of two for 32 values."""
    shape = (*codes.shape[:-1], codes.shape[-1] * 2)
    _groups(module, scales, shape, 32)
    return _matrix("MXFP4", shape, Quantised(codes, Code.E2M1, scales, 1, 32))


def _eight_bit_floats(module: Module, of: Quantisation) -> TensorInfo:
    weight, scales = module.take("weight"), module.take(*_SCALES)
    rows, columns = weight.shape[-2:]
    if scales.dtype in _POWERS and scales.shape == (*weight.shape[:-1], columns / 32):
        return _matrix("MXFP8", weight.shape, Quantised(weight, Code.E4M3, scales, 1, 32))
    stacked = len(weight.shape) - 2
    one = scales.shape[stacked:]  # the scales' shape for one matrix
    parts = Quantised(weight, Code.E4M3, scales, 0, 0)
    height, width = of.block or DEFAULT_BLOCK
    in_blocks = (-(-rows // height), -(-columns // width))
    groups = "" if columns % 32 else f", or {[*weight.shape[:-1], columns // 32]} of MXFP8"
    expected = (
        f"{', '.join((*_FLOATS, *_POWERS))} with one scale, {rows} or {list(in_blocks)} for each matrix (blocks of "
        f"{height} x {width}){groups}"
    )
    if scales.dtype not in (*_FLOATS, *_POWERS) or scales.shape[:stacked] != weight.shape[:stacked]:
        raise module.misfit(scales, expected)
    if len(one) == 4 and one[1] == one[3] == 1:  # ModelOpt's shape of block scales
        one = (one[0], one[2])
    if one == in_blocks and (of.block or prod(one) > 1):  # undeclared, a single scale is not that of a block
        return _matrix(block_type(height, width), weight.shape, replace(parts, scale_rows=height, group=width))
    if prod(one) == 1:
        return _matrix("FP8 tensor", weight.shape, parts)
    if one in ((rows,), (rows, 1)):
        return _matrix("FP8 channel", weight.shape, replace(parts, scale_rows=1))
    raise module.misfit(scales, expected)


def _signed_bytes(module: Module, of: Quantisation) -> TensorInfo:
    """int8 bytes: one integer each, or two 4-bit integers (W4AFP8), or two E2M1 values (transformers, DeepSeek-V4)."""
    weight, scales = module.take("weight"), module.take(*_SCALES)
    if scales.dtype in _POWERS:
        return _mxfp4(module, weight, scales)
    if scales.dtype not in _FLOATS:
        raise module.misfit(scales, ", ".join(_FLOATS))
    if of.paired:
        _expect_bits(module, of, 4)
        shape = (*weight.shape[:-1], weight.shape[-1] * 2)
        group = _groups(module, scales, shape)
        parts = Quantised(weight, Code.SIGNED4, scales, 1, group)
        return _matrix(integer_type(4, True, group, scales.dtype), shape, parts)
    _expect_bits(module, of, 4, 8)  # 4-bit integers, too, may be stored one per byte
    group = 0 if scales.shape == weight.shape[:-1] else _groups(module, scales, weight.shape)
    return _matrix(integer_type(8, True, group), weight.shape, Quantised(weight, Code.INT8, scales, 1, group))


def _packed_integers(module: Module, of: Quantisation) -> TensorInfo:
    """compressed-tensors: int32 words pack neighbouring columns; integers are stored plus 2^(bits - 1)."""
    packed, scales, zeros = module.take("weight_packed"), module.take("weight_scale"), module.maybe("weight_zero_point")
    module.take("weight_shape")
    bits = _expect_bits(module, of, 4, 8)
    shape = (*packed.shape[:-1], packed.shape[-1] * 32 // bits)
    group = _groups(module, scales, shape)
    code = Code.UINT8 if bits == 8 else Code.UINT4 if zeros else Code.INT4
    words = (*shape[:-2], -(-shape[-2] * bits // 32), scales.shape[-1])
    if zeros and zeros.shape != words:
        raise module.misfit(zeros, f"{list(words)}")
    g_idx = module.maybe("weight_g_idx")
    if g_idx is not None and (g_idx.shape != shape[-1:] or g_idx.dtype != "I32" or len(shape) > 2):
        raise module.misfit(g_idx, f"I32 {list(shape[-1:])} of a single matrix")
    ordered = of.integers(module.name).ordered or g_idx is None or not group
    parts = Quantised(packed, code, scales, 1, group, zeros=zeros, g_idx=g_idx, ordered=ordered)
    return _matrix(integer_type(bits, zeros is None, group, scales.dtype, ordered), shape, parts)


def _packed_floats(module: Module, of: Quantisation) -> TensorInfo:
    """Two E2M1 values per byte: NVFP4 of compressed-tensors and ModelOpt, MXFP4."""
    packed, scales = module.take("weight_packed", "weight"), module.take("weight_scale")
    if scales.dtype in _POWERS:
        return _mxfp4(module, packed, scales)
    if scales.dtype != "F8_E4M3":
        raise module.misfit(scales, f"F8_E4M3 for NVFP4, or {' or '.join(_POWERS)} for MXFP4,")
    shape = (*packed.shape[:-1], packed.shape[-1] * 2)
    _groups(module, scales, shape, 16)
    factor = module.take("weight_global_scale", "weight_scale_2")
    if factor.dtype != "F32" or prod(factor.shape) != prod(shape[:-2]):
        raise module.misfit(factor, f"F32 with one number for each of {prod(shape[:-2])} matrices")
    inverse = module.dtype("weight_global_scale") != ""  # weight_global_scale divides, weight_scale_2 multiplies
    parts = Quantised(packed, Code.E2M1, scales, 1, 16, factor=factor, inverse=inverse)
    return _matrix("NVFP4", shape, parts)


def _blocks_of_floats(module: Module, of: Quantisation) -> TensorInfo:
    """gpt-oss: two E2M1 values per byte, [experts, rows, groups, 16]; scales [experts, rows, groups]."""
    blocks, scales = module.take("blocks"), module.take("scales")
    fit = len(blocks.shape) == 4 and blocks.shape[-1] == 16 and scales.shape == blocks.shape[:-1]
    if not fit or scales.dtype not in _POWERS:
        expected = f"{' or '.join(_POWERS)} [experts, rows, groups] beside blocks [experts, rows, groups, 16]"
        raise module.misfit(scales, expected)
    shape = (*blocks.shape[:2], blocks.shape[2] * 32)
    return _matrix("MXFP4", shape, Quantised(blocks, Code.E2M1, scales, 1, 32))


def _transposed_integers(module: Module, of: Quantisation) -> TensorInfo:
    """GPTQ and AWQ: codes are [columns, rows]; an int32 word packs neighbouring columns (GPTQ) or rows (AWQ). Scales
    and zero points are [groups, rows]."""
    words, scales, zeros = module.take("qweight"), module.take("scales"), module.take("qzeros")
    if len(words.shape) != 2 or len(scales.shape) != 2 or scales.dtype not in _FLOATS:
        raise module.misfit(scales, f"{', '.join(_FLOATS)} [groups, rows] of a single matrix")
    rule = of.integers(module.name)
    ordered, symmetric = rule.ordered or scales.shape[0] == 1, rule.symmetric
    g_idx = module.maybe("g_idx") if ordered else module.take("g_idx")
    bits = _expect_bits(module, of, 4, 8)
    per_word, awq = 32 // bits, of.awq
    rows, columns = scales.shape[1], words.shape[0] * (1 if awq else per_word)
    groups = scales.shape[0]
    stored_rows = words.shape[1] * (per_word if awq else 1)
    if not groups or columns % groups or rows != stored_rows:
        raise module.misfit(scales, f"[groups, {stored_rows}], groups dividing {columns} columns,")
    if rows % per_word or zeros.shape != (groups, rows // per_word) or zeros.dtype != "I32":
        raise module.misfit(zeros, f"I32 {[groups, rows // per_word]}, {per_word} rows a word,")
    if g_idx is not None and (g_idx.shape != (columns,) or g_idx.dtype != "I32"):
        raise module.misfit(g_idx, f"I32 {[columns]}")
    if groups > 1 and rule.group > 0 and groups == -(-columns // rule.group) and columns % rule.group:
        if g_idx is None:
            raise _smaller_group(module, rule.group, columns)
        ordered = False  # g_idx tells the group of each column
    code = Code.UINT8 if bits == 8 else Code.INT4 if symmetric else Code.UINT4
    group = 0 if groups == 1 else columns // groups
    parts = Quantised(
        words, code, scales, 1, group, Order.AWQ if awq else Order.WORDS, zeros, zero_offset=of.zero_offset,
        symmetric=symmetric, g_idx=g_idx, ordered=ordered,
    )  # fmt: skip
    return _matrix(integer_type(bits, symmetric, group, scales.dtype, ordered), (rows, columns), parts)


def _smaller_group(module: Module, group: int, columns: int) -> WeightsError:
    """Make the error for a last group of fewer columns: groups of equal size would fit the scales as well."""
    return WeightsError(
        f"{module.file}: {module.name} has {columns} columns in groups of {group} columns, the last one smaller, which "
        "is not implemented without g_idx.",
        _OTHER,
    )


def _groups(module: Module, scales: TensorInfo, shape: Shape, group: int = 0) -> int:
    """Columns per scale, given scales [rows, groups]; 0: one scale for all columns. group: the expected number, 0: any.
    Raises WeightsError."""
    columns, count = shape[-1], scales.shape[-1] if scales.shape else 0
    fit = len(scales.shape) == len(shape) and scales.shape[:-1] == shape[:-1] and count and columns % count == 0
    if not fit or (group and columns // count != group):
        groups = columns // group if group else f"groups of {columns} columns"
        raise module.misfit(scales, f"[{', '.join(map(str, (*shape[:-1], groups)))}]")
    return 0 if count == 1 and not group else columns // count


def _expect_bits(module: Module, of: Quantisation, *known: int) -> int:
    bits = of.integers(module.name).bits
    if bits not in known:
        expected = f"integers of {bits} bits" if bits else "no integers"
        raise WeightsError(
            f"{module.file}: for {module.name} the config ({of.method}) declares {expected}, but its tensors hold "
            f"integers, of which only {' or '.join(map(str, known))} bits are implemented.",
            _OTHER,
        )
    return bits


def block_type(height: int, width: int) -> str:
    """The type name of FP8 in blocks: packed weights have one scale per panel and group."""
    return f"FP8 block {width}" if height % PANEL_ROWS == 0 else f"FP8 block {height} x {width}"


def integer_type(bits: int, symmetric: bool, group: int, scales: str = "", ordered: bool = True) -> str:
    """The type name of integers in groups of `group` columns (0: the whole row). scales: dtype of the scales."""
    order = "" if ordered else " in another order"
    of_scales = f" {scales}" if bits == 4 and symmetric else ""
    return f"{'' if symmetric else 'U'}INT{bits} {group or 'channel'}{of_scales}{order}"


# Name of the tensor that holds a module's codes -> its dtype -> reader.
_READERS = {
    "weight": {"F8_E4M3": _eight_bit_floats, "I8": _signed_bytes, "U8": _packed_floats},
    "qweight": {"I32": _transposed_integers},
    "weight_packed": {"I32": _packed_integers, "U8": _packed_floats},
    "blocks": {"U8": _blocks_of_floats},
}
