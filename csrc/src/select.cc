#include "select.h"

#include <vector>

#include "error.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace proa {
namespace {

struct Candidate {
    const Kernels* kernels;
    const char* missing;  // the first feature that this CPU lacks; null if it lacks none
    bool for_tests = false;
};

#if defined(__x86_64__)

struct Registers {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
    Registers r;
    if (!__get_cpuid_count(leaf, subleaf, &r.eax, &r.ebx, &r.ecx, &r.edx)) return {};
    return r;
}

// Register states that the operating system saves; without that a CPU feature is unusable.
uint64_t saved_states() {
    if (!(cpuid(1, 0).ecx >> 27 & 1)) return 0;
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t(high) << 32 | low;
}

bool has(unsigned reg, int bit) { return reg >> bit & 1; }

const char* missing_for_avx2() {
    const Registers one = cpuid(1, 0), seven = cpuid(7, 0);
    if ((saved_states() & 0x6) != 0x6) return "AVX state (operating system)";
    if (!has(seven.ebx, 5)) return "AVX2";
    if (!has(one.ecx, 12)) return "FMA";
    if (!has(one.ecx, 29)) return "F16C";
    if (!has(seven.ebx, 8)) return "BMI2";
    return nullptr;
}

const char* missing_for_avx512() {
    if (const char* missing = missing_for_avx2()) return missing;
    const Registers seven = cpuid(7, 0);
    if ((saved_states() & 0xe6) != 0xe6) return "AVX-512 state (operating system)";
    if (!has(seven.ebx, 16)) return "AVX512F";
    if (!has(seven.ebx, 17)) return "AVX512DQ";
    if (!has(seven.ebx, 30)) return "AVX512BW";
    if (!has(seven.ebx, 31)) return "AVX512VL";
    return nullptr;
}

const char* missing_for_avx512bf16() {
    if (const char* missing = missing_for_avx512()) return missing;
    if (!has(cpuid(7, 1).eax, 5)) return "AVX512_BF16";
    if (!has(cpuid(7, 0).ecx, 1)) return "AVX512_VBMI";
    if (!has(cpuid(7, 0).ecx, 11)) return "AVX512_VNNI";
    return nullptr;
}

// Linux saves the tiles only for a process that has requested it (Documentation/arch/x86/xstate.rst).
bool tiles_permitted() {
    constexpr int kRequestPermission = 0x1023, kTileData = 18;
    return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

[[maybe_unused]] const char* missing_for_amx() {
    if (const char* missing = missing_for_avx512bf16()) return missing;
    const Registers seven = cpuid(7, 0);
    if (!has(seven.edx, 24)) return "AMX_TILE";
    if (!has(seven.edx, 22)) return "AMX_BF16";
    if (!has(seven.ecx, 8)) return "GFNI";
    if ((saved_states() & 0x60000) != 0x60000 || !tiles_permitted()) return "AMX state (operating system)";
    return nullptr;
}

#endif

// The best first.
std::vector<Candidate> candidates() {
    return {
#ifdef PROA_HAS_amx
        {kAmxKernels, missing_for_amx()},
#endif
#ifdef PROA_HAS_avx512bf16
        {kAvx512Bf16Kernels, missing_for_avx512bf16()},
#endif
#ifdef PROA_HAS_avx512
        {kAvx512Kernels, missing_for_avx512()},
#endif
#ifdef PROA_HAS_avx2
        {kAvx2Kernels, missing_for_avx2()},
#endif
        {kScalarKernels, nullptr},
        {kScalarTilesKernels, nullptr, true},
    };
}

[[noreturn]] void fail_unknown(const std::string& wanted) {
    std::string names;
    for (const Candidate& candidate : candidates())
        names += (names.empty() ? "" : ", ") + std::string(candidate.kernels->name);
    throw Error(PROA_ERROR_ARGUMENT, "There are no kernels named " + wanted + "; there are " + names + ".");
}

}  // namespace

Selected select_kernels(const std::string& wanted) {
    std::string reason;
    for (const Candidate& candidate : candidates()) {
        const std::string name = candidate.kernels->name;
        if (wanted.empty() ? candidate.for_tests : wanted != name) continue;
        if (!candidate.missing) return {candidate.kernels, wanted.empty() ? reason : "asked for"};
        if (!wanted.empty())
            throw Error(PROA_ERROR_ARGUMENT,
                        "This CPU cannot run the " + name + " kernels: it lacks " + candidate.missing + ".");
        if (reason.empty()) reason = "no " + name + ": " + candidate.missing + " is missing";
    }
    fail_unknown(wanted);
}

const Kernels* kernels_named(const std::string& name) {
    for (const Candidate& candidate : candidates())
        if (name == candidate.kernels->name) return candidate.kernels;
    fail_unknown(name);
}

}  // namespace proa
