// A value of an operation that changes from step to step while a worker that is late with a task of the previous step
// may still read it: the worker gets the old or the new value (see Pool).
#pragma once

namespace proa {

template <class T>
class Late {
  public:
    void set(T value) const { __atomic_store_n(&value_, value, __ATOMIC_RELAXED); }
    T get() const { return __atomic_load_n(&value_, __ATOMIC_RELAXED); }

  private:
    mutable T value_{};
};

}  // namespace proa
