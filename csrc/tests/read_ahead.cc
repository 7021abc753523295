// Reading ahead: pieces are not replaced while a late worker may still read them.
#include "read_ahead.h"

#include <chrono>
#include <cstdlib>
#include <memory>
#include <thread>

#include "operations.h"

using namespace testing;

namespace {

constexpr int kExperts = 4;

// A task for each thread of a pool with one worker, which is kept inside its task until it is let go.
struct Late {
    std::thread::id caller = std::this_thread::get_id();
    std::atomic<bool> inside{false}, let_go{false};

    static void run(const void* context, int, const std::byte*) {
        auto& late = *const_cast<Late*>(static_cast<const Late*>(context));
        if (std::this_thread::get_id() != late.caller) late.inside.store(true);
        while (!(std::this_thread::get_id() == late.caller ? late.inside : late.let_go).load())
            std::this_thread::yield();
    }
};

void a_late_worker_keeps_its_pieces() {
    proa::Host host({.teams = {{0}}, .pin = false, .spin_us = 50, .redo = false, .lanes = 2},
                    proa::select_kernels("").kernels);
    const proa::Layout l = proa::layout_of(proa::Format::kBf16, 32, 32, 0);
    const size_t each = size_t(l.panels) * l.panel_bytes;
    const std::unique_ptr<void, decltype(&std::free)> memory{std::aligned_alloc(64, each * kExperts), &std::free};
    std::memset(memory.get(), 0, each * kExperts);
    const proa::Matrix up{l, kExperts, {{0, l.panels, static_cast<const uint8_t*>(memory.get()), each}}};
    const proa::Experts experts{&up, &up, proa::Activation::kSilu, 0, nullptr, nullptr};
    proa::ReadAhead ahead(host);

    std::atomic<bool> over{false};
    std::unique_ptr<Late> late;
    std::atomic<Late*> known{nullptr};
    std::thread other([&] {  // the caller of another lane, whose task keeps the worker
        late = std::make_unique<Late>();
        known.store(late.get());
        host.pool.run(proa::published(2, 1, late.get(), Late::run), 1);
    });
    while (!known.load() || !known.load()->inside.load()) std::this_thread::yield();
    std::thread later([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(50));
        over.store(true);
        known.load()->let_go.store(true);
    });
    for (int i = 0; i < 200; ++i) ahead.begin(experts, {i % kExperts});
    CHECK(over.load());  // else pieces were used again while a worker could be reading them
    later.join(), other.join();
}

}  // namespace

int main() {
    a_late_worker_keeps_its_pieces();
    return 0;
}
