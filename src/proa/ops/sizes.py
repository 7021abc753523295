"""How much memory the steps of a GPU take: numbers that the plan and the kernels share, so that they stand once. Pure
arithmetic over counts. Never: torch, models, what a plan adds up.
"""

from __future__ import annotations

from itertools import accumulate

# Decode graphs: sequences of a step are padded up to the next of these. Padding costs neither weights nor KV.
SMALL_BUCKETS = (1, 2, 4, 8)
BUCKET_STEP = 8

# Parts that attention cuts a sequence's past into, for kernels that are compiled for that many.
MOST_SPLITS = 256
MOST_PROCESSORS = 192  # multiprocessors of the largest GPU (GB202); plans are made before the device can be asked

DELTA_CHUNK = 64  # rows of a chunk of the gated delta rule
UNPACKED_BYTES = 64 << 20  # rows of bfloat16 that packed linear layers become at a time, for many tokens
BLOCK_TOKENS = (16, 32, 64, 128)  # of experts' blocks of many tokens
FAULT_COLUMNS = 3  # int32 of a row's fault record, before its experts
ADDRESSES = 4  # int64 of an expert in the residency tables; and an int32, its number

# The sampler: columns of a program, bins of log-weights, candidates of a cut, changed logits of a step (int32 words of
# each), best tokens of a row whose log-probabilities are told.
LOGIT_COLUMNS, LOGIT_BINS, MOST_KEPT = 2048, 512, 16384
MOST_EDITS, EDIT_WORDS, MOST_LOGPROBS = 120_000, 5, 100


def buckets(most: int) -> tuple[int, ...]:
    """Batch sizes that have a decode graph: 1, 2, 4, 8, then every BUCKET_STEP, and `most` itself."""
    sizes = {size for size in SMALL_BUCKETS if size < most} | set(range(2 * BUCKET_STEP, most, BUCKET_STEP)) | {most}
    return tuple(sorted(sizes))


def attention_splits(sequences: int, kv_heads: int, processors: int) -> int:
    """How many parts each sequence's past is cut into: one sequence alone shall keep every multiprocessor busy, and
    short ones that share a batch with it shall not cost many empty programs."""
    alone = -(-2 * processors // kv_heads)
    together = -(-8 * processors // (sequences * kv_heads))
    return max(1, min(alone, together, MOST_SPLITS))


def attention_floats(sequences: int, heads: int, dim: int, splits: int) -> int:
    """float32 that the parts leave: a vector a head, and its maximum and sum as one."""
    return sequences * heads * splits * (dim + 1)


def latent_splits(sequences: int, tiles: int, processors: int) -> int:
    """The same of latent attention, `tiles` programs of heads for each part."""
    alone = -(-processors // tiles)
    together = -(-2 * processors // (sequences * tiles))
    return max(1, min(alone, together, MOST_SPLITS))


def delta_chunk_floats(rows: int, heads: int) -> int:
    """float32 that chunks of the gated delta rule leave for each other, of value heads."""
    return rows * heads * (2 * DELTA_CHUNK + 2)


def input_counts(rows: int, sequences: int, most_pages: int) -> tuple[int, ...]:
    """Of a step's inputs: int64 tokens, slots, positions; then int32 first rows, lengths, states, page tables."""
    return rows, rows, rows, sequences + 1, sequences, sequences, sequences * most_pages


def input_starts(rows: int, sequences: int, most_pages: int) -> list[int]:
    """The byte where each of these begins, and where the last one ends: multiples of 16, whatever the counts, since
    Triton compiles a kernel once for aligned addresses and once more for others."""
    counts = input_counts(rows, sequences, most_pages)
    sizes = [(8 if i < 3 else 4) * count for i, count in enumerate(counts)]
    return list(accumulate((-(-size // 16) * 16 for size in sizes), initial=0))


def input_bytes(rows: int, sequences: int, most_pages: int) -> int:
    return input_starts(rows, sequences, most_pages)[-1]


def angle_bytes(positions: int, dim: int) -> int:
    """cos and sin in float32 of half of the rotated dimensions."""
    return 2 * positions * (dim // 2) * 4


def fault_bytes(rows: int, top_k: int) -> int:
    """Records of a step, and of one that others run between."""
    return 2 * rows * (FAULT_COLUMNS + top_k) * 4


def table_words(experts: int) -> int:
    """int32 of a layer in the residency tables: more than enough, so that rows begin on 16 bytes."""
    return (experts * (2 * ADDRESSES + 1) // 4 + 1) * 4


def residency_bytes(layers: int, experts: int) -> int:
    """Tables and counts of layers, `experts` of the largest."""
    return layers * 4 * (table_words(experts) + experts)


def most_blocks(pairs: int, experts: int, block_tokens: int) -> int:
    """Blocks of (token, expert) pairs that so many fill at most, however they are routed."""
    used = min(pairs, experts)
    return used + (pairs - used) // block_tokens


def order_entries(pairs: int, experts: int) -> int:
    """int32 that hold the pairs in blocks of any size."""
    return max(most_blocks(pairs, experts, size) * size for size in BLOCK_TOKENS)


def expert_space_bytes(tokens: int, top_k: int, experts: int, hidden: int, padded_width: int) -> int:
    """Between the kernels of a layer's experts: silu(gate) * up in bfloat16, results in float32, pairs by expert."""
    pairs = tokens * top_k
    return pairs * (2 * padded_width + 4 * hidden) + 4 * (experts + 1 + order_entries(pairs, experts))


def parts_of(vocab: int) -> int:
    """Programs that share a row of logits."""
    return -(-vocab // LOGIT_COLUMNS)


def best_keys(rows: int, vocab: int) -> int:
    """int64 that the search for each row's best token leaves."""
    return rows * parts_of(vocab)


def explain_keys(rows: int, vocab: int, count: int) -> int:
    """int64 that the search for each row's `count` best tokens leaves."""
    return rows * parts_of(vocab) * count


def weights_bytes(jobs: int, vocab: int, most_kept: int) -> int:
    """What the passes over a row of logits leave for each other."""
    return jobs * (16 * parts_of(vocab) + 4 * LOGIT_BINS + 4 + 28 * most_kept)


def sampler_bytes(rows: int, vocab: int) -> int:
    """What drawing the tokens of a step takes beside its logits."""
    columns = 52 * -(-rows // 4) * 4  # of what is asked
    return weights_bytes(rows, vocab, min(MOST_KEPT, vocab)) + (4 * EDIT_WORDS + 4) * MOST_EDITS + columns


def logprobs_bytes(rows: int, vocab: int) -> int:
    """What telling log-probabilities takes beside the logits."""
    most = min(MOST_LOGPROBS, vocab)
    return weights_bytes(rows, vocab, 1) + 8 * explain_keys(rows, vocab, most) + rows * (20 + 8 * most + 4)
