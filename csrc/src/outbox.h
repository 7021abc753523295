// Messages to a socket, sent by a worker that has nothing to do while the caller goes on: a send that wakes a reader on
// another CPU takes some 50 us of a thread whose caches are cold. Never: what is sent, frames.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "host.h"

namespace proa {

// Calls come from the thread that runs the host's programs. At most one message is left to workers; it is gone when the
// next one is written, when a program begins, and when flush() or the destructor returns.
class Outbox {
  public:
    Outbox(std::shared_ptr<Host> host, int socket);
    ~Outbox();
    Outbox(const Outbox&) = delete;
    Outbox& operator=(const Outbox&) = delete;

    // Throws Error (system) if this message or the one before it cannot be sent.
    void write(const void* data, size_t size);
    void flush();
    void finish();  // the same, but what cannot be sent is told by the next call

    uint64_t sent_by_workers() const { return by_workers_.load(std::memory_order_relaxed); }

  private:
    enum class State { kNothing, kLeft, kTaken };

    static void help(const void* outbox, int task, std::byte* scratch);
    bool take();
    void send(int flags);

    std::shared_ptr<Host> host_;
    const int socket_;
    std::atomic<State> state_{State::kNothing};
    std::vector<char> message_;
    size_t sent_ = 0;  // of it
    int error_ = 0;
    std::atomic<uint64_t> by_workers_{0};
};

}  // namespace proa
