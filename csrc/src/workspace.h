// Scratch memory that a lane's operations use one after another. Never: data that must outlive an operation.
#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdlib>
#include <memory>
#include <new>

namespace proa {

constexpr size_t kBufferAlign = 64, kHugeBytes = size_t(2) << 20;
constexpr size_t aligned(size_t bytes) { return (bytes + kBufferAlign - 1) / kBufferAlign * kBufferAlign; }

class Workspace {
  public:
    // At least `bytes`, aligned; contents are lost. The previous memory must not be in use, since it may be
    // reallocated.
    std::byte* take(size_t bytes) {
        if (bytes > bytes_) {
            memory_.reset();
            bytes_ = 0;
            const size_t align = bytes >= kHugeBytes ? kHugeBytes : kBufferAlign;
            const size_t whole = (bytes + align - 1) / align * align;
            memory_.reset(static_cast<std::byte*>(std::aligned_alloc(align, whole)));
            if (!memory_) throw std::bad_alloc();
            if (align == kHugeBytes) madvise(memory_.get(), whole, MADV_HUGEPAGE);  // best effort: only for speed
            bytes_ = bytes;
        }
        return memory_.get();
    }
    bool fits(size_t bytes) const { return bytes <= bytes_; }

  private:
    struct Free {
        void operator()(std::byte* p) const { std::free(p); }
    };
    std::unique_ptr<std::byte, Free> memory_;
    size_t bytes_ = 0;
};

// Carves consecutive parts out of a piece of memory; without memory it only measures the size.
class Carver {
  public:
    explicit Carver(std::byte* memory = nullptr) : memory_(memory) {}
    template <class T>
    T* take(size_t count) {
        T* part = memory_ ? reinterpret_cast<T*>(memory_ + used_) : nullptr;
        used_ += aligned(count * sizeof(T));
        return part;
    }
    size_t used() const { return used_; }

  private:
    std::byte* memory_;
    size_t used_ = 0;
};

}  // namespace proa
