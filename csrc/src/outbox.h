// Sends messages to a socket from an idle worker, so that the caller does not block: a send that wakes a reader on
// another CPU takes about 50 us on a thread with cold caches. Never: the contents and framing of messages.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "host.h"

namespace proa {

// Called only from the thread that runs the host's programs. At most one message is pending; it has been sent when the
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
    void finish();  // flush, but an error is thrown by the next call

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
    size_t sent_ = 0;  // bytes of it
    int error_ = 0;
    std::atomic<uint64_t> by_workers_{0};
};

}  // namespace proa
