// RAM for weights: huge pages, bound to a NUMA node. Belongs here: allocating, binding and faulting pages, and
// reporting their kind. Never: the layout of their contents.
//
// A lack of memory must never end in SIGBUS or in the kernel's OOM killer:
// - hugetlb pages are reserved by mmap before use, and every page is faulted by touch(), which turns a failure into
//   an error (MADV_POPULATE_WRITE; fallocate on kernels before 5.14, where hugetlb is not used for that reason),
// - the file behind an arena is sealed: a process that gets the descriptor cannot shrink it,
// - the free memory of the node, the machine and the control groups is checked before each step of faulting.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "proa/native.h"

namespace proa {

// What this kernel can do with pages, probed and read from /sys. Tests pass other facts.
struct PageFacts {
    size_t huge_bytes = 2 << 20;  // size of a transparent huge page
    bool populate = false;        // madvise can fault pages and report failure
    bool shmem_huge = false;      // files in memory get huge pages where madvise asks for them
    bool shmem_collapse = false;  // madvise can merge touched pages of such a file (Linux 6.1), whatever the setting
    bool anon_huge = false;       // anonymous memory gets huge pages where madvise asks for them
    size_t hugetlb_free = 0;      // unreserved pages of 2 MiB
    std::string shmem_setting;    // /sys/kernel/mm/transparent_hugepage/shmem_enabled, for messages
    static PageFacts probe();
};

// An owned file descriptor; -1: none.
class Descriptor {
  public:
    Descriptor() = default;
    explicit Descriptor(int fd) : fd_(fd) {}
    Descriptor(Descriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
    Descriptor& operator=(Descriptor&& other) noexcept;
    ~Descriptor();
    int get() const { return fd_; }

  private:
    int fd_ = -1;
};

// An owned range of reserved addresses without memory; its destructor unmaps it, with anything mapped over it.
class AddressRange {
  public:
    explicit AddressRange(size_t bytes);
    AddressRange(const AddressRange&) = delete;
    AddressRange& operator=(const AddressRange&) = delete;
    ~AddressRange();
    char* begin() const { return begin_; }

  private:
    char* begin_;
    size_t bytes_;
};

class Arena {
  public:
    // `node` -1 binds to none; `flags` are PROA_ARENA_*.
    Arena(size_t bytes, int node, uint32_t flags, const PageFacts& facts = PageFacts::probe());

    char* data() const { return data_; }
    size_t bytes() const { return bytes_; }
    int fd() const { return file_.get(); }

    // Interleaves pages over `nodes`; only before the first touch. Throws Error if the kernel refuses.
    void interleave(const std::vector<int>& nodes);

    // Allocates memory for [first, first + count); keeps contents. Thread-safe.
    void touch(size_t first, size_t count);
    proa_arena_info info() const;
    uint64_t huge_bytes() const;  // slow: see native.h

  private:
    bool map_hugetlb(int node);
    void map_file(bool small);
    void map_anonymous();
    void map_over_range(int fd);
    void bind(int node, bool strict);
    int set_policy(int policy, const std::vector<int>& nodes);
    void fault(size_t first, size_t count);
    void populate(char* at, size_t bytes);
    size_t settling_page(size_t offset) const;
    void note(const std::string& text);

    PageFacts facts_;
    size_t bytes_;
    size_t mapped_bytes_;
    AddressRange range_;
    Descriptor file_;
    char* data_;
    int node_ = -1;                // the node that its pages are bound to
    size_t interleaved_over_ = 0;  // number of nodes, if interleaved
    int32_t pages_ = PROA_PAGES_SMALL;
    bool collapses_ = false;  // touch() merges small pages into huge ones
    std::string reason_;
    std::vector<std::atomic<uint8_t>> touched_;  // per block of huge_bytes: 1 once its pages are allocated
};

}  // namespace proa
