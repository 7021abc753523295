"""Fixes for Triton's interpreter, which runs kernels on CPU tensors. It treats bfloat16 as 16-bit integers in
arithmetic, truncates it where a GPU rounds, reads the NaN of e4m3 as 480, and with NumPy 2.4 fails to use scalars as
bounds of a loop; the patches make it behave like a GPU.
It spends half of its time on useless work: at each call of a function inside a kernel it replaces the functions of
triton.language again, for each operation it builds the table of NumPy's types and several types with their shapes,
and looks for the type of the result if both sides have the same, and it computes integer overflows, which it reports
in debug mode only. The patches remove that.
Imported only where kernels are interpreted.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_patch_language, _patch_tensor = interpreter._patch_lang, interpreter._patch_lang_tensor
_convert, _dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
_binary = interpreter.InterpreterBuilder.binary_op
_ARITHMETIC = (np.add, np.subtract, np.multiply)


def _rounded(data: np.ndarray, source: Any, target: Any, mode: Any) -> np.ndarray:
    """The bits of `data` rounded to another float type."""
    if (source, target) == (tl.float32, tl.bfloat16):
        return torch.from_numpy(np.array(data, np.float32)).bfloat16().view(torch.int16).numpy().view(np.uint16)
    if (source, target) == (tl.bfloat16, tl.float32):
        return (data.view(np.uint16).astype(np.uint32) << 16).astype(np.uint32)
    return _convert(data, source, target, mode)


def _wide(value: Any) -> Any:
    if value.dtype.scalar == tl.float8e4nv:
        codes = torch.from_numpy(np.ascontiguousarray(value.data)).view(torch.float8_e4m3fn)
        return interpreter.TensorHandle(codes.float().numpy(), tl.float32)
    if value.dtype.scalar != tl.bfloat16:
        return value
    return interpreter.TensorHandle(_rounded(value.data, tl.bfloat16, tl.float32, None).view(np.float32), tl.float32)


def _product(self: Any, a: Any, b: Any, d: Any, input_precision: Any, most_imprecise: Any) -> Any:
    return _dot(self, _wide(a), _wide(b), d, input_precision, most_imprecise)


def _binary_op(self: Any, a: Any, b: Any, op: Any) -> Any:
    if a.dtype.scalar != tl.bfloat16 or op not in _ARITHMETIC:
        return _binary(self, a, b, op)
    exact = op(_wide(a).data, _wide(b).data)
    return interpreter.TensorHandle(_rounded(exact, tl.float32, tl.bfloat16, None), tl.bfloat16)


def _constant(self: Any, value: float) -> Any:
    return interpreter.TensorHandle(_rounded(np.array([value]), tl.float32, tl.bfloat16, None), tl.bfloat16)


def _patch(tensor: Any, scope: Any) -> None:
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


@functools.cache
def _patch_for_good(function: Any) -> Any:
    """Replace the functions of triton.language that `function` uses; the returned scope restores nothing."""
    _patch_language(function)
    return interpreter._LangPatchScope()


def _numpy_type(of: Any) -> np.dtype[Any]:
    element = of.element_ty if isinstance(of, tl.block_type) else of
    return np.dtype(np.uint64) if isinstance(element, tl.pointer_type) else _numpy_scalar(element)


_numpy_scalar = functools.cache(interpreter._get_np_dtype)


_SHAPES: dict[tuple[int, ...], tuple[Any, int, str]] = {}  # of blocks: the shape, one object each, its size, its text
_TENSOR_SHAPES: dict[int, tuple[Any, Any]] = {}  # by the id of an object above: what tensors have as shape and numel
_NO_SHAPE = tl.tuple([]), tl.constexpr(1)
_new_block_type, _equal = tl.block_type.__init__, tl.tuple.__eq__
_broadcast, _cast = interpreter.TritonSemantic.broadcast_impl_value, interpreter.TritonSemantic.cast


def _block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """Make the type from a shape that has been checked before, if it has."""
    sizes = tuple(size.value if isinstance(size, tl.constexpr) else size for size in shape)
    known = _SHAPES.get(sizes)
    if known is None:
        _new_block_type(self, element_ty, shape)
        _SHAPES[sizes] = self.shape, self.numel, str(self.shape)
        _TENSOR_SHAPES[id(self.shape)] = tl.tuple([tl.constexpr(size) for size in sizes]), tl.constexpr(self.numel)
        return
    self.element_ty = element_ty
    self.shape, self.numel, text = known
    self.name = f"<{text}, {element_ty}>"


def _tensor(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - its name in Triton
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _TENSOR_SHAPES[id(type.shape)] if type.is_block() else _NO_SHAPE


def _shape_equal(self: Any, other: Any) -> Any:
    if type(other) is list and all(type(size) is int for size in other):
        return tl.constexpr(self.values == other)
    return _equal(self, other)


def _broadcast_both(self: Any, a: Any, b: Any) -> Any:
    if a.type.is_block() and b.type.is_block() and a.type.shape is b.type.shape:
        return a, b
    return _broadcast(self, a, b)


def _cast_scalars(self: Any, value: Any, to: Any, fp_downcast_rounding: str | None = None) -> Any:
    return value if value.dtype is to else _cast(self, value, to, fp_downcast_rounding)


_operands = interpreter.TritonSemantic.binary_op_type_checking_impl
_PLAIN = {id(of) for of in (tl.float32, tl.int32, tl.int64)}  # of two such operands the result has the same type
_OFFSETS = {id(of) for of in (tl.int32, tl.int64)}


def _checked_operands(
    self: Any, a: Any, b: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False, arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> Any:  # fmt: skip
    """Leave all but the commonest operands to Triton: two tensors of one type, a tensor and a number of its kind, or a
    pointer and an offset."""
    if allow_lhs_ptr and type(b) is tl.tensor and id(b.dtype) in _OFFSETS and type(a) is tl.tensor and a.dtype.is_ptr():
        return self.broadcast_impl_value(a, b)
    if type(a) is tl.tensor and id(a.dtype) in _PLAIN:
        if type(b) is tl.tensor:
            if a.dtype is b.dtype:
                return self.broadcast_impl_value(a, b)
        elif arithmetic_check and (
            (a.dtype is tl.float32 and type(b) in (int, float))
            or (a.dtype is tl.int32 and type(b) is int and -(1 << 31) <= b < 1 << 31)
        ):
            return self.broadcast_impl_value(a, self.scalar_constant(b, dtype=a.dtype))
    return _operands(self, a, b, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)


_BUILTIN = tl.core.builtin(lambda: None).__code__  # of the wrapper that asks whether `_semantic` was given


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    function, semantic = member.__wrapped__ if member.__code__ is _BUILTIN else member, interpreter.interpreter_semantic

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, call)


def repair() -> None:
    interpreter.TritonSemantic.binary_op_type_checking_impl = _checked_operands
    interpreter._patch_attr = _patch_attr
    interpreter.TritonSemantic.cast = _cast_scalars
    tl.block_type.__init__ = _block_type
    tl.tensor.__init__ = _tensor
    tl.tuple.__eq__ = _shape_equal
    interpreter.TritonSemantic.broadcast_impl_value = _broadcast_both
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    interpreter._patch_lang = _patch_for_good
    interpreter._get_np_dtype = _numpy_type
    interpreter._patch_lang_tensor = _patch
    interpreter._convert_float = _rounded
    interpreter.InterpreterBuilder.create_dot = _product
    interpreter.InterpreterBuilder.binary_op = _binary_op
    interpreter.InterpreterBuilder.get_bf16 = _constant
