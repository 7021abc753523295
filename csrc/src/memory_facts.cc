#include "memory_facts.h"

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

namespace proa {
namespace {

// "MemFree:  123 kB" or "Node 0 MemFree:  123 kB" -> 125952, if the line has that key.
std::optional<size_t> bytes_after(const std::string& line, const char* key) {
    const size_t at = line.find(key);
    if (at == std::string::npos || (at > 0 && line[at - 1] != ' ')) return std::nullopt;
    size_t kib = 0;
    if (std::sscanf(line.c_str() + at + std::strlen(key), " %zu kB", &kib) != 1) return std::nullopt;
    return kib << 10;
}

std::optional<size_t> sum_of(const std::string& path, std::initializer_list<const char*> keys) {
    std::ifstream file(path);
    std::optional<size_t> sum;
    for (std::string line; std::getline(file, line);) {
        for (const char* key : keys) {
            if (const auto bytes = bytes_after(line, key)) sum = sum.value_or(0) + *bytes;
        }
    }
    return sum;
}

// Bytes of `node` that the kernel reserves in each zone; allocating them ends in the OOM killer.
// (calculate_totalreserve_pages in mm/page_alloc.c, which MemAvailable deducts for the machine.)
size_t kept_back(int node) {
    std::ifstream file("/proc/zoneinfo");
    size_t pages = 0, high = 0, managed = 0;
    int at = -1;
    for (std::string line; std::getline(file, line);) {
        std::sscanf(line.c_str(), "Node %d, zone", &at);
        std::sscanf(line.c_str(), " high %zu", &high);
        std::sscanf(line.c_str(), " managed %zu", &managed);
        const size_t list = line.find("protection: (");
        if (at != node || list == std::string::npos) continue;
        std::istringstream numbers(line.substr(list + std::strlen("protection: (")));
        size_t most = 0;
        for (size_t number = 0; numbers >> number; numbers.ignore(1)) most = std::max(most, number);
        pages += std::min(managed, most + high);
    }
    return pages * static_cast<size_t>(sysconf(_SC_PAGESIZE));
}

// The lesser of two amounts, either of which may be unknown.
std::optional<size_t> lesser(std::optional<size_t> a, std::optional<size_t> b) {
    if (!a || !b) return a ? a : b;
    return std::min(*a, *b);
}

// Bytes left below one control group's limit, with file pages counted as free; no value if it has no limit.
std::optional<size_t> left_in_group(const std::string& folder, bool second_version) {
    const char* const names[2][2] = {{"/memory.limit_in_bytes", "/memory.usage_in_bytes"},
                                     {"/memory.max", "/memory.current"}};
    const auto limit = lesser(number_in(folder + names[second_version][0]), number_in(folder + "/memory.high"));
    const auto used = number_in(folder + names[second_version][1]);
    if (!limit || !used) return std::nullopt;
    size_t dropped = 0;
    std::ifstream stat(folder + "/memory.stat");
    const std::string prefix = second_version ? "" : "total_";
    size_t bytes = 0;
    for (std::string key; stat >> key >> bytes;) {
        if (key == prefix + "inactive_file" || key == prefix + "active_file") dropped += bytes;
    }
    return *limit - std::min(*limit, *used - std::min(*used, dropped));
}

// The least that any control group above this process leaves, assuming the usual mount points.
std::optional<size_t> left_in_groups() {
    std::ifstream file("/proc/self/cgroup");
    std::optional<size_t> least;
    for (std::string line; std::getline(file, line);) {  // "4:memory:/box" or "0::/box"
        const size_t first = line.find(':'), second = line.find(':', first + 1);
        if (second == std::string::npos) continue;
        const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
        const bool second_version = controllers == ",,";
        if (!second_version && controllers.find(",memory,") == std::string::npos) continue;
        const std::string mount = second_version ? "/sys/fs/cgroup" : "/sys/fs/cgroup/memory";
        std::string group = line.substr(second + 1);
        while (!group.empty()) {
            least = lesser(least, left_in_group(mount + group, second_version));
            group.resize(group.rfind('/') == std::string::npos ? 0 : group.rfind('/'));
        }
        least = lesser(least, left_in_group(mount, second_version));
    }
    return least;
}

}  // namespace

std::string chosen_word(const std::string& path) {
    std::ifstream file(path);
    std::string word, first;
    while (file >> word) {
        if (word.front() == '[') return word.substr(1, word.size() - 2);
        if (first.empty()) first = word;
    }
    return first;
}

std::optional<size_t> number_in(const std::string& path) {
    size_t value = 0;
    if (std::ifstream file(path); file >> value) return value;
    return std::nullopt;
}

std::optional<size_t> available_bytes(int node) {
    const auto anywhere = lesser(sum_of("/proc/meminfo", {"MemAvailable:"}), left_in_groups());
    if (node < 0) return anywhere;
    const std::string nodes = "/sys/devices/system/node/", path = nodes + "node" + std::to_string(node) + "/meminfo";
    // A virtual machine may count RAM in /proc/meminfo that its host adds to the node only when it is needed.
    if (chosen_word(nodes + "has_memory") == std::to_string(node)) return anywhere;
    auto local = sum_of(path, {"MemFree:", "Active(file):", "Inactive(file):"});
    if (local) *local -= std::min(*local, kept_back(node));
    return lesser(local, anywhere);
}

size_t huge_mapped_bytes(const void* begin, size_t bytes) {
    const auto wanted = reinterpret_cast<uintptr_t>(begin);
    std::ifstream file("/proc/self/smaps");
    size_t sum = 0;
    bool inside = false;
    for (std::string line; std::getline(file, line);) {
        uintptr_t first = 0, last = 0;
        if (std::sscanf(line.c_str(), "%zx-%zx ", &first, &last) == 2) {
            inside = first >= wanted && last <= wanted + bytes;
        } else if (inside) {
            for (const char* key : {"AnonHugePages:", "ShmemPmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"}) {
                sum += bytes_after(line, key).value_or(0);
            }
        }
    }
    return sum;
}

std::string mib(size_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f MiB", static_cast<double>(bytes) / (1 << 20));
    return text;
}

}  // namespace proa
