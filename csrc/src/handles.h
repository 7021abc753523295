// The types behind the opaque handles of the C interface.
#pragma once

#include <memory>

#include "doorbell.h"
#include "host.h"
#include "matrix.h"
#include "moe.h"
#include "outbox.h"

// Programs share the Host they run on: it lives until the last of them and the handle are destroyed.
struct proa_pool {
    std::shared_ptr<proa::Host> owner;
    proa::Host& host = *owner;
};

struct proa_matrix {
    proa::Matrix matrix;
};

struct proa_experts {
    proa::Experts experts;
};

struct proa_outbox {
    proa::Outbox outbox;
};

struct proa_doorbell {
    proa::Doorbell doorbell;
};
