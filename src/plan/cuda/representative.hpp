// Problems whose kernels stand for all: what CI compiles for every chip and `regard prebuild`
// builds.
#pragma once

#include <vector>

#include "plan/cuda/chip.hpp"
#include "plan/cuda/kernel/kernel_config.h"
#include "problem/problem.h"

namespace regard {

// Shapes of an ordinary size, without data: every type, the usual head sizes, both passes, each
// feature at least once. They share kernels, so that a chip needs about a hundred.
std::vector<Problem> representative_problems();

// The kernels that these problems need on a chip, each once.
std::vector<KernelConfig> representative_kernels(const Chip&);

}  // namespace regard
