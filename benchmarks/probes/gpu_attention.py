"""How near the GPU's attention, norms, rotary store and greedy choice come to its bandwidth. Needs a CUDA device.

Every time is that of a launch inside a CUDA graph, over caches that do not fit into the second-level cache together.
Bandwidth: of a plain copy, read and written, measured in the same run. Prefill is compared with the SDPA of torch over
plain tensors, the same work: the best of its backends. Both run over a cache of bfloat16 and over one of fp8 (E4M3):
bytes are the cache's, so that fp8 at the same share of the copy takes half the time.
Run: python benchmarks/probes/gpu_attention.py [--sweep | --splits]
--sweep also tries other splits, blocks and stages. --splits times only few rows of a prompt behind a long past, by the
number of programs that share a tile's positions.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from proa.ops.caches import KvPages
from proa.ops.sizes import argmax_keys, attention_floats, attention_splits, prompt_splits
from proa.ops.table import Angles, Norm, QkNorm
from proa.ops.triton import argmax, attention, attention_decode, heads, norm

PAGE_TOKENS = 16
CACHE_BYTES = 300 << 20  # of all copies that a graph goes through
BF16 = torch.bfloat16
KV_TYPES = {"bf16": BF16, "fp8": torch.float8_e4m3fn}


def microseconds(calls: list[Callable[[], None]]) -> float:
    """Time of one call: the median of ten replays of a graph that makes all of them a few times."""
    rounds = max(1, 40 // len(calls))
    for call in calls:
        call()  # compiles; on the stream that fills the caches: another one would not wait for them
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls * rounds:
            call()
    graph.replay()
    times = []
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / (rounds * len(calls)))
    return median(times)


def rand(*shape: int) -> Tensor:
    return torch.randn(*shape, device="cuda", dtype=BF16)


def copy_bandwidth() -> float:
    """Bytes a microsecond, read and written."""
    a = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    b = torch.empty_like(a)
    return 2 * a.numel() / microseconds([lambda: b.copy_(a)])


def paged(
    sequences: int, kv_len: int, kv_heads: int, dim: int, kv: torch.dtype = BF16
) -> tuple[KvPages, Tensor, Tensor]:
    pages = -(-kv_len // PAGE_TOKENS)
    pool = rand(2, sequences * pages, PAGE_TOKENS, kv_heads, dim).to(kv)
    table = torch.randperm(sequences * pages, device="cuda").to(torch.int32).view(sequences, pages)
    return KvPages(pool[0], pool[1]), table, torch.full((sequences,), kv_len, dtype=torch.int32, device="cuda")


def decode_time(
    sequences: int, kv_len: int, shape: tuple[int, int, int], splits: int, kv: torch.dtype = BF16
) -> tuple[float, int]:
    """Microseconds, and bytes of K and V."""
    query_heads, kv_heads, dim = shape
    read = 2 * sequences * kv_len * kv_heads * dim * kv.itemsize
    q, out = rand(sequences, query_heads, dim), rand(sequences, query_heads, dim)
    workspace = torch.empty(attention_floats(sequences, query_heads, dim, splits), device="cuda")
    softmax = attention.Softmax(dim**-0.5)
    caches = [paged(sequences, kv_len, kv_heads, dim, kv) for _ in range(min(64, -(-CACHE_BYTES // read)))]
    calls = [
        lambda c=c: attention_decode.decode(q, c[0], c[1], c[2], softmax, splits, workspace, out)  # type: ignore[misc]
        for c in caches
    ]
    return microseconds(calls), read


def decodes(bandwidth: float) -> None:
    for shape in ((32, 4, 128), (64, 8, 64), (16, 16, 128), (96, 8, 128), (16, 2, 256)):
        for sequences, kv_len in ((1, 128), (1, 4096), (1, 65536), (8, 8192), (32, 4096), (64, 1024)):
            splits = attention_splits(sequences, shape[1], processors())
            for name, kv in KV_TYPES.items():
                time, read = decode_time(sequences, kv_len, shape, splits, kv)
                print(
                    f"decode {name} {shape[0]}/{shape[1]} heads of {shape[2]}, {sequences} x {kv_len}, {splits} "
                    f"splits: {time:.1f} us, {read / time / 1e6:.2f} TB/s, {read / time / bandwidth:.0%} of the copy"
                )


def sweep(bandwidth: float) -> None:
    chosen = attention_decode._decode_shape
    shape, sequences = (32, 4, 128), ((1, 65536), (8, 8192), (1, 4096))
    for tokens, warps, stages in ((64, 4, 5), (64, 4, 3), (32, 4, 5), (32, 4, 7), (128, 4, 3), (64, 4, 7), (64, 8, 5)):

        def other(group: int, dim: int) -> tuple[dict[str, int], int, int]:
            return chosen(group, dim)[0] | {"TOKENS": tokens}, warps, stages  # noqa: B023

        attention_decode._decode_shape = other
        for count, kv_len in sequences:
            line = []
            for per_processor in (1, 2, 3, 4, 6):
                splits = max(1, per_processor * processors() // (count * shape[1]))
                for name, kv in KV_TYPES.items():
                    time, read = decode_time(count, kv_len, shape, splits, kv)
                    line.append(f"{name} {splits}: {time:.1f} us {read / time / bandwidth:.0%}")
            print(f"sweep {count} x {kv_len}, blocks of {tokens}, {warps} warps, {stages} stages:", ", ".join(line))
    attention_decode._decode_shape = chosen


def prefill_time(
    q_len: int, kv_len: int, shape: tuple[int, int, int], kv: torch.dtype = BF16, splits: int = 1
) -> float:
    query_heads, kv_heads, dim = shape
    cache, table, lens = paged(1, kv_len, kv_heads, dim, kv)
    q, out = rand(q_len, query_heads, dim), rand(q_len, query_heads, dim)
    starts = torch.tensor([0, q_len], dtype=torch.int32, device="cuda")
    softmax = attention.Softmax(dim**-0.5)
    return microseconds([lambda: attention.prefill_in_splits(q, cache, table, starts, lens, softmax, splits, out)])


def flops(q_len: int, kv_len: int, shape: tuple[int, int, int]) -> float:
    return 4.0 * shape[0] * shape[2] * q_len * (kv_len - q_len + (q_len + 1) / 2)


def prefills() -> None:
    for shape in ((32, 4, 128), (64, 8, 64), (16, 2, 256)):
        query_heads, kv_heads, dim = shape
        for q_len, kv_len in ((2048, 2048), (8192, 8192), (2048, 16384), (16, 16384)):
            time = prefill_time(q_len, kv_len, shape)
            text = f"prefill {query_heads}/{kv_heads} heads of {dim}, {q_len} rows of {kv_len}: {time:.0f} us, "
            text += f"{flops(q_len, kv_len, shape) / time / 1e6:.0f} TFLOP/s"
            narrow = prefill_time(q_len, kv_len, shape, KV_TYPES["fp8"])
            text += f"; fp8 {narrow:.0f} us, {flops(q_len, kv_len, shape) / narrow / 1e6:.0f} TFLOP/s"
            if q_len == kv_len:
                q, k, v = (rand(1, n, q_len, dim) for n in (query_heads, query_heads, query_heads))
                run = lambda: scaled_dot_product_attention(q, k, v, is_causal=True)  # noqa: B023, E731
                with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION], set_priority=True):
                    peer = microseconds([run])
                text += f"; torch {peer:.0f} us, {flops(q_len, kv_len, shape) / peer / 1e6:.0f} TFLOP/s"
            print(text)


def splits_of_prompts() -> None:
    for shape in ((32, 4, 128), (64, 8, 64), (16, 2, 256)):
        for past in (0, 1024, 8192, 32768):
            for rows in (32, 64, 128, 256, 512):
                chosen = prompt_splits(rows, *shape[:2], processors())
                times = {n: prefill_time(rows, past + rows, shape, splits=n) for n in sorted({1, 2, 4, 8, 16, chosen})}
                text = ", ".join(f"{n}{'*' * (n == chosen)}: {time:.0f}" for n, time in times.items())
                print(f"{shape[0]}/{shape[1]} heads of {shape[2]}, {rows} rows behind {past}: us by splits {text}")


def sweep_prefill() -> None:
    chosen = attention._prefill_shape
    shape = (32, 4, 128)
    for rows, tokens, warps, stages in (
        (64, 64, 4, 5), (64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 64, 8, 5),
        (128, 128, 8, 3), (128, 128, 8, 5),
    ):  # fmt: skip

        def other(group: int, dim: int) -> tuple[dict[str, int], int, int]:
            return chosen(group, dim)[0] | {"TOKENS": tokens, "TILE": rows}, warps, stages  # noqa: B023

        attention._prefill_shape = other
        try:
            rates = [
                f"{q} rows of {kv}: {flops(q, kv, shape) / prefill_time(q, kv, shape) / 1e6:.0f} TFLOP/s"
                for q, kv in ((2048, 2048), (8192, 8192))
            ]
        except Exception as error:  # noqa: BLE001 - too much shared memory, say
            rates = [f"{type(error).__name__}: {error}"]
        print(f"sweep of prefill, tile {rows}, blocks of {tokens}, {warps} warps, {stages} stages:", ", ".join(rates))
    attention._prefill_shape = chosen


def small_ones(bandwidth: float) -> None:
    for rows in (1, 8, 64, 2048):
        x, y, out, weight = rand(rows, 2048), rand(rows, 2048), rand(rows, 2048), rand(2048)
        time = microseconds([lambda: norm.add_rms_norm(x, y, Norm(weight, 1e-6), out)])  # noqa: B023
        share = 8 * x.numel() / time / bandwidth
        print(f"add and norm, {rows} x 2048: {time:.1f} us, {share:.0%} of the copy (from the cache where it fits)")
        qkv, slots = rand(rows, 40, 128), torch.arange(rows, device="cuda")
        caches = {name: paged(1, rows + PAGE_TOKENS, 4, 128, kv)[0] for name, kv in KV_TYPES.items()}
        angles = torch.rand(rows, 64, device="cuda")
        norms, rotation = QkNorm(rand(128), rand(128), 1e-6), Angles(angles, angles, False)
        q, kv = qkv[:, :32], qkv[:, 32:]
        for name, cache in caches.items():
            time = microseconds([lambda: heads.rotate_store(q, kv, norms, rotation, cache, slots, q)])  # noqa: B023
            print(f"head norms, rotary and store in {name}, {rows} x 40 x 128: {time:.1f} us")
    for rows in (1, 32):
        logits = torch.randn(rows, 151936, device="cuda")
        keys = torch.empty(argmax_keys(rows, 151936), dtype=torch.int64, device="cuda")
        ids = torch.empty(rows, dtype=torch.int32, device="cuda")
        time = microseconds([lambda: argmax.argmax(logits, keys, ids)])  # noqa: B023
        print(f"best of 151936, {rows} rows: {time:.1f} us")


def processors() -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count


def main() -> None:
    bandwidth = copy_bandwidth()
    print(torch.cuda.get_device_name(), f"copy {bandwidth / 1e6:.2f} TB/s read and written")
    if "--splits" in sys.argv[1:]:
        splits_of_prompts()
        return
    small_ones(bandwidth)
    decodes(bandwidth)
    prefills()
    if "--sweep" in sys.argv[1:]:
        sweep(bandwidth)
        sweep_prefill()


if __name__ == "__main__":
    main()
