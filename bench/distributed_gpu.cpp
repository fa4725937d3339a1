// A causal sequence over all GPUs of this machine, through C++ and NCCL: distributed_gpu [ROWS
// [HEADS KEY_HEADS]], of each rank; bf16, D 128. For Overlap::none and Overlap::heads: milliseconds
// of one call from idle GPUs and of eight behind each other, the slowest rank's, and the
// efficiency: the time of the whole problem on one GPU over the number of GPUs times that of a
// rank. The exit status is 1 where a result differs from one GPU's by more than bf16's rounding.
#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <barrier>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include "regard/cuda.hpp"
#include "regard/distributed.hpp"
#include "regard/regard.hpp"

using namespace regard;
namespace rd = regard::distributed;

namespace {

constexpr std::int64_t kSize = 128;  // of a head
constexpr int kCalls = 8, kRounds = 7;
constexpr double kMostError = 1e-2;  // of results in bf16, by norm
using Bits = std::vector<std::uint16_t>;

struct Heads {
  std::int64_t q, kv;
};

float value_of(std::uint16_t bf16) {
  const std::uint32_t bits = std::uint32_t(bf16) << 16;
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// (heads, rows, 128), normally distributed.
Bits drawn(std::int64_t heads, std::int64_t rows, unsigned seed) {
  std::minstd_rand bits(seed);
  std::normal_distribution<float> normal;
  Bits table(1 << 16), values(std::size_t(heads * rows * kSize));
  for (std::uint16_t& x : table) {
    const float value = normal(bits);
    std::uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    x = std::uint16_t(wide >> 16);
  }
  for (std::uint16_t& x : values) x = table[(bits() >> 8) & 0xffff];
  return values;
}

// Those rows of each head.
Bits rows_of(const Bits& whole, std::int64_t length, const std::vector<std::int64_t>& positions) {
  Bits part;
  for (std::size_t head = 0; head < whole.size() / std::size_t(length * kSize); ++head) {
    for (const std::int64_t at : positions) {
      const auto row = whole.begin() + (std::int64_t(head) * length + at) * kSize;
      part.insert(part.end(), row, row + kSize);
    }
  }
  return part;
}

// Memory of a GPU for the tensors of both passes over so many rows.
struct Problem {
  Problem(int gpu, Heads heads, std::int64_t rows) : gpu(gpu), rows(rows) {
    const auto tensor = [&](std::int64_t count) {
      const std::size_t bytes = std::size_t(count * rows * kSize) * 2;
      return Tensor(cuda_memory::allocate(gpu, bytes), bf16, {1, count, rows, kSize});
    };
    a.q = tensor(heads.q), a.k = tensor(heads.kv), a.v = tensor(heads.kv);
    out = tensor(heads.q), dout = tensor(heads.q), gradients.dq = tensor(heads.q);
    gradients.dk = tensor(heads.kv), gradients.dv = tensor(heads.kv);
    lse = Tensor(cuda_memory::allocate(gpu, std::size_t(heads.q * rows) * 4), f32,
                 {1, heads.q, rows});
    run.device = cuda(gpu);
  }
  Problem(const Problem&) = delete;
  Problem& operator=(const Problem&) = delete;
  ~Problem() {
    for (const Tensor* x :
         {&a.q, &a.k, &a.v, &out, &dout, &lse, &gradients.dq, &gradients.dk, &gradients.dv}) {
      cuda_memory::free(gpu, x->data);
    }
  }

  ForwardOutputs to() const { return {.out = out, .lse = lse}; }
  BackwardInputs from() const { return {.out = out, .lse = lse, .dout = dout, .dlse = {}}; }

  int gpu;
  std::int64_t rows;
  Attention a;
  Tensor out, dout, lse;
  Gradients gradients;
  Run run;
};

// q, k, v and dout of the whole sequence, in the host's memory.
struct Sequence {
  Sequence(Heads heads, std::int64_t length)
      : length(length),
        values{drawn(heads.q, length, 1), drawn(heads.kv, length, 2), drawn(heads.kv, length, 3),
               drawn(heads.q, length, 4)} {}

  void copy_rows(const Problem& to, const std::vector<std::int64_t>& positions) const {
    const void* places[] = {to.a.q.data, to.a.k.data, to.a.v.data, to.dout.data};
    for (int n = 0; n < 4; ++n) {
      const Bits part = rows_of(values[n], length, positions);
      cuda_memory::to_device(to.gpu, const_cast<void*>(places[n]), part.data(), part.size() * 2);
    }
  }

  std::int64_t length;
  Bits values[4];
};

Bits on_host(const Problem& from, const Tensor& x) {
  Bits found(std::size_t(x.sizes[1] * x.sizes[2] * kSize));
  cuda_memory::to_host(from.gpu, found.data(), x.data, found.size() * 2);
  return found;
}

// out, dq, dk and dv.
using Results = std::array<Bits, 4>;
Results results_of(const Problem& from) {
  const Gradients& g = from.gradients;
  return {on_host(from, from.out), on_host(from, g.dq), on_host(from, g.dk), on_host(from, g.dv)};
}

// The norm of the difference over that of what is wanted.
double difference(const Bits& found, const Bits& wanted) {
  double apart = 0, whole = 0;
  for (std::size_t i = 0; i < wanted.size(); ++i) {
    apart += std::pow(double(value_of(found[i])) - value_of(wanted[i]), 2);
    whole += std::pow(double(value_of(wanted[i])), 2);
  }
  return found.size() == wanted.size() ? std::sqrt(apart / whole) : INFINITY;
}

// Milliseconds of a call of `calls` in a row: the median over rounds, which begin at once on all
// ranks and on idle GPUs.
double milliseconds(int gpu, int calls, const std::function<void()>& begin,
                    const std::function<void()>& call) {
  std::vector<double> found;
  for (int round = 0; round <= kRounds; ++round) {
    cuda_memory::synchronize(gpu);
    begin();
    const auto began = std::chrono::steady_clock::now();
    for (int n = 0; n < calls; ++n) call();
    cuda_memory::synchronize(gpu);
    const std::chrono::duration<double, std::milli> spent =
        std::chrono::steady_clock::now() - began;
    if (round > 0) found.push_back(spent.count() / calls);
  }
  std::nth_element(found.begin(), found.begin() + kRounds / 2, found.end());
  return found[kRounds / 2];
}

struct Times {
  double one[2] = {}, queued[2] = {};  // forward, backward
  void keep_slowest(const Times& other) {
    for (int n = 0; n < 2; ++n) {
      one[n] = std::max(one[n], other.one[n]);
      queued[n] = std::max(queued[n], other.queued[n]);
    }
  }
};

Times measured(int gpu, const std::function<void()>& begin, const std::function<void()>& forward,
               const std::function<void()>& backward) {
  Times times;
  const std::function<void()> passes[] = {forward, backward};
  for (int n = 0; n < 2; ++n) {
    times.one[n] = milliseconds(gpu, 1, begin, passes[n]);
    times.queued[n] = milliseconds(gpu, kCalls, begin, passes[n]);
  }
  return times;
}

std::vector<void*> communicators(int count) {
  std::vector<void*> made(static_cast<std::size_t>(count));
  std::vector<int> devices;
  for (int n = 0; n < count; ++n) devices.push_back(n);
  void* const nccl = dlopen("libnccl.so.2", RTLD_NOW);
  const auto init =
      !nccl ? nullptr
            : reinterpret_cast<int (*)(void**, int, const int*)>(dlsym(nccl, "ncclCommInitAll"));
  if (!init || init(made.data(), count, devices.data()) != 0) {
    std::fprintf(stderr, "distributed_gpu: NCCL is needed (libnccl.so.2)\n");
    std::exit(1);
  }
  return made;
}

void show(const char* name, const Times& times, const Times& alone, int ranks, double error) {
  std::printf("%-10s", name);
  const auto pass = [&](const double(&ms)[2], const double(&one)[2]) {
    std::printf("  %7.3f %7.3f", ms[0], ms[1]);
    if (ranks > 1) std::printf("  %4.2f %4.2f", one[0] / ranks / ms[0], one[1] / ranks / ms[1]);
    if (ranks == 1) std::printf("  %9s", "");
  };
  pass(times.one, alone.one);
  pass(times.queued, alone.queued);
  if (ranks > 1) std::printf("  %8.1e", error);
  std::printf("\n");
}

// What the ranks' threads share.
struct Ranks {
  rd::Plan plan;
  const Sequence& sequence;
  Heads heads;
  const Results& wanted;  // of the whole sequence
  std::vector<Times> times;
  std::vector<double> errors;
  std::barrier<> meeting;
};

void measure_rank(Ranks& ranks, int rank, void* communicator) {
  const std::vector<std::int64_t> positions = ranks.plan.positions(rank);
  Problem part(rank, ranks.heads, std::int64_t(positions.size()));
  ranks.sequence.copy_rows(part, positions);
  const rd::Collectives nccl = rd::nccl_collectives(communicator);
  const auto forward = [&] { rd::forward(part.a, part.to(), ranks.plan, nccl, part.run); };
  const auto backward = [&] {
    rd::backward(part.a, part.from(), part.gradients, ranks.plan, nccl, part.run);
  };
  const auto n = std::size_t(rank);
  ranks.times[n] = measured(
      rank, [&] { ranks.meeting.arrive_and_wait(); }, forward, backward);
  const Results found = results_of(part);
  for (std::size_t at = 0; at < found.size(); ++at) {
    const Bits wanted = rows_of(ranks.wanted[at], ranks.sequence.length, positions);
    ranks.errors[n] = std::max(ranks.errors[n], difference(found[at], wanted));
  }
}

// Whether all results are right.
bool compare(Heads heads, std::int64_t rows, const std::vector<void*>& nccl) {
  const int count = int(nccl.size());
  const Sequence sequence(heads, rows * count);
  std::printf("%lld rows a rank, heads %lld/%lld, causal, %d GPUs\n", (long long)rows,
              (long long)heads.q, (long long)heads.kv, count);
  Times alone;
  Results wanted;
  {
    Problem whole(0, heads, sequence.length);
    whole.a.causal = Causal::top_left;
    std::vector<std::int64_t> all(std::size_t(sequence.length));
    for (std::size_t n = 0; n < all.size(); ++n) all[n] = std::int64_t(n);
    sequence.copy_rows(whole, all);
    alone = measured(
        0, [] {}, [&] { forward(whole.a, whole.to(), whole.run); },
        [&] { backward(whole.a, whole.from(), whole.gradients, whole.run); });
    wanted = results_of(whole);
  }
  show("one GPU", alone, alone, 1, 0);
  bool all_right = true;
  for (const rd::Overlap overlap : {rd::Overlap::none, rd::Overlap::heads}) {
    const rd::WholeSequence whole{.length = sequence.length,
                                  .heads_q = heads.q,
                                  .heads_kv = heads.kv,
                                  .head_size = kSize,
                                  .causal = Causal::top_left};
    Ranks ranks{rd::plan(whole, count, rd::Scheme::gather, {}, rd::RowCounts::equal, overlap),
                sequence,
                heads,
                wanted,
                std::vector<Times>(nccl.size()),
                std::vector<double>(nccl.size()),
                std::barrier<>(count)};
    std::vector<std::thread> threads;
    for (int rank = 0; rank < count; ++rank) {
      threads.emplace_back(measure_rank, std::ref(ranks), rank, nccl[std::size_t(rank)]);
    }
    for (std::thread& thread : threads) thread.join();
    Times slowest;
    for (const Times& times : ranks.times) slowest.keep_slowest(times);
    const double error = *std::max_element(ranks.errors.begin(), ranks.errors.end());
    show(overlap == rd::Overlap::none ? "gather" : "by heads", slowest, alone, count, error);
    all_right = all_right && error <= kMostError;
  }
  return all_right;
}

}  // namespace

int main(int count, char** arguments) {
  const auto number = [&](int n) { return std::int64_t(std::atoll(arguments[n])); };
  if (count == 3 || count > 4) {
    std::fprintf(stderr, "distributed_gpu [ROWS [HEADS KEY_HEADS]]\n");
    return 2;
  }
  const int gpus = int(cuda_setup().devices.size());
  if (gpus < 2) {
    std::printf("two GPUs are needed, %d found\n", gpus);
    return 0;
  }
  const std::vector<void*> nccl = communicators(gpus);
  std::printf("%-10s  %31s  %31s  %8s\n", "ms, forward and backward", "one call, efficiency",
              "eight in a row, efficiency", "error");
  bool all_right = true;
  for (const std::int64_t rows :
       count > 1 ? std::vector{number(1)} : std::vector<std::int64_t>{8192, 32768}) {
    for (const Heads heads : count > 3 ? std::vector{Heads{number(2), number(3)}}
                                       : std::vector{Heads{32, 8}, Heads{16, 16}}) {
      all_right = compare(heads, rows, nccl) && all_right;
    }
  }
  return all_right ? 0 : 1;
}
