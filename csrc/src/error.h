// How failures travel: inside the library as exceptions, across the C interface as a code and a sentence.

#pragma once

#include <exception>
#include <new>
#include <stdexcept>
#include <string>

#include "proa/native.h"

namespace proa {

// An error with its code. The message is one whole sentence that includes the values.
class Error : public std::runtime_error {
  public:
    Error(int code, const std::string& what) : std::runtime_error(what), code_(code) {}
    int code() const noexcept { return code_; }

  private:
    int code_;
};

// Throws PROA_ERROR_ARGUMENT unless `holds`. For messages with values, write the `if` out, so that a hot path does not
// build a string that is never used.
inline void require(bool holds, const char* otherwise) {
    if (!holds) throw Error(PROA_ERROR_ARGUMENT, otherwise);
}

// Stores the message for proa_last_error() and returns the code. Does not allocate; long messages are truncated.
int record_error(int code, const char* what) noexcept;

// Runs the body of a function of the C interface and turns exceptions into error codes.
template <typename Body>
int guarded(Body&& body) noexcept {
    try {
        body();
        return PROA_OK;
    } catch (const Error& error) {
        return record_error(error.code(), error.what());
    } catch (const std::bad_alloc&) {
        return record_error(PROA_ERROR_MEMORY, "There is not enough memory.");
    } catch (const std::exception& error) {  // std::system_error among them
        return record_error(PROA_ERROR_SYSTEM, error.what());
    }
}

}  // namespace proa
