"""A trial of the GPU's attention at start: a library's kernel over segments of a long past against Proa's over pages.
Never: the kernels, using the faster one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from proa.models.mixers import AttentionKernel
from proa.models.spec import Model
from proa.ops.caches import Caches, KvPages
from proa.ops.cuda_attention import Rectangle, SegmentedAttention, by_head, cudnn
from proa.ops.gpu_traits import GpuTraits
from proa.ops.sizes import SEGMENT_TOKENS, segment_rows
from proa.ops.triton import attention
from proa.ops.triton.attention_segments import new_segment
from proa.plan.kernels import growing_attention
from proa.plan.plan import Plan
from proa.types import Decision

ROW = "attention of long prompts"
RUNS = 3  # of each kernel; the fastest counts
OWN = "Proa's kernel"


class AttentionTrial:
    """Prepares cuDNN's kernels in a thread, since the first use takes 0.5 to 1.5 s, and compares them at the end."""

    def __init__(
        self, plan: Plan, spec: Model, device: torch.device, traits: GpuTraits, rectangle: Rectangle = cudnn
    ) -> None:  # fmt: skip
        self._device, self._traits, self._rectangle = device, traits, rectangle
        self._deterministic = plan.deterministic
        least = SEGMENT_TOKENS[-1]
        self._kernels = [
            kernel
            for kernel in growing_attention(spec)
            if plan.context_tokens >= least + (rows := segment_rows(kernel.heads)) and plan.max_batch_tokens >= rows
        ]
        self._refused = ""
        self._thread = threading.Thread(target=self._prepare, name="attention", daemon=True)
        if self._kernels and not self._deterministic:
            self._thread.start()

    @torch.inference_mode()
    def _prepare(self) -> None:
        try:
            with torch.cuda.device(self._device):
                self._prepare_shapes()
        except RuntimeError as e:  # the GPU is too old, or cuDNN is not there
            self._refused = str(e).splitlines()[0]

    def _prepare_shapes(self) -> None:
        for kernel in self._kernels:
            for tokens in SEGMENT_TOKENS:
                self._rectangle(*_inputs(kernel, tokens, self._device), 1.0)

    @torch.inference_mode()
    def result(self, caches: Caches) -> tuple[SegmentedAttention | None, Decision | None]:
        """What to use for long prompts, None for Proa's kernel, and the start-up table's row, if there are any. caches:
        of the model; read only."""
        if not self._kernels:
            return None, None
        if self._deterministic:
            return None, Decision(ROW, "auto", OWN, "--deterministic: segments depend on where a prompt is cut")
        self._thread.join()
        if self._refused:
            return None, Decision(ROW, "auto", OWN, f"cuDNN: {self._refused}")
        self._prepare_shapes()  # cuDNN keeps what it prepared for the thread that asked
        theirs, own = self._rates(self._kernels[0], caches)
        return self._decide(theirs, own)

    def _decide(self, theirs: float, own: float) -> tuple[SegmentedAttention | None, Decision]:
        rates = f"{theirs / 1e12:.0f} TFLOP/s with cuDNN over {SEGMENT_TOKENS[0]} keys, {own / 1e12:.0f} with {OWN}"
        if own >= theirs:
            return None, Decision(ROW, "auto", OWN, rates)
        got = f"cuDNN, keys in segments of {' and '.join(map(str, SEGMENT_TOKENS))}"
        return SegmentedAttention(self._rectangle, self._traits), Decision(ROW, "auto", got, rates)

    def _rates(self, kernel: AttentionKernel, caches: Caches) -> tuple[float, float]:
        """FLOP/s of the library's kernel and of Proa's, of a tile of rows over the longest segment."""
        q, keys, values = _inputs(kernel, SEGMENT_TOKENS[0], self._device)
        rows, heads, dim = q.shape[2], kernel.heads, kernel.head_dim
        flops = 4 * rows * SEGMENT_TOKENS[0] * heads * dim
        cache = _cache_of(kernel, caches)
        pages = torch.arange(SEGMENT_TOKENS[0] + rows, dtype=torch.int32, device=self._device) % cache.num_pages
        starts, lens = torch.zeros(2, dtype=torch.int32, device=self._device), pages[:1].clone()
        starts[1:].fill_(rows)
        lens.fill_(SEGMENT_TOKENS[0] + rows // 2)  # half of the rows' own keys are beyond the diagonal
        rows_first = q[0].transpose(0, 1)
        own = partial(
            attention.prefill, rows_first, cache, pages[None], starts, lens, attention.Softmax(1.0),
            torch.empty_like(rows_first), torch.empty(rows, heads, device=self._device),
            native_codes=self._traits.converts_e4m3,
        )  # fmt: skip
        return flops / _fastest(partial(self._rectangle, q, keys, values, 1.0)), flops / _fastest(own)


def _inputs(kernel: AttentionKernel, tokens: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """q [1, heads, rows, D], keys and values [1, kv_heads, tokens, D] of a tile and a segment."""
    q = torch.zeros(segment_rows(kernel.heads), kernel.heads, kernel.head_dim, dtype=torch.bfloat16, device=device)
    keys, values = new_segment(tokens, kernel.kv_heads, kernel.head_dim, device)
    return by_head(q), by_head(keys.zero_()), by_head(values.zero_())


def _cache_of(kernel: AttentionKernel, caches: Caches) -> KvPages:
    """The first cache that such a kernel reads."""
    every = (cache for layer in caches for cache in layer if isinstance(cache, KvPages))
    return next(cache for cache in every if cache.keys.shape[2:] == (kernel.kv_heads, kernel.head_dim))


def _fastest(launch: Callable[[], object]) -> float:
    """Seconds of the fastest of RUNS launches, after one that is not counted."""
    found: list[float] = []
    for _ in range(1 + RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        launch()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / 1e3)
    return min(found[1:])
