// Tensor maps of a launch, encoded by the driver.
#pragma once

#include "cuda/driver.hpp"
#include "cuda/kernels/tensor_maps.h"
#include "plan/cuda/kernel/kernel_config.h"
#include "problem/problem.h"

namespace regard::cuda_backend {

// The tensor maps of a wgmma kernel. Error if the driver rejects a tensor, which plans exclude.
// planes: the f32 tensors in the workspace.
ForwardMaps forward_maps(const Driver&, const Problem&, const KernelConfig&, const void* hi_lo,
                         int device);

BackwardMaps backward_maps(const Driver&, const Problem&, const KernelConfig&, const void* hi_lo,
                           int device);
// Of either.
LaunchMaps launch_maps(const Driver&, const Problem&, const KernelConfig&, const void* hi_lo,
                       int device);

}  // namespace regard::cuda_backend
