"""kt-kernel 0.7.2 beside Proa. See README.md; the options are those of `proa bench kernels`.

Its workers take turns with the caller, and want one core less than there are: with as many workers as cores each call
lasts 8 ms. It has no way to share one stack of weights between formats: every format is loaded from bfloat16.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from beside import Call, Dense, Loaded, Peer, bf16_values, compare, main, options_of

from proa.bench.kernel_cases import ExpertShape
from proa.errors import UsageError

# Proa's format -> its class, bits of a weight with scales, and what it does.
CLASSES = {
    "bf16": ("AMXBF16_MOE", 16.0, "bf16"),
    "int8": ("AMXInt8_MOE", 8.0, "int8, one scale a row, activations rounded to 8 bits"),
    "int4-g128": ("AMXInt4_MOE", 4.0, "int4, one scale a row, activations rounded to 8 bits"),
}

_TOKEN_STEP = 64  # its buffers hold a multiple of this


def load_extension() -> Any:
    try:
        return importlib.import_module("kt_kernel").kt_kernel_ext
    except ImportError as error:
        raise UsageError(
            f"kt-kernel is not installed here ({error}).", "See benchmarks/peers/README.md for how to install it."
        ) from None


def run(argv: Sequence[str]) -> None:
    options = options_of(argv, "run_kt_kernel.py", list(CLASSES))
    extension = load_extension()

    def make_peer(threads: int) -> Peer:
        workers = max(1, threads - 1)
        pool = extension.WorkerPoolConfig()
        pool.subpool_count, pool.subpool_numa_map, pool.subpool_thread_count = 1, [0], [workers]
        cpu = extension.CPUInfer(pool)

        def load(of: str, shape: ExpertShape, layers: int, dense: Dense, most_tokens: int) -> Loaded:
            kind, bits, _ = CLASSES[of]
            made = [_layer(extension, cpu, kind, shape, dense, most_tokens) for _ in range(layers)]
            return Loaded(lambda calls: _prepare(cpu, made, shape, calls), bits, made.clear)

        formats = {name: f"{kind}: {words}" for name, (kind, _, words) in CLASSES.items()}
        return Peer("kt-kernel", importlib.metadata.version("kt-kernel"), workers, formats, load)

    compare(make_peer, options)


def _layer(extension: Any, cpu: Any, kind: str, shape: ExpertShape, dense: Dense, most_tokens: int) -> Any:
    config = extension.moe.MOEConfig(shape.experts, shape.top_k, shape.hidden, shape.width, 0)
    config.max_len, config.pool = -(-most_tokens // _TOKEN_STEP) * _TOKEN_STEP, cpu.backend_
    config.gate_proj, config.up_proj = dense.gate.ctypes.data, dense.up.ctypes.data
    config.down_proj = dense.down.ctypes.data
    layer = getattr(extension.moe, kind)(config)
    order = np.arange(shape.experts, dtype=np.int64)
    cpu.submit(layer.load_weights_task(order.ctypes.data))
    cpu.sync()
    return layer


def _prepare(
    cpu: Any, layers: Sequence[Any], shape: ExpertShape, calls: Sequence[Call]
) -> tuple[Callable[[int], None], Callable[[], npt.NDArray[np.float32]]]:
    ids = [call.ids.astype(np.int64) for call in calls]
    y, tokens = np.zeros_like(calls[0].x), np.array([len(calls[0].x)], np.int32)

    def call(number: int) -> None:
        one = calls[number % len(calls)]
        cpu.submit(
            layers[number % len(layers)].forward_task(
                tokens.ctypes.data, shape.top_k, ids[number % len(calls)].ctypes.data, one.weights.ctypes.data,
                one.x.ctypes.data, y.ctypes.data, False,
            )
        )  # fmt: skip
        cpu.sync()

    return call, lambda: bf16_values(y)


if __name__ == "__main__":
    main(run)
