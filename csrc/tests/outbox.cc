// The outbox: every message arrives once, complete and in order, whichever thread sends it.

#include "outbox.h"

#include <sys/socket.h>
#include <unistd.h>

#include <string>
#include <thread>

#include "check.h"
#include "error.h"

namespace {

using namespace proa;

struct Ends {
    int of[2];
    Ends() { CHECK(socketpair(AF_UNIX, SOCK_STREAM, 0, of) == 0); }
    ~Ends() { close(of[0]), close(of[1]); }
};

std::shared_ptr<Host> host(int workers) {
    PoolOptions options;
    options.teams = {std::vector<int>(size_t(workers), 0)};
    options.pin = false;
    return std::make_shared<Host>(options, nullptr);
}

std::string read_all(int end, size_t bytes) {
    std::string found;
    char some[4096];
    while (found.size() < bytes) {
        const ssize_t count = read(end, some, std::min(sizeof some, bytes - found.size()));
        CHECK(count > 0);
        found.append(some, size_t(count));
    }
    return found;
}

void messages_arrive_in_order(int workers) {
    Ends ends;
    const auto of = host(workers);
    of->pool.keep_awake();
    Outbox outbox(of, ends.of[0]);
    std::vector<std::string> messages;
    std::string all;
    for (int i = 0; i < 500; ++i) {
        messages.push_back("message " + std::to_string(i) + std::string(size_t(i % 7), '.'));
        all += messages.back();
    }
    std::string found;
    std::thread reader([&] { found = read_all(ends.of[1], all.size()); });
    for (size_t i = 0; i < messages.size(); ++i) {
        const uint64_t before = outbox.sent_by_workers();
        outbox.write(messages[i].data(), messages[i].size());
        while (workers && i % 50 == 0 && outbox.sent_by_workers() == before) std::this_thread::yield();
    }
    outbox.flush();
    reader.join();
    CHECK(found == all);
    CHECK(workers ? outbox.sent_by_workers() >= 10 : outbox.sent_by_workers() == 0);
    of->pool.let_sleep();
}

// A worker does not block when the socket is full; the caller does.
void one_larger_than_the_socket_holds() {
    Ends ends;
    Outbox outbox(host(1), ends.of[0]);
    std::string all(8 << 20, 'a');
    for (size_t i = 0; i < all.size(); i += 1000) all[i] = char('b' + i / 1000 % 20);
    std::string found;
    std::thread reader([&] {
        std::this_thread::sleep_for(std::chrono::milliseconds(5));
        found = read_all(ends.of[1], all.size() + 4);
    });
    outbox.write(all.data(), all.size());
    outbox.write("last", 4);
    outbox.flush();
    reader.join();
    CHECK(found == all + "last");
}

void what_is_left_is_sent_at_the_end() {
    Ends ends;
    {
        Outbox(host(2), ends.of[0]).write("end", 3);
    }
    CHECK(read_all(ends.of[1], 3) == "end");
}

void a_closed_socket_is_told() {
    Ends ends;
    Outbox outbox(host(1), ends.of[0]);
    shutdown(ends.of[1], SHUT_RDWR);
    const auto fails = [&](auto&& call) {
        try {
            call();
        } catch (const Error& error) {
            return std::string(error.what()).find("cannot be sent") != std::string::npos;
        }
        return false;
    };
    outbox.write("lost", 4);
    outbox.finish();
    CHECK(fails([&] { outbox.flush(); }));
    CHECK(fails([&] { outbox.write("lost too", 8); }));
}

void a_pool_has_one() {
    Ends ends;
    const auto of = host(1);
    {
        Outbox first(of, ends.of[0]);
        bool refused = false;
        try {
            Outbox second(of, ends.of[0]);
        } catch (const Error&) {
            refused = true;
        }
        CHECK(refused);
    }
    Outbox(of, ends.of[0]).write("again", 5);
    CHECK(read_all(ends.of[1], 5) == "again");
}

}  // namespace

int main() {
    messages_arrive_in_order(0);
    messages_arrive_in_order(1);
    messages_arrive_in_order(3);
    one_larger_than_the_socket_holds();
    what_is_left_is_sent_at_the_end();
    a_closed_socket_is_told();
    a_pool_has_one();
}
