// A processor with AVX2 that has AVX-512 and AMX too, by emulation; in place of the library's
// src/cpu/processor_x86.cpp and src/cpu/amx.cpp.
#include "cpu/processor.hpp"

namespace regard::cpu_backend {

std::vector<Isa> usable_isas() {
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (!avx2) return {Isa::scalar};
  return {Isa::amx, Isa::avx512, Isa::avx2, Isa::scalar};
}

const IsaKernels& kernels_of(Isa isa) {
  switch (isa) {
    case Isa::avx2:
      return avx2_kernels;
    case Isa::avx512:
      return avx512_kernels;
    case Isa::amx:
      return amx_kernels;
    case Isa::avx512bf16:
    case Isa::scalar:
    case Isa::neon:
      break;
  }
  return scalar_kernels;
}

std::string missing(Isa) { return "neither offered by this processor nor emulated"; }

std::string processor_name() { return "emulated"; }

}  // namespace regard::cpu_backend
