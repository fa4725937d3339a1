// The processor that this process runs on.
#pragma once

#include "plan/cpu/plan.hpp"

namespace regard::cpu_backend {

// Probed once per process; measures the rate of bf16 dot products where they exist.
const Processor& this_processor();

}  // namespace regard::cpu_backend
