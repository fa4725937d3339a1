// plan_cuda: every decision of a call on a GPU, and how it explains itself.
#pragma once

#include "plan/cuda/chip.hpp"
#include "plan/cuda/choice.hpp"
#include "plan/cuda/plan.hpp"

namespace regard {

enum class Reasons : uint8 { left_out, given };

// Pure. Sequence tables and data are never read; pointers only count by their alignment. Launches
// whose grid would be empty are left out. Reasons cost most of the time.
CudaPlan plan_cuda(const Problem&, const Chip&, const CudaChoice&, Reasons);

// The main kernel's configuration in one line, or "none"; and everything, of a plan with reasons.
std::string cuda_kernel_line(const CudaPlan&);
std::string cuda_explanation(const Problem&, const Chip&, const CudaPlan&);

}  // namespace regard
