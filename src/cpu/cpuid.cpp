// The processor that this process runs on.
#include "cpu/cpuid.hpp"

#include <algorithm>

#include "cpu/peak.hpp"
#include "cpu/processor.hpp"
#include "threads/float_state.hpp"

namespace regard::cpu_backend {
namespace {

// Whether one thread multiplies bf16 faster with these instructions than f32 with FMA. The rates
// differ by two one way or the other; measured in turns, both meet what else the core does.
bool pays(Isa isa) {
  constexpr int kTurns = 8;
  constexpr double kSeconds = 0.0001;
  double bf16 = 0, f32 = 0;
  for (int i = 0; i < kTurns; ++i) {
    bf16 = std::max(bf16, spin_rate(isa, Type::bf16, kSeconds));
    f32 = std::max(f32, spin_rate(Isa::avx512, Type::f32, kSeconds));
  }
  return bf16 > 1.2 * f32;
}

Processor probe() {
  const DefaultFloatState floats;
  Processor processor;
  processor.usable = usable_isas();
  const auto usable = [&](Isa isa) { return std::ranges::count(processor.usable, isa) > 0; };
  // f16 takes 3.5 tile products for one, and was 1.03 to 1.9 times as fast by them on a Xeon with
  // AMX.
  processor.amx_pays = usable(Isa::amx) && pays(Isa::amx);
  processor.bf16_dot_pays = usable(Isa::avx512bf16) && pays(Isa::avx512bf16);
  return processor;
}

}  // namespace

const Processor& this_processor() {
  // Never destroyed: calls may come while the process ends.
  static const Processor* const processor = new Processor(probe());
  return *processor;
}

}  // namespace regard::cpu_backend
