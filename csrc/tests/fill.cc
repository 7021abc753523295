// Filling panels from files and memory: every stored type gives the same bytes on every pool, in memory of exactly the
// required size. The Python tests compare values with float64 and with plain tensors.

#include "fill.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "bfloat16.h"
#include "nibbles.h"
#include "operations.h"
#include "stored_bytes.h"

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

// One job per panel, teams in rotation.
std::vector<proa::Fill> jobs_of(proa::Stored stored, const proa::Layout& l, int fd, uint64_t from, size_t stride,
                                bool transposed, uint8_t* out, int teams) {
    std::vector<proa::Fill> jobs;
    for (int first = 0; first < kRows; first += proa::kPanelRows) {
        const int rows = std::min(proa::kPanelRows, kRows - first);
        const proa::Layout part =
            proa::layout_of(l.format, rows, kColumns, l.format == proa::Format::kBf16 ? 0 : l.group);
        const size_t skip = transposed ? size_t(first) * stride / kRows : size_t(first) * stride;
        jobs.push_back({fd, from + skip, stride, stored,
                        transposed ? proa::Order::kPlainTransposed : proa::Order::kRows, false, part, 1,
                        out + size_t(first / proa::kPanelRows) * l.panel_bytes, first / proa::kPanelRows % teams});
    }
    return jobs;
}

// Every pool, from a file or from memory, writes the same bytes. jobs(fd, from, out, teams).
template <class Jobs>
void same_bytes(const std::vector<uint8_t>& bytes, const proa::Layout& l, const Jobs& jobs) {
    const File file(bytes);
    std::vector<uint8_t> first;
    for (int kind : kPools)
        for (bool in_memory : {false, true}) {
            proa::Pool pool(pool_options(kind));
            std::vector<uint8_t> out(size_t(l.panels) * l.panel_bytes, 0);
            const uint64_t from = in_memory ? reinterpret_cast<uint64_t>(bytes.data()) : 0;
            proa::fill(pool, jobs(in_memory ? -1 : file.fd, from, out.data(), pool.nodes()));
            if (first.empty()) first = out;
            CHECK(out == first);
            CHECK(out != std::vector<uint8_t>(out.size(), 0));
        }
}

void same_on_every_pool(proa::Stored stored, proa::Format format, int group, bool transposed) {
    const proa::StoredFacts facts = proa::facts_of(stored);
    const proa::Layout l = proa::layout_of(format, kRows, kColumns, group);
    const size_t stride =
        size_t(transposed ? kRows : kColumns) / size_t(facts.block_values) * size_t(facts.block_bytes);
    const std::vector<uint8_t> bytes = finite_bytes(stored, kRows * kColumns, unsigned(stored) + 1);
    same_bytes(bytes, l, [&](int fd, uint64_t from, uint8_t* out, int teams) {
        return jobs_of(stored, l, fd, from, stride, transposed, out, teams);
    });
}

// Codes in every order: every pool, from a file or from memory, writes the same bytes.
void coded_on_every_pool(proa::Stored stored, proa::Order order, proa::Format format, int rows) {
    constexpr int kGroup = 32, kCodedColumns = 320;
    const proa::Layout l = proa::layout_of(format, rows, kCodedColumns, kGroup);
    const bool transposed = order != proa::Order::kRows;
    const size_t per_byte = size_t(proa::facts_of(stored).block_values);
    const size_t runs = transposed ? size_t(proa::transposed_rows(stored, order, kCodedColumns)) : size_t(rows);
    const size_t stride = transposed ? proa::transposed_bytes(order, rows) : kCodedColumns / per_byte;
    const std::vector<uint8_t> bytes = finite_bytes(stored, stride * runs * per_byte, unsigned(order) + 7);
    const std::vector<float> scales = Random(3).floats(size_t(rows) * (kCodedColumns / kGroup));
    const proa::Scales of{proa::Stored::kF32,
                          reinterpret_cast<const uint8_t*>(scales.data()),
                          kCodedColumns / kGroup * 4,
                          1,
                          0,
                          kGroup,
                          nullptr,
                          1.f};
    same_bytes(bytes, l, [&](int fd, uint64_t from, uint8_t* out, int) {
        return std::vector<proa::Fill>{{fd, from, stride, stored, order, false, l, 1, out, 0, of}};
    });
}

// AWQ: a word has eight rows of one column; vectors of words and single words are transposed alike.
void transposes_words_of_eight_rows() {
    constexpr int kWhere[8] = {0, 2, 4, 6, 1, 3, 5, 7};  // code i of a word belongs to row kWhere[i] of eight
    for (int rows : {8, 40, 64, 104})
        for (int columns : {8, 72}) {
            const size_t stride = size_t(rows) / 2 + 4;
            const std::vector<uint8_t> stored = random_bytes(stride * size_t(columns), unsigned(rows + columns));
            std::vector<uint8_t> transposed(size_t(rows) * size_t(columns) / 2, 0xaa);
            proa::transpose(proa::Stored::kUint4, proa::Order::kAwqTransposed, stored.data(), stride, rows, columns,
                            transposed.data());
            const auto code = [](const uint8_t* from, int i) { return from[i / 2] >> i % 2 * 4 & 15; };
            for (int k = 0; k < columns; ++k)
                for (int n = 0; n < rows; ++n) {
                    const int place = int(std::find(kWhere, kWhere + 8, n % 8) - kWhere);
                    CHECK(code(transposed.data() + size_t(n) * size_t(columns) / 2, k) ==
                          code(stored.data() + size_t(k) * stride, n / 8 * 8 + place));
                }
        }
}

void looks_up_alike_with_and_without_shuffles() {
    const std::vector<uint8_t> codes = random_bytes(300, 5), numbers = random_bytes(40 * 16 * 2, 6);
    uint16_t tables[40][16];
    std::memcpy(tables, numbers.data(), sizeof tables);
    for (int group_bytes : {8, 9, 20, 64, 300})
        for (int bytes : {0, 1, 7, 8, 31, 64, 65, 300}) {
            std::vector<uint16_t> best(size_t(2 * bytes) + 1, 7), plain(best);
            proa::look_up_nibbles(tables, group_bytes, codes.data(), bytes, best.data());
            proa::look_up_nibbles_plainly(tables, group_bytes, codes.data(), bytes, plain.data());
            CHECK(best == plain);
            CHECK(best.back() == 7);  // nothing is written beyond the last value
            for (int i = 0; i < 2 * bytes; ++i)
                CHECK(best[size_t(i)] == tables[i / 2 / group_bytes][codes[size_t(i / 2)] >> i % 2 * 4 & 15]);
        }
}

// Values of every exponent, with NaN and ties, in groups, the last of which is shorter.
void scales_alike_with_and_without_vectors() {
    const std::vector<uint8_t> bits = random_bytes(300 * 4, 7), others = random_bytes(300 * 4, 8);
    std::vector<float> scales(300), floats(300);
    std::memcpy(floats.data(), bits.data(), bits.size());
    for (size_t i = 0; i < 300; ++i) scales[i] = float(others[i]) / 16.f;
    for (size_t i = 0; i < 300; i += 3) floats[i] = std::bit_cast<float>(std::bit_cast<uint32_t>(floats[i]) << 15);
    const std::vector<float> minimums(scales.rbegin(), scales.rend());
    for (int count : {0, 1, 7, 16, 31, 48, 300}) {
        std::vector<uint16_t> best(size_t(count) + 1, 7), plain(best);
        proa::round_to_bf16(floats.data(), size_t(count), best.data());
        proa::round_to_bf16_plainly(floats.data(), size_t(count), plain.data());
        CHECK(best == plain && best.back() == 7);
        for (int i = 0; i < count; ++i) CHECK(std::isnan(floats[size_t(i)]) == ((best[size_t(i)] & 0x7fff) > 0x7f80));
        for (int group : {1, 6, 16, 24}) {
            std::vector<uint16_t> of(best), same(best);
            proa::scale_bf16(of.data(), count, group, scales.data(), minimums.data(), 0.75f);
            proa::scale_bf16_plainly(same.data(), count, group, scales.data(), minimums.data(), 0.75f);
            CHECK(of == same && of.back() == 7);
            for (int i = 0; i < count; ++i) {
                const float value = std::bit_cast<float>(uint32_t(best[size_t(i)]) << 16);
                const float exact = value * scales[size_t(i / group)] * 0.75f + minimums[size_t(i / group)];
                uint16_t rounded;
                proa::round_to_bf16_plainly(&exact, 1, &rounded);
                CHECK(of[size_t(i)] == rounded);
            }
        }
    }
}

void says_which_file_ends() {
    const proa::Layout l = proa::layout_of(proa::Format::kBf16, kRows, kColumns, 0);
    std::vector<uint8_t> out(size_t(l.panels) * l.panel_bytes);
    std::vector<uint8_t> bytes = finite_bytes(proa::Stored::kBf16, kRows * kColumns, 1);
    bytes.pop_back();
    const File file(bytes);
    for (int kind : kPools) {
        proa::Pool pool(pool_options(kind));
        int64_t which = -1;
        try {
            proa::fill(pool,
                       jobs_of(proa::Stored::kBf16, l, file.fd, 0, kColumns * 2, false, out.data(), pool.nodes()));
        } catch (const proa::ReadFailed& failed) {
            CHECK(failed.error == 0);
            which = failed.job;
        }
        CHECK(which == kRows / proa::kPanelRows);  // the last job
    }
}

}  // namespace

int main() {
    using proa::Stored;
    for (Stored stored : kPlainTypes) {
        same_on_every_pool(stored, proa::Format::kBf16, 0, false);
        same_on_every_pool(stored, proa::Format::kBf16, 0, true);
    }
    for (Stored stored : kBlockTypes) {
        same_on_every_pool(stored, proa::Format::kBf16, 0, false);
        if (stored == Stored::kQ5_1) continue;  // no packed format holds it
        const proa::KeptFormat kept = proa::kept_format(stored);
        same_on_every_pool(stored, kept.format, kept.group, false);
    }
    for (int rows : {16, 72, 1024}) {
        using proa::Format, proa::Order;
        coded_on_every_pool(Stored::kE4m3, Order::kRows, Format::kFp8Row, rows);
        coded_on_every_pool(Stored::kInt4, Order::kRows, Format::kInt4F32, rows);
        coded_on_every_pool(Stored::kSigned4, Order::kRows, Format::kInt4F32, rows);
        coded_on_every_pool(Stored::kInt4, Order::kWordsTransposed, Format::kInt4F32, rows);
        coded_on_every_pool(Stored::kUint8, Order::kWordsTransposed, Format::kInt8F32, rows);
        coded_on_every_pool(Stored::kInt4, Order::kAwqTransposed, Format::kInt4F32, rows);
    }
    transposes_words_of_eight_rows();
    looks_up_alike_with_and_without_shuffles();
    scales_alike_with_and_without_vectors();
    says_which_file_ends();
    return 0;
}
