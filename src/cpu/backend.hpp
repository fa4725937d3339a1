// Runs the CPU's plans on the thread pool.
#pragma once

#include "cpu/kernels/kernels.h"
#include "plan/cpu/plan.hpp"
#include "regard/regard.hpp"

namespace regard::cpu_backend {

void forward(const Problem&, const Plan&, const Run&);
void backward(const Problem&, const Plan&, const Run&);
// The same with other kernels than the plan's: tests bring some that count.
void forward(const Problem&, const Plan&, const CpuKernels&, const Run&);
void backward(const Problem&, const Plan&, const CpuKernels&, const Run&);

// FLOP/s of the plan's instruction on all its workers at once.
double measured_peak(const Problem&, const Plan&, const Run&);

}  // namespace regard::cpu_backend
