// What a thread's calls of one problem share: the plan, the loaded kernels, the tensor maps.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "cuda/driver.hpp"
#include "cuda/kernel_cache.hpp"
#include "cuda/tensor_maps.hpp"
#include "plan/cuda/plan.hpp"
#include "regard/regard.hpp"

namespace regard::cuda_backend {

struct PreparedLaunch {
  const LoadedKernel* kernel = nullptr;
  TensorMaps maps;  // of kernels of family wgmma
};

struct PreparedCall {
  CudaPlan plan;
  std::vector<PreparedLaunch> launches;  // of plan.launches
  MemoryPool pool = nullptr;             // once a call needed a workspace of the library's own
};

// Of the current context. Made anew, which may compile kernels, unless the problem is among the
// last few of this thread in this context, except for addresses of equal alignment and the seed of
// dropout. Shared, because a caller's allocator may make calls of its own meanwhile. Error where
// the problem is not supported, or its kernels cannot be had.
std::shared_ptr<PreparedCall> prepared_call(const Problem&, const Run&, std::uint64_t context);

}  // namespace regard::cuda_backend
