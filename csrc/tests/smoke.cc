// The C interface itself: version, error messages, exceptions converted to codes.

#include <cstring>
#include <new>
#include <string>
#include <system_error>
#include <thread>

#include "check.h"
#include "error.h"
#include "proa/native.h"

namespace {

void version_is_that_of_the_header() { CHECK(proa_abi_version() == PROA_ABI_VERSION); }

void a_fresh_thread_has_no_error() {
    std::thread([] { CHECK(std::strcmp(proa_last_error(), "") == 0); }).join();
}

void exceptions_become_codes() {
    using proa::guarded;
    CHECK(guarded([] {}) == PROA_OK);
    CHECK(guarded([] { proa::require(false, "Rows must be positive, not -1."); }) == PROA_ERROR_ARGUMENT);
    CHECK(std::strcmp(proa_last_error(), "Rows must be positive, not -1.") == 0);
    CHECK(guarded([] { throw proa::Error(PROA_ERROR_WORKER, "Worker 3 died."); }) == PROA_ERROR_WORKER);
    CHECK(std::strcmp(proa_last_error(), "Worker 3 died.") == 0);
    CHECK(guarded([] { throw std::bad_alloc(); }) == PROA_ERROR_MEMORY);
    CHECK(guarded([] { throw std::system_error(EPERM, std::generic_category(), "mbind"); }) == PROA_ERROR_SYSTEM);
    CHECK(std::strstr(proa_last_error(), "mbind") != nullptr);
}

void texts_belong_to_their_thread() {
    proa::record_error(PROA_ERROR_ARGUMENT, "mine");
    std::thread([] { proa::record_error(PROA_ERROR_ARGUMENT, "yours"); }).join();
    CHECK(std::strcmp(proa_last_error(), "mine") == 0);
}

void long_texts_are_cut_and_short_ones_leave_no_rest() {
    proa::record_error(PROA_ERROR_ARGUMENT, std::string(100000, 'x').c_str());
    CHECK(std::strlen(proa_last_error()) == 1023);
    proa::record_error(PROA_ERROR_ARGUMENT, "short");
    CHECK(std::strcmp(proa_last_error(), "short") == 0);
}

}  // namespace

int main() {
    version_is_that_of_the_header();
    a_fresh_thread_has_no_error();
    exceptions_become_codes();
    texts_belong_to_their_thread();
    long_texts_are_cut_and_short_ones_leave_no_rest();
    return 0;
}
