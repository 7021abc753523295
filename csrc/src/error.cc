#include "error.h"

#include <cstring>

namespace proa {
namespace {

constexpr size_t kTextBytes = 1024;
thread_local char last_error[kTextBytes] = "";

}  // namespace

int record_error(int code, const char* what) noexcept {
    std::strncpy(last_error, what, kTextBytes - 1);
    return code;
}

}  // namespace proa

const char* proa_last_error() { return proa::last_error; }
