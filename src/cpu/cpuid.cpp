// The processor that this process runs on.
#include "cpu/cpuid.hpp"

#include <algorithm>

#include "cpu/peak.hpp"
#include "cpu/processor.hpp"

namespace regard::cpu_backend {
namespace {

Processor probe() {
  Processor processor;
  processor.usable = usable_isas();
  // The rates differ by two one way or the other, so that noise cannot flip the choice. f16 takes
  // 3.5 tile products for one, and was 1.03 to 1.9 times as fast by them on a Xeon with AMX.
  const auto pays = [&](Isa isa) {
    return std::ranges::count(processor.usable, isa) > 0 &&
           spin_rate(isa, Type::bf16, 0.0005) > 1.2 * spin_rate(Isa::avx512, Type::f32, 0.0005);
  };
  processor.amx_pays = pays(Isa::amx);
  processor.bf16_dot_pays = pays(Isa::avx512bf16);
  return processor;
}

}  // namespace

const Processor& this_processor() {
  // Never destroyed: calls may come while the process ends.
  static const Processor* const processor = new Processor(probe());
  return *processor;
}

}  // namespace regard::cpu_backend
