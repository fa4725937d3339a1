// One causal sequence over two processes on CPUs, which exchange through a socket;
// docs/distributed.md shows the call. Each process compares its rows with one call over the whole.
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <regard/distributed.hpp>
#include <vector>

namespace {

using regard::distributed::Receive;
using regard::distributed::Send;

constexpr std::int64_t kLength = 1000, kHeads = 4, kHeadsOfKeys = 2, kSize = 64;

// [exchange]
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
// [/exchange]

// (1, heads, rows, size) floats.
struct Floats {
  Floats(std::int64_t its_heads, std::int64_t its_rows)
      : heads(its_heads), rows(its_rows), x(std::size_t(heads * rows * kSize)) {}
  regard::Tensor tensor() { return {x.data(), regard::f32, {1, heads, rows, kSize}}; }
  float* row(std::int64_t h, std::int64_t i) { return &x[std::size_t((h * rows + i) * kSize)]; }

  std::int64_t heads, rows;
  std::vector<float> x;
};

Floats random_floats(std::int64_t heads, unsigned seed) {
  Floats made(heads, kLength);
  std::mt19937 bits(seed);
  for (float& x : made.x) x = float(bits() % 2001) / 1000 - 1;
  return made;
}

// These rows of a whole tensor.
Floats rows_of(Floats& whole, const std::vector<std::int64_t>& positions) {
  Floats part(whole.heads, std::int64_t(positions.size()));
  for (std::int64_t h = 0; h < part.heads; ++h) {
    for (std::int64_t i = 0; i < part.rows; ++i) {
      std::copy_n(whole.row(h, positions[std::size_t(i)]), kSize, part.row(h, i));
    }
  }
  return part;
}

double difference(Floats& part, Floats& whole, const std::vector<std::int64_t>& positions) {
  const Floats want = rows_of(whole, positions);
  double most = 0;
  for (std::size_t n = 0; n < want.x.size(); ++n) {
    most = std::max(most, std::fabs(double(part.x[n]) - double(want.x[n])));
  }
  return most;
}

int attend(int rank, int socket) {
  Floats all_q = random_floats(kHeads, 1), all_k = random_floats(kHeadsOfKeys, 2);
  Floats all_v = random_floats(kHeadsOfKeys, 3), all_dout = random_floats(kHeads, 4);

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
  const std::int64_t rows = plan.rows(rank);
  Floats q = rows_of(all_q, positions), k = rows_of(all_k, positions);
  Floats v = rows_of(all_v, positions), dout = rows_of(all_dout, positions);
  Floats out(kHeads, rows), dq(kHeads, rows), dk(kHeadsOfKeys, rows), dv(kHeadsOfKeys, rows);
  std::vector<float> sums(std::size_t(kHeads * rows));
  const regard::Tensor lse{sums.data(), regard::f32, {1, kHeads, rows}};

  const regard::Attention part{.q = q.tensor(), .k = k.tensor(), .v = v.tensor()};
  rd::forward(part, {.out = out.tensor(), .lse = lse}, plan, ranks);
  rd::backward(part, {.out = out.tensor(), .lse = lse, .dout = dout.tensor()},
               {.dq = dq.tensor(), .dk = dk.tensor(), .dv = dv.tensor()}, plan, ranks);
  // [/call]

  Floats all_out(kHeads, kLength), all_dq(kHeads, kLength);
  Floats all_dk(kHeadsOfKeys, kLength), all_dv(kHeadsOfKeys, kLength);
  std::vector<float> all_sums(std::size_t(kHeads * kLength));
  const regard::Tensor all_lse{all_sums.data(), regard::f32, {1, kHeads, kLength}};
  const regard::Attention whole{.q = all_q.tensor(),
                                .k = all_k.tensor(),
                                .v = all_v.tensor(),
                                .causal = regard::Causal::top_left};
  regard::forward(whole, {.out = all_out.tensor(), .lse = all_lse});
  regard::backward(whole, {.out = all_out.tensor(), .lse = all_lse, .dout = all_dout.tensor()},
                   {.dq = all_dq.tensor(), .dk = all_dk.tensor(), .dv = all_dv.tensor()});
  const double most =
      std::max({difference(out, all_out, positions), difference(dq, all_dq, positions),
                difference(dk, all_dk, positions), difference(dv, all_dv, positions)});
  if (rank == 0) std::fputs(plan.explain().c_str(), stdout);
  std::printf("rank %d: %lld rows, at most %.1e from one process\n", rank, (long long)(rows), most);
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
