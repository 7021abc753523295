// Arenas with every kind of page. On a machine with several NUMA nodes (tools/numa_in_qemu.sh emulates one), numa_maps
// must show that pages lie on the node they were bound to.

#include "arena.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cinttypes>
#include <cstring>
#include <fstream>
#include <thread>

#include "check.h"
#include "error.h"
#include "memory_facts.h"

namespace {

using proa::Arena;
using proa::PageFacts;

constexpr size_t kMib = 1 << 20;

int code_of(auto&& body) {
    try {
        body();
    } catch (const proa::Error& error) {
        CHECK(std::strlen(error.what()) > 20);
        return error.code();
    }
    return PROA_OK;
}

bool contains(const char* text, const char* part) { return std::strstr(text, part) != nullptr; }

// Pages of the mapping at `at` on each node, from numa_maps: "7f.. bind:1 file=.. N0=3 N1=512".
std::vector<size_t> pages_by_node(const void* at) {
    char begin[32];
    std::snprintf(begin, sizeof begin, "%zx ", reinterpret_cast<uintptr_t>(at));
    std::vector<size_t> pages(64);
    std::ifstream maps("/proc/self/numa_maps");
    for (std::string line; std::getline(maps, line);) {
        if (line.rfind(begin, 0) != 0) continue;
        std::printf("  %s\n", line.c_str());
        for (size_t from = 0; (from = line.find(" N", from)) != std::string::npos; ++from) {
            size_t node = 0, count = 0;
            if (std::sscanf(line.c_str() + from, " N%zu=%zu", &node, &count) == 2 && node < 64) pages[node] = count;
        }
    }
    return pages;
}

void use(Arena& arena) {
    const auto bytes = arena.bytes();
    CHECK(reinterpret_cast<uintptr_t>(arena.data()) % kMib == 0);
    CHECK(arena.info().touched_bytes == 0);
    arena.touch(0, bytes);
    CHECK(arena.data()[0] == 0 && arena.data()[bytes / 2] == 0 && arena.data()[bytes - 1] == 0);
    for (size_t i = 0; i < bytes; i += 1000) arena.data()[i] = static_cast<char>(i % 127);
    arena.touch(0, bytes);
    for (size_t i = 0; i < bytes; i += 1000) CHECK(arena.data()[i] == static_cast<char>(i % 127));
    const auto info = arena.info();
    CHECK(info.touched_bytes == info.mapped_bytes && info.mapped_bytes >= bytes && info.bytes == bytes);
    CHECK(arena.huge_bytes() <= info.mapped_bytes);
    std::printf("pages %d node %d: %" PRIu64 " of %" PRIu64 " bytes huge; %s\n", info.pages, info.node,
                arena.huge_bytes(), info.touched_bytes, info.reason);
}

PageFacts no_huge_pages() {
    PageFacts facts;
    facts.populate = PageFacts::probe().populate;
    facts.shmem_setting = "never";
    return facts;
}

void test_the_best_of_this_machine() {
    const auto facts = PageFacts::probe();
    Arena arena(33 * kMib + 5, -1, 0);
    use(arena);
    const auto info = arena.info();
    CHECK((info.pages == PROA_PAGES_HUGETLB) == (info.reason[0] == 0 || facts.hugetlb_free >= 17));
    if (facts.shmem_collapse) CHECK(info.pages >= PROA_PAGES_SHMEM_HUGE && arena.huge_bytes() > 0);
}

void test_each_kind() {
    auto facts = no_huge_pages();
    Arena small(5 * kMib, -1, 0, facts);
    use(small);
    CHECK(small.info().pages == PROA_PAGES_SMALL && small.huge_bytes() == 0 && small.fd() >= 0);
    CHECK(contains(small.info().reason, "shmem_enabled is \"never\""));

    facts.anon_huge = true;
    Arena anonymous(5 * kMib, -1, 0, facts);
    use(anonymous);
    CHECK(anonymous.info().pages == PROA_PAGES_ANON_HUGE && anonymous.fd() == -1);
    CHECK(contains(anonymous.info().reason, "not sharable"));
    Arena shared(5 * kMib, -1, PROA_ARENA_SHARED, facts);
    CHECK(shared.info().pages == PROA_PAGES_SMALL && shared.fd() >= 0);

    facts.shmem_huge = true;
    Arena shmem(5 * kMib, -1, 0, facts);
    use(shmem);
    CHECK(shmem.info().pages == PROA_PAGES_SHMEM_HUGE);

    Arena plain(5 * kMib, -1, PROA_ARENA_SMALL_PAGES);
    use(plain);
    CHECK(plain.info().pages == PROA_PAGES_SMALL && plain.huge_bytes() == 0);
}

void test_kernels_without_populate() {
    PageFacts facts;
    facts.hugetlb_free = 1000;  // not used: a missing page could not be reported
    Arena file(3 * kMib, -1, PROA_ARENA_SHARED, facts);
    use(file);
    CHECK(file.info().pages == PROA_PAGES_SMALL && contains(file.info().reason, "before 5.14"));
    facts.anon_huge = true;
    Arena anonymous(3 * kMib, -1, 0, facts);
    use(anonymous);
}

void test_sharing() {
    Arena arena(2 * kMib, -1, PROA_ARENA_SHARED);
    arena.touch(0, arena.bytes());
    void* const other = mmap(nullptr, 2 * kMib, PROT_READ | PROT_WRITE, MAP_SHARED, arena.fd(), 0);
    CHECK(other != MAP_FAILED);
    arena.data()[12345] = 7;
    CHECK(static_cast<char*>(other)[12345] == 7);
    CHECK(ftruncate(arena.fd(), 4096) != 0);  // sealed: a process that maps the file cannot lose its pages
    munmap(other, 2 * kMib);
}

void test_what_lies_beyond_the_end_faults() {
    Arena arena(2 * kMib, -1, 0);
    arena.touch(0, arena.bytes());
    for (const size_t offset : {size_t{0} - 1, static_cast<size_t>(arena.info().mapped_bytes)}) {
        const pid_t child = fork();
        if (child == 0) {
            const rlimit no_core = {0, 0};
            setrlimit(RLIMIT_CORE, &no_core);
            close(STDERR_FILENO);  // sanitizers and emulators would report the intended crash
            *static_cast<volatile char*>(arena.data() + offset) = 1;
            _exit(0);
        }
        int status = 0;
        waitpid(child, &status, 0);
        CHECK(!WIFEXITED(status) || WEXITSTATUS(status) != 0);
    }
}

void test_parts_from_many_threads() {
    Arena arena(64 * kMib, -1, 0);
    arena.touch(5 * kMib, 1);
    CHECK(arena.info().touched_bytes == PageFacts::probe().huge_bytes);
    std::vector<std::thread> threads;
    for (size_t i = 0; i < 8; ++i) {
        threads.emplace_back([&arena, i] {
            for (size_t part = 0; part < 8; ++part) arena.touch((8 * part + i) * kMib, kMib);
            for (size_t part = 0; part < 8; ++part) arena.data()[(8 * part + i) * kMib] = 1;
        });
    }
    for (auto& thread : threads) thread.join();
    CHECK(arena.info().touched_bytes == 64 * kMib);
}

void test_refusals() {
    CHECK(code_of([] { Arena(0, -1, 0); }) == PROA_ERROR_ARGUMENT);
    CHECK(code_of([] { Arena(~size_t{0}, -1, 0); }) == PROA_ERROR_ARGUMENT);
    CHECK(code_of([] { Arena(1, -2, 0); }) == PROA_ERROR_ARGUMENT);
    CHECK(code_of([] { Arena(1, 1024, 0); }) == PROA_ERROR_ARGUMENT);
    CHECK(code_of([] { Arena(1, -1, 8); }) == PROA_ERROR_ARGUMENT);
    CHECK(code_of([] { Arena(1, 1023, PROA_ARENA_STRICT_NODE); }) == PROA_ERROR_SYSTEM);
    Arena unbound(1, 1023, 0);
    CHECK(unbound.info().node == -1 && contains(unbound.info().reason, "not bound"));
    use(unbound);
    CHECK(code_of([] { Arena(*proa::available_bytes(-1) * 2, -1, 0); }) == PROA_ERROR_MEMORY);

    Arena interleaved(1, -1, 0);
    CHECK(code_of([&] { interleaved.interleave({}); }) == PROA_ERROR_ARGUMENT);
    CHECK(code_of([&] { interleaved.interleave({-1}); }) == PROA_ERROR_ARGUMENT);
    CHECK(code_of([&] { interleaved.interleave({1024}); }) == PROA_ERROR_ARGUMENT);
    CHECK(code_of([&] { interleaved.interleave({1022, 1023}); }) == PROA_ERROR_SYSTEM);

    Arena arena(10, -1, 0);
    CHECK(code_of([&] { arena.touch(11, 0); }) == PROA_ERROR_ARGUMENT);
    CHECK(code_of([&] { arena.touch(5, 6); }) == PROA_ERROR_ARGUMENT);
    CHECK(code_of([&] { arena.touch(5, ~size_t{0}); }) == PROA_ERROR_ARGUMENT);
    arena.touch(10, 0);
    CHECK(arena.info().touched_bytes == 0);
}

void test_c_interface() {
    proa_arena* arena = nullptr;
    CHECK(proa_arena_create(100, -1, 0, nullptr) == PROA_ERROR_ARGUMENT);
    CHECK(proa_arena_create(0, -1, 0, &arena) == PROA_ERROR_ARGUMENT && arena == nullptr);
    CHECK(proa_arena_create(100, -1, 0, &arena) == PROA_OK);
    void* data = nullptr;
    size_t bytes = 0;
    int fd = -2;
    proa_arena_info info;
    CHECK(proa_arena_data(arena, &data) == PROA_OK && data != nullptr);
    CHECK(proa_arena_bytes(arena, &bytes) == PROA_OK && bytes == 100);
    CHECK(proa_arena_fd(arena, &fd) == PROA_OK && fd >= -1);
    CHECK(proa_arena_interleave(arena, nullptr, 1) == PROA_ERROR_ARGUMENT);
    CHECK(proa_arena_touch(arena, 0, 100) == PROA_OK);
    CHECK(proa_arena_touch(arena, 0, 101) == PROA_ERROR_ARGUMENT);
    CHECK(contains(proa_last_error(), "100 bytes"));
    CHECK(proa_arena_get_info(arena, &info) == PROA_OK && info.bytes == 100 && info.touched_bytes > 0);
    std::memset(data, 1, 100);
    CHECK(proa_arena_data(nullptr, &data) == PROA_ERROR_ARGUMENT);
    CHECK(proa_arena_touch(nullptr, 0, 0) == PROA_ERROR_ARGUMENT);
    CHECK(proa_arena_get_info(arena, nullptr) == PROA_ERROR_ARGUMENT);
    CHECK(proa_arena_destroy(arena) == PROA_OK && proa_arena_destroy(nullptr) == PROA_OK);
}

// One arena of each kind on `node`: every page of it must lie there.
void check_node(int node, bool has_memory) {
    auto huge = no_huge_pages();
    huge.shmem_huge = huge.anon_huge = true;
    auto anonymous = no_huge_pages();
    anonymous.anon_huge = true;
    for (const auto& facts : {PageFacts::probe(), no_huge_pages(), huge, anonymous}) {
        if (!has_memory) {
            CHECK(code_of([&] { Arena(4 * kMib, node, PROA_ARENA_STRICT_NODE, facts); }) != PROA_OK);
            continue;
        }
        Arena arena(4 * kMib, node, PROA_ARENA_STRICT_NODE, facts);
        use(arena);
        CHECK(arena.info().node == node);
        const auto pages = pages_by_node(arena.data());
        for (size_t other = 0; other < pages.size(); ++other) CHECK((pages[other] > 0) == (other == size_t(node)));
    }
    if (has_memory) {
        const size_t too_much = *proa::available_bytes(node) + 64 * kMib;
        CHECK(code_of([&] { Arena(too_much, node, 0, no_huge_pages()); }) == PROA_ERROR_MEMORY);
    }
}

// One arena of each kind over several nodes: each node has its share.
void check_interleaved(const std::vector<int>& nodes) {
    auto huge = no_huge_pages();
    huge.shmem_huge = huge.anon_huge = true;
    auto anonymous = no_huge_pages();
    anonymous.anon_huge = true;
    for (const auto& facts : {PageFacts::probe(), no_huge_pages(), huge, anonymous}) {
        Arena arena(24 * kMib, -1, 0, facts);
        arena.interleave(nodes);
        use(arena);
        CHECK(arena.info().node == -1);
        const auto pages = pages_by_node(arena.data());
        size_t all = 0;
        for (const size_t count : pages) all += count;
        for (size_t node = 0; node < pages.size(); ++node) {
            const bool named = std::find(nodes.begin(), nodes.end(), int(node)) != nodes.end();
            CHECK(named ? pages[node] * nodes.size() * 4 >= all * 3 : pages[node] == 0);
        }
    }
}

// Two arenas that do not fit together: touching the second must return an error, not end in SIGBUS or the OOM killer.
int fill_node(int node, size_t bytes, const PageFacts& facts) {
    Arena first(bytes, node, PROA_ARENA_STRICT_NODE, facts), second(bytes, node, PROA_ARENA_STRICT_NODE, facts);
    first.touch(0, bytes);
    CHECK(code_of([&] { second.touch(0, bytes); }) == PROA_ERROR_MEMORY);
    CHECK(second.info().touched_bytes < bytes);
    CHECK(first.info().pages == second.info().pages);
    return first.info().pages;
}

void check_exhaustion(int node) {
    const size_t bytes = *proa::available_bytes(node) / 10 * 6;
    if (bytes > 500 * kMib) {
        std::printf("skipped: node %d has too much memory to fill\n", node);
        return;
    }
    for (const auto& facts : {PageFacts::probe(), no_huge_pages()}) fill_node(node, bytes, facts);
    const std::string pool = "/sys/devices/system/node/node" + std::to_string(node) + "/hugepages/hugepages-2048kB/";
    const size_t reserved = proa::number_in(pool + "free_hugepages").value_or(0);
    if (reserved >= 10) CHECK(fill_node(node, reserved / 10 * 6 * 2 * kMib, PageFacts::probe()) == PROA_PAGES_HUGETLB);
}

void test_nodes() {
    if (access("/proc/self/numa_maps", R_OK) != 0) {
        std::printf("skipped: this system has no /proc/self/numa_maps, which shows the nodes of pages\n");
        return;
    }
    if (const Arena trial(1, 0, 0);
        contains(trial.info().reason, "policies") || contains(trial.info().reason, "sandbox")) {
        std::printf("skipped: %s\n", trial.info().reason);
        return;
    }
    int nodes = 0;
    std::vector<int> with_memory;
    for (int node = 0; node < 64; ++node) {
        const std::string folder = "/sys/devices/system/node/node" + std::to_string(node);
        if (access(folder.c_str(), R_OK) != 0) continue;
        std::string kib;
        std::ifstream(folder + "/meminfo") >> kib >> kib >> kib >> kib;  // "Node 0 MemTotal: 123 kB"
        check_node(node, kib != "0");
        if (kib != "0") check_exhaustion(node);
        if (kib != "0") with_memory.push_back(node);
        ++nodes;
    }
    check_interleaved(with_memory);
    if (with_memory.size() > 2) check_interleaved({with_memory[0], with_memory[2]});
    std::printf("%d NUMA nodes checked\n", nodes);
    check_exhaustion(-1);
}

}  // namespace

int main() {
    test_the_best_of_this_machine();
    test_each_kind();
    test_kernels_without_populate();
    test_sharing();
    test_what_lies_beyond_the_end_faults();
    test_parts_from_many_threads();
    test_refusals();
    test_c_interface();
    test_nodes();
    std::printf("arena: all passed\n");
}
