// The kernels by instruction set and type, and the rate that their instruction can reach.
#include "cpu/peak.hpp"

#include <algorithm>
#include <chrono>

#include "cpu/processor.hpp"

namespace regard::cpu_backend {

const CpuKernels& kernels(Isa isa, Type type) {
  static_assert(kTypeCount == 7, "a type was added: the kernels that compute it");
  const IsaKernels& table = kernels_of(isa);
  if (type == Type::f64) return *table.f64;
  if (table.f16 && type == Type::f16) return *table.f16;
  return table.bf16 && type == Type::bf16 ? *table.bf16 : *table.f32;
}

double spin_rate(Isa isa, Type type, double seconds) {
  using Clock = std::chrono::steady_clock;
  const CpuKernels& k = kernels(isa, type);
  const auto rate_of = [&](int64 rounds) {
    const auto start = Clock::now();
    const double flops = k.spin(rounds);
    return flops / std::max(1e-9, std::chrono::duration<double>(Clock::now() - start).count());
  };
  constexpr int kTries = 5;
  const double flops_per_round = k.spin(1);
  double best = rate_of(2000);
  const auto rounds = int64(best * seconds / kTries / flops_per_round) + 1;
  for (int i = 0; i < kTries; ++i) best = std::max(best, rate_of(rounds));
  return best;
}

}  // namespace regard::cpu_backend
