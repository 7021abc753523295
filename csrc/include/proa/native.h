// The C interface of Proa's native library: everything that other programs may call, and all they need to know.
//
// Rules, for every function below:
// - It returns PROA_OK or one of the error codes; proa_last_error() then says why, in one sentence. (The only
//   exceptions are proa_abi_version and proa_last_error themselves.)
// - Handles are opaque pointers. Sizes are in elements or in bytes, as the name says, and are checked at this border.
// - Nothing throws through it, and it needs no header of torch, CUDA or Python.
// PROA_ABI_VERSION goes up by one whenever a caller that was written for the former version could go wrong.

#ifndef PROA_NATIVE_H
#define PROA_NATIVE_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PROA_API __attribute__((visibility("default")))

// ---- version and errors

#define PROA_ABI_VERSION 9

#define PROA_OK 0
#define PROA_ERROR_ARGUMENT 1  // the caller passed something wrong
#define PROA_ERROR_MEMORY 2    // there is not enough memory
#define PROA_ERROR_SYSTEM 3    // the operating system refused something else
#define PROA_ERROR_WORKER 4    // a worker thread died
#define PROA_ERROR_NUMERICS 5  // a result is infinite or no number

// The version that the library was built with: PROA_ABI_VERSION of its header.
PROA_API int proa_abi_version(void);

// Why the last failed call on this thread failed; "" if none has. Valid until the next failure on the same thread.
PROA_API const char* proa_last_error(void);

// ---- arena: RAM for weights, on huge pages where possible, on one NUMA node if asked

typedef struct proa_arena proa_arena;

#define PROA_ARENA_SHARED 1u       // other processes must be able to map it (proa_arena_fd)
#define PROA_ARENA_STRICT_NODE 2u  // an error if it cannot be bound to the node
#define PROA_ARENA_SMALL_PAGES 4u  // no huge pages: for tests and comparisons

#define PROA_PAGES_SMALL 0       // a file in memory, pages of the machine's base size
#define PROA_PAGES_ANON_HUGE 1   // anonymous memory with transparent huge pages; no file
#define PROA_PAGES_SHMEM_HUGE 2  // a file in memory with transparent huge pages
#define PROA_PAGES_HUGETLB 3     // a file in memory on reserved pages of 2 MiB

typedef struct proa_arena_info {
    uint64_t bytes;          // as asked
    uint64_t mapped_bytes;   // in whole pages
    uint64_t touched_bytes;  // that have pages by proa_arena_touch
    int32_t pages;           // PROA_PAGES_*
    int32_t node;            // the NUMA node it is bound to, or -1
    char reason[1000];       // why there is nothing better; "" if this is the best
} proa_arena_info;

// Addresses for `bytes` bytes (zeros), bound to NUMA node `node`, or to none if it is -1. Memory comes with
// proa_arena_touch: a part that was never touched must not be used, for the system may kill the process there.
PROA_API int proa_arena_create(size_t bytes, int node, uint32_t flags, proa_arena** out);

// Waits for nobody: the caller must know that nothing uses its memory any more. A null pointer is let pass.
PROA_API int proa_arena_destroy(proa_arena* arena);

// Gives memory to bytes [first, first + count), or fails with the numbers. Contents stay. From any thread.
PROA_API int proa_arena_touch(proa_arena* arena, size_t first, size_t count);

// Deals the pages out over `count` NUMA nodes in turn, instead of the node it was created with; before the first touch.
PROA_API int proa_arena_interleave(proa_arena* arena, const int32_t* nodes, int32_t count);

PROA_API int proa_arena_data(const proa_arena* arena, void** out);    // page-aligned, for as long as the arena lives
PROA_API int proa_arena_bytes(const proa_arena* arena, size_t* out);  // as asked
PROA_API int proa_arena_fd(const proa_arena* arena, int* out);        // stays the arena's; -1 if there is no file
PROA_API int proa_arena_get_info(const proa_arena* arena, proa_arena_info* out);

// Bytes that lie on huge pages now, by the kernel's account of the whole process: that takes it milliseconds for each
// gigabyte that the process maps.
PROA_API int proa_arena_get_huge_bytes(const proa_arena* arena, uint64_t* out);

// ---- pool: the threads that compute, and the instruction set they use

typedef struct proa_pool proa_pool;

typedef struct proa_pool_options {
    const int32_t* cpus;        // of all workers, team by team; the thread that calls works along and is not listed
    const int32_t* team_begin;  // [teams + 1] into cpus; team i serves slice i of every matrix
    int32_t teams;
    int32_t pin;                // bind each worker to its CPU, or to its team's home if homes are given
    int32_t spin_us;            // how long an idle worker spins before it sleeps
    int32_t redo;               // do the tasks of a worker that is off its core again
    const char* isa;            // "" or null: the best; else the name of kernels that this CPU can run
    const int32_t* homes;       // null, or the CPUs that any worker of a team may run on, team by team
    const int32_t* home_begin;  // [teams + 1] into homes
} proa_pool_options;

// Which kernels a pool with this wish gets, and why no better ones. Texts of at most `bytes` bytes.
PROA_API int proa_select_isa(const char* wanted, char* name, char* reason, size_t bytes);

PROA_API int proa_pool_create(const proa_pool_options* options, proa_pool** out);
PROA_API int proa_pool_destroy(proa_pool* pool);
// From now on only the first workers[i] of team i work, beside the calling thread; the others sleep and cost nothing.
// Teams but the first (the caller's) keep at least one of theirs.
PROA_API int proa_pool_use(proa_pool* pool, const int32_t* workers, int32_t teams);
PROA_API int proa_pool_redone(const proa_pool* pool, uint64_t* out);  // tasks done twice so far
PROA_API int proa_pool_kill_worker_for_test(proa_pool* pool);         // the next one that looks ends its thread

// ---- packed weights (formats: csrc/src/layout.h)

typedef struct proa_matrix proa_matrix;

typedef struct proa_layout_info {
    int32_t panels;  // of 16 rows
    int32_t padded;  // columns
    int32_t group;   // columns that share a scale
    int64_t code_bytes, scale_bytes, panel_bytes;
} proa_layout_info;

// Rows of weights, one code a byte (16-bit formats: two), and scales in the format's type. Strides in bytes.
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

// Panels at out, out + step * panel_bytes, ...; rows beyond the last are zeros.
PROA_API int proa_pack(int format, int64_t rows, int64_t columns, int64_t group, const proa_source* source, int step,
                       void* out, int64_t out_bytes);

// A stack of `count` matrices whose panels lie in `slices` pieces, one a team. The memory stays the caller's and must
// live as long as the handle.
PROA_API int proa_matrix_create(int format, int64_t rows, int64_t columns, int64_t group, int64_t count, int64_t slices,
                                const int32_t* first_panels, const void* const* data, const int64_t* strides,
                                const int64_t* bytes, proa_matrix** out);
PROA_API int proa_matrix_destroy(proa_matrix* matrix);

// ---- loading: a checkpoint's rows into panels, by all workers

#define PROA_FILL_PLAIN (-1)  // as a format: rows of bfloat16, one after the other

// A rectangle of a stored tensor. Stored types have ggml's numbers (csrc/src/stored.h).
typedef struct proa_fill_job {
    uint64_t from;      // of its first row: an offset in the file, or an address
    int64_t stride;     // bytes from row to row
    int64_t rows;       // of the target
    int64_t columns;    // of the target
    int64_t group;      // as for proa_layout
    void* out;          // panels at out, out + step * panel_bytes, ..., or plain rows
    int64_t out_bytes;  // that may be written there
    int32_t fd;         // of the file, or -1: `from` is an address
    int32_t stored;     // type of its numbers
    int32_t order;      // of stored rows; numbers of csrc/src/coded.h. 1: they are the target's columns, plain types
    int32_t format;     // that keeps the stored type exactly, bfloat16 (each number rounded once), or PROA_FILL_PLAIN
    int32_t step;       // from panel to panel
    int32_t team;       // whose workers do it
    // Of codes (stored types beyond 1000) the scales, in memory: a row of them for `scale_rows` rows of the matrix, in
    // which the job's first row is row `scale_first`; one for `scale_group` columns (0: all). mins: likewise or null.
    const void* scales;
    const void* mins;
    const int32_t* group_of;  // the scale of each column, or null: columns are in the order of their groups
    int64_t scale_stride, scale_rows, scale_first, scale_group;  // stride in bytes, 0: there is one row
    int32_t scale_type;                                          // a stored type
    float factor;                                                // of all scales
} proa_fill_job;

#define PROA_FILL_NOT_FINITE (-1)

typedef struct proa_fill_failure {
    int64_t job;    // that failed; -1: none
    int32_t error;  // of its file: the system's number, or 0: it ends too early; else PROA_FILL_NOT_FINITE
} proa_fill_failure;

// Does all jobs. PROA_OK with a `failure` if a file could not be read, or if a number or scale is NaN or infinite, or
// becomes infinite as bfloat16; what had been filled by then stays.
PROA_API int proa_fill(proa_pool* pool, const proa_fill_job* jobs, int64_t count, proa_fill_failure* failure);

// The rows of a job of codes in memory as float32 [rows][columns].
PROA_API int proa_decode(const proa_fill_job* job, float* to);

// proa_arena_touch on [firsts[i], firsts[i] + counts[i]) of arenas[i] by the workers of teams[i].
PROA_API int proa_touch(proa_pool* pool, const int32_t* teams, proa_arena* const* arenas, const int64_t* firsts,
                        const int64_t* counts, int64_t parts);

// Stored numbers as float32, exactly.
PROA_API int proa_to_float(int stored, const void* from, int64_t from_bytes, int64_t values, float* to);

// ---- linear maps and experts. x: bfloat16 rows; y: bfloat16 rows, or float32 if wide. Strides in values.

typedef struct proa_experts proa_experts;

// activation: 0 SiLU, 1 GELU (tanh), 2 clamped SwiGLU of gpt-oss, 3 squared ReLU without a gate. Panels of gate and up
// alternate in gate_up. Biases are float32 in the order of the (padded) panels, or null. All must outlive the handle.
PROA_API int proa_experts_create(const proa_matrix* gate_up, const proa_matrix* down, int activation, float limit,
                                 const float* gate_bias, const float* down_bias, proa_experts** out);
PROA_API int proa_experts_destroy(proa_experts* experts);

PROA_API int proa_linear(proa_pool* pool, const proa_matrix* weights, int64_t outputs, const float* bias, const void* x,
                         int64_t x_stride, void* y, int64_t y_stride, int wide, int64_t tokens, int lane);

// ids, weights: [tokens][top_k]; an id of -1 is skipped. top_k 0: all tokens to the only expert, weight 1.
PROA_API int proa_moe(proa_pool* pool, const proa_experts* experts, int64_t top_k, const int32_t* ids,
                      const float* weights, const void* x, int64_t x_stride, void* y, int64_t y_stride, int wide,
                      int64_t tokens, int lane);

// ---- ceilings: what the machine can do at best, and how long experts take. For benchmarks.

// Bytes/s that `workers` threads of the pool read together for about `seconds`: whoever is free takes the next 1 MB.
// Span i, [data[i], data[i] + bytes[i]), is read by team i; only spans beyond all caches measure memory.
PROA_API int proa_measure_read(proa_pool* pool, const void* const* data, const int64_t* bytes, int64_t spans,
                               int workers, double seconds, double* bytes_per_s);
// Floating-point operations/s of the unit that the pool's kernels multiply with, on registers alone.
PROA_API int proa_measure_peak(proa_pool* pool, int workers, double seconds, double* flops_per_s);
// Seconds of a phase of one empty task for each thread, the mean of `phases`. meet: each task waits until every thread
// has one; else whoever is quick may do them all.
PROA_API int proa_measure_dispatch(proa_pool* pool, int phases, int meet, double* seconds_each);

typedef struct proa_moe_trial {
    const proa_experts* const* layers;  // of one shape; call i takes layer i % layer_count and routing i % routings
    int64_t layer_count;
    const int32_t* ids;    // [routings][tokens][top_k]
    const float* weights;  // likewise
    int64_t routings, tokens, top_k;
    const void* x;
    int64_t x_stride;
    void* y;  // bfloat16
    int64_t y_stride;
} proa_moe_trial;

// Calls `first` to first + calls - 1 of proa_moe, one after the other; seconds[i] is what each took.
PROA_API int proa_time_moe(proa_pool* pool, const proa_moe_trial* trial, int64_t first, int64_t calls, double* seconds);

// ---- recorded programs: a whole step in one call, over buffers that stay where they are. Rows are bfloat16 and
// `stride` values apart; an operation works on as many rows as the run is told.

typedef struct proa_program proa_program;

typedef struct proa_kv_pages {
    void *keys, *values;  // [pages][page_tokens][kv_heads][head_dim]
    int64_t pages, page_tokens, kv_heads, head_dim;
    int32_t type;                  // 0: bfloat16; 1: e4m3, finite values beyond 448 held there
    float key_scale, value_scale;  // of e4m3: what a stored value is multiplied with; else 1
} proa_kv_pages;

PROA_API int proa_program_create(proa_pool* pool, int64_t most_rows, int64_t most_sequences, int64_t most_pages,
                                 proa_program** out);
PROA_API int proa_program_destroy(proa_program* program);
PROA_API int proa_program_size(const proa_program* program, int64_t* out);  // operations so far

// The sequences of the coming runs: sequence s owns the next q_lens[s] rows, the last of which is its token
// kv_lens[s] - 1; its pages begin at page_table + s * table_stride, its recurrent state lies in slot states[s] (null:
// in slot 0). pages, page_tokens: of the cache.
PROA_API int proa_program_set_batch(proa_program* program, int64_t sequences, const int32_t* q_lens,
                                    const int32_t* kv_lens, const int32_t* states, const int32_t* page_table,
                                    int64_t table_stride, int64_t pages, int64_t page_tokens);

// Which kernels compute the rows of the next batches: those that are fastest for so many rows, at first; or fixed ones,
// so that a row has the same bits whatever other rows a step has. Decode: batches of one row a sequence. Prompt: any.
#define PROA_REGIME_BY_ROWS 0
#define PROA_REGIME_DECODE 1
#define PROA_REGIME_PROMPT 2
PROA_API int proa_program_set_regime(proa_program* program, int32_t regime);

// Operations [first, end) for `rows` rows.
PROA_API int proa_program_run(proa_program* program, int64_t first, int64_t end, int64_t rows, int lane);

PROA_API int proa_program_add_embed(proa_program* program, const int64_t* tokens, const void* table, int64_t vocabulary,
                                    int64_t width, void* out, int64_t out_stride);
// Rows of a packed matrix, rounded to bfloat16.
PROA_API int proa_program_add_lookup(proa_program* program, const proa_matrix* table, const int64_t* tokens, void* out,
                                     int64_t out_stride);
// A residual, if not null, is added to x first, and stays there. offset: added to the weights. apart: values from group
// to group of x, 0: the width; the output's lie side by side.
PROA_API int proa_program_add_rms_norm(proa_program* program, void* x, int64_t x_stride, const void* residual,
                                       int64_t residual_stride, const void* weight, int64_t groups, int64_t width,
                                       float eps, void* out, int64_t out_stride, float offset, int64_t apart);
PROA_API int proa_program_add_add(proa_program* program, void* x, int64_t x_stride, const void* y, int64_t y_stride,
                                  int64_t width);  // x += y
PROA_API int proa_program_add_gated_add(proa_program* program, void* x, int64_t x_stride, const void* gate,
                                        int64_t gate_stride, const void* y, int64_t y_stride,
                                        int64_t width);  // x += sigmoid(gate) * y
// x *= sigmoid(gate), of heads that lie side by side in x and `apart` values apart in the gate.
PROA_API int proa_program_add_gate(proa_program* program, void* x, int64_t x_stride, const void* gate,
                                   int64_t gate_stride, int64_t heads, int64_t head_dim, int64_t apart);
PROA_API int proa_program_add_rotary(proa_program* program, void* x, int64_t x_stride, const float* cos,
                                     const float* sin, int64_t heads, int64_t head_dim, int64_t half, int interleaved);
// How top_k experts are chosen by their logits. A score is the sigmoid of a logit, or the softmax over all. The choice
// is by score + correction (float32 [experts] or null), among the `kept` best of `groups` groups of one size: those
// whose best_of (1 or 2) best experts have the largest sum; of equals the first. Weights are scores, which
// renormalising divides by the larger of `least` and their sum + epsilon, times scale.
typedef struct proa_router_rule {
    int64_t experts, top_k, groups, kept, best_of;
    int sigmoids, renormalise;
    float scale, epsilon, least;
    const float* correction;
} proa_router_rule;
PROA_API int proa_program_add_route(proa_program* program, const void* logits, int64_t stride, int wide,
                                    const proa_router_rule* rule, int32_t* ids, float* weights);
// The id of each row's largest value, of equal ones the lowest; -1 where a value is infinite or no number.
PROA_API int proa_program_add_best(proa_program* program, const float* logits, int64_t stride, int64_t width,
                                   int32_t* ids);
// Keys and values of the rows go to their slots: page * page_tokens + offset.
PROA_API int proa_program_add_write_kv(proa_program* program, const proa_kv_pages* cache, const void* keys,
                                       int64_t keys_stride, const void* values, int64_t values_stride,
                                       const int64_t* slots);
// window 0: a row sees everything before it. sinks: float32 [heads] or null.
PROA_API int proa_program_add_attention(proa_program* program, const proa_kv_pages* cache, const void* q,
                                        int64_t q_stride, void* out, int64_t out_stride, int64_t heads, int64_t window,
                                        float scale, const float* sinks);

// A layer of latent attention: of each token a latent, then a key that all heads share, side by side.
typedef struct proa_latent_pages {
    void* rows;  // bfloat16 [pages][page_tokens][latent + key]
    int64_t pages, page_tokens, latent, key;
} proa_latent_pages;

// Latents and keys of the rows go to their slots.
PROA_API int proa_program_add_write_latent(proa_program* program, const proa_latent_pages* cache, const void* latents,
                                           int64_t latents_stride, const void* keys, int64_t keys_stride,
                                           const int64_t* slots);
// Rows of q are heads of latent + key values, those of out heads of latent values: the softmax of q and all of a
// token's values weighs its latent.
PROA_API int proa_program_add_latent_attention(proa_program* program, const proa_latent_pages* cache, const void* q,
                                               int64_t q_stride, void* out, int64_t out_stride, int64_t heads,
                                               float scale);
// Each head's map, of a stack of bfloat16 matrices: heads are x_apart and y_apart values apart in their rows. `carried`
// values behind a head's inputs go behind its outputs as they are.
PROA_API int proa_program_add_head_linear(proa_program* program, const proa_matrix* weights, int64_t carried,
                                          const void* x, int64_t x_stride, int64_t x_apart, void* y, int64_t y_stride,
                                          int64_t y_apart);

// Linear attention by the gated delta rule. A row has `groups` groups, each a key head and its per_group value heads.
typedef struct proa_gated_delta {
    int64_t groups, per_group, key_dim, value_dim, taps;
    const void *q, *k, *v, *z;         // bfloat16, of a group [key_dim], [key_dim], [per_group][value_dim] twice
    int64_t row_stride, group_stride;  // values
    const void *b, *a;                 // bfloat16, of a group [per_group]
    int64_t gates_row_stride, gates_group_stride;
    const float* conv;             // [taps][channels], the oldest first; channels: all of q, all of k, all of v
    const float *a_log, *dt_bias;  // [groups * per_group]
    const void* norm;              // bfloat16 [value_dim]
    float eps;
    float* rule;  // [slots][groups * per_group][key_dim][value_dim]
    void* tail;   // bfloat16 [slots][taps - 1][channels], the oldest first
    int64_t slots;
    float* mixed;  // [most rows * channels], for the operation's own use
    void* out;     // bfloat16 rows of [groups * per_group][value_dim]
    int64_t out_stride;
} proa_gated_delta;
PROA_API int proa_program_add_gated_delta(proa_program* program, const proa_gated_delta* delta);
PROA_API int proa_program_add_linear(proa_program* program, const proa_matrix* weights, int64_t outputs,
                                     const float* bias, const void* x, int64_t x_stride, void* y, int64_t y_stride,
                                     int wide);
PROA_API int proa_program_add_moe(proa_program* program, const proa_experts* experts, int64_t top_k, const int32_t* ids,
                                  const float* weights, const void* x, int64_t x_stride, void* y, int64_t y_stride);

// ---- an outbox: messages to a stream socket, sent by a worker that has nothing to do while the caller goes on. The
// one thread calls that runs the pool's programs. A message is gone when the next one is written, when a program
// begins, and when it is flushed; a pool has one outbox at a time, and lives as long as it.

typedef struct proa_outbox proa_outbox;

PROA_API int proa_outbox_create(proa_pool* pool, int socket, proa_outbox** out);
PROA_API int proa_outbox_destroy(proa_outbox* outbox);
// Both fail (system) if this message, or the one before it, cannot be sent. The data are copied.
PROA_API int proa_outbox_write(proa_outbox* outbox, const void* data, size_t size);
PROA_API int proa_outbox_flush(proa_outbox* outbox);

// ---- a queue of jobs for the experts, whose thread of its own works as the pool's caller on a lane

typedef struct proa_queue proa_queue;

// slots: jobs that may be under way, a power of two. The layers, and all that jobs point to, must outlive it.
PROA_API int proa_queue_create(proa_pool* pool, const proa_experts* const* layers, int64_t layer_count, int64_t slots,
                               int lane, int spin_us, proa_queue** out);
PROA_API int proa_queue_destroy(proa_queue* queue);

// From one thread: puts proa_moe's arguments into a slot, without allocation or lock. number: of the job, from 1 on, or
// 0 if all slots are taken. Jobs run in order.
PROA_API int proa_queue_submit(proa_queue* queue, int64_t layer, int64_t tokens, int64_t top_k, const int32_t* ids,
                               const float* weights, const void* x, int64_t x_stride, void* y, int64_t y_stride,
                               int wide, uint64_t* number);

// From any thread. An error of a job is told for it and for all that follow, which are not run.
PROA_API int proa_queue_done(const proa_queue* queue, uint64_t number, int* done);
PROA_API int proa_queue_wait(const proa_queue* queue, uint64_t number);

// ---- a doorbell: jobs for the experts from a GPU, through a block of memory that both sides address

typedef struct proa_doorbell proa_doorbell;

#define PROA_PROBE_LAYER (-1)  // a job of this layer is answered at once, without work

// Offsets in the block. A job is written from `header` on (int32 layer, int32 tokens; ids int32, weights float32
// [tokens][top_k]; x bfloat16 [tokens][hidden]), then its number, one more than the former's, released at `rung`
// (uint32). The answer y float32 [tokens][hidden] is there when `answered` (uint32) holds the number; `dead` (uint32,
// the high half of the same 64 bits) is 0, or the error code of a failure after which nothing is answered any more.
//
// A GPU that cannot store numbers there has its jobs copied, from `header` on, with the number (int32) behind the
// tokens; ids, weights and x stand where they do in a block for these tokens alone, y where it always does. If the
// number is that of the last job answered, there is no job. It rings
// - by flags (uint32): it waits until `ready` & 0x80000001, has the job copied, writes 1 to `rung`, waits until
//   `done` & 0x80000001 and writes 0 to `rung`. After a failure both keep their highest bit;
// - or by calls, in this order: the job is copied, proa_doorbell_call_ring, proa_doorbell_call_wait.
//
// At any time it may say what the next job will probably need, so that idle workers read those weights into their
// caches: foreseen_ids int32 [rows][top_k], up to PROA_FORESEEN_ROWS rows, each with its likeliest expert first, -1 for
// none; layer and rows (int32); then a number that changes (uint32, released) at `foreseen`. Nothing answers.
typedef struct proa_doorbell_layout {
    int64_t rung, answered, dead, done, ready, header, ids, weights, x, y;
    int64_t foreseen, foreseen_layer, foreseen_rows, foreseen_ids;
    int64_t bytes;  // of the block
} proa_doorbell_layout;

PROA_API int proa_doorbell_layout_of(int64_t most_tokens, int64_t top_k, int64_t hidden, proa_doorbell_layout* out);

typedef struct proa_doorbell_options {
    const proa_experts* const* layers;
    int64_t layer_count;
    void* memory;  // the block, on a boundary of 64 bytes; cleared as far as needed
    int64_t memory_bytes;
    int64_t most_tokens, top_k, hidden;
    const int32_t* cpus;  // where the doorbell's thread may run
    int64_t cpu_count;    // 0: anywhere
    int32_t lane;
    int32_t spin_us;     // how long its thread goes on looking after the last step
    int32_t way;         // PROA_WAY_...
    int32_t read_ahead;  // whether it listens to what is foreseen
    // Jobs of up to so many tokens are rows of decode: their kernels are fixed as by PROA_REGIME_DECODE. 0: no job's
    // are.
    int32_t decode_tokens;
} proa_doorbell_options;

#define PROA_FORESEEN_ROWS 4

#define PROA_WAY_NUMBER 0  // the job's number stands in `rung`
#define PROA_WAY_FLAGS 1
#define PROA_WAY_CALLS 2

// Layers and memory must outlive it. Whoever waits for an answer when it is destroyed is told of a failure.
PROA_API int proa_doorbell_create(proa_pool* pool, const proa_doorbell_options* options, proa_doorbell** out);
PROA_API int proa_doorbell_destroy(proa_doorbell* doorbell);

// Before a step that may ring, and after it; steps may overlap. Between the two nobody who works for it sleeps. Behind
// the last step nobody reads weights or jobs, so that they may be freed.
PROA_API int proa_doorbell_arm(proa_doorbell* doorbell);
PROA_API int proa_doorbell_disarm(proa_doorbell* doorbell);

// Fails with what a job failed with, at every call from then on; or with PROA_ERROR_NUMERICS, once for each time that a
// job's result was not finite (the first such job since the last call).
PROA_API int proa_doorbell_check(proa_doorbell* doorbell);

// Makes it fail: whoever waits for an answer stops.
PROA_API int proa_doorbell_fail(proa_doorbell* doorbell, const char* why);

// The GPU's part, for a CPU that stands in for one. answered: 0 if it failed, or if the time was over.
PROA_API int proa_doorbell_ring(proa_doorbell* doorbell, uint32_t number);
PROA_API int proa_doorbell_wait(proa_doorbell* doorbell, uint32_t number, int64_t timeout_us, int* answered);

// For the GPU's driver to call, from its own thread, with the doorbell. The second one returns when the job is
// answered, or at once after a failure.
PROA_API void proa_doorbell_call_ring(void* doorbell);
PROA_API void proa_doorbell_call_wait(void* doorbell);

// Since it was created; a job counts once proa_doorbell_check has returned after it.
typedef struct proa_doorbell_counters {
    uint64_t jobs;
    uint64_t pairs;         // of a token and an expert
    uint64_t weight_bytes;  // of the experts that jobs needed, each once a job
    uint64_t moe_ns;        // from ring to answer
    uint64_t waiting_ns;    // from an answer to the next ring, or from arming
    uint64_t experts;       // that jobs needed, each once a job
    uint64_t foreseen;      // of these
    uint64_t gaps;          // between a layer's experts and those of the next layer
    uint64_t gap_ns;        // of these
} proa_doorbell_counters;
PROA_API int proa_doorbell_get_counters(const proa_doorbell* doorbell, proa_doorbell_counters* out);

#ifdef __cplusplus
}
#endif

#endif  // PROA_NATIVE_H
