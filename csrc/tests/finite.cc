// all_finite agrees with the decoded values, with and without vectors; and jobs report non-finite sources.

#include "finite.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "fill.h"
#include "operations.h"
#include "stored_bytes.h"

using namespace testing;
using proa::Format, proa::Order, proa::Stored;

namespace {

constexpr int kRows = 40, kColumns = 512;

// Decoded values that overflow float32 (float64, and powers of two times up to 6) count as finite.
bool decodes_to_finite(Stored type, const std::vector<uint8_t>& bytes, size_t values) {
    std::vector<float> floats(values);
    if (type == Stored::kF64) {
        std::vector<double> doubles(values);
        std::memcpy(doubles.data(), bytes.data(), bytes.size());
        return std::all_of(doubles.begin(), doubles.end(), [](double x) { return std::isfinite(x); });
    }
    if (type == Stored::kMxfp4) {
        for (size_t at = 0; at < bytes.size(); at += 17)
            if (bytes[at] == 0xff) return false;
        return true;
    }
    proa::to_float(type, bytes.data(), values, floats.data());
    return std::all_of(floats.begin(), floats.end(), [](float x) { return std::isfinite(x); });
}

// All sizes, with one byte at every place changed to every value: the result agrees with the decoded values.
void agrees_with_decoded_values(Stored type) {
    const proa::StoredFacts facts = proa::facts_of(type);
    Random random(unsigned(type) + 3);
    for (int blocks : {1, 2, 31, 200}) {
        const size_t values = size_t(blocks) * size_t(facts.block_values);
        std::vector<uint8_t> bytes = finite_bytes(type, values, unsigned(blocks));
        CHECK(proa::all_finite(type, bytes.data(), values) && proa::all_finite_plainly(type, bytes.data(), values));
        for (int round = 0; round < 300; ++round) {
            const auto at = size_t(random.below(int(bytes.size())));
            const uint8_t before = bytes[at];
            bytes[at] = uint8_t(round % 2 ? 0xff : random.below(256));
            const bool want = decodes_to_finite(type, bytes, values);
            CHECK(proa::all_finite(type, bytes.data(), values) == want);
            CHECK(proa::all_finite_plainly(type, bytes.data(), values) == want);
            bytes[at] = before;
        }
    }
}

// The largest finite value of each type, and the next bit pattern, with both signs.
template <class T>
void draws_the_line(Stored type, T largest) {
    const T sign = T(T(1) << (8 * sizeof(T) - 1)), next = T(largest + 1);
    for (T flip : {T(0), sign}) {
        const T bits[2] = {T(largest ^ flip), T(next ^ flip)};
        const auto* bytes = reinterpret_cast<const uint8_t*>(bits);
        CHECK(proa::all_finite(type, bytes, 1) && !proa::all_finite(type, bytes, 2));
    }
}

void draws_the_line_where_infinity_begins() {
    draws_the_line(Stored::kF16, uint16_t(0x7bff));
    draws_the_line(Stored::kBf16, uint16_t(0x7f7f));
    draws_the_line(Stored::kF32, uint32_t(0x7f7fffff));
    draws_the_line(Stored::kF64, uint64_t(0x7fefffffffffffff));
    draws_the_line(Stored::kE4m3, uint8_t(0x7e));
    const uint8_t powers[2] = {254, 255};
    CHECK(proa::all_finite(Stored::kE8m0, powers, 1) && !proa::all_finite(Stored::kE8m0, powers, 2));
}

// On every pool two finite jobs succeed; of a finite and a non-finite job, the second is reported.
void expect_refused(proa::Fill good, proa::Fill bad) {
    const proa::Layout& l = good.layout;
    const size_t bytes = std::max(size_t(l.panels) * l.panel_bytes, size_t(l.rows) * size_t(l.columns) * 2);
    std::vector<uint8_t> out(bytes), other(bytes);  // workers test the values that they have written
    good.out = out.data(), bad.out = other.data();
    for (int kind : kPools) {
        proa::Pool pool(pool_options(kind));
        proa::fill(pool, {good});
        int64_t which = -1;
        try {
            proa::fill(pool, {good, bad});
        } catch (const proa::NotFinite& failed) {
            which = failed.job;
        }
        CHECK(which == 1);
    }
}

proa::Fill job_of(Stored stored, const void* from, const proa::Layout& l) {
    const proa::StoredFacts facts = proa::facts_of(stored);
    const size_t stride = size_t(l.columns / facts.block_values) * size_t(facts.block_bytes);
    return {-1, reinterpret_cast<uint64_t>(from), stride, stored, Order::kRows, false, l, 1, nullptr, 0};
}

// Panels of the type's own format and of bfloat16, plain rows, and transposed ones, each with one non-finite value at
// the end.
void jobs_refuse(Stored stored) {
    const std::vector<uint8_t> good = finite_bytes(stored, kRows * kColumns, 5), bad = spoilt(stored, good);
    const auto refuse = [&](const proa::Layout& l, bool plain, Order order) {
        proa::Fill jobs[2] = {job_of(stored, good.data(), l), job_of(stored, bad.data(), l)};
        for (proa::Fill& job : jobs) {
            job.plain = plain, job.order = order;
            if (order == Order::kPlainTransposed) job.stride = job.stride / kColumns * kRows;
        }
        expect_refused(jobs[0], jobs[1]);
    };
    const proa::Layout rows = proa::layout_of(Format::kBf16, kRows, kColumns, 0);
    refuse(rows, true, Order::kRows);
    refuse(rows, false, Order::kRows);
    if (proa::facts_of(stored).block_values == 1) return refuse(rows, false, Order::kPlainTransposed);
    if (stored == Stored::kQ5_1) return;
    const proa::KeptFormat kept = proa::kept_format(stored);
    refuse(proa::layout_of(kept.format, kRows, kColumns, kept.group), false, Order::kRows);
}

// Codes, their scales and minimums, packed in their format and as bfloat16.
void coded_jobs_refuse(Stored stored, Stored scale, Format kept, int group, bool has_min = false) {
    const auto groups = size_t(kColumns / group);
    const std::vector<uint8_t> codes = finite_bytes(stored, kRows * kColumns, 6);
    const std::vector<uint8_t> scales = finite_bytes(scale, kRows * groups, 7, true), bad = spoilt(scale, scales);
    for (const proa::Layout& l :
         {proa::layout_of(kept, kRows, kColumns, group), proa::layout_of(Format::kBf16, kRows, kColumns, 0)}) {
        const auto job = [&](const auto& of, const auto& times, const auto& plus) {
            proa::Fill made = job_of(stored, of.data(), l);
            const size_t stride = groups * size_t(proa::facts_of(scale).block_bytes);
            made.scales = {scale, times.data(), stride, 1, 0, group, has_min ? plus.data() : nullptr, 1.f};
            return made;
        };
        const proa::Fill good = job(codes, scales, scales);
        expect_refused(good, job(codes, bad, scales));
        if (has_min) expect_refused(good, job(codes, scales, bad));
        if (stored == Stored::kE4m3) {
            const std::vector<uint8_t> bad_codes = spoilt(stored, codes);
            expect_refused(good, job(bad_codes, scales, scales));
        }
    }
}

// Scales shared by blocks of rows, some of them for rows outside of the job.
void only_the_jobs_scales_count() {
    const std::vector<uint8_t> codes = finite_bytes(Stored::kE4m3, kRows * kColumns, 8);
    const proa::Layout l = proa::layout_of(Format::kFp8Panel, kRows, kColumns, 128);
    std::vector<float> scales(4 * kColumns / 128, 0.5f);
    scales.front() = NAN;  // of the 32 rows before the job's
    scales.back() = NAN;   // of rows after them
    proa::Fill job = job_of(Stored::kE4m3, codes.data(), l);
    const auto* data = reinterpret_cast<const uint8_t*>(scales.data());
    job.scales = {Stored::kF32, data, kColumns / 128 * 4, 32, 32, 128, nullptr, 1.f};
    std::vector<float> other = scales;
    other[2 * kColumns / 128] = INFINITY;  // of the job's last eight rows
    proa::Fill bad = job;
    bad.scales.data = reinterpret_cast<const uint8_t*>(other.data());
    expect_refused(job, bad);
}

// A value that is finite in float32 but overflows bfloat16.
void bfloat16_overflow_is_refused() {
    std::vector<float> numbers(kRows * kColumns, 1.f);
    const proa::Layout l = proa::layout_of(Format::kBf16, kRows, kColumns, 0);
    std::vector<float> large = numbers;
    large[kColumns + 3] = std::numeric_limits<float>::max();
    expect_refused(job_of(Stored::kF32, numbers.data(), l), job_of(Stored::kF32, large.data(), l));
}

}  // namespace

int main() {
    for (Stored type : kPlainTypes) agrees_with_decoded_values(type), jobs_refuse(type);
    for (Stored type : kBlockTypes) agrees_with_decoded_values(type), jobs_refuse(type);
    agrees_with_decoded_values(Stored::kE4m3);
    agrees_with_decoded_values(Stored::kE8m0);
    for (Stored type : {Stored::kInt8, Stored::kUint8, Stored::kInt4, Stored::kUint4, Stored::kSigned4, Stored::kE2m1})
        CHECK(proa::all_finite(type, std::vector<uint8_t>(64, 0xff).data(), 64));
    draws_the_line_where_infinity_begins();
    coded_jobs_refuse(Stored::kE4m3, Stored::kF32, Format::kFp8Row, 128);
    coded_jobs_refuse(Stored::kE4m3, Stored::kE8m0, Format::kMxfp8, 32);
    coded_jobs_refuse(Stored::kInt8, Stored::kF32, Format::kInt8F32, 128);
    coded_jobs_refuse(Stored::kInt4, Stored::kF16, Format::kInt4F16, 32);
    coded_jobs_refuse(Stored::kInt4, Stored::kBf16, Format::kInt4Bf16, 32);
    coded_jobs_refuse(Stored::kSigned4, Stored::kBf16, Format::kInt4Bf16, 32);
    coded_jobs_refuse(Stored::kUint4, Stored::kF32, Format::kUint4F32, 32, true);
    coded_jobs_refuse(Stored::kE2m1, Stored::kE8m0, Format::kMxfp4, 32);
    only_the_jobs_scales_count();
    bfloat16_overflow_is_refused();
    return 0;
}
