"""Sizes of the buffers of GPU steps, shared by the memory plan and the kernels' launchers. Pure arithmetic over counts.
Never: torch, models, adding up a plan.
"""

from __future__ import annotations

from itertools import accumulate

from proa.types import MOST_LOGPROBS as MOST_LOGPROBS  # most that a request may ask for

# Decode graphs: the sequences of a step are padded up to the next of these sizes. Padding rows read no expert weights
# and no KV.
SMALL_BUCKETS = (1, 2, 4, 8)
BUCKET_STEP = 8

# Linear layers of up to this many bfloat16 rows have kernels of Proa's; above, those of cuBLAS.
LINEAR_ROWS = 16

# Whole steps with prompts are padded up to the next of these numbers of rows, for which they have a graph. Launched op
# by op, 24 layers of Qwen3-30B-A3B take a host 35 ms, an H100 10 ms for 32 rows and 14 for 512 (decision 066).
PROMPT_ROWS = (32, 64, 128, 256, 512)

# Most parts that split-KV attention cuts a sequence into, in decode and for a tile of a prompt; kernels are compiled
# for this many. Programs of a prompt's tiles for each SM: as many as are resident there at D = 128.
MOST_SPLITS, MOST_PROMPT_SPLITS, PROMPT_PROGRAMS = 256, 16, 2
MOST_HEAD_DIM, MOST_HEAD_GROUP = 256, 64  # on a GPU: largest head dimension, most query heads per KV head
MOST_LATENT_RANK, MOST_LATENT_KEY = 512, 64  # on a GPU: longest latent, and its longest rotary part
LATENT_HEADS = 64  # most heads per program of latent attention; smaller programs have fewer splits
FEW_SEQUENCES = 256  # up to this many, one compiled kernel serves all numbers of sequences
E4M3_CAPABILITY = 89  # first compute capability that converts E4M3, and whose tensor cores multiply it
E4M3_COLUMNS = 128  # columns per scale of rows that are rounded to E4M3, if a row has several
E4M3_ABOVE = 10  # rows are rounded for experts that have more tokens than this on average
MOST_PROCESSORS = 192  # SMs of the largest GPU (GB202); plans are made before the device is known

RING_BANKS = 2  # the ring holds experts copied in for a prompt: one layer is read while the next arrives
# Alignment of the ring's banks, and of experts in lent KV pages: kernels read panels in vectors of 16 bytes, DMA in
# larger bursts.
EXPERT_ALIGNMENT_BYTES = 256
# Launches with fewer rows than this share no buffer with the others: a decode step may run while chunks of a prompt are
# computed on another stream. Launches that share buffers must run in order.
FEW_ROWS = 128
# Attention of long prompts: tokens of segments of the past, and rows x heads of a tile. Segments of 16384 tokens reach
# 690 TFLOP/s with cuDNN on an H200, of 4096 tokens 650, of 2048 tokens 600 (789 in a dense product).
SEGMENT_TOKENS = (16384, 4096, 2048)
# Those of prompts beside decode steps: each of decode's kernels waits until programs of the prompt's end, and one of
# cuDNN's computes 128 rows of a segment, 0.24 ms with 16384 tokens.
SHORT_SEGMENT_TOKENS = SEGMENT_TOKENS[1:]
SEGMENT_VECTORS = 65536
SEGMENTS_MERGED = 3  # most segments merged by one launch
EXPANDED_BYTES = 320 << 20  # keys and values of a segment of latents, for a group of heads
EXPANDED_ROWS = 4096  # rows that attend to them at once
EXPANDED_MARGIN = 1.25  # they must need so many times fewer FLOPs than latents: they are written and read again
# Rows that attend over latents at once: with 128 heads of DeepSeek-V3 their queries and sums take 279 KB each.
LATENT_ROWS = 1024
DELTA_CHUNK = 64  # rows of a chunk of the gated delta rule
UNPACKED_BYTES = 64 << 20  # bfloat16 rows that a packed linear layer is dequantised to at a time, for many tokens
BLOCK_TOKENS = (16, 32, 64, 128)  # sizes of the blocks of (token, expert) pairs in the grouped kernels
WIDE_BLOCK = 256  # and where shared memory allows
FAULT_COLUMNS = 3  # int32 columns of a row's fault record before its experts' ids
ADDRESSES = 4  # int64 per expert in the residency tables, besides one int32 (its CPU number)

# Sampler: logits per program, bins of log-weights, most candidates of a top-k/top-p cut; most edited logits of a step
# and int32 words of each.
LOGIT_COLUMNS, LOGIT_BINS, MOST_KEPT = 2048, 512, 16384
MOST_EDITS, EDIT_WORDS = 120_000, 5


def buckets(most: int) -> tuple[int, ...]:
    """Batch sizes that have a decode graph: 1, 2, 4, 8, then every BUCKET_STEP, and `most` itself."""
    sizes = {size for size in SMALL_BUCKETS if size < most} | set(range(2 * BUCKET_STEP, most, BUCKET_STEP)) | {most}
    return tuple(sorted(sizes))


def deterministic_buckets(most: int) -> tuple[int, ...]:
    """`buckets` with --deterministic: several if a row has the same bits in each (CudaOps, least_rows), which cuBLAS
    does not give."""
    return buckets(most) if most <= LINEAR_ROWS else (most,)


def prompt_rows(most: int) -> tuple[int, ...]:
    """The sizes of PROMPT_ROWS for steps of up to `most` rows."""
    return tuple(rows for rows in PROMPT_ROWS if rows <= most)


def warm_rows(most: int) -> list[int]:
    """Numbers of prefill rows that together launch every kernel for up to `most` rows: kernels change at powers of two,
    and Triton compiles multiples of 16 separately."""
    powers = [1 << i for i in range(1, most.bit_length())]
    return sorted({rows for power in powers for rows in (power, power + 1) if rows <= most} | {most} - {1})


def attention_splits(sequences: int, kv_heads: int, processors: int) -> int:
    """Number of parts that each sequence's KV is split into: enough for a single sequence to occupy every SM, but few
    in large batches, where short sequences would launch many empty programs."""
    alone = -(-2 * processors // kv_heads)
    together = -(-8 * processors // (sequences * kv_heads))
    return max(1, min(alone, together, MOST_SPLITS))


def attention_floats(sequences: int, heads: int, dim: int, splits: int) -> int:
    """float32 elements of the partial results: per head and part a vector, and its log-sum-exp."""
    return sequences * heads * splits * (dim + 1)


def prompt_splits(rows: int, heads: int, kv_heads: int, processors: int) -> int:
    """Number of programs that share the positions of a tile of a prompt's rows: as many as all SMs hold at once, since
    a second wave takes as long as the first. 32 heads, 4 KV heads, an H200, behind 32768 tokens, us by 1, 2, 4, 8, 16
    programs: 64 rows 566, 300, 208, 112, 123; 128 rows 568, 404, 213, 221, 241; 256 rows 576, 417, 426, 443, 479."""
    tiles = -(-rows // max(1, MOST_HEAD_GROUP // (heads // kv_heads)))
    return max(1, min(MOST_PROMPT_SPLITS, PROMPT_PROGRAMS * processors // (tiles * kv_heads)))


def prompt_split_floats(rows: int, heads: int, dim: int) -> int:
    """Most float32 elements of the partial results of split tiles, in a step of up to so many rows."""
    vectors = min(rows * heads * MOST_PROMPT_SPLITS, PROMPT_PROGRAMS * MOST_PROCESSORS * MOST_HEAD_GROUP)
    return vectors * (dim + 1)


def segment_rows(heads: int) -> int:
    """Query rows of a tile of attention over segments: enough programs for every SM, results of 16 MiB at D = 128."""
    return max(1, min(2048, SEGMENT_VECTORS // heads) // 16 * 16)


def segment_bytes(heads: int, kv_heads: int, dim: int) -> int:
    """Bytes of the buffers of attention over segments: a tile's queries, keys and values of a segment, results that are
    merged at once, and in float32 merged results and sums of exponentials."""
    vectors = segment_rows(heads) * heads
    of_vector = 2 * dim + SEGMENTS_MERGED * (2 * dim + 4) + 4 * dim + 4
    return 2 * 2 * SEGMENT_TOKENS[0] * kv_heads * dim + vectors * of_vector


def latent_splits(sequences: int, tiles: int, processors: int) -> int:
    """attention_splits for latent attention, with `tiles` programs (tiles of heads) per part."""
    alone = -(-processors // tiles)
    together = -(-2 * processors // (sequences * tiles))
    return max(1, min(alone, together, MOST_SPLITS))


def latent_flops(rows: int, past: int, rank: int, rotary: int, keys: int, values: int) -> tuple[int, int]:
    """FLOPs of a head of latent attention for `rows` rows after `past` positions, W_k and W_v included: over latents,
    and over keys and values that are expanded from them, the values padded to the keys' dims. keys, values: K and V."""
    pairs, maps = rows * past + rows * (rows + 1) // 2, 2 * rank * (keys + values)
    return 2 * (2 * rank + rotary) * pairs + maps * rows, 4 * (keys + rotary) * pairs + maps * (past + rows)


def expands(rows: int, past: int, rank: int, rotary: int, keys: int, values: int) -> bool:
    """Whether a prompt's latent attention expands keys and values: where that takes clearly fewer FLOPs. Not for so
    few rows that their step may be a graph, which keeps what it was recorded with."""
    if rows <= PROMPT_ROWS[-1] or values > keys + rotary:
        return False
    absorbed, expanded = latent_flops(rows, past, rank, rotary, keys, values)
    return EXPANDED_MARGIN * expanded <= absorbed


def expanded_head_bytes(tokens: int, rotary: int, keys: int, values: int) -> int:
    """Bytes of a head's keys and values of so many tokens: the products with W_k and W_v, whole keys, padded values."""
    return 2 * tokens * (keys + values + 2 * (keys + rotary))


def expanded_heads(tokens: int, heads: int, rotary: int, keys: int, values: int) -> int:
    """Heads whose keys and values of so many tokens fit into EXPANDED_BYTES, at least one."""
    return max(1, min(heads, EXPANDED_BYTES // expanded_head_bytes(tokens, rotary, keys, values)))


def expanded_bytes(rows: int, heads: int, rank: int, rotary: int, keys: int, values: int) -> int:
    """Bytes of the buffers of latent attention with expanded keys and values, for up to `rows` rows: keys and values of
    a segment, its latents, queries in tiles, the first result, also without padding, results that are merged at once,
    and in float32 merged results and sums of exponentials."""
    rows = min(rows, EXPANDED_ROWS)
    tokens, dims = max(SEGMENT_TOKENS[0], rows), keys + rotary
    group = expanded_heads(tokens, heads, rotary, keys, values)
    merged = rows * group * (2 * dims + (SEGMENTS_MERGED + 2) * (2 * dims + 4) + 4 * dims + 4)
    return group * expanded_head_bytes(tokens, rotary, keys, values) + 2 * tokens * (rank + rotary) + merged


def delta_chunk_floats(rows: int, heads: int) -> int:
    """float32 elements that the chunk kernels of the gated delta rule exchange; heads: value heads."""
    return rows * heads * (2 * DELTA_CHUNK + 2)


def input_counts(rows: int, sequences: int, most_pages: int) -> tuple[int, ...]:
    """Element counts of a step's inputs: int64 tokens, slots, positions; int32 first rows, lengths, states, page
    tables."""
    return rows, rows, rows, sequences + 1, sequences, sequences, sequences * most_pages


def input_starts(rows: int, sequences: int, most_pages: int) -> list[int]:
    """Byte offset of each input of input_counts, and the end of the last one. All are multiples of 16, because Triton
    compiles separate kernels for aligned and unaligned addresses."""
    counts = input_counts(rows, sequences, most_pages)
    sizes = [(8 if i < 3 else 4) * count for i, count in enumerate(counts)]
    return list(accumulate((-(-size // 16) * 16 for size in sizes), initial=0))


def input_bytes(rows: int, sequences: int, most_pages: int) -> int:
    return input_starts(rows, sequences, most_pages)[-1]


def angle_bytes(positions: int, dim: int) -> int:
    """Bytes of cos and sin, float32 [positions, dim / 2] each; dim: rotary dimensions."""
    return 2 * positions * (dim // 2) * 4


def fault_bytes(rows: int, top_k: int) -> int:
    """Bytes of the fault records of two steps: the running one, and one that is suspended while others run."""
    return 2 * rows * (FAULT_COLUMNS + top_k) * 4


def table_words(experts: int) -> int:
    """int32 words of a layer in the residency tables, rounded up so that rows are aligned to 16 bytes."""
    return (experts * (2 * ADDRESSES + 1) // 4 + 1) * 4


def residency_bytes(layers: int, experts: int) -> int:
    """Bytes of the residency tables and expert counts of all layers; experts: those of the largest layer."""
    return layers * 4 * (table_words(experts) + experts)


def aligned(nbytes: int) -> int:
    """Bytes, padded to EXPERT_ALIGNMENT_BYTES."""
    return -(-nbytes // EXPERT_ALIGNMENT_BYTES) * EXPERT_ALIGNMENT_BYTES


def bank_bytes(ring_bytes: int) -> int:
    """Bytes of a bank of a ring of this size."""
    return ring_bytes // RING_BANKS // EXPERT_ALIGNMENT_BYTES * EXPERT_ALIGNMENT_BYTES


def ring_groups(experts: int, expert_bytes: int, bank_bytes: int) -> int:
    """Number of groups into which a layer's experts must be divided so that each group fits into a bank of the ring, at
    least 1. A bank holds at least one expert."""
    return max(1, -(-experts // (bank_bytes // expert_bytes)))


def most_blocks(pairs: int, experts: int, block_tokens: int) -> int:
    """Most blocks that `pairs` (token, expert) pairs can fill, for any routing."""
    used = min(pairs, experts)
    return used + (pairs - used) // block_tokens


def order_entries(pairs: int, experts: int) -> int:
    """int32 elements that hold the pairs sorted by expert, padded to blocks, for any size of block."""
    return max(most_blocks(pairs, experts, size) * size for size in (*BLOCK_TOKENS, WIDE_BLOCK))


def expert_space_bytes(tokens: int, top_k: int, experts: int, hidden: int, padded_width: int) -> int:
    """Bytes of the buffers between the kernels of a layer's experts: activations in bfloat16, results in float32, pairs
    sorted by expert."""
    pairs = tokens * top_k
    return pairs * (2 * padded_width + 4 * hidden) + 4 * (experts + 1 + order_entries(pairs, experts))


def parts_of(vocab: int) -> int:
    """Number of programs that share a row of logits."""
    return -(-vocab // LOGIT_COLUMNS)


def mask_words(vocab: int) -> int:
    """int32 words of a row's mask of allowed tokens: a bit for each token and for the grammar's own end."""
    return vocab // 32 + 1


def argmax_keys(rows: int, vocab: int) -> int:
    """int64 elements of the argmax kernels' partial results."""
    return rows * parts_of(vocab)


def logprobs_keys(rows: int, vocab: int, count: int) -> int:
    """int64 elements of the partial results of the top-`count` tokens per row."""
    return rows * parts_of(vocab) * count


def weights_bytes(jobs: int, vocab: int, most_kept: int) -> int:
    """Bytes that the sampler's passes over the logits exchange; jobs: sampled rows."""
    return jobs * (16 * parts_of(vocab) + 4 * LOGIT_BINS + 8 + 28 * most_kept)


def sampler_bytes(rows: int, vocab: int) -> int:
    """Bytes of the sampler's buffers for a step, besides its logits."""
    columns = 56 * -(-rows // 4) * 4  # sampling parameters of the rows
    masks = 4 * rows * mask_words(vocab)
    return weights_bytes(rows, vocab, min(MOST_KEPT, vocab)) + (4 * EDIT_WORDS + 4) * MOST_EDITS + columns + masks


def logprobs_bytes(rows: int, vocab: int) -> int:
    """Bytes of the buffers for logprobs, besides the logits."""
    most = min(MOST_LOGPROBS, vocab)
    return weights_bytes(rows, vocab, 1) + 8 * logprobs_keys(rows, vocab, most) + rows * (20 + 8 * most + 4)
