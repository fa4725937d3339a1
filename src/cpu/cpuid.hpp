// What this processor and its operating system allow.
#pragma once

#include <string>
#include <vector>

#include "plan/plan.hpp"

namespace regard::cpu_backend {

// Probed once per process; measures the rate of bf16 dot products where they exist.
const Processor& this_processor();

std::string processor_name();

// Bytes of a data cache (level 1 to 3), 0 if unknown.
std::size_t cache_size(int level);

}  // namespace regard::cpu_backend
