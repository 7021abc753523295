// The C interface of the job queue: checks arguments; of a job only as far as it costs no time.
#include "error.h"
#include "handles.h"

using proa::require;

extern "C" {

int proa_queue_create(proa_pool* pool, const proa_experts* const* layers, int64_t layer_count, int64_t slots, int lane,
                      int spin_us, proa_queue** out) {
    return proa::guarded([&] {
        require(pool && layers && out, "A null pointer.");
        require(layer_count >= 1 && layer_count <= 1 << 16, "A queue must have 1 to 65536 layers.");
        require(slots >= 1 && slots <= 1 << 16 && (slots & (slots - 1)) == 0,
                "Slots must be a power of two up to 65536.");
        require(lane >= 0 && lane < proa::kLanes, "There are lanes 0 and 1.");
        std::vector<const proa::Experts*> experts;
        for (int64_t i = 0; i < layer_count; ++i) {
            require(layers[i], "The experts of a layer are a null pointer.");
            require(int(layers[i]->experts.gate_up->slices.size()) <= pool->host.pool.nodes(),
                    "The experts have more slices than the pool has teams.");
            experts.push_back(&layers[i]->experts);
        }
        *out = new proa_queue{{pool->owner, std::move(experts), int(slots), lane, spin_us}};
    });
}

int proa_queue_destroy(proa_queue* queue) {
    return proa::guarded([&] { delete queue; });
}

int proa_queue_submit(proa_queue* queue, int64_t layer, int64_t tokens, int64_t top_k, const int32_t* ids,
                      const float* weights, const void* x, int64_t x_stride, void* y, int64_t y_stride, int wide,
                      uint64_t* number) {
    return proa::guarded([&] {
        require(queue && ids && weights && x && y && number, "A null pointer.");
        require(layer >= 0 && layer < queue->queue.layers(), "There is no such layer.");
        require(tokens >= 1 && tokens <= 1 << 20 && top_k >= 1 && top_k <= 1024,
                "Too many tokens, or experts per token.");
        const proa::Experts& e = queue->queue.layer(int(layer));
        require(x_stride >= e.gate_up->layout.columns && y_stride >= e.down->layout.rows, "Rows overlap.");
        *number = queue->queue.submit({int(layer), int(tokens), int(top_k), ids, weights,
                                       static_cast<const uint16_t*>(x), x_stride, y, y_stride, wide != 0});
    });
}

int proa_queue_done(const proa_queue* queue, uint64_t number, int* done) {
    return proa::guarded([&] {
        require(queue && done, "A null pointer.");
        *done = queue->queue.done(number);
    });
}

int proa_queue_wait(const proa_queue* queue, uint64_t number) {
    return proa::guarded([&] {
        require(queue, "A null pointer.");
        queue->queue.wait(number);
    });
}

}  // extern "C"
