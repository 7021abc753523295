"""A trial of the GPU's attention at start: a library's kernel over segments of a long past against Proa's over pages.
Never: the kernels, using the faster one.
"""

from __future__ import annotations

import threading

import torch

from proa.models.spec import Model
from proa.ops.attention_rates import inputs_of, rates
from proa.ops.caches import Caches
from proa.ops.cuda_attention import Rectangle, SegmentedAttention, cudnn
from proa.ops.gpu_traits import GpuTraits
from proa.ops.sizes import SEGMENT_TOKENS, segment_rows
from proa.plan.kernels import growing_attention
from proa.plan.plan import Plan
from proa.types import Decision

ROW = "attention of long prompts"
OWN = "Proa's kernel"
DETERMINISTIC = "--deterministic: segments depend on where a prompt is cut"  # why a library's kernel is not used


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
            if self._device.type == "cuda":
                torch.cuda.set_device(self._device)  # for this thread
            self._prepare_shapes()
        except RuntimeError as e:  # the GPU is too old, or cuDNN is not there
            self._refused = str(e).splitlines()[0]

    def _prepare_shapes(self) -> None:
        for kernel in self._kernels:
            for tokens in SEGMENT_TOKENS:
                self._rectangle(*inputs_of(kernel, tokens, self._device), 1.0)

    @torch.inference_mode()
    def result(self, caches: Caches) -> tuple[SegmentedAttention | None, Decision | None]:
        """Return the attention for long prompts (None: Proa's kernel) and the start-up table's row, if there is one.
        caches: of the model; read only."""
        if not self._kernels:
            return None, None
        if self._deterministic:
            return None, Decision(ROW, "auto", OWN, DETERMINISTIC)
        self._thread.join()
        if self._refused:
            return None, Decision(ROW, "auto", OWN, f"cuDNN: {self._refused}")
        self._prepare_shapes()  # cuDNN keeps prepared kernels by thread
        theirs, own = rates(self._kernels[0], caches, self._rectangle, self._traits)
        return self._decide(theirs, own)

    def _decide(self, theirs: float, own: float) -> tuple[SegmentedAttention | None, Decision]:
        found = f"{theirs / 1e12:.0f} TFLOP/s with cuDNN over {SEGMENT_TOKENS[0]} keys, {own / 1e12:.0f} with {OWN}"
        if own >= theirs:
            return None, Decision(ROW, "auto", OWN, found)
        got = f"cuDNN, keys in segments of {' and '.join(map(str, SEGMENT_TOKENS))}"
        return SegmentedAttention(self._rectangle, self._traits), Decision(ROW, "auto", got, found)
