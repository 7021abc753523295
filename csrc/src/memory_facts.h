// Current facts about memory from /proc and /sys. Belongs here: reading numbers. Never: decisions.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace proa {

// The first word in brackets ("always [madvise] never" -> "madvise"), else the first word; "" if unreadable.
std::string chosen_word(const std::string& path);

std::optional<size_t> number_in(const std::string& path);

// Bytes that this process can allocate now: the least of what is free on `node` (-1: any), on the machine, and within
// the limits of its control groups. File pages count as free, since the kernel drops them; its reserves do not.
// No value if unknown.
std::optional<size_t> available_bytes(int node);

// Bytes of [begin, begin + bytes) mapped with huge pages. The kernel walks the process's page tables for it.
size_t huge_mapped_bytes(const void* begin, size_t bytes);

// 12345678 -> "11.8 MiB"
std::string mib(size_t bytes);

}  // namespace proa
