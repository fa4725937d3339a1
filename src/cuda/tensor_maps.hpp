// Tensor maps of a launch, encoded by the driver.
#pragma once

#include "cuda/driver.hpp"
#include "cuda/kernels/tensor_maps.h"
#include "plan/cuda/kernel/kernel_config.h"
#include "problem/problem.h"

namespace regard::cuda_backend {

// Of a kernel of family wgmma; an Error where the driver refuses a tensor, which plans exclude.
// hi_lo: the parts of f32 in the workspace.
LaunchMaps launch_maps(const Driver&, const Problem&, const KernelConfig&, const void* hi_lo,
                       int device);

}  // namespace regard::cuda_backend
