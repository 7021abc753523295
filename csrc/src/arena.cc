#include "arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

#include "error.h"
#include "memory_facts.h"

namespace proa {
namespace {

// Values of the kernel's interface that the C library's headers may be too old to name.
constexpr int kMadvPopulateWrite = 23;
constexpr int kMadvCollapse = 25;
constexpr unsigned kMfdHuge2Mib = 21u << 26;
constexpr int kMpolBind = 2;
constexpr int kMpolInterleave = 3;
constexpr size_t kHugetlbBytes = 2 << 20;

constexpr size_t kMaxNodes = 1024;
constexpr size_t kLongBits = 8 * sizeof(unsigned long);
constexpr size_t kMaxBytes = size_t{1} << 46;
constexpr size_t kStepBytes = 64 << 20;   // faulted between two checks of the free memory
constexpr size_t kSpareBytes = 64 << 20;  // left free for page tables and other processes
constexpr const char* kName = "proa-arena";

const std::string kThp = "/sys/kernel/mm/transparent_hugepage/";

size_t round_up(size_t value, size_t unit) { return (value + unit - 1) / unit * unit; }

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

std::string because(int error) { return std::string(" (") + std::strerror(error) + ")"; }

// The setting for one size of huge pages, which may inherit the setting for all sizes.
std::string huge_page_setting(size_t huge_bytes, const char* name) {
    const std::string own = chosen_word(kThp + "hugepages-" + std::to_string(huge_bytes >> 10) + "kB/" + name);
    return own.empty() || own == "inherit" ? chosen_word(kThp + name) : own;
}

bool gives_on_request(const std::string& setting) {
    return setting == "always" || setting == "within_size" || setting == "advise" || setting == "madvise" ||
           setting == "force";
}

bool can_populate() {
    const AddressRange range(page_bytes());
    mprotect(range.begin(), page_bytes(), PROT_READ | PROT_WRITE);
    return madvise(range.begin(), page_bytes(), kMadvPopulateWrite) == 0;
}

// Tries MADV_COLLAPSE on one huge page and checks the result: some sandboxes accept the advice and do nothing.
bool can_collapse_shmem(size_t huge_bytes) {
    const Descriptor file(memfd_create(kName, MFD_CLOEXEC));
    if (file.get() < 0 || ftruncate(file.get(), static_cast<off_t>(huge_bytes)) != 0) return false;
    const AddressRange range(3 * huge_bytes);
    char* const at = range.begin() + huge_bytes - reinterpret_cast<uintptr_t>(range.begin()) % huge_bytes;
    if (mmap(at, huge_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, file.get(), 0) == MAP_FAILED) return false;
    if (madvise(at, page_bytes(), kMadvPopulateWrite) != 0) return false;
    return madvise(at, huge_bytes, kMadvCollapse) == 0 && huge_mapped_bytes(at, huge_bytes) == huge_bytes;
}

// Arenas are aligned to the largest page that they may get, and their sizes are multiples of it.
size_t unit(const PageFacts& facts) { return std::max(facts.huge_bytes, kHugetlbBytes); }

size_t checked(size_t bytes, int node, uint32_t flags) {
    constexpr uint32_t known = PROA_ARENA_SHARED | PROA_ARENA_STRICT_NODE | PROA_ARENA_SMALL_PAGES;
    require(bytes > 0 && bytes <= kMaxBytes, "An arena must have at least one byte and at most 64 TiB.");
    require(node >= -1 && node < static_cast<int>(kMaxNodes),
            "A NUMA node must be a number from 0 to 1023, or -1 for none.");
    require((flags & ~known) == 0, "The flags of an arena must be a union of PROA_ARENA_*.");
    return bytes;
}

// Sets the file's size and seals it, so that a process with the descriptor cannot remove pages under a reader.
bool give_size(int fd, size_t bytes) {
    return ftruncate(fd, static_cast<off_t>(bytes)) == 0 &&
           fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) == 0;
}

void check_available(size_t bytes, int node, const char* for_what) {
    const auto available = available_bytes(node);
    if (!available || bytes + kSpareBytes <= *available) return;
    const std::string where = node < 0 ? "on this machine" : "on NUMA node " + std::to_string(node);
    throw Error(PROA_ERROR_MEMORY, std::string(for_what) + " needs " + mib(bytes) + ", but only " + mib(*available) +
                                       " are available " + where + ", of which " + mib(kSpareBytes) +
                                       " are kept free.");
}

std::string no_pages(size_t bytes, int node, int error) {
    const auto available = available_bytes(node);
    return "The system has no pages for the next " + mib(bytes) + " of the arena" +
           (node < 0 ? "" : " on NUMA node " + std::to_string(node)) +
           (available ? ", where " + mib(*available) + " are free" : "") + because(error) + ".";
}

// Takes write faults on [at, at + bytes) without changing the contents, for kernels without MADV_POPULATE_WRITE.
void write_fault(char* at, size_t bytes) {
    for (size_t offset = 0; offset < bytes; offset += page_bytes()) __atomic_fetch_or(at + offset, 0, __ATOMIC_RELAXED);
}

std::string why_not_bound(const std::string& which, int error) {
    switch (error) {
        case ENOSYS: return "this kernel has no NUMA memory policies";
        case EPERM: return "a sandbox forbids mbind (for Docker: --cap-add SYS_NICE, or another seccomp profile)";
        case EINVAL: return which + " does not exist, has no memory, or is forbidden by a cpuset (cpuset.mems)";
        default: return "mbind to " + which + " failed" + because(error);
    }
}

}  // namespace

PageFacts PageFacts::probe() {
    PageFacts facts;
    facts.huge_bytes = number_in(kThp + "hpage_pmd_size").value_or(facts.huge_bytes);
    static const bool populates = can_populate();
    facts.populate = populates;
    facts.shmem_setting = huge_page_setting(facts.huge_bytes, "shmem_enabled");
    const bool forbidden = prctl(PR_GET_THP_DISABLE, 0, 0, 0, 0) == 1;
    facts.shmem_huge = !forbidden && gives_on_request(facts.shmem_setting);
    if (!forbidden && !facts.shmem_huge && facts.populate) {
        // Probed once: checking the result takes longer the more memory is mapped.
        static const bool collapses = can_collapse_shmem(facts.huge_bytes);
        facts.shmem_collapse = collapses;
    }
    facts.anon_huge = !forbidden && gives_on_request(huge_page_setting(facts.huge_bytes, "enabled"));
    const std::string pool = "/sys/kernel/mm/hugepages/hugepages-2048kB/";
    const size_t free_pages = number_in(pool + "free_hugepages").value_or(0);
    facts.hugetlb_free = free_pages - std::min(free_pages, number_in(pool + "resv_hugepages").value_or(0));
    return facts;
}

Descriptor& Descriptor::operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
}

Descriptor::~Descriptor() {
    if (fd_ >= 0) close(fd_);
}

AddressRange::AddressRange(size_t bytes) : bytes_(bytes) {
    void* const got = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (got == MAP_FAILED) {
        throw Error(PROA_ERROR_MEMORY, "The address space has no free range of " + mib(bytes) + because(errno) + ".");
    }
    begin_ = static_cast<char*>(got);
}

AddressRange::~AddressRange() { munmap(begin_, bytes_); }

Arena::Arena(size_t bytes, int node, uint32_t flags, const PageFacts& facts)
    : facts_(facts),
      bytes_(checked(bytes, node, flags)),
      mapped_bytes_(round_up(bytes, unit(facts))),
      range_(mapped_bytes_ + 2 * unit(facts)),
      // At least one guard page of addresses stays on either side: a kernel that overruns the end faults, and the
      // system does not merge neighbouring mappings with this one.
      data_(range_.begin() + unit(facts) - reinterpret_cast<uintptr_t>(range_.begin()) % unit(facts)),
      touched_(mapped_bytes_ / facts.huge_bytes) {
    const bool small = flags & PROA_ARENA_SMALL_PAGES;
    if (small || !map_hugetlb(node)) {
        check_available(bytes, node, "The arena");
        const bool shared = flags & PROA_ARENA_SHARED;
        if (!small && !shared && facts.anon_huge && !facts.shmem_huge && !facts.shmem_collapse) {
            map_anonymous();
        } else {
            map_file(small);
        }
    }
    madvise(data_, mapped_bytes_, MADV_DONTDUMP);  // a crash must not write a model's weights to disk
    if (node >= 0) bind(node, flags & PROA_ARENA_STRICT_NODE);
}

bool Arena::map_hugetlb(int node) {
    const size_t needed = mapped_bytes_ / kHugetlbBytes;
    const std::string pool = "/sys/devices/system/node/node" + std::to_string(node) + "/hugepages/hugepages-2048kB/";
    size_t free_pages = facts_.hugetlb_free;
    if (node >= 0) free_pages = std::min(free_pages, number_in(pool + "free_hugepages").value_or(free_pages));
    if (free_pages < needed) {
        note("hugetlb: " + std::to_string(needed) + " pages of 2 MiB are needed and " + std::to_string(free_pages) +
             " are free (sysctl vm.nr_hugepages)");
        return false;
    }
    if (!facts_.populate) {
        note("hugetlb: not used on kernels before 5.14, where touching a missing page kills the process");
        return false;
    }
    Descriptor file(memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_HUGETLB | kMfdHuge2Mib));
    if (file.get() < 0 || !give_size(file.get(), mapped_bytes_)) {
        note("hugetlb: a file of such pages could not be created" + because(errno));
        return false;
    }
    // The first mapping reserves the pages for the file; not yet over range_, where a failure would leave a hole.
    void* const trial = mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
    if (trial == MAP_FAILED) {
        note("hugetlb: reserving " + std::to_string(needed) + " pages failed" + because(errno));
        return false;
    }
    munmap(trial, mapped_bytes_);
    map_over_range(file.get());
    file_ = std::move(file);
    pages_ = PROA_PAGES_HUGETLB;
    return true;
}

void Arena::map_file(bool small) {
    file_ = Descriptor(memfd_create(kName, MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (file_.get() < 0 || !give_size(file_.get(), mapped_bytes_)) {
        throw Error(PROA_ERROR_SYSTEM,
                    "A file in memory of " + mib(mapped_bytes_) + " cannot be created" + because(errno) + ".");
    }
    map_over_range(file_.get());
    if (!small && (facts_.shmem_huge || facts_.shmem_collapse)) {
        pages_ = PROA_PAGES_SHMEM_HUGE;
        collapses_ = !facts_.shmem_huge;
        madvise(data_, mapped_bytes_, MADV_HUGEPAGE);
        if (collapses_) note("shmem_enabled is \"" + facts_.shmem_setting + "\": pages are merged when touched");
        return;
    }
    madvise(data_, mapped_bytes_, MADV_NOHUGEPAGE);
    if (small) {
        note("small pages were requested");
    } else {
        note("no huge pages for files in memory: " + kThp + "shmem_enabled is \"" + facts_.shmem_setting +
             "\" (\"advise\" allows them)");
        if (!facts_.anon_huge) note("nor for anonymous memory: see " + kThp + "enabled (\"madvise\" allows them)");
    }
}

void Arena::map_anonymous() {
    // In place, not by a new mapping: another thread could take the addresses in between.
    if (mprotect(data_, mapped_bytes_, PROT_READ | PROT_WRITE) != 0) {
        throw Error(PROA_ERROR_MEMORY,
                    "The system refused " + mib(mapped_bytes_) + " of memory" + because(errno) + ".");
    }
    madvise(data_, mapped_bytes_, MADV_HUGEPAGE);
    pages_ = PROA_PAGES_ANON_HUGE;
    note("anonymous memory, not sharable: files in memory get no huge pages (" + kThp + "shmem_enabled is \"" +
         facts_.shmem_setting + "\")");
}

void Arena::map_over_range(int fd) {
    if (mmap(data_, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
        throw Error(PROA_ERROR_MEMORY, mib(mapped_bytes_) + " cannot be mapped" + because(errno) + ".");
    }
}

void Arena::bind(int node, bool strict) {
    const int error = set_policy(kMpolBind, {node});
    if (error == 0) {
        node_ = node;
        return;
    }
    const std::string why = why_not_bound("NUMA node " + std::to_string(node), error);
    if (strict)
        throw Error(PROA_ERROR_SYSTEM,
                    "The arena cannot be bound to NUMA node " + std::to_string(node) + ": " + why + ".");
    note("not bound: " + why + "; pages lie near the thread that touches them first");
}

int Arena::set_policy(int policy, const std::vector<int>& nodes) {
    std::vector<unsigned long> mask(kMaxNodes / kLongBits);
    for (const int node : nodes)
        mask[static_cast<size_t>(node) / kLongBits] |= 1UL << (static_cast<size_t>(node) % kLongBits);
    // The kernel reads one bit fewer than the given number.
    return syscall(SYS_mbind, data_, mapped_bytes_, policy, mask.data(), kMaxNodes + 1, 0) == 0 ? 0 : errno;
}

void Arena::interleave(const std::vector<int>& nodes) {
    require(!nodes.empty(), "Pages must be interleaved over at least one node.");
    std::string which = "one of the NUMA nodes";
    for (const int node : nodes) {
        require(node >= 0 && node < static_cast<int>(kMaxNodes), "A NUMA node must be a number from 0 to 1023.");
        which += " " + std::to_string(node);
    }
    if (const int error = set_policy(kMpolInterleave, nodes))
        throw Error(PROA_ERROR_SYSTEM,
                    "The arena cannot be interleaved over NUMA nodes: " + why_not_bound(which, error) + ".");
    node_ = -1;
    interleaved_over_ = nodes.size();
}

void Arena::touch(size_t first, size_t count) {
    if (first > bytes_ || count > bytes_ - first) {
        throw Error(PROA_ERROR_ARGUMENT, "Bytes " + std::to_string(first) + " to " + std::to_string(first) + " + " +
                                             std::to_string(count) + " lie outside of an arena of " +
                                             std::to_string(bytes_) + " bytes.");
    }
    const size_t end = (first + count + facts_.huge_bytes - 1) / facts_.huge_bytes;
    const size_t step = std::max<size_t>(1, kStepBytes / facts_.huge_bytes);
    for (size_t block = first / facts_.huge_bytes; count > 0 && block < end;) {
        size_t last = block;
        while (last < end && last - block < step && !touched_[last].load(std::memory_order_acquire)) ++last;
        if (last > block) fault(block * facts_.huge_bytes, (last - block) * facts_.huge_bytes);
        for (size_t done = block; done < last; ++done) touched_[done].store(1, std::memory_order_release);
        block = std::max(last, block + 1);
    }
}

void Arena::fault(size_t first, size_t count) {
    char* const at = data_ + first;
    if (pages_ != PROA_PAGES_HUGETLB) check_available(count, node_, "The next part of the arena");
    if (collapses_) {
        // The kernel merges onto the node with most of a block's pages: one page of each block decides it.
        for (size_t block = 0; block < count; block += facts_.huge_bytes)
            populate(at + block + settling_page(first + block), page_bytes());
        madvise(at, count, kMadvCollapse);  // best effort; info() reports the result
    }
    if (facts_.populate) return populate(at, count);
    // Allocate the file's pages first: without them, a write would raise SIGBUS.
    if (fd() >= 0 && fallocate(fd(), 0, static_cast<off_t>(first), static_cast<off_t>(count)) != 0) {
        throw Error(PROA_ERROR_MEMORY, no_pages(count, node_, errno));
    }
    write_fault(at, count);
}

// The page of the block at an offset that decides the block's node. Small pages are interleaved one by one, so that the
// first pages of all blocks could be on one node.
size_t Arena::settling_page(size_t offset) const {
    if (interleaved_over_ < 2) return 0;
    const size_t block = offset / facts_.huge_bytes, page = offset / page_bytes();
    return (block + (page / interleaved_over_ + 1) * interleaved_over_ - page) % interleaved_over_ * page_bytes();
}

void Arena::populate(char* at, size_t bytes) {
    if (madvise(at, bytes, kMadvPopulateWrite) != 0) throw Error(PROA_ERROR_MEMORY, no_pages(bytes, node_, errno));
}

uint64_t Arena::huge_bytes() const { return huge_mapped_bytes(data_, mapped_bytes_); }

proa_arena_info Arena::info() const {
    proa_arena_info info = {};
    info.bytes = bytes_;
    info.mapped_bytes = mapped_bytes_;
    for (const auto& block : touched_) info.touched_bytes += block.load(std::memory_order_acquire) * facts_.huge_bytes;
    info.pages = pages_;
    info.node = node_;
    std::strncpy(info.reason, reason_.c_str(), sizeof info.reason - 1);
    return info;
}

void Arena::note(const std::string& text) { reason_ += (reason_.empty() ? "" : "; ") + text; }

}  // namespace proa

// ---- the C interface

struct proa_arena {
    proa::Arena arena;
};

namespace {

const proa::Arena& arena_of(const proa_arena* handle) {
    proa::require(handle != nullptr, "The arena's handle is null.");
    return handle->arena;
}

template <typename T, typename Get>
int give(const proa_arena* handle, T* out, Get&& get) {
    return proa::guarded([&] {
        proa::require(out != nullptr, "The output pointer is null.");
        *out = get(arena_of(handle));
    });
}

}  // namespace

int proa_arena_create(size_t bytes, int node, uint32_t flags, proa_arena** out) {
    return proa::guarded([&] {
        proa::require(out != nullptr, "The output pointer for the arena's handle is null.");
        *out = new proa_arena{proa::Arena(bytes, node, flags)};
    });
}

int proa_arena_interleave(proa_arena* arena, const int32_t* nodes, int32_t count) {
    return proa::guarded([&] {
        arena_of(arena);
        proa::require(nodes && count > 0, "Pages must be interleaved over at least one node.");
        arena->arena.interleave({nodes, nodes + count});
    });
}

int proa_arena_data(const proa_arena* arena, void** out) {
    return give(arena, out, [](const proa::Arena& a) { return a.data(); });
}

int proa_arena_bytes(const proa_arena* arena, size_t* out) {
    return give(arena, out, [](const proa::Arena& a) { return a.bytes(); });
}

int proa_arena_fd(const proa_arena* arena, int* out) {
    return give(arena, out, [](const proa::Arena& a) { return a.fd(); });
}

int proa_arena_get_info(const proa_arena* arena, proa_arena_info* out) {
    return give(arena, out, [](const proa::Arena& a) { return a.info(); });
}

int proa_arena_get_huge_bytes(const proa_arena* arena, uint64_t* out) {
    return give(arena, out, [](const proa::Arena& a) { return a.huge_bytes(); });
}

int proa_arena_touch(proa_arena* arena, size_t first, size_t count) {
    return proa::guarded([&] {
        arena_of(arena);
        arena->arena.touch(first, count);
    });
}

int proa_arena_destroy(proa_arena* arena) {
    return proa::guarded([&] { delete arena; });
}
