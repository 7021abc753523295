"""The few functions of ggml that run one layer's experts, by ctypes on the libraries that llama-cpp-python and
ik-llama-cpp-python bring.

Functions and enumerations are those of ggml.h, ggml-backend.h and ggml-alloc.h. Never: timing.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Mapping, Sequence
from ctypes import POINTER, c_bool, c_char_p, c_int, c_int64, c_size_t, c_void_p
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

F32, I32 = 0, 26
GRAPH_NODES = 256
_CONTEXT_BYTES = 1 << 20  # of descriptions; tensors' data lie in buffers


class _InitParams(ctypes.Structure):
    _fields_ = [("mem_size", c_size_t), ("mem_buffer", c_void_p), ("no_alloc", c_bool)]


Signatures = Mapping[str, tuple[Any, tuple[Any, ...]]]  # of a function: its result, its parameters
_P, _N = c_void_p, c_int64
_SIGNATURES: Signatures = {
    "ggml_init": (_P, (_InitParams,)),
    "ggml_free": (None, (_P,)),
    "ggml_row_size": (c_size_t, (c_int, _N)),
    "ggml_new_tensor_2d": (_P, (_P, c_int, _N, _N)),
    "ggml_new_tensor_3d": (_P, (_P, c_int, _N, _N, _N)),
    "ggml_mul_mat_id": (_P, (_P, _P, _P, _P)),
    "ggml_mul": (_P, (_P, _P, _P)),
    "ggml_add": (_P, (_P, _P, _P)),
    "ggml_view_2d": (_P, (_P, _P, _N, _N, c_size_t, c_size_t)),
    "ggml_new_graph_custom": (_P, (_P, c_size_t, c_bool)),
    "ggml_build_forward_expand": (None, (_P, _P)),
    "ggml_quantize_chunk": (c_size_t, (c_int, _P, _P, _N, _N, _N, _P)),
    "ggml_backend_cpu_init": (_P, ()),
    "ggml_backend_cpu_set_n_threads": (None, (_P, c_int)),
    "ggml_backend_get_default_buffer_type": (_P, (_P,)),
    "ggml_backend_buffer_free": (None, (_P,)),
    "ggml_backend_alloc_ctx_tensors_from_buft": (_P, (_P, _P)),
    "ggml_backend_tensor_set": (None, (_P, _P, c_size_t, c_size_t)),
    "ggml_backend_tensor_get": (None, (_P, _P, c_size_t, c_size_t)),
    "ggml_backend_graph_compute": (c_int, (_P, _P)),
    "ggml_gallocr_new": (_P, (_P,)),
    "ggml_gallocr_free": (None, (_P,)),
    "ggml_gallocr_alloc_graph": (c_bool, (_P, _P)),
}
LLAMA_CPP: Signatures = {
    "ggml_swiglu_split": (_P, (_P, _P, _P)),
    "ggml_backend_cpu_reg": (_P, ()),
    "ggml_backend_reg_dev_get": (_P, (_P, c_size_t)),
    "ggml_backend_reg_get_proc_address": (_P, (_P, c_char_p)),
    "ggml_backend_buft_name": (c_char_p, (_P,)),
}
IK_LLAMA: Signatures = {
    "ggml_moe_up_gate": (_P, (_P, _P, _P, _P, _P, c_int)),
    "repack_bf16_bf16_r16": (None, (_P, _P, _N, _N)),
}


class Ggml:
    """ggml's CPU backend with `threads` threads. Raises OSError if a library cannot be loaded. more: what only one
    program has."""

    def __init__(self, libraries: Sequence[Path], threads: int, more: Signatures) -> None:
        loaded = [ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL) for path in libraries]
        for name, (result, parameters) in {**_SIGNATURES, **more}.items():
            found = next(library for library in loaded if name in _names(library, name))
            function = getattr(found, name)
            function.restype, function.argtypes = result, parameters
            setattr(self, name.removeprefix("ggml_"), function)
        self.backend = self.backend_cpu_init()
        self.backend_cpu_set_n_threads(self.backend, threads)
        self.plain_memory = self.backend_get_default_buffer_type(self.backend)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(name)

    def context(self) -> int:
        return int(self.init(_InitParams(_CONTEXT_BYTES, None, True)))

    def repacking_memory(self) -> int:
        """Memory in which weights of some types are rearranged for this CPU; plain memory if there is none. That of AMX
        takes no experts: loading a model, llama.cpp does not choose it for them."""
        registry = self.backend_cpu_reg()
        address = self.backend_reg_get_proc_address(registry, b"ggml_backend_dev_get_extra_bufts")
        if not address:
            return int(self.plain_memory)
        kinds = ctypes.CFUNCTYPE(POINTER(c_void_p), c_void_p)(address)(self.backend_reg_dev_get(registry, 0))
        for kind in itertools.takewhile(bool, kinds or ()):
            if self.backend_buft_name(kind) == b"CPU_REPACK":
                return int(kind)
        return int(self.plain_memory)

    def quantized(self, kind: int, values: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
        """Rows of blocks of the type `kind`."""
        rows, columns = values.reshape(-1, values.shape[-1]).shape
        out = np.empty(rows * self.row_size(kind, columns), np.uint8)
        self.quantize_chunk(kind, values.ctypes.data, out.ctypes.data, 0, rows, columns, None)
        return out

    def put(self, tensor: int, values: npt.NDArray[Any]) -> None:
        self.backend_tensor_set(tensor, values.ctypes.data, 0, values.nbytes)


def _names(library: ctypes.CDLL, name: str) -> Sequence[str]:
    try:
        getattr(library, name)
    except AttributeError:
        return ()
    return (name,)
