// What /proc and /sys say about memory at this moment. Belongs here: reading numbers. Never: decisions.
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace proa {

// The first word in brackets ("always [madvise] never" -> "madvise"), else the first word; "" if unreadable.
std::string chosen_word(const std::string& path);

std::optional<size_t> number_in(const std::string& path);

// Bytes that this process can have now: on `node` (-1: anywhere), on the machine and within the limits of its control
// groups, whichever is least. File pages count as free, for the kernel drops them; what it keeps for itself does not.
// No value where nothing is said.
std::optional<size_t> available_bytes(int node);

// Bytes of [begin, begin + bytes) that this process has mapped by huge pages. Walks the process's page tables.
size_t huge_mapped_bytes(const void* begin, size_t bytes);

// 12345678 -> "11.8 MiB"
std::string mib(size_t bytes);

}  // namespace proa
