// The C interface of Proa's native library: all functions and types that other programs may use, with proa/tables.h.
//
// Rules, for every function below:
// - It returns PROA_OK or an error code; proa_last_error() then gives the reason in one sentence. The exceptions are
//   proa_abi_version, proa_last_error, and the host functions proa_doorbell_call_ring and proa_doorbell_call_wait.
// - Handles are opaque pointers. Sizes are in elements, or in bytes if the name says so; all arguments are checked.
// - No exception crosses the interface, and this header needs none of torch, CUDA or Python.
// PROA_ABI_VERSION is increased by every change that breaks existing callers.

#ifndef PROA_NATIVE_H
#define PROA_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#define PROA_API __attribute__((visibility("default")))

#include "proa/tables.h"

#ifdef __cplusplus
extern "C" {
#endif

// ---- version and errors

#define PROA_ABI_VERSION 12

#define PROA_OK 0
#define PROA_ERROR_ARGUMENT 1  // an argument is invalid
#define PROA_ERROR_MEMORY 2    // there is not enough memory
#define PROA_ERROR_SYSTEM 3    // another error of the operating system
#define PROA_ERROR_WORKER 4    // a worker thread died
#define PROA_ERROR_NUMERICS 5  // a result is non-finite (NaN or Inf)

// The version that the library was built with: PROA_ABI_VERSION of its header.
PROA_API int proa_abi_version(void);

// The reason of the last failed call on this thread; "" if none has failed. Valid until the thread's next failure.
PROA_API const char* proa_last_error(void);

// ---- arena: RAM for weights, on huge pages where possible, on one NUMA node if asked

typedef struct proa_arena proa_arena;

#define PROA_ARENA_SHARED 1u       // back it by a file that other processes can map (proa_arena_fd)
#define PROA_ARENA_STRICT_NODE 2u  // fail if it cannot be bound to the node
#define PROA_ARENA_SMALL_PAGES 4u  // no huge pages: for tests and comparisons

#define PROA_PAGES_SMALL 0       // a file in memory, pages of the machine's base size
#define PROA_PAGES_ANON_HUGE 1   // anonymous memory with transparent huge pages; no file
#define PROA_PAGES_SHMEM_HUGE 2  // a file in memory with transparent huge pages
#define PROA_PAGES_HUGETLB 3     // a file in memory on reserved pages of 2 MiB

typedef struct proa_arena_info {
    uint64_t bytes;          // as requested
    uint64_t mapped_bytes;   // rounded up to whole pages
    uint64_t touched_bytes;  // backed by memory since proa_arena_touch
    int32_t pages;           // PROA_PAGES_*
    int32_t node;            // the NUMA node it is bound to, or -1
    char reason[1000];       // why the pages are not of a better kind; "" for the best kind
} proa_arena_info;

// Reserves addresses for `bytes` zeroed bytes, bound to NUMA node `node` (-1: none). proa_arena_touch allocates the
// memory: a part that was never touched must not be accessed, since the system may kill the process.
PROA_API int proa_arena_create(size_t bytes, int node, uint32_t flags, proa_arena** out);

// Frees the memory at once: the caller must ensure that it is no longer in use. A null pointer is ignored.
PROA_API int proa_arena_destroy(proa_arena* arena);

// Allocates memory for bytes [first, first + count); fails with the sizes in the reason if there is too little.
// Contents are kept. Thread-safe.
PROA_API int proa_arena_touch(proa_arena* arena, size_t first, size_t count);

// Interleaves the pages over `count` NUMA nodes, instead of the node it was created with; only before the first touch.
PROA_API int proa_arena_interleave(proa_arena* arena, const int32_t* nodes, int32_t count);

PROA_API int proa_arena_data(const proa_arena* arena, void** out);    // page-aligned, valid while the arena lives
PROA_API int proa_arena_bytes(const proa_arena* arena, size_t* out);  // as requested
PROA_API int proa_arena_fd(const proa_arena* arena, int* out);        // owned by the arena; -1 if there is no file
PROA_API int proa_arena_get_info(const proa_arena* arena, proa_arena_info* out);

// Bytes on huge pages now, from /proc: takes milliseconds per gigabyte that the process maps.
PROA_API int proa_arena_get_huge_bytes(const proa_arena* arena, uint64_t* out);

// ---- pool: the worker threads, and the instruction set of their kernels

typedef struct proa_pool proa_pool;

typedef struct proa_pool_options {
    const int32_t* cpus;        // one per worker, team by team; the calling thread works too and is not listed
    const int32_t* team_begin;  // [teams + 1] into cpus; team i serves slice i of every matrix
    int32_t teams;
    int32_t pin;                // bind each worker to its CPU, or to all CPUs of its team's home if homes are given
    int32_t spin_us;            // how long an idle worker spins before it sleeps
    int32_t redo;               // repeat the tasks of a preempted worker on another one
    const char* isa;            // "" or null: the best; else the name of kernels that this CPU can run
    const int32_t* homes;       // null, or the CPUs that any worker of a team may run on, team by team
    const int32_t* home_begin;  // [teams + 1] into homes
    int32_t lanes;              // at least 1: threads that may call at the same time, each with a lane of its own
    int32_t nice;               // what is added to the workers' nice value
} proa_pool_options;

// Writes the name of the kernels that a pool with this `isa` gets, and why it gets no better ones: "" if there are
// none, "asked for" if `wanted` names them. Both texts have room for `bytes` bytes.
PROA_API int proa_select_isa(const char* wanted, char* name, char* reason, size_t bytes);

PROA_API int proa_pool_create(const proa_pool_options* options, proa_pool** out);
PROA_API int proa_pool_destroy(proa_pool* pool);
// From now on only the first workers[i] workers of team i take part, and the calling thread; the others sleep. Every
// team except the first (the caller's) must keep at least one.
PROA_API int proa_pool_use(proa_pool* pool, const int32_t* workers, int32_t teams);
PROA_API int proa_pool_redone(const proa_pool* pool, uint64_t* out);  // tasks repeated so far

// ---- packed weights

typedef struct proa_matrix proa_matrix;

typedef struct proa_layout_info {
    int32_t panels;  // of 16 rows
    int32_t padded;  // columns
    int32_t group;   // columns that share a scale
    int64_t code_bytes, scale_bytes, panel_bytes;
} proa_layout_info;

// Rows of weights, one code per byte (16-bit formats: two bytes), and scales in the format's type. Strides in bytes.
typedef struct proa_source {
    const void* codes;
    int64_t code_stride;
    const void* scales;
    int64_t scale_stride;
    int64_t scale_rows;  // rows that share a row of scales
    const void* mins;
    const void* block_scales;
    const void* block_mins;
    int64_t block_stride;
    float factor;
} proa_source;

PROA_API int proa_layout(int format, int64_t rows, int64_t columns, int64_t group, proa_layout_info* out);

// Packs rows into panels at out, out + step * panel_bytes, ...; rows of the last panel beyond `rows` become zeros.
PROA_API int proa_pack(int format, int64_t rows, int64_t columns, int64_t group, const proa_source* source, int step,
                       void* out, int64_t out_bytes);

// A stack of `count` matrices whose panels lie in `slices` pieces, one per team. The caller owns the memory, which must
// outlive the handle.
PROA_API int proa_matrix_create(int format, int64_t rows, int64_t columns, int64_t group, int64_t count, int64_t slices,
                                const int32_t* first_panels, const void* const* data, const int64_t* strides,
                                const int64_t* bytes, proa_matrix** out);
PROA_API int proa_matrix_destroy(proa_matrix* matrix);

// ---- loading: packs a checkpoint's rows into panels, by all workers

#define PROA_FILL_PLAIN (-1)  // value of `format`: contiguous rows of bfloat16 instead of panels

// A job: a rectangle of a stored tensor and its destination. Stored types have ggml's values (csrc/src/stored.h).
typedef struct proa_fill_job {
    uint64_t from;      // first row: an offset in the file, or an address
    int64_t stride;     // bytes from row to row
    int64_t rows;       // of the target
    int64_t columns;    // of the target
    int64_t group;      // as for proa_layout
    void* out;          // panels at out, out + step * panel_bytes, ..., or plain rows
    int64_t out_bytes;  // room at out
    int32_t fd;         // the file, or -1: `from` is an address
    int32_t stored;     // stored type
    int32_t order;      // order of the stored values: Order in csrc/src/coded.h
    int32_t format;     // one that holds the stored type exactly, bfloat16 (rounded once), or PROA_FILL_PLAIN
    int32_t step;       // distance of consecutive panels, in panels
    int32_t team;       // the team whose workers run it
    // Scales of quantised types (stored types from 1000 on), in memory: `scale_rows` rows of the matrix share a row of
    // scales, and the job's first row is row `scale_first` of the matrix; `scale_group` columns share a scale (0: all).
    // mins: added minima in the same layout, or null.
    const void* scales;
    const void* mins;
    const int32_t* group_of;  // the group of each column, or null: columns are sorted by group
    int64_t scale_stride, scale_rows, scale_first, scale_group;  // stride in bytes, 0: a single row of scales
    int32_t scale_type;                                          // a stored type
    float factor;                                                // scale of the whole matrix
} proa_fill_job;

#define PROA_FILL_NOT_FINITE (-1)

typedef struct proa_fill_failure {
    int64_t job;    // index of the failed job; -1: none failed
    int32_t error;  // errno of its file, 0: the file ends too early, or PROA_FILL_NOT_FINITE
} proa_fill_failure;

// Runs all jobs. Returns PROA_OK and sets `failure` if a file could not be read, or if a value or scale is NaN or
// infinite, or overflows bfloat16; the destinations are then partly filled.
PROA_API int proa_fill(proa_pool* pool, const proa_fill_job* jobs, int64_t count, proa_fill_failure* failure);

// Dequantises the rows of a job whose source is quantised and in memory, to float32 [rows][columns].
PROA_API int proa_decode(const proa_fill_job* job, float* to);

// The workers of team teams[i] call proa_arena_touch on [firsts[i], firsts[i] + counts[i]) of arenas[i], for all i.
PROA_API int proa_touch(proa_pool* pool, const int32_t* teams, proa_arena* const* arenas, const int64_t* firsts,
                        const int64_t* counts, int64_t parts);

// Converts stored values to float32, exactly.
PROA_API int proa_to_float(int stored, const void* from, int64_t from_bytes, int64_t values, float* to);

// ---- linear layers and experts. x: bfloat16 rows; y: bfloat16 rows, or float32 if wide. Strides in elements.

typedef struct proa_experts proa_experts;

#define PROA_ACTIVATION_SILU 0
#define PROA_ACTIVATION_CLAMPED_SWIGLU 1  // gpt-oss: (up + 1) gate sigmoid(1.702 gate), both clamped to `limit`
#define PROA_ACTIVATION_RELU2 2           // squared ReLU, without a gate

// activation: PROA_ACTIVATION_*. Panels of gate and up alternate in gate_up; without a gate it has those of up. Biases
// are float32 in the order of the (padded) panels, or null. All must outlive the handle.
PROA_API int proa_experts_create(const proa_matrix* gate_up, const proa_matrix* down, int activation, float limit,
                                 const float* gate_bias, const float* down_bias, proa_experts** out);
PROA_API int proa_experts_destroy(proa_experts* experts);

PROA_API int proa_linear(proa_pool* pool, const proa_matrix* weights, int64_t outputs, const float* bias, const void* x,
                         int64_t x_stride, void* y, int64_t y_stride, int wide, int64_t tokens, int lane);

// ids, weights: [tokens][top_k]; an id of -1 is skipped. top_k 0: every token gets expert 0, with weight 1.
PROA_API int proa_moe(proa_pool* pool, const proa_experts* experts, int64_t top_k, const int32_t* ids,
                      const float* weights, const void* x, int64_t x_stride, void* y, int64_t y_stride, int wide,
                      int64_t tokens, int lane);

// ---- ceilings: limits of the machine, and the time of experts. For benchmarks.

// Bytes/s that `workers` threads of the pool read together for about `seconds`, in chunks of 1 MiB: a thread that has
// finished one takes the next.
// Range i, [data[i], data[i] + bytes[i]), is read by team i; only ranges larger than all caches measure memory.
PROA_API int proa_measure_read(proa_pool* pool, const void* const* data, const int64_t* bytes, int64_t spans,
                               int workers, double seconds, double* bytes_per_s);
// Peak floating-point operations/s of the unit that the pool's kernels multiply with, on registers only.
PROA_API int proa_measure_peak(proa_pool* pool, int workers, double seconds, double* flops_per_s);
// Mean seconds of a phase with one empty task per thread, over `phases` phases. meet: each task waits until every
// thread has one; else a fast thread may run them all.
PROA_API int proa_measure_dispatch(proa_pool* pool, int phases, int meet, double* seconds_each);

typedef struct proa_moe_trial {
    const proa_experts* const* layers;  // of equal shape; call i uses layer i % layer_count and routing i % routings
    int64_t layer_count;
    const int32_t* ids;    // [routings][tokens][top_k]
    const float* weights;  // likewise
    int64_t routings, tokens, top_k;
    const void* x;
    int64_t x_stride;
    void* y;  // bfloat16
    int64_t y_stride;
} proa_moe_trial;

// Runs calls `first` to first + calls - 1 of proa_moe, one after the other; seconds[i] is the time of each.
PROA_API int proa_time_moe(proa_pool* pool, const proa_moe_trial* trial, int64_t first, int64_t calls, double* seconds);

// ---- recorded programs: a whole step in one call, over fixed buffers. Rows are bfloat16 and `stride` elements apart;
// each run sets the number of rows.

typedef struct proa_program proa_program;

typedef struct proa_kv_pages {
    void *keys, *values;  // [pages][page_tokens][kv_heads][head_dim]
    int64_t pages, page_tokens, kv_heads, head_dim;
    int32_t type;                  // 0: bfloat16; 1: e4m3, finite values saturate at +-448
    float key_scale, value_scale;  // e4m3: K = stored value * key_scale, V likewise; bfloat16: 1
} proa_kv_pages;

PROA_API int proa_program_create(proa_pool* pool, int64_t most_rows, int64_t most_sequences, int64_t most_pages,
                                 proa_program** out);
PROA_API int proa_program_destroy(proa_program* program);
PROA_API int proa_program_size(const proa_program* program, int64_t* out);  // operations so far

// Sets the sequences of later runs: sequence s owns the next q_lens[s] rows, the last of which is its token
// kv_lens[s] - 1; its pages begin at page_table + s * table_stride, its recurrent state is in slot states[s] (null:
// slot 0). pages, page_tokens: of the cache.
PROA_API int proa_program_set_batch(proa_program* program, int64_t sequences, const int32_t* q_lens,
                                    const int32_t* kv_lens, const int32_t* states, const int32_t* page_table,
                                    int64_t table_stride, int64_t pages, int64_t page_tokens);

// Sets which kernels compute the next batches. BY_ROWS (initially): the fastest for the number of rows. DECODE (one row
// per sequence) and PROMPT (any batch): fixed kernels, so that a row has the same bits whatever other rows a step has.
#define PROA_REGIME_BY_ROWS 0
#define PROA_REGIME_DECODE 1
#define PROA_REGIME_PROMPT 2
PROA_API int proa_program_set_regime(proa_program* program, int32_t regime);

// Runs operations [first, end) on `rows` rows.
PROA_API int proa_program_run(proa_program* program, int64_t first, int64_t end, int64_t rows, int lane);

PROA_API int proa_program_add_embed(proa_program* program, const int64_t* tokens, const void* table, int64_t vocabulary,
                                    int64_t width, void* out, int64_t out_stride);
// Looks up rows of a packed matrix, rounded to bfloat16.
PROA_API int proa_program_add_lookup(proa_program* program, const proa_matrix* table, const int64_t* tokens, void* out,
                                     int64_t out_stride);
// offset: added to the weights. apart: elements between the starts of consecutive groups of x, 0: the width; groups of
// the output are contiguous.
PROA_API int proa_program_add_rms_norm(proa_program* program, const void* x, int64_t x_stride, const void* weight,
                                       int64_t groups, int64_t width, float eps, void* out, int64_t out_stride,
                                       float offset, int64_t apart);
PROA_API int proa_program_add_add(proa_program* program, void* x, int64_t x_stride, const void* y, int64_t y_stride,
                                  int64_t width);  // x += y
PROA_API int proa_program_add_gated_add(proa_program* program, void* x, int64_t x_stride, const void* gate,
                                        int64_t gate_stride, const void* y, int64_t y_stride,
                                        int64_t width);  // x += sigmoid(gate) * y
// x *= sigmoid(gate); heads are contiguous in x, and start `apart` elements apart in the gate.
PROA_API int proa_program_add_gate(proa_program* program, void* x, int64_t x_stride, const void* gate,
                                   int64_t gate_stride, int64_t heads, int64_t head_dim, int64_t apart);
PROA_API int proa_program_add_rotary(proa_program* program, void* x, int64_t x_stride, const float* cos,
                                     const float* sin, int64_t heads, int64_t head_dim, int64_t half, int interleaved);
#define PROA_SCORE_SOFTMAX 0  // over all logits
#define PROA_SCORE_SIGMOID 1  // of each logit

// The rule that chooses top_k experts from logits. Experts are chosen by score + correction (float32 [experts] or
// null), among the `kept` best of `groups` groups of equal size: those whose best_of (1 or 2) best experts have the
// largest sum; the first among equals. Weights are scores, if renormalised divided by max(least, their sum + epsilon),
// times scale. The kernels read this struct: a new part of a rule is a field here and its arithmetic in kernels/rows.h.
typedef struct proa_router_rule {
    int32_t experts, top_k, score, renormalise, groups, kept, best_of;
    float scale, epsilon, least;
    const float* correction;
} proa_router_rule;
PROA_API int proa_program_add_route(proa_program* program, const void* logits, int64_t stride, int wide,
                                    const proa_router_rule* rule, int32_t* ids, float* weights);
// The argmax of each row, the lowest id among equals; -1 for a row with a non-finite value.
PROA_API int proa_program_add_best(proa_program* program, const float* logits, int64_t stride, int64_t width,
                                   int32_t* ids);
// Writes keys and values of the rows to their slots: page * page_tokens + offset.
PROA_API int proa_program_add_write_kv(proa_program* program, const proa_kv_pages* cache, const void* keys,
                                       int64_t keys_stride, const void* values, int64_t values_stride,
                                       const int64_t* slots);
// window: positions that a row sees, its own included; 0: all earlier ones. sinks: float32 [heads] or null.
PROA_API int proa_program_add_attention(proa_program* program, const proa_kv_pages* cache, const void* q,
                                        int64_t q_stride, void* out, int64_t out_stride, int64_t heads, int64_t window,
                                        float scale, const float* sinks);

// The cache of a layer of latent attention: per token the latent, followed by the rotary key that all heads share.
typedef struct proa_latent_pages {
    void* rows;  // bfloat16 [pages][page_tokens][latent + key]
    int64_t pages, page_tokens, latent, key;
} proa_latent_pages;

// Writes latents and keys of the rows to their slots.
PROA_API int proa_program_add_write_latent(proa_program* program, const proa_latent_pages* cache, const void* latents,
                                           int64_t latents_stride, const void* keys, int64_t keys_stride,
                                           const int64_t* slots);
// Rows of q are heads of latent + key elements, those of out heads of latent elements: out is the sum of latents
// weighted by the softmax of q times the cached rows.
PROA_API int proa_program_add_latent_attention(proa_program* program, const proa_latent_pages* cache, const void* q,
                                               int64_t q_stride, void* out, int64_t out_stride, int64_t heads,
                                               float scale);
// Multiplies each head with its own matrix of a stack of bfloat16 matrices. Heads start x_apart and y_apart elements
// apart in their rows. `carried` elements behind a head's inputs are copied behind its outputs.
PROA_API int proa_program_add_head_linear(proa_program* program, const proa_matrix* weights, int64_t carried,
                                          const void* x, int64_t x_stride, int64_t x_apart, void* y, int64_t y_stride,
                                          int64_t y_apart);

// Linear attention by the gated delta rule. A row has `groups` groups, each a key head with its per_group value heads.
typedef struct proa_gated_delta {
    int64_t groups, per_group, key_dim, value_dim, taps;
    const void *q, *k, *v, *z;         // bfloat16, per group [key_dim], [key_dim], [per_group][value_dim] twice
    int64_t row_stride, group_stride;  // in elements
    const void *b, *a;                 // bfloat16, per group [per_group]
    int64_t gates_row_stride, gates_group_stride;
    const float* conv;             // [taps][channels], oldest tap first; channels: all of q, all of k, all of v
    const float *a_log, *dt_bias;  // [groups * per_group]
    const void* norm;              // bfloat16 [value_dim]
    float eps;
    float* rule;  // [slots][groups * per_group][key_dim][value_dim]
    void* tail;   // bfloat16 [slots][taps - 1][channels], oldest row first
    int64_t slots;
    float* mixed;  // workspace [most rows * channels]
    void* out;     // bfloat16 rows of [groups * per_group][value_dim]
    int64_t out_stride;
} proa_gated_delta;
PROA_API int proa_program_add_gated_delta(proa_program* program, const proa_gated_delta* delta);
PROA_API int proa_program_add_linear(proa_program* program, const proa_matrix* weights, int64_t outputs,
                                     const float* bias, const void* x, int64_t x_stride, void* y, int64_t y_stride,
                                     int wide);
PROA_API int proa_program_add_moe(proa_program* program, const proa_experts* experts, int64_t top_k, const int32_t* ids,
                                  const float* weights, const void* x, int64_t x_stride, void* y, int64_t y_stride);

// ---- an outbox: messages to a stream socket, sent by an idle worker so that the caller does not block. Only the
// thread that runs the pool's programs may call it. A message has been sent when the next one is written, when a
// program begins, and when it is flushed. A pool has at most one outbox at a time and must outlive it.

typedef struct proa_outbox proa_outbox;

PROA_API int proa_outbox_create(proa_pool* pool, int socket, proa_outbox** out);
PROA_API int proa_outbox_destroy(proa_outbox* outbox);
// Both fail with PROA_ERROR_SYSTEM if this message, or the one before it, cannot be sent. The data are copied.
PROA_API int proa_outbox_write(proa_outbox* outbox, const void* data, size_t size);
PROA_API int proa_outbox_flush(proa_outbox* outbox);

// ---- a doorbell: a GPU's jobs for the experts, through a block of memory that both sides address

typedef struct proa_doorbell proa_doorbell;

#define PROA_PROBE_LAYER (-1)      // a job of this layer is answered at once, without work
#define PROA_DECODE_JOB (1 << 20)  // added to the layer of a decode step's job, of which pairs may be deferred

// Offsets in the block. A job is written from `header` on (int32 layer, int32 tokens; ids int32, weights float32
// [tokens][top_k]; x bfloat16 [tokens][hidden]), then its number, the previous one plus 1, is stored with release
// semantics at `rung` (uint32). The answer y float32 [tokens][hidden] is complete when `answered` (uint32) holds the
// number; `dead` (uint32, the high half of the same 64 bits) is 0, or the error code of a failure after which no job is
// answered any more.
//
// A GPU that cannot store a changing number has its jobs copied, from `header` on, with the number (int32) behind the
// tokens; ids, weights and x are then at their offsets in a block for that number of tokens, y at its usual one. A
// number equal to that of the last answered job means that there is no job. The GPU rings
// - by flags (uint32): it waits until `ready` & 0x80000001, copies the job, writes 1 to `rung`, waits until
//   `done` & 0x80000001 and writes 0 to `rung`. After a failure both keep their highest bit;
// - or by calls, in this order: copy the job, proa_doorbell_call_ring, proa_doorbell_call_wait.
//
// With `deferred`, of a job with PROA_DECODE_JOB the `deferred` choices of a token with the least weights are computed
// after the answer, if they are pairs of the job (weights are those of all choices), and their sum is added to y of the
// next layer's job. All layers of such a step must ring, in order and with the same tokens, even without a pair; the
// last one defers nothing.
//
// At any time the GPU may publish a prediction of the experts that the next job will need, so that idle workers read
// their weights into their caches: foreseen_ids int32 [rows][top_k], up to PROA_FORESEEN_ROWS rows, each with its
// likeliest expert first, -1 for none; layer and rows (int32); then a changed number (uint32, release) at `foreseen`. A
// prediction is not answered.
typedef struct proa_doorbell_layout {
    int64_t rung, answered, dead, done, ready, header, ids, weights, x, y;
    int64_t foreseen, foreseen_layer, foreseen_rows, foreseen_ids;
    int64_t bytes;  // size of the block
} proa_doorbell_layout;

PROA_API int proa_doorbell_layout_of(int64_t most_tokens, int64_t top_k, int64_t hidden, proa_doorbell_layout* out);

typedef struct proa_doorbell_options {
    const proa_experts* const* layers;
    int64_t layer_count;
    void* memory;  // the block, aligned to 64 bytes; initialised by proa_doorbell_create
    int64_t memory_bytes;
    int64_t most_tokens, top_k, hidden;
    const int32_t* cpus;  // affinity of the doorbell's thread
    int64_t cpu_count;    // 0: any CPU
    int32_t lane;
    int32_t spin_us;        // how long its thread polls after the last step
    int32_t way;            // PROA_WAY_*
    int32_t read_ahead;     // 1: act on predictions
    int32_t decode_tokens;  // jobs of up to this many tokens use the kernels of PROA_REGIME_DECODE; 0: none
    int32_t deferred;       // of a token, the most pairs that are deferred; 0: none
} proa_doorbell_options;

#define PROA_FORESEEN_ROWS 4

#define PROA_WAY_NUMBER 0  // `rung` holds the job's number
#define PROA_WAY_FLAGS 1
#define PROA_WAY_CALLS 2

// Layers and memory must outlive it. Waits that are pending when it is destroyed return with a failure.
PROA_API int proa_doorbell_create(proa_pool* pool, const proa_doorbell_options* options, proa_doorbell** out);
PROA_API int proa_doorbell_destroy(proa_doorbell* doorbell);

// Call arm before a step that may ring, and disarm after it; steps may overlap. Between the two the doorbell's thread
// and the workers do not sleep. After the last step no worker reads weights or jobs, so that they may be freed.
PROA_API int proa_doorbell_arm(proa_doorbell* doorbell);
PROA_API int proa_doorbell_disarm(proa_doorbell* doorbell);

// Fails with the error of a failed job, at this and every later call; or with PROA_ERROR_NUMERICS, once, if a job's
// result was non-finite (for the first such job since the last call).
PROA_API int proa_doorbell_check(proa_doorbell* doorbell);

// Fails the doorbell: pending waits for answers return.
PROA_API int proa_doorbell_fail(proa_doorbell* doorbell, const char* why);

// The GPU's part of the protocol, for tests and for a GPU that is simulated on the CPU. answered: 0 after a failure or
// the timeout.
PROA_API int proa_doorbell_ring(proa_doorbell* doorbell, uint32_t number);
PROA_API int proa_doorbell_wait(proa_doorbell* doorbell, uint32_t number, int64_t timeout_us, int* answered);

// Host functions for the GPU driver to call, from its own thread, with the doorbell as argument.
// proa_doorbell_call_wait returns when the job is answered, or at once after a failure.
PROA_API void proa_doorbell_call_ring(void* doorbell);
PROA_API void proa_doorbell_call_wait(void* doorbell);

// Totals since its creation; a job is included once proa_doorbell_check has returned after it.
typedef struct proa_doorbell_counters {
    uint64_t jobs;
    uint64_t pairs;         // (token, expert) pairs
    uint64_t weight_bytes;  // weights of the experts in jobs, each expert once per job
    uint64_t moe_ns;        // from ring to answer, and for deferred pairs
    uint64_t waiting_ns;    // from an answer (or from arming) to the next ring
    uint64_t experts;       // experts in jobs, each once per job
    uint64_t foreseen;      // of these, predicted
    uint64_t gaps;          // intervals between the jobs of consecutive layers
    uint64_t gap_ns;        // their total
    uint64_t deferred;      // of the pairs, those computed after the answer
    uint64_t deferred_ns;   // of moe_ns, for these
} proa_doorbell_counters;
PROA_API int proa_doorbell_get_counters(const proa_doorbell* doorbell, proa_doorbell_counters* out);

#ifdef __cplusplus
}
#endif

#endif  // PROA_NATIVE_H
