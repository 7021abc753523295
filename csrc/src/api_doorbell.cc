// The C interface of the doorbell: checks arguments. Jobs are checked when they arrive.
#include <sched.h>

#include "error.h"
#include "handles.h"

using proa::require;

namespace {

void check_size(int64_t most_tokens, int64_t top_k, int64_t hidden) {
    require(most_tokens >= 1 && most_tokens <= 1 << 20 && top_k >= 1 && top_k <= 1024,
            "A job must have 1 to 2^20 tokens with 1 to 1024 experts each.");
    require(hidden >= 1 && hidden <= 1 << 20, "Rows must have 1 to 2^20 elements.");
}

std::vector<const proa::Experts*> layers_of(const proa_pool* pool, const proa_doorbell_options& o) {
    require(o.layers && o.layer_count >= 1 && o.layer_count <= 1 << 16, "A doorbell must have 1 to 65536 layers.");
    std::vector<const proa::Experts*> layers;
    for (int64_t i = 0; i < o.layer_count; ++i) {
        require(o.layers[i], "The experts of a layer are a null pointer.");
        const proa::Experts& e = o.layers[i]->experts;
        require(int(e.gate_up->slices.size()) <= pool->host.pool.nodes(),
                "The experts have more slices than the pool has teams.");
        require(e.gate_up->layout.columns == o.hidden && e.down->layout.rows == o.hidden,
                "The experts' rows must be as long as the doorbell's.");
        layers.push_back(&e);
    }
    return layers;
}

std::vector<int> cpus_of(const proa_doorbell_options& o) {
    require(o.cpu_count >= 0 && o.cpu_count <= CPU_SETSIZE && (o.cpus || !o.cpu_count),
            "The list of CPUs is missing or too long.");
    for (int64_t i = 0; i < o.cpu_count; ++i)
        require(o.cpus[i] >= 0 && o.cpus[i] < CPU_SETSIZE, "Threads can be bound to CPUs 0 to 1023.");
    return {o.cpus, o.cpus + o.cpu_count};
}

}  // namespace

extern "C" {

int proa_doorbell_layout_of(int64_t most_tokens, int64_t top_k, int64_t hidden, proa_doorbell_layout* out) {
    return proa::guarded([&] {
        require(out, "An argument is a null pointer.");
        check_size(most_tokens, top_k, hidden);
        const proa::DoorbellLayout l = proa::doorbell_layout(int(most_tokens), int(top_k), int(hidden));
        *out = {l.rung, l.answered, l.dead,     l.done,           l.ready,         l.header,       l.ids,  l.weights,
                l.x,    l.y,        l.foreseen, l.foreseen_layer, l.foreseen_rows, l.foreseen_ids, l.bytes};
    });
}

int proa_doorbell_create(proa_pool* pool, const proa_doorbell_options* options, proa_doorbell** out) {
    return proa::guarded([&] {
        require(pool && options && out, "An argument is a null pointer.");
        const proa_doorbell_options& o = *options;
        check_size(o.most_tokens, o.top_k, o.hidden);
        require_lane(pool->host, o.lane);
        require(o.spin_us >= 0, "The spin time must not be negative.");
        require(o.way >= PROA_WAY_NUMBER && o.way <= PROA_WAY_CALLS,
                "The way to ring must be PROA_WAY_NUMBER, _FLAGS or _CALLS.");
        require(o.deferred >= 0 && o.deferred <= o.top_k,
                "At most a token's experts can be deferred, and not fewer than 0.");
        const proa::DoorbellSize size{int(o.most_tokens), int(o.top_k), int(o.hidden)};
        require(o.memory && reinterpret_cast<uintptr_t>(o.memory) % proa::kLineBytes == 0,
                "The doorbell's memory must be aligned to 64 bytes.");
        require(o.memory_bytes >= proa::doorbell_layout(size.most_tokens, size.top_k, size.hidden).bytes,
                "The doorbell's memory is too small.");
        *out = new proa_doorbell{{pool->owner,
                                  layers_of(pool, o),
                                  static_cast<std::byte*>(o.memory),
                                  size,
                                  proa::Way(o.way),
                                  {o.lane, o.spin_us, cpus_of(o), o.read_ahead != 0, o.decode_tokens, o.deferred}}};
    });
}

int proa_doorbell_destroy(proa_doorbell* doorbell) {
    return proa::guarded([&] { delete doorbell; });
}

int proa_doorbell_arm(proa_doorbell* doorbell) {
    return proa::guarded([&] {
        require(doorbell, "An argument is a null pointer.");
        doorbell->doorbell.arm();
    });
}

int proa_doorbell_disarm(proa_doorbell* doorbell) {
    return proa::guarded([&] {
        require(doorbell, "An argument is a null pointer.");
        doorbell->doorbell.disarm();
    });
}

int proa_doorbell_check(proa_doorbell* doorbell) {
    return proa::guarded([&] {
        require(doorbell, "An argument is a null pointer.");
        doorbell->doorbell.check();
    });
}

int proa_doorbell_fail(proa_doorbell* doorbell, const char* why) {
    return proa::guarded([&] {
        require(doorbell && why, "An argument is a null pointer.");
        doorbell->doorbell.fail(PROA_ERROR_SYSTEM, why);
    });
}

int proa_doorbell_ring(proa_doorbell* doorbell, uint32_t number) {
    return proa::guarded([&] {
        require(doorbell, "An argument is a null pointer.");
        doorbell->doorbell.ring(number);
    });
}

int proa_doorbell_wait(proa_doorbell* doorbell, uint32_t number, int64_t timeout_us, int* answered) {
    return proa::guarded([&] {
        require(doorbell && answered, "An argument is a null pointer.");
        require(timeout_us >= 0 && timeout_us <= int64_t(1) << 50, "The timeout must be 0 to 2^50 microseconds.");
        *answered = doorbell->doorbell.wait(number, timeout_us);
    });
}

void proa_doorbell_call_ring(void* doorbell) { static_cast<proa_doorbell*>(doorbell)->doorbell.ring_copied(); }

void proa_doorbell_call_wait(void* doorbell) { static_cast<proa_doorbell*>(doorbell)->doorbell.wait_copied(); }

int proa_doorbell_get_counters(const proa_doorbell* doorbell, proa_doorbell_counters* out) {
    return proa::guarded([&] {
        require(doorbell && out, "An argument is a null pointer.");
        const proa::DoorbellCounters c = doorbell->doorbell.counters();
        *out = {c.jobs,     c.pairs, c.weight_bytes, c.moe_ns,   c.waiting_ns, c.experts,
                c.foreseen, c.gaps,  c.gap_ns,       c.deferred, c.deferred_ns};
    });
}

}  // extern "C"
