// The C interface of the outbox.
#include "error.h"
#include "handles.h"

using proa::require;

extern "C" {

int proa_outbox_create(proa_pool* pool, int socket, proa_outbox** out) {
    return proa::guarded([&] {
        require(pool && out, "An argument is a null pointer.");
        require(socket >= 0, "The socket must not be negative.");
        *out = new proa_outbox{{pool->owner, socket}};
    });
}

int proa_outbox_destroy(proa_outbox* outbox) {
    return proa::guarded([&] { delete outbox; });
}

int proa_outbox_write(proa_outbox* outbox, const void* data, size_t size) {
    return proa::guarded([&] {
        require(outbox && (data || !size), "An argument is a null pointer.");
        outbox->outbox.write(data, size);
    });
}

int proa_outbox_flush(proa_outbox* outbox) {
    return proa::guarded([&] {
        require(outbox, "An argument is a null pointer.");
        outbox->outbox.flush();
    });
}

}  // extern "C"
