// What the opaque handles of the C interface are.
#pragma once

#include "host.h"
#include "matrix.h"
#include "moe.h"

struct proa_pool {
    proa::Host host;
};

struct proa_matrix {
    proa::Matrix matrix;
};

struct proa_experts {
    proa::Experts experts;
};
