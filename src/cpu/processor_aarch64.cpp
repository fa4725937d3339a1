// aarch64: every one has NEON.
#include "cpu/processor.hpp"

namespace regard::cpu_backend {

std::vector<Isa> usable_isas() { return {Isa::neon, Isa::scalar}; }

const IsaKernels& kernels_of(Isa isa) {
  switch (isa) {
    case Isa::neon:
      return neon_kernels;
    case Isa::scalar:
    case Isa::avx2:
    case Isa::avx512:
    case Isa::avx512bf16:
    case Isa::amx:
      break;
  }
  return scalar_kernels;
}

std::string missing(Isa) { return "not offered by this processor"; }

std::string processor_name() { return "unknown"; }

}  // namespace regard::cpu_backend
