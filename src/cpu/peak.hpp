// The kernels by instruction set and type, and the rate that their instruction can reach.
#pragma once

#include "cpu/kernels/kernels.h"

namespace regard::cpu_backend {

const CpuKernels& kernels(Isa, Type);

// FLOP/s of one thread in a register-only loop that runs for about `seconds`; the best of several.
double spin_rate(Isa, Type, double seconds);

}  // namespace regard::cpu_backend
