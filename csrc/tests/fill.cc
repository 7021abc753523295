// Filling panels from files and memory: every stored type gives the same bytes on every pool, in memory of exactly the
// size it needs. Values are compared with float64 and with plain tensors in Python's tests.

#include "fill.h"

#include <unistd.h>

#include <cstdio>

#include "operations.h"

using namespace testing;

namespace {

constexpr int kRows = 75, kColumns = 512;

struct File {
    FILE* file = std::tmpfile();
    int fd = fileno(file);
    explicit File(const std::vector<uint8_t>& bytes) {
        CHECK(write(fd, bytes.data(), bytes.size()) == ssize_t(bytes.size()));
    }
    ~File() { std::fclose(file); }
};

std::vector<uint8_t> random_bytes(size_t count, unsigned seed) {
    Random random(seed);
    std::vector<uint8_t> bytes(count);
    for (uint8_t& byte : bytes) byte = uint8_t(random.below(256));
    return bytes;
}

// One job a panel, team by team in turn.
std::vector<proa::Fill> jobs_of(proa::Stored stored, const proa::Layout& l, int fd, uint64_t from, size_t stride,
                                bool transposed, uint8_t* out, int teams) {
    std::vector<proa::Fill> jobs;
    for (int first = 0; first < kRows; first += proa::kPanelRows) {
        const int rows = std::min(proa::kPanelRows, kRows - first);
        const proa::Layout part =
            proa::layout_of(l.format, rows, kColumns, l.format == proa::Format::kBf16 ? 0 : l.group);
        const size_t skip = transposed ? size_t(first) * stride / kRows : size_t(first) * stride;
        jobs.push_back({fd, from + skip, stride, stored, transposed, false, part, 1,
                        out + size_t(first / proa::kPanelRows) * l.panel_bytes, first / proa::kPanelRows % teams});
    }
    return jobs;
}

void same_on_every_pool(proa::Stored stored, proa::Format format, int group, bool transposed) {
    const proa::StoredFacts facts = proa::facts_of(stored);
    const proa::Layout l = proa::layout_of(format, kRows, kColumns, group);
    const size_t stride =
        size_t(transposed ? kRows : kColumns) / size_t(facts.block_values) * size_t(facts.block_bytes);
    const std::vector<uint8_t> bytes = random_bytes(stride * (transposed ? kColumns : kRows), unsigned(stored) + 1);
    const File file(bytes);
    std::vector<uint8_t> first;
    for (int kind = 0; kind < kPools; ++kind)
        for (bool in_memory : {false, true}) {
            proa::Pool pool(pool_options(kind));
            std::vector<uint8_t> out(size_t(l.panels) * l.panel_bytes, 0);
            const uint64_t from = in_memory ? reinterpret_cast<uint64_t>(bytes.data()) : 0;
            proa::fill(
                pool, jobs_of(stored, l, in_memory ? -1 : file.fd, from, stride, transposed, out.data(), pool.nodes()));
            if (first.empty()) first = out;
            CHECK(out == first);
            CHECK(out != std::vector<uint8_t>(out.size(), 0));
        }
}

void says_which_file_ends() {
    const proa::Layout l = proa::layout_of(proa::Format::kBf16, kRows, kColumns, 0);
    std::vector<uint8_t> out(size_t(l.panels) * l.panel_bytes);
    const File file(random_bytes(size_t(kRows) * kColumns * 2 - 1, 1));
    for (int kind = 0; kind < kPools; ++kind) {
        proa::Pool pool(pool_options(kind));
        int64_t which = -1;
        try {
            proa::fill(pool,
                       jobs_of(proa::Stored::kBf16, l, file.fd, 0, kColumns * 2, false, out.data(), pool.nodes()));
        } catch (const proa::ReadFailed& failed) {
            CHECK(failed.error == 0);
            which = failed.job;
        }
        CHECK(which == kRows / proa::kPanelRows);  // the last
    }
}

}  // namespace

int main() {
    using proa::Stored;
    for (Stored stored : {Stored::kF32, Stored::kF16, Stored::kF64, Stored::kBf16}) {
        same_on_every_pool(stored, proa::Format::kBf16, 0, false);
        same_on_every_pool(stored, proa::Format::kBf16, 0, true);
    }
    for (Stored stored : {Stored::kQ4_0, Stored::kQ4_1, Stored::kQ5_0, Stored::kQ5_1, Stored::kQ8_0, Stored::kQ4K,
                          Stored::kQ5K, Stored::kQ6K})
        same_on_every_pool(stored, proa::Format::kBf16, 0, false);
    for (Stored stored : {Stored::kQ4_0, Stored::kQ4_1, Stored::kQ8_0, Stored::kQ4K, Stored::kQ6K}) {
        const proa::KeptFormat kept = proa::kept_format(stored);
        same_on_every_pool(stored, kept.format, kept.group, false);
    }
    says_which_file_ends();
    return 0;
}
