// One launch of a plan, and the number of the call that it belongs to.
#pragma once

#include "cuda/driver.hpp"
#include "cuda/kernel_cache.hpp"
#include "cuda/kernels/params.h"
#include "cuda/kernels/tensor_maps.h"
#include "plan/cuda/plan.hpp"

namespace regard::cuda_backend {

// A new 64-bit number for each call. Flags in the workspace are compared with it, so that the
// workspace never needs clearing. A replayed graph brings the same number again; each user says why
// that does no harm (arrivals, tile_scheduler.cuh, has_flags).
uint64 new_nonce();

// Puts a kernel on the stream. `maps`: of kernels of family wgmma; null for others.
void launch_kernel(const Driver&, const CudaLaunch&, const LoadedKernel&, KernelParams&,
                   LaunchMaps* maps, Stream, int device);

}  // namespace regard::cuda_backend
