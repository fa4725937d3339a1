// REGARD_RECORD: calls that needed new kernels, as lines that `regard prebuild --recorded` reads.
#pragma once

#include <vector>

#include "cuda/planning.hpp"
#include "regard/cuda.hpp"

namespace regard::cuda_backend {

// Whether calls on this device are recorded.
bool is_recorded(const Run&);

// Appends a line if the call has a kernel that no call recorded by this process has. A file that
// cannot be written to is named once on stderr.
void record(const PlannedCall&, const Run&);

// The kernels that the call loads on the device of the Run; or an Error.
std::vector<KernelConfig> kernels_of(const PlannedCall&, Run);

}  // namespace regard::cuda_backend
