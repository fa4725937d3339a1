// A KernelConfig as text: what the run-time compiler reads, and what a person does.
#pragma once

#include <string>

#include "plan/cuda/kernel/kernel_config.h"

namespace regard {

const char* name_of(Kernel);
const char* name_of(Family);
const char* name_of(Products);
const char* name_of(BiasGradient);

// "regard::KernelConfig{.kernel = regard::Kernel::forward, ...}": a constant expression wherever
// plan/cuda/kernel/kernel_config.h is included. Members that are as they are by default are left
// out, except kernel, family and level. Equal texts mean equal configs.
std::string to_text(const KernelConfig&);

}  // namespace regard
