// What differs between processor families; one processor_*.cpp implements it.
#pragma once

#include <string>
#include <vector>

#include "cpu/kernels/kernels.h"

namespace regard::cpu_backend {

// Instruction sets that the processor and its operating system allow, the widest first.
std::vector<Isa> usable_isas();

// The kernels of one instruction set, which is usable.
const IsaKernels& kernels_of(Isa);

// Why an instruction set is not usable.
std::string missing(Isa);

// As the processor calls itself, or "unknown".
std::string processor_name();

}  // namespace regard::cpu_backend
