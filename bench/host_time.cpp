// What a call costs the host, in a steady loop: host_time [DEVICE], where DEVICE is a GPU's number;
// without one, the CPU on one thread, with a query so short that little is left to compute.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <vector>

#include "regard/cuda.hpp"
#include "regard/regard.hpp"

using namespace regard;

namespace {

struct Shape {
  const char* name;
  Type type;
  std::int64_t batch, heads_q, heads_kv, len_q, len_k, dim;
  Causal causal = Causal::none;
};

// Memory of the device, or of the host, that lives as long as the program.
void* memory(int device, std::int64_t bytes) {
  const auto size = static_cast<std::size_t>(bytes);
  if (device < 0) return std::calloc(size, 1);
  void* const data = cuda_memory::allocate(device, size);
  cuda_memory::fill(device, data, 0, size);
  return data;
}

// The best of many short bursts, so that the queue of a GPU never fills and makes the host wait.
double microseconds(int device, const std::function<void()>& call) {
  constexpr int kBursts = 200, kCalls = 16;
  using Clock = std::chrono::steady_clock;
  double best = 1e9;
  for (int burst = 0; burst < kBursts; ++burst) {
    const Clock::time_point begin = Clock::now();
    for (int i = 0; i < kCalls; ++i) call();
    const Clock::duration spent = Clock::now() - begin;
    best = std::min(best, std::chrono::duration<double, std::micro>(spent).count() / kCalls);
    if (device >= 0) cuda_memory::synchronize(device);
  }
  return best;
}

void measure(int device, const Shape& s) {
  const auto rows = [&](std::int64_t heads, std::int64_t length) {
    const std::int64_t bytes = s.batch * heads * length * s.dim * std::int64_t(size_of(s.type));
    return Tensor(memory(device, bytes), s.type, {s.batch, heads, length, s.dim});
  };
  const auto queries = [&] { return rows(s.heads_q, s.len_q); };
  const auto keys = [&] { return rows(s.heads_kv, s.len_k); };
  Attention a;
  a.q = queries(), a.k = keys(), a.v = keys(), a.causal = s.causal;
  const Tensor lse(memory(device, s.batch * s.heads_q * s.len_q * 4), f32,
                   {s.batch, s.heads_q, s.len_q});
  const ForwardOutputs to{.out = queries(), .lse = lse};
  const BackwardInputs from{.out = to.out, .lse = lse, .dout = queries(), .dlse = {}};
  Gradients gradients;
  gradients.dq = queries(), gradients.dk = keys(), gradients.dv = keys();
  Run run;
  run.threads = 1;
  if (device >= 0) run.device = cuda(device);
  const double forward_us = microseconds(device, [&] { forward(a, to, run); });
  const double backward_us = microseconds(device, [&] { backward(a, from, gradients, run); });
  std::printf("%-28s forward %7.2f us   backward %7.2f us\n", s.name, forward_us, backward_us);
}

}  // namespace

int main(int count, char** arguments) {
  if (count < 2) {
    measure(-1, {"f32 (1, 1, 1, 64)", f32, 1, 1, 1, 1, 1, 64});
    measure(-1, {"f32 (1, 8, 1, 64)", f32, 1, 8, 8, 1, 1, 64});
    return 0;
  }
  const int device = std::atoi(arguments[1]);
  measure(device, {"f16 (1, 2, 100, 64)", f16, 1, 2, 2, 100, 100, 64});
  measure(device, {"f16 (2, 8, 512, 64) causal", f16, 2, 8, 8, 512, 512, 64, Causal::top_left});
  measure(device, {"bf16 decoding, 2048 keys", bf16, 4, 32, 8, 1, 2048, 128});
  measure(device, {"f32 (2, 8, 256, 64)", f32, 2, 8, 8, 256, 256, 64});
}
