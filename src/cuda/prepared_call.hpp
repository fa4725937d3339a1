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

// The prepared call for the problem in the current context, among the last few of this thread. A
// miss plans it and may compile kernels; addresses of equal alignment and the dropout seed are not
// part of the key. Shared, because a caller's allocator may make calls of its own meanwhile. An
// Error where the problem is not supported, or its kernels cannot be had.
std::shared_ptr<PreparedCall> prepared_call(const Problem&, const Run&, std::uint64_t context);

}  // namespace regard::cuda_backend
