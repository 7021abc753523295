#include "outbox.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "error.h"

namespace proa {

Outbox::Outbox(std::shared_ptr<Host> host, int socket) : host_(std::move(host)), socket_(socket) {
    require(!host_->outbox, "The pool has an outbox already.");
    host_->outbox = this;
}

Outbox::~Outbox() {
    finish();
    host_->outbox = nullptr;
    host_->pool.withdraw();
    host_->pool.settle();  // from here on no worker reads this object
}

void Outbox::write(const void* data, size_t size) {
    flush();
    const char* from = static_cast<const char*>(data);
    message_.assign(from, from + size);
    sent_ = 0;
    state_.store(State::kLeft, std::memory_order_release);
    if (host_->pool.threads() < 2) return flush();
    const int nodes = host_->pool.nodes();
    Phase phase = spread(nodes, nodes);  // one task per node; the first to run sends
    phase.context = this;
    phase.run = help;
    host_->pool.post(phase);
}

void Outbox::flush() {
    finish();
    if (error_)
        throw Error(PROA_ERROR_SYSTEM, "The message cannot be sent: " + std::string(std::strerror(error_)) + ".");
}

void Outbox::finish() {
    while (state_.load(std::memory_order_acquire) != State::kNothing) take() ? send(0) : relax();
}

void Outbox::help(const void* outbox, int, std::byte*) {
    Outbox& self = *static_cast<Outbox*>(const_cast<void*>(outbox));
    if (!self.take()) return;
    self.by_workers_.fetch_add(1, std::memory_order_relaxed);
    self.send(MSG_DONTWAIT);
}

bool Outbox::take() {
    State left = State::kLeft;
    return state_.compare_exchange_strong(left, State::kTaken, std::memory_order_acq_rel);
}

// Sends as much as the socket takes; with MSG_DONTWAIT, the rest is left for later.
void Outbox::send(int flags) {
    while (sent_ < message_.size() && !error_) {
        const ssize_t done = ::send(socket_, message_.data() + sent_, message_.size() - sent_, flags | MSG_NOSIGNAL);
        if (done >= 0) {
            sent_ += size_t(done);
        } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
            return state_.store(State::kLeft, std::memory_order_release);
        } else if (errno != EINTR) {
            error_ = errno;
        }
    }
    state_.store(State::kNothing, std::memory_order_release);
}

}  // namespace proa
