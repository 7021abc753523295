// Looks up rows of a packed matrix: the embedding of a model with a tied head. Never: unpacked tables (rows.h).
#pragma once

#include "host.h"
#include "matrix.h"
#include "rows.h"

namespace proa {

// out[t] = row tokens[t] of the table, rounded to bfloat16. Throws Error for an id outside of the vocabulary.
struct Lookup {
    const Matrix* table;  // a stack of one
    const int64_t* tokens;
    Rows out;
};

inline void check(const Lookup&) {}  // the C interface has checked the arguments
void run(const Lookup& op, Host& host, int rows, int lane);

}  // namespace proa
