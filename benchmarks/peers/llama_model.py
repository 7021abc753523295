"""A whole model in llama.cpp, through llama-cpp-python's bindings: prompts in, greedy tokens out, timed.

Its defaults: weights mapped from the file and rearranged as it likes, float16 KV, steps of 512 tokens, flash attention
where it chooses. Never: what Proa does.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.metadata
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from proa.errors import ProaError, UsageError

MODULE, PACKAGE = "llama_cpp", "llama-cpp-python"
_WARNING = 3  # of ggml_log_level; 4 is an error, 5 continues the line before


def bindings() -> ModuleType:
    """Raises UsageError if llama-cpp-python, or something that it needs, is not installed."""
    try:
        return importlib.import_module(MODULE)
    except (ImportError, OSError, RuntimeError) as error:
        raise UsageError(
            f"{PACKAGE} cannot be used here: {error}.", "See benchmarks/peers/README.md for how to install it."
        ) from error


def version() -> str:
    return importlib.metadata.version(PACKAGE)


class LlamaModel:
    """One file, loaded. Contexts of `context_tokens`; `threads` for both single tokens and prompts."""

    def __init__(self, path: Path, threads: int, context_tokens: int) -> None:
        """Raises ProaError if llama.cpp refuses the file."""
        self._api: Any = bindings()
        self._errors: list[str] = []
        # Kept as long as the library may call it.
        self._log = self._api.llama_log_callback(self._hear)
        self._api.llama_log_set(self._log, ctypes.c_void_p(0))
        self._api.llama_backend_init()
        self._model = self._api.llama_model_load_from_file(str(path).encode(), self._api.llama_model_default_params())
        if not self._model:
            raise ProaError(f"llama.cpp cannot load {path}: {self._said()}", "Use a file that both programs read.")
        wanted = self._api.llama_context_default_params()
        wanted.n_ctx = context_tokens
        wanted.n_threads = wanted.n_threads_batch = threads
        self._step_tokens = int(wanted.n_batch)
        self._context = self._api.llama_init_from_model(self._model, wanted)
        if not self._context:
            raise ProaError(f"llama.cpp cannot make a context for {path}: {self._said()}")
        self._vocab = int(self._api.llama_vocab_n_tokens(self._api.llama_model_get_vocab(self._model)))

    def __enter__(self) -> LlamaModel:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)

    @property
    def system(self) -> str:
        """What it was built for."""
        return str(self._api.llama_print_system_info().decode().strip())

    def answer(self, prompt: Sequence[int], count: int) -> tuple[list[int], float, float]:
        """`count` greedy tokens, whatever they are; seconds to the first one, and for all others together."""
        self._clear()
        begin = time.perf_counter()
        tokens = [int(self._step(prompt).argmax())]
        first = time.perf_counter()
        while len(tokens) < count:
            tokens.append(int(self._step(tokens[-1:]).argmax()))
        return tokens, first - begin, time.perf_counter() - first

    def agreement(self, prompt: Sequence[int], tokens: Sequence[int]) -> tuple[int, float | None]:
        """How many of `tokens` are its own greedy ones before the first that is not, and by how much the logit of that
        one is below the best; None if all are."""
        self._clear()
        logits = self._step(prompt)
        for i, token in enumerate(tokens):
            behind = float(logits.max() - logits[token])
            if behind > 0:
                return i, behind
            logits = self._step([token])
        return len(tokens), None

    def _clear(self) -> None:
        self._api.llama_memory_clear(self._api.llama_get_memory(self._context), True)

    def _step(self, tokens: Sequence[int]) -> npt.NDArray[np.float32]:
        """Logits after the last token, valid until the next step."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        for start in range(0, len(tokens), self._step_tokens):
            count = min(self._step_tokens, len(tokens) - start)
            part = ctypes.cast(ctypes.byref(array, 4 * start), ctypes.POINTER(ctypes.c_int32))
            code = self._api.llama_decode(self._context, self._api.llama_batch_get_one(part, count))
            if code != 0:
                raise ProaError(f"llama.cpp's llama_decode returned {code}: {self._said()}")
        row = self._api.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(row, (self._vocab,))

    def _hear(self, level: int, text: bytes, _: Any) -> None:
        if level > _WARNING:
            self._errors.append(text.decode(errors="replace"))

    def _said(self) -> str:
        return " ".join("".join(self._errors).split()) or "it does not say why."
