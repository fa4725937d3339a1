// Processors without their own kernels use the plain C++ kernels.
#include "cpu/processor.hpp"

namespace regard::cpu_backend {

std::vector<Isa> usable_isas() { return {Isa::scalar}; }

const IsaKernels& kernels_of(Isa) { return scalar_kernels; }

std::string missing(Isa) { return "not offered by this processor"; }

std::string processor_name() { return "unknown"; }

}  // namespace regard::cpu_backend
