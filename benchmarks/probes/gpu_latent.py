"""How near the GPU's latent attention comes to its bandwidth and its products. Needs a CUDA device.

Every time is that of a launch inside a CUDA graph, over caches that do not fit into the second-level cache together.
Bandwidth: of a plain copy, read and written, measured in the same run. GB/s of decode counts each latent once, however
many tiles of heads read it.
Run: python benchmarks/probes/gpu_latent.py [--sweep]   --sweep also tries other tiles, blocks, stages and splits.
"""

from __future__ import annotations

import sys
from functools import partial

import torch
from gpu_attention import CACHE_BYTES, PAGE_TOKENS, copy_bandwidth, microseconds, processors, rand
from torch import Tensor

from proa.ops.caches import LatentPages
from proa.ops.cuda_attention import Rectangle, cudnn
from proa.ops.cuda_latent import CudaLatentAttention, CudaLatentMaps
from proa.ops.expanded_latents import ExpandedAttention, flash
from proa.ops.gpu_traits import traits_of
from proa.ops.sizes import attention_floats
from proa.ops.table import Angles, Norm
from proa.ops.triton import latent_attention
from proa.ops.triton.latent_attention import TileShape
from proa.ops.triton.latent_store import latent_store

RANK, KEY = 512, 64
WIDTH, SCALE = RANK + KEY, (128 + KEY) ** -0.5
HEADS = {"V2-Lite": 16, "Kimi-K2": 64, "V3": 128}


def paged(sequences: int, kv_len: int) -> tuple[LatentPages, Tensor, Tensor]:
    pages = -(-kv_len // PAGE_TOKENS)
    table = torch.randperm(sequences * pages, device="cuda").to(torch.int32).view(sequences, pages)
    lens = torch.full((sequences,), kv_len, dtype=torch.int32, device="cuda")
    return LatentPages(rand(sequences * pages, PAGE_TOKENS, WIDTH), RANK), table, lens


def decode_time(sequences: int, kv_len: int, heads: int, splits: int) -> tuple[float, int]:
    """Microseconds, and bytes of latents and keys."""
    read = sequences * kv_len * WIDTH * 2
    q, out = rand(sequences, heads, WIDTH), rand(sequences, heads, RANK)
    floats = attention_floats(sequences, heads, RANK, splits)
    workspace, shared = torch.empty(floats, device="cuda"), traits_of(q.device).shared_bytes
    caches = [paged(sequences, kv_len) for _ in range(min(64, -(-CACHE_BYTES // read)))]
    calls = [
        lambda c=c: latent_attention.decode(q, *c, SCALE, splits, shared, workspace, out)  # type: ignore[misc]
        for c in caches
    ]
    return microseconds(calls), read


def flops(pairs: float, heads: int) -> float:
    return 2.0 * heads * pairs * (WIDTH + RANK)


def decodes(bandwidth: float) -> None:
    for name, heads in HEADS.items():
        for sequences in (1, 4, 32):
            for kv_len in (1024, 8192, 65536):
                splits = latent_attention.splits_for(
                    sequences, heads, processors(), traits_of(torch.device("cuda")).shared_bytes
                )
                time, read = decode_time(sequences, kv_len, heads, splits)
                print(
                    f"decode {name}, {heads} heads, {sequences} x {kv_len}, {splits} splits: {time:.1f} us, "
                    f"{read / time / 1e3:.0f} GB/s, {read / time / bandwidth:.0%} of the copy, "
                    f"{flops(sequences * kv_len, heads) / time / 1e6:.0f} TFLOP/s",
                    flush=True,
                )


def maps_of(heads: int) -> CudaLatentMaps:
    device = torch.device("cuda")
    maps = CudaLatentMaps(heads, 128, 128, RANK, device, CudaLatentAttention(traits_of(device)))
    maps.weight.normal_()
    return maps


def prefill_time(q_len: int, kv_len: int, heads: int) -> float:
    cache, table, lens = paged(1, kv_len)
    q, out = rand(q_len, heads, WIDTH), rand(q_len, heads, RANK)
    starts = torch.tensor([0, q_len], dtype=torch.int32, device="cuda")
    shared = traits_of(q.device).shared_bytes
    return microseconds([lambda: latent_attention.prefill(q, cache, table, starts, lens, SCALE, shared, out)])


def expanded_times(q_len: int, kv_len: int, heads: int) -> tuple[float, ...]:
    """Microseconds of one layer with absorbed weights, with keys and values that are expanded for flash-attention, and
    for cuDNN; all with W_k and W_v."""
    cache, table, lens = paged(1, kv_len)
    maps = maps_of(heads)
    weight = maps.weight.view(heads, 256, RANK)
    q, seen, out = rand(q_len, heads, 128 + KEY), rand(q_len, heads, RANK), rand(q_len, heads, 128)
    starts = torch.tensor([0, q_len], dtype=torch.int32, device="cuda")
    shared = traits_of(q.device).shared_bytes

    def absorbed() -> None:
        latent_attention.prefill(maps.queries(q), cache, table, starts, lens, SCALE, shared, seen)
        maps.values(seen)

    def expanded(by: Rectangle | None) -> None:
        attention = ExpandedAttention(flash, q_len, by)
        attention.attend(q, weight, cache, table[0], kv_len - q_len, SCALE, out, beside_decode=False)

    return tuple(microseconds([of]) for of in (absorbed, partial(expanded, None), partial(expanded, cudnn)))


def expansions() -> None:
    for name, heads in HEADS.items():
        for q_len, kv_len in ((1024, 1024), (1024, 4096), (1024, 16384), (1024, 65536), (4096, 16384)):
            own, by_flash, by_cudnn = expanded_times(q_len, kv_len, heads)
            print(
                f"prefill {name}, {q_len} of {kv_len}: absorbed {own:.0f} us, expanded {by_flash:.0f} us by "
                f"flash-attention, {by_cudnn:.0f} us by cuDNN and flash-attention",
                flush=True,
            )


def prefills() -> None:
    for name, heads in HEADS.items():
        for q_len, kv_len in ((512, 512), (2048, 2048), (512, 16384)):
            time = prefill_time(q_len, kv_len, heads)
            pairs = q_len * (kv_len - q_len + (q_len + 1) / 2)
            print(
                f"prefill {name}, {heads} heads, {q_len} rows of {kv_len}: {time:.0f} us, "
                f"{flops(pairs, heads) / time / 1e6:.0f} TFLOP/s",
                flush=True,
            )


def around() -> None:
    """What stands before and after attention."""
    for name, heads in HEADS.items():
        maps = maps_of(heads)
        for rows in (1, 4, 32, 2048):
            q, kv, seen = rand(rows, heads, 192), rand(rows, WIDTH), rand(rows, heads, RANK)
            angles, slots = torch.rand(rows, KEY // 2, device="cuda"), torch.arange(rows, device="cuda")
            cache, norm = paged(1, rows + PAGE_TOKENS)[0], Norm(rand(RANK), 1e-6)
            turned = Angles(angles, angles, True)
            store = microseconds([lambda: latent_store(q, kv, norm, turned, cache, slots)])  # noqa: B023
            queries, values = microseconds([lambda: maps.queries(q)]), microseconds([lambda: maps.values(seen)])  # noqa: B023
            half = maps.weight.nbytes / 2
            print(
                f"around {name}, {rows} rows: norm, rotary and store {store:.1f} us; to latents {queries:.1f} us "
                f"({half / queries / 1e3:.0f} GB/s), from latents {values:.1f} us ({half / values / 1e3:.0f} GB/s)",
                flush=True,
            )


SHAPES = (
    TileShape(16, 32, 8, 5), TileShape(16, 32, 8, 7), TileShape(16, 32, 4, 5), TileShape(16, 64, 8, 5), TileShape(16, 16, 8, 9),
    TileShape(32, 32, 8, 5), TileShape(32, 16, 8, 7), TileShape(64, 16, 8, 5), TileShape(64, 16, 8, 7), TileShape(64, 32, 8, 3),
    TileShape(64, 32, 8, 5), TileShape(64, 64, 8, 3),
)  # fmt: skip


def sweep(bandwidth: float) -> None:
    chosen, chosen_prefill = latent_attention.decode_shape, latent_attention.prefill_shape
    for shape in SHAPES:
        latent_attention.decode_shape = lambda heads, shared: shape  # noqa: B023
        latent_attention.prefill_shape = lambda shared: shape  # noqa: B023
        for name, heads in HEADS.items():
            line = []
            try:
                for sequences, kv_len in ((1, 8192), (1, 65536), (32, 8192)):
                    for per_processor in (1, 2, 3):
                        tiles = -(-heads // shape.tile)
                        splits = min(256, max(1, per_processor * processors() // (sequences * tiles)))
                        time, read = decode_time(sequences, kv_len, heads, splits)
                        share = f"{read / time / bandwidth:.0%}"
                        line.append(f"{sequences} x {kv_len} in {splits}: {time:.1f} us {share}")
                time = prefill_time(2048, 2048, heads)
                line.append(f"prefill {flops(2048 * 2049 / 2, heads) / time / 1e6:.0f} TFLOP/s")
            except Exception as error:  # noqa: BLE001 - too much shared memory, say
                line.append(f"{type(error).__name__}: {str(error)[:80]}")
            print(f"sweep {name}, {shape}:", ", ".join(line), flush=True)
    latent_attention.decode_shape, latent_attention.prefill_shape = chosen, chosen_prefill


def main() -> None:
    bandwidth = copy_bandwidth()
    print(torch.cuda.get_device_name(), f"copy {bandwidth / 1e6:.2f} TB/s read and written")
    around()
    decodes(bandwidth)
    prefills()
    expansions()
    if "--sweep" in sys.argv[1:]:
        sweep(bandwidth)


if __name__ == "__main__":
    main()
