"""The limits of mixers' kernels, for refusals before anything is loaded, and their buffers on a GPU: one row for each
class of kernel in models/mixers.py. Never: adding up a plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

from proa.machine.machine import Gpu
from proa.models.mixers import AttentionKernel, DeltaKernel, Kernel, LatentKernel, Mixer
from proa.models.spec import Model
from proa.ops import sizes
from proa.plan.device import best_effort

CPU_MOST_DIM = 576  # head dimension: csrc/src/isa/attend.h
CPU_DELTA_UNIT, CPU_MOST_TAPS = 16, 8  # dimensions of values are multiples of the first: csrc/src/delta.cc


@dataclass(frozen=True)
class Facts:
    """What is known of a class of kernel.

    beyond_cpu, beyond_gpu: the reason why the native kernels, or a GPU's, cannot compute it; "" if they can.
    decode_floats: float32 elements of a GPU's partial results, in a decode step of so many sequences. row_floats: those
    of a step of so many rows. long_bytes: bytes of attention's other buffers for prompts, in such a step.
    prompt_share: the part of Mixer.pair_flops that a GPU computes for so many rows of a prompt after so many others.
    """

    beyond_cpu: Callable[[Any], str] = lambda kernel: ""
    beyond_gpu: Callable[[Any, Gpu], str] = lambda kernel, gpu: ""
    decode_floats: Callable[[Any, int], int] = lambda kernel, sequences: 0
    row_floats: Callable[[Any, int], int] = lambda kernel, rows: 0
    long_bytes: Callable[[Any, int], int] = lambda kernel, rows: 0
    prompt_share: Callable[[Any, int, int], float] = lambda kernel, rows, past: 1.0


def beyond_cpu(spec: Model) -> str:
    """The reason why the native kernels cannot compute the model's mixers; empty if they can."""
    return next(filter(None, (FACTS[type(k)].beyond_cpu(k) for k in _kernels(spec))), "")


def beyond_gpu(spec: Model, gpu: Gpu) -> str:
    """The reason why the GPU's kernels cannot compute the model; empty if they can."""
    if any(not ffn.gating.gated for ffn in spec.routed.values()):
        return "the GPU's kernels have no experts without a gate"
    found = (FACTS[type(k)].beyond_gpu(k, gpu) for k in _kernels(spec))
    return next(filter(None, found), "") or ("" if gpu.simulated else _beyond_fused(spec))


def _beyond_fused(spec: Model) -> str:
    """The reason why a GPU's fused kernels cannot compute what surrounds the mixers; plain torch can."""
    if any(block.mixer is None or block.ffn is None for block in spec.blocks):
        return "the GPU's kernels need an attention or recurrent layer and an FFN in every block"
    shared = [ffn.shared for ffn in spec.routed.values() if ffn.shared]
    if not all(mlp.gating.gated for mlp in (*shared, *spec.ffns)):
        return "the GPU's kernels have no MLPs without a gate"
    return ""


def partials_bytes(spec: Model, max_running: int) -> int:
    """Bytes of partial results of decode on the largest GPU, for the kernel and the bucket that need most."""
    buckets = sizes.buckets(max_running)
    return max((4 * FACTS[type(k)].decode_floats(k, n) for k in _kernels(spec) for n in buckets), default=0)


def chunks_bytes(spec: Model, batch_tokens: int) -> int:
    """Bytes that the kernels of a layer exchange in a step of so many rows, for the kernel that needs most."""
    return max((4 * FACTS[type(k)].row_floats(k, batch_tokens) for k in _kernels(spec)), default=0)


def long_bytes(spec: Model, batch_tokens: int) -> int:
    """Bytes of attention's other buffers for prompts, for the kernel that needs most."""
    growing = (kernel for mixer in spec.mixers if mixer.seen(inf) == inf for kernel in mixer.kernels)
    return max((FACTS[type(k)].long_bytes(k, batch_tokens) for k in growing), default=0)


def prompt_share(mixer: Mixer, rows: int, past: int) -> float:
    """The part of Mixer.pair_flops that a GPU computes for so many rows of a prompt after `past` others."""
    return min((FACTS[type(k)].prompt_share(k, rows, past) for k in mixer.kernels), default=1.0)


def growing_attention(spec: Model) -> list[AttentionKernel]:
    """The different attention kernels of a model that see all of the past, in the order of layers."""
    found = {
        kernel: None
        for mixer in spec.mixers
        for kernel in mixer.kernels
        if isinstance(kernel, AttentionKernel) and mixer.seen(inf) == inf
    }
    return list(found)


def has_latents(mixer: Mixer) -> bool:
    """Whether the mixer is latent attention."""
    return any(isinstance(kernel, LatentKernel) for kernel in mixer.kernels)


def latent_kernels(spec: Model) -> list[LatentKernel]:
    """The different kernels of latent attention of a model, in the order of layers."""
    return [kernel for kernel in _kernels(spec) if isinstance(kernel, LatentKernel)]


def _kernels(spec: Model) -> dict[Kernel, None]:
    """The different kernels of a model, in the order of layers."""
    return {kernel: None for mixer in spec.mixers for kernel in mixer.kernels}


def _attention_on_cpu(of: AttentionKernel) -> str:
    return "" if of.head_dim <= CPU_MOST_DIM else f"heads have {of.head_dim} dimensions, more than {CPU_MOST_DIM}"


def _attention_on_gpu(of: AttentionKernel, gpu: Gpu) -> str:
    group = of.heads // of.kv_heads
    if of.head_dim > sizes.MOST_HEAD_DIM:
        return f"heads have {of.head_dim} dimensions, more than {sizes.MOST_HEAD_DIM}"
    most = sizes.MOST_HEAD_GROUP
    return "" if group <= most else f"{group} query heads share a KV head, more than {most}"


def _prompt_floats(of: AttentionKernel, rows: int) -> int:
    return sizes.prompt_split_floats(rows, of.heads, of.head_dim)


def _attention_floats(of: AttentionKernel, sequences: int) -> int:
    splits = sizes.attention_splits(sequences, of.kv_heads, sizes.MOST_PROCESSORS)
    return sizes.attention_floats(sequences, of.heads, of.head_dim, splits)


def _segment_bytes(of: AttentionKernel, rows: int) -> int:
    return sizes.segment_bytes(of.heads, of.kv_heads, of.head_dim) if rows >= sizes.segment_rows(of.heads) else 0


def _latent_on_cpu(of: LatentKernel) -> str:
    width = of.rank + of.rotary_dim
    if width <= CPU_MOST_DIM:
        return ""
    return f"latents have {width} elements with their rotary part, more than {CPU_MOST_DIM}"


def _latent_on_gpu(of: LatentKernel, gpu: Gpu) -> str:
    rank, key = sizes.MOST_LATENT_RANK, sizes.MOST_LATENT_KEY
    if of.rank > rank or of.rotary_dim > key:
        return f"latents have {of.rank} elements and {of.rotary_dim} rotary ones; the most are {rank} and {key}"
    old = best_effort(gpu)
    return "latent attention needs matrix instructions for bfloat16, compute capability 8.0" if old else ""


def _latent_floats(of: LatentKernel, sequences: int) -> int:
    splits = sizes.latent_splits(sequences, -(-of.heads // sizes.LATENT_HEADS), sizes.MOST_PROCESSORS)
    return sizes.attention_floats(sequences, of.heads, of.rank, splits)


def _latent_bytes(of: LatentKernel, rows: int) -> int:
    """Queries and sums of rows over latents, or keys and values that are expanded."""
    over_latents = 2 * min(rows, sizes.LATENT_ROWS) * of.heads * (2 * of.rank + of.rotary_dim)
    if rows <= sizes.PROMPT_ROWS[-1]:
        return over_latents
    widths = of.rank, of.rotary_dim, of.key_dim, of.value_dim
    return max(over_latents, sizes.expanded_bytes(rows, of.heads, *widths))


def _expanded_share(of: LatentKernel, rows: int, past: int) -> float:
    """W_k and W_v of the rows themselves are counted with the layer's weights."""
    widths = of.rank, of.rotary_dim, of.key_dim, of.value_dim
    if not sizes.expands(rows, past, *widths):
        return 1.0
    maps = 2 * rows * of.rank * (of.key_dim + of.value_dim)
    absorbed, expanded = sizes.latent_flops(rows, past, *widths)
    return (expanded - maps) / (absorbed - maps)


def _delta_on_cpu(of: DeltaKernel) -> str:
    if of.value_dim % CPU_DELTA_UNIT:
        return f"values of the delta rule have {of.value_dim} dimensions, which is no multiple of {CPU_DELTA_UNIT}"
    return "" if of.taps <= CPU_MOST_TAPS else f"the convolution has {of.taps} taps, more than {CPU_MOST_TAPS}"


def _delta_floats(of: DeltaKernel, rows: int) -> int:
    """Chunk inverses, scores and decays."""
    return sizes.delta_chunk_floats(rows, of.heads)


FACTS: dict[type[Kernel], Facts] = {
    AttentionKernel: Facts(
        _attention_on_cpu,
        _attention_on_gpu,
        decode_floats=_attention_floats,
        row_floats=_prompt_floats,
        long_bytes=_segment_bytes,
    ),
    LatentKernel: Facts(
        _latent_on_cpu,
        _latent_on_gpu,
        decode_floats=_latent_floats,
        long_bytes=_latent_bytes,
        prompt_share=_expanded_share,
    ),
    DeltaKernel: Facts(_delta_on_cpu, row_floats=_delta_floats),
}
