// One causal sequence over two processes on CPUs, which exchange through a socket;
// docs/distributed.md shows the call. Each process compares its rows with one call over the whole.
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <regard/distributed.hpp>
#include <vector>

#include "distributed_sequence.hpp"

namespace {

using regard::distributed::Receive;
using regard::distributed::Send;

// Both processes send and receive at once: a pipe holds less than a message.
const char* exchange(void* self, const Send* send, std::size_t send_count, const Receive* receive,
                     std::size_t receive_count, void*) {
  const int socket = *static_cast<int*>(self);
  const Send* const send_end = send + send_count;
  const Receive* const receive_end = receive + receive_count;
  std::size_t sent = 0, received = 0;  // bytes of the messages that `send` and `receive` point at
  while (send != send_end || receive != receive_end) {
    const int wanted = (send != send_end ? POLLOUT : 0) | (receive != receive_end ? POLLIN : 0);
    pollfd ready{socket, short(wanted), 0};
    if (poll(&ready, 1, 10000) <= 0) return "the other process has been silent for 10 seconds";
    if (ready.revents & POLLIN) {
      const auto got =
          read(socket, static_cast<char*>(receive->data) + received, receive->bytes - received);
      if (got <= 0) return "the other process has ended";
      received += std::size_t(got);
      if (received == receive->bytes) ++receive, received = 0;
    } else if (ready.revents & POLLOUT) {
      const auto put = ::send(socket, static_cast<const char*>(send->data) + sent,
                              send->bytes - sent, MSG_DONTWAIT | MSG_NOSIGNAL);
      if (put < 0 && errno != EAGAIN) return std::strerror(errno);
      sent += put > 0 ? std::size_t(put) : 0;
      if (sent == send->bytes) ++send, sent = 0;
    } else {
      return "the other process has ended";
    }
  }
  return nullptr;
}

int attend(int rank, int socket) {
  Sequence whole(kLength);
  whole.draw();

  // [call]
  namespace rd = regard::distributed;
  const rd::Plan plan = rd::plan({.length = kLength,
                                  .heads_q = kHeads,
                                  .heads_kv = kHeadsOfKeys,
                                  .head_size = kSize,
                                  .type = regard::f32,
                                  .causal = regard::Causal::top_left},
                                 2);
  const rd::Collectives ranks{.rank = rank, .size = 2, .self = &socket, .exchange = exchange};
  const std::vector<std::int64_t> positions = plan.positions(rank);  // the rows of this process
  Sequence part = whole.rows_of(positions);

  const regard::Attention attention{.q = part.q(), .k = part.k(), .v = part.v()};
  rd::forward(attention, {.out = part.out(), .lse = part.lse()}, plan, ranks);
  rd::backward(attention, {.out = part.out(), .lse = part.lse(), .dout = part.dout()},
               {.dq = part.dq(), .dk = part.dk(), .dv = part.dv()}, plan, ranks);
  // [/call]

  const double most = largest_difference(whole, part, positions);
  if (rank == 0) std::fputs(plan.explain().c_str(), stdout);
  std::printf("rank %d: %zu rows, at most %.1e from one process\n", rank, positions.size(), most);
  return most < 1e-5 ? 0 : 1;
}

int attend_and_report(int rank, int socket) {
  try {
    return attend(rank, socket);
  } catch (const regard::Error& error) {
    std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
    return 1;
  }
}

}  // namespace

int main() {
  int sockets[2];
  if (socketpair(AF_UNIX, SOCK_STREAM, 0, sockets) != 0) return 1;
  const pid_t child = fork();
  if (child < 0) return 1;
  const int rank = child == 0 ? 1 : 0;
  close(sockets[1 - rank]);
  const int failed = attend_and_report(rank, sockets[rank]);
  if (rank == 1) return failed;
  int status = 0;
  waitpid(child, &status, 0);
  return failed || status != 0;
}
