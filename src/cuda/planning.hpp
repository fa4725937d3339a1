// From a Run on a GPU to a plan: what is forced, which chip.
#pragma once

#include <string>

#include "plan/backend.hpp"
#include "plan/cuda/planner.hpp"
#include "regard/regard.hpp"

namespace regard::cuda_backend {

bool on_gpu(const Run&);  // or planned for one; an Error where no device can be so

std::string forced_backend(const Run&);  // by the call, else by REGARD_BACKEND; "" = none
std::string device_name(const Run&);     // "cpu", "cuda:0", "sm_80"

// The chip of the device, or the one that is named; an Error where there is none.
const Chip& chip_of(const Run&);

CudaPlan make_plan(const Problem&, const Run&, Reasons);
CudaPlan make_supported_plan(const Problem&, const Run&);  // or an Error

// The kernels that a call loads: its plan's, and, of a forward call that gradients follow, those of
// a backward call with dq, dk, dv, dsink, and with and without dbias, where that is supported.
std::vector<KernelConfig> kernels_to_load(const CudaPlan&, const Problem&, const Run&);

// Any GPU, or a chip to plan for.
const Backend& gpu();

}  // namespace regard::cuda_backend
