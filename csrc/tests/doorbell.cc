// The doorbell, rung by a thread in place of a GPU: answers equal the experts' results, failures end every wait, and no
// thread hangs.
#include "doorbell.h"

#include <algorithm>
#include <chrono>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <numeric>
#include <thread>
#include <utility>

#include "operations.h"
#include "pack.h"

using namespace testing;

namespace {

constexpr int kExperts = 5, kHidden = 64, kWidth = 32, kTopK = 3, kMostTokens = 6, kLayers = 3;
constexpr int64_t kSecond = 1'000'000;

struct Block {
    proa::DoorbellLayout layout = proa::doorbell_layout(kMostTokens, kTopK, kHidden);
    std::unique_ptr<std::byte, decltype(&std::free)> memory{
        static_cast<std::byte*>(std::aligned_alloc(proa::kLineBytes, size_t(layout.bytes))), &std::free};

    template <class T>
    T* at(int64_t offset) const {
        return reinterpret_cast<T*>(memory.get() + offset);
    }
};

// Random bf16 weights, in panels.
class Layer {
  public:
    explicit Layer(unsigned seed) {
        Random random(seed);
        fill(up_, up_memory_, proa::layout_of(proa::Format::kBf16, 2 * kWidth, kHidden, 0), random);
        fill(down_, down_memory_, proa::layout_of(proa::Format::kBf16, kHidden, kWidth, 0), random);
        experts = {&up_, &down_, proa::Activation::kSilu, 0, nullptr, nullptr};
    }
    // Makes all results of an expert NaN.
    void poison(int expert) {
        const size_t each = down_memory_.size() / kExperts;
        for (size_t i = 0; i < each; ++i) down_memory_[size_t(expert) * each + i] = 0x7fc0;
    }
    proa::Experts experts;

  private:
    static void fill(proa::Matrix& m, std::vector<uint16_t>& memory, const proa::Layout& l, Random& random) {
        const size_t each = size_t(l.panels) * l.panel_bytes;
        memory = random.rows(each * kExperts / 2 + 32, 0.2f);
        auto* data = reinterpret_cast<uint8_t*>(memory.data());
        data += -reinterpret_cast<uintptr_t>(data) & 63;
        memory.resize(each * kExperts / 2 + 32);
        m = {l, kExperts, {{0, l.panels, data, each}}};
    }
    proa::Matrix up_, down_;
    std::vector<uint16_t> up_memory_, down_memory_;
};

struct Job {
    int layer, tokens;
    std::vector<int32_t> ids;
    std::vector<float> weights;
    std::vector<uint16_t> x;

    Job(Random& random, int layer_, int tokens_) : layer(layer_), tokens(tokens_) {
        for (int t = 0; t < tokens; ++t)
            for (int k = 0, first = random.below(kExperts); k < kTopK; ++k)
                ids.push_back(random.below(3) ? (first + k) % kExperts : -1);
        weights = random.floats(ids.size());
        x = random.rows(size_t(tokens) * kHidden);
    }
    std::vector<float> exact(const Layer& of, proa::Host& host, int lane = 0) const {
        std::vector<float> y(x.size());
        run_once(proa::Moe{&of.experts, kTopK, ids.data(), weights.data(), x.data(), kHidden, y.data(), kHidden, true},
                 host, tokens, lane);
        return y;
    }
    // Splits it as deferral does: the `most` lightest choices of each token, by sorting them.
    std::pair<Job, Job> split(int most) const {
        std::pair<Job, Job> parts{*this, *this};
        for (int t = 0; t < tokens; ++t) {
            std::vector<int> order(kTopK);
            std::iota(order.begin(), order.end(), t * kTopK);
            std::stable_sort(order.begin(), order.end(),
                             [this](int a, int b) { return weights[size_t(a)] > weights[size_t(b)]; });
            for (int i = 0; i < kTopK; ++i)
                (i < kTopK - most ? parts.second : parts.first).ids[size_t(order[size_t(i)])] = -1;
        }
        return parts;
    }
    void write(const Block& block, proa::Way way, uint32_t number, bool decode = false) const {
        const int32_t header[3] = {decode ? layer + proa::kDecodeJob : layer, tokens, int32_t(number)};
        const auto of_these = proa::doorbell_layout(tokens, kTopK, kHidden);
        const proa::DoorbellLayout& l = way == proa::Way::kNumber ? block.layout : of_these;
        std::memcpy(block.at<int32_t>(l.header), header, sizeof header);
        std::memcpy(block.at<int32_t>(l.ids), ids.data(), ids.size() * 4);
        std::memcpy(block.at<float>(l.weights), weights.data(), weights.size() * 4);
        std::memcpy(block.at<uint16_t>(l.x), x.data(), x.size() * 2);
    }
};

struct Bench {
    proa::Host host;
    std::vector<std::unique_ptr<Layer>> layers;
    Block block;

    explicit Bench(int pool, void (*taken)() = nullptr, int lanes = 2)
        : host(options(pool, taken, lanes), proa::select_kernels("").kernels) {
        for (unsigned i = 0; i < kLayers; ++i) layers.push_back(std::make_unique<Layer>(i));
    }
    static proa::PoolOptions options(int pool, void (*taken)(), int lanes) {
        proa::PoolOptions found = pool_options(pool);
        found.taken_for_test = taken;
        found.lanes = lanes;
        return found;
    }
    std::unique_ptr<proa::Doorbell> bell(proa::Way way = proa::Way::kNumber, int spin_us = 100, bool read_ahead = false,
                                         int deferred = 0) {
        return bell_in(block, 1, way, spin_us, read_ahead, deferred);
    }
    std::unique_ptr<proa::Doorbell> bell_in(const Block& of, int lane, proa::Way way = proa::Way::kNumber,
                                            int spin_us = 100, bool read_ahead = false, int deferred = 0) {
        std::vector<const proa::Experts*> experts;
        for (const auto& layer : layers) experts.push_back(&layer->experts);
        const std::shared_ptr<proa::Host> unowned(&host, [](proa::Host*) {});
        const proa::DoorbellSize size{kMostTokens, kTopK, kHidden};
        return std::make_unique<proa::Doorbell>(unowned, experts, of.memory.get(), size, way,
                                                proa::DoorbellService{lane, spin_us, {}, read_ahead, 0, deferred});
    }
};

// Rings and waits in place of the GPU.
bool ring_and_wait(proa::Doorbell& bell, proa::Way way, uint32_t number, int64_t timeout_us) {
    if (way != proa::Way::kCalls) {
        bell.ring(number);
        return bell.wait(number, timeout_us);
    }
    bell.ring_copied();
    bell.wait_copied();
    return bell.wait(number, 0);
}

// Returns the error code that `check` throws, or 0.
int failure(proa::Doorbell& bell, std::string* what = nullptr) {
    try {
        bell.check();
    } catch (const proa::Error& error) {
        if (what) *what = error.what();
        return error.code();
    }
    return 0;
}

void answers_are_the_experts(int pool, proa::Way way, int rounds) {
    Bench bench(pool);
    const auto bell = bench.bell(way);
    Random random(7);
    uint32_t number = 0;
    for (int step = 0; step < rounds; ++step) {
        bell->arm();
        for (int layer = 0; layer < kLayers; ++layer) {
            const Job job(random, layer, 1 + random.below(kMostTokens));
            const std::vector<float> want = job.exact(*bench.layers[size_t(layer)], bench.host);
            CHECK(failure(*bell) == 0);  // the last y has been checked, so the test may overwrite it
            std::fill_n(bench.block.at<float>(bench.block.layout.y), want.size(),
                        std::numeric_limits<float>::quiet_NaN());
            job.write(bench.block, way, ++number);
            CHECK(ring_and_wait(*bell, way, number, 60 * kSecond));
            for (int i = 0; i < random.below(3) && way != proa::Way::kNumber; ++i)  // the same number: no job
                CHECK(ring_and_wait(*bell, way, number, 60 * kSecond));
            CHECK(!std::memcmp(want.data(), bench.block.at<float>(bench.block.layout.y), want.size() * 4));
        }
        bell->disarm();
        if (step % 16 == 0)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));  // long enough for its thread to sleep and wake
    }
    CHECK(failure(*bell) == 0);
    CHECK(bell->counters().jobs == number);
}

// A doorbell on each lane, each with a GPU that rings it: every answer is that of its own job.
void doorbells_answer_at_once(int lanes) {
    Bench bench(2, nullptr, lanes + 1);
    std::vector<Block> blocks;
    for (int lane = 0; lane < lanes; ++lane) blocks.emplace_back();
    std::vector<std::unique_ptr<proa::Doorbell>> bells;
    for (int lane = 0; lane < lanes; ++lane) bells.push_back(bench.bell_in(blocks[size_t(lane)], lane));
    std::mutex exact;  // the expected results are computed on the last lane, which has one caller at a time
    std::vector<std::thread> gpus;
    for (int lane = 0; lane < lanes; ++lane)
        gpus.emplace_back([&, lane] {
            Block& block = blocks[size_t(lane)];
            proa::Doorbell& bell = *bells[size_t(lane)];
            Random random(unsigned(70 + lane));
            bell.arm();
            for (uint32_t number = 1; number <= 60; ++number) {
                const int layer = random.below(kLayers);
                const Job job(random, layer, 1 + random.below(kMostTokens));
                std::vector<float> want;
                {
                    const std::lock_guard lock(exact);
                    want = job.exact(*bench.layers[size_t(layer)], bench.host, lanes);
                }
                CHECK(failure(bell) == 0);
                job.write(block, proa::Way::kNumber, number);
                CHECK(ring_and_wait(bell, proa::Way::kNumber, number, 60 * kSecond));
                CHECK(!std::memcmp(want.data(), block.at<float>(block.layout.y), want.size() * 4));
            }
            bell.disarm();
            CHECK(failure(bell) == 0 && bell.counters().jobs == 60);
        });
    for (std::thread& gpu : gpus) gpu.join();
}

void one_doorbell_of_a_pool_reads_ahead() {
    Bench bench(2);
    Block other;
    auto first = bench.bell(proa::Way::kNumber, 100, true);
    try {
        bench.bell_in(other, 0, proa::Way::kNumber, 100, true);
        CHECK(false);
    } catch (const proa::Error& error) {
        CHECK(error.code() == PROA_ERROR_ARGUMENT);
    }
    first.reset();
    CHECK(bench.bell_in(other, 0, proa::Way::kNumber, 100, true));
}

// Predictions, right, wrong or invalid, change no answer; right ones are counted.
void predictions_change_no_answer(int pool) {
    Bench bench(pool);
    const auto bell = bench.bell(proa::Way::kNumber, 100, true);
    const proa::DoorbellLayout& l = bench.block.layout;
    Random random(11);
    uint32_t number = 0;
    bell->arm();
    for (int step = 0; step < 200; ++step) {
        const int layer = step % kLayers, rows = 1 + random.below(proa::kForeseenRows);
        const Job job(random, layer, rows);
        const std::vector<float> want = job.exact(*bench.layers[size_t(layer)], bench.host);
        const auto say = [&](int64_t offset, int value) {
            std::atomic_ref<int32_t>(*bench.block.at<int32_t>(offset)).store(value, std::memory_order_relaxed);
        };
        for (size_t i = 0; i < job.ids.size(); ++i) say(l.foreseen_ids + int64_t(i) * 4, job.ids[i]);
        if (step % 4 == 1) say(l.foreseen_ids + random.below(kTopK) * 4, random.below(2 * kExperts) - 3);
        say(l.foreseen_layer, step % 8 == 2 ? random.below(7) - 2 : layer);
        say(l.foreseen_rows, step % 8 == 6 ? random.below(9) - 2 : rows);
        const auto before = bell->counters();
        std::atomic_ref<uint32_t>(*bench.block.at<uint32_t>(l.foreseen)).store(uint32_t(step + 1));
        std::this_thread::sleep_for(std::chrono::microseconds(random.below(3) * 100));
        job.write(bench.block, proa::Way::kNumber, ++number);
        CHECK(ring_and_wait(*bell, proa::Way::kNumber, number, 60 * kSecond));
        CHECK(failure(*bell) == 0);
        CHECK(!std::memcmp(want.data(), bench.block.at<float>(l.y), want.size() * 4));
        const auto after = bell->counters();
        CHECK(after.foreseen - before.foreseen <= after.experts - before.experts);
        CHECK(after.gaps - before.gaps == (layer ? 1 : 0));  // none before the first layer, which begins a step
        CHECK((after.gap_ns > before.gap_ns) == (layer > 0));
    }
    bell->disarm();
    CHECK(bell->counters().foreseen > 0);
}

// What the GPU may do as soon as it has the answer: write other rows into the block.
void overwrite(const Block& block) {
    std::memset(block.at<uint8_t>(block.layout.ids), 0xff, size_t(block.layout.y - block.layout.ids));
}

// Each answer of a decode step has the job's heavy pairs and the light ones of the layer before; the last has all.
// Other jobs come between steps, and steps end early.
void light_pairs_come_one_layer_later(int pool, proa::Way way, int deferred, bool read_ahead) {
    Bench bench(pool);
    const auto bell = bench.bell(way, 100, read_ahead, deferred);
    Random random(unsigned(13 + deferred));
    uint32_t number = 0;
    uint64_t late = 0;
    const auto answer = [&](const Job& job, std::vector<float> want, const std::vector<float>& owed, bool decode) {
        for (size_t i = 0; i < owed.size(); ++i) want[i] += owed[i];
        job.write(bench.block, way, ++number, decode);
        CHECK(ring_and_wait(*bell, way, number, 60 * kSecond));
        overwrite(bench.block);
        CHECK(!std::memcmp(want.data(), bench.block.at<float>(bench.block.layout.y), want.size() * 4));
        CHECK(failure(*bell) == 0);
    };
    bell->arm();
    for (int step = 0; step < 60; ++step) {
        const int tokens = 1 + random.below(kMostTokens), end = step % 5 ? kLayers : 1 + random.below(kLayers);
        std::vector<float> owed;
        for (int layer = 0; layer < end; ++layer) {
            Job job(random, layer, tokens);
            if (step % 3 == 0) job.weights.assign(job.weights.size(), 0.25f);  // equal weights: the later is lighter
            if (step % 7 == 0) job.ids.assign(job.ids.size(), -1);             // all pairs are on the GPU
            const auto [now, light] = job.split(layer + 1 < kLayers ? deferred : 0);
            answer(job, now.exact(*bench.layers[size_t(layer)], bench.host), owed, true);
            owed = light.exact(*bench.layers[size_t(layer)], bench.host);
            late += uint64_t(std::count_if(light.ids.begin(), light.ids.end(), [](int32_t id) { return id >= 0; }));
        }
        const Job prompt(random, random.below(kLayers), tokens);
        if (step % 2) answer(prompt, prompt.exact(*bench.layers[size_t(prompt.layer)], bench.host), {}, false);
    }
    bell->disarm();
    const proa::DoorbellCounters counted = bell->counters();
    CHECK(counted.deferred == late && (late > 0) == (deferred > 0));
    CHECK(counted.jobs == number && counted.deferred_ns <= counted.moe_ns);
}

// A decode step whose layer does not ring would lose what was deferred to it.
void a_decode_step_without_a_layer_fails() {
    for (const auto& [layer, tokens] : {std::pair{2, 2}, std::pair{1, 3}, std::pair{2, 3}}) {
        Bench bench(1);
        const auto bell = bench.bell(proa::Way::kNumber, 100, false, 1);
        Random random(1);
        bell->arm();
        Job(random, 0, 2).write(bench.block, proa::Way::kNumber, 1, true);
        CHECK(ring_and_wait(*bell, proa::Way::kNumber, 1, 60 * kSecond));
        Job(random, layer, tokens).write(bench.block, proa::Way::kNumber, 2, true);
        CHECK(!ring_and_wait(*bell, proa::Way::kNumber, 2, 60 * kSecond));
        std::string what;
        CHECK(failure(*bell, &what) == PROA_ERROR_ARGUMENT);
        CHECK(what.find("every layer must ring") != std::string::npos);
    }
}

// A deferred expert that is non-finite is reported once, with its own layer.
void a_non_finite_deferred_expert_is_reported_with_its_layer() {
    Bench bench(1);
    bench.layers[0]->poison(4);
    const auto bell = bench.bell(proa::Way::kNumber, 100, false, 1);
    Random random(3);
    bell->arm();
    for (int layer = 0; layer < 2; ++layer) {
        Job job(random, layer, 2);
        job.ids = {0, 1, 2, 3, 4, 0};
        job.weights = {0.5f, 0.3f, 0.2f, 0.4f, 0.1f, 0.5f};  // expert 4 of the second token is its lightest
        job.write(bench.block, proa::Way::kNumber, uint32_t(layer + 1), true);
        CHECK(ring_and_wait(*bell, proa::Way::kNumber, uint32_t(layer + 1), 60 * kSecond));
        std::string what;
        CHECK(failure(*bell, &what) == (layer ? 0 : PROA_ERROR_NUMERICS));
        if (!layer) CHECK(what.find("layer 0, row 1 of 2, experts 4.") != std::string::npos);
    }
}

// Every bad job ends its wait and all later ones.
void failures_end_every_wait(proa::Way way) {
    const auto expect = [way](int code, const char* text, const std::function<void(Bench&, proa::Doorbell&)>& spoil) {
        Bench bench(1);
        const auto bell = bench.bell(way);
        Random random(1);
        Job(random, 0, 2).write(bench.block, way, 1);
        bell->arm();
        spoil(bench, *bell);
        for (int32_t number = 1; number < 50; ++number) {
            bench.block.at<int32_t>(bench.block.layout.header)[2] = number;
            if (!ring_and_wait(*bell, way, uint32_t(number), 60 * kSecond)) break;
            CHECK(number + 1 < 50);
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        std::string what;
        CHECK(failure(*bell, &what) == code);
        CHECK(what.find(text) != std::string::npos);
        CHECK(failure(*bell) == code);
        const auto begin = std::chrono::steady_clock::now();
        CHECK(!ring_and_wait(*bell, way, 50, 60 * kSecond));
        CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(1));
        for (int64_t flag : {bench.block.layout.done, bench.block.layout.ready})
            CHECK(std::atomic_ref<uint32_t>(*bench.block.at<uint32_t>(flag)).load() & proa::kFailed);
    };
    const auto header = [](Bench& bench) { return bench.block.at<int32_t>(bench.block.layout.header); };
    const auto id = [way](Bench& bench) {
        const auto of_these = proa::doorbell_layout(2, kTopK, kHidden);
        return bench.block.at<int32_t>((way == proa::Way::kNumber ? bench.block.layout : of_these).ids);
    };
    expect(PROA_ERROR_ARGUMENT, "layer 3", [&](Bench& bench, auto&) { header(bench)[0] = kLayers; });
    expect(PROA_ERROR_ARGUMENT, "layer -2", [&](Bench& bench, auto&) { header(bench)[0] = -2; });
    expect(PROA_ERROR_ARGUMENT, "0 tokens", [&](Bench& bench, auto&) { header(bench)[1] = 0; });
    expect(PROA_ERROR_ARGUMENT, "7 tokens", [&](Bench& bench, auto&) { header(bench)[1] = 7; });
    expect(PROA_ERROR_ARGUMENT, "Expert id 99", [&](Bench& bench, auto&) { id(bench)[4] = 99; });
    expect(PROA_ERROR_WORKER, "has ended", [](Bench& bench, auto&) { bench.host.pool.kill_worker_for_test(); });
    expect(PROA_ERROR_SYSTEM, "enough", [](auto&, proa::Doorbell& bell) { bell.fail(PROA_ERROR_SYSTEM, "enough"); });
    expect(PROA_ERROR_ARGUMENT, "while none was armed", [](auto&, proa::Doorbell& bell) { bell.disarm(); });
    expect(PROA_ERROR_ARGUMENT, "number 3 after number 0", [&](Bench& bench, proa::Doorbell& bell) {
        header(bench)[2] = 3;
        CHECK(!ring_and_wait(bell, way, 3, 60 * kSecond));
    });
}

// A dead worker is reported by `check` even if steps have no jobs.
void a_dead_worker_is_reported_without_a_job() {
    Bench bench(2);
    const auto bell = bench.bell();
    CHECK(failure(*bell) == 0);
    bench.host.pool.kill_worker_for_test();
    const auto begin = std::chrono::steady_clock::now();
    while (failure(*bell) == 0) CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(10));
    CHECK(failure(*bell) == PROA_ERROR_WORKER);
}

// A non-finite result is answered, reported once, with its layer, row and experts.
void non_finite_results_are_reported() {
    Bench bench(1);
    bench.layers[2]->poison(4);
    const auto bell = bench.bell();
    Random random(3);
    Job job(random, 2, 3);
    job.ids = {0, 1, 2, -1, 4, 3, 2, 1, 0};
    job.write(bench.block, proa::Way::kNumber, 1);
    bell->arm();
    for (uint32_t number : {1, 2}) {
        bell->ring(number);
        CHECK(bell->wait(number, 60 * kSecond));
        std::string what;
        CHECK(failure(*bell, &what) == PROA_ERROR_NUMERICS);
        CHECK(what.find("layer 2, row 1 of 3, experts 4, 3") != std::string::npos);
        CHECK(failure(*bell) == 0);
    }
}

// Once no step is armed, weights may be freed: a preempted worker whose task another one has done must not read them.
void no_worker_reads_after_a_step() {
    static std::atomic<int> taken{0}, away{0};
    Bench bench(1, [] {
        if (++taken % 7) return;
        away.fetch_add(1);
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        away.fetch_sub(1);
    });
    const auto bell = bench.bell();
    Random random(9);
    for (uint32_t number = 1; number <= 60; ++number) {
        Job(random, int(number) % kLayers, kMostTokens).write(bench.block, proa::Way::kNumber, number);
        bell->arm();
        CHECK(ring_and_wait(*bell, proa::Way::kNumber, number, 60 * kSecond));
        bell->disarm();
        CHECK(away.load() == 0);
    }
    CHECK(taken.load() > 60);
}

void it_ends_whatever_it_is_doing() {
    Bench bench(1);
    Random random(5);
    const Job job(random, 1, kMostTokens);
    for (int i = 0; i < 60; ++i) {
        const auto way = proa::Way(i / 6 % 3);
        const auto bell = bench.bell(way, i % 2 ? 0 : 1000);
        if (i % 3) bell->arm();
        if (i % 3 == 2) {
            job.write(bench.block, way, 1);
            bell->ring(1);
        }
    }
}

}  // namespace

int main() {
    for (proa::Way way : {proa::Way::kNumber, proa::Way::kFlags, proa::Way::kCalls}) {
        for (int pool : kPools) answers_are_the_experts(pool, way, 60);
        failures_end_every_wait(way);
        for (int deferred = 0; deferred <= kTopK; ++deferred)
            light_pairs_come_one_layer_later(2, way, deferred, way == proa::Way::kNumber && deferred == 2);
    }
    for (int pool : kPools) light_pairs_come_one_layer_later(pool, proa::Way::kNumber, 1, true);
    a_decode_step_without_a_layer_fails();
    a_non_finite_deferred_expert_is_reported_with_its_layer();
    for (int lanes : {1, 2, 3, 5}) doorbells_answer_at_once(lanes);
    one_doorbell_of_a_pool_reads_ahead();
    for (int pool : kPools) predictions_change_no_answer(pool);
    a_dead_worker_is_reported_without_a_job();
    non_finite_results_are_reported();
    no_worker_reads_after_a_step();
    it_ends_whatever_it_is_doing();
    return 0;
}
