// Tensor maps of a launch, encoded by the driver.
#pragma once

#include <array>

#include "cuda/driver.hpp"
#include "cuda/kernels/tensor_maps.h"
#include "plan/cuda/kernel/kernel_config.h"
#include "problem/problem.h"

namespace regard::cuda_backend {

// The tensor maps of one wgmma launch, for problems that differ in addresses only: encoded for the
// first problem, then patched where a tensor lies elsewhere.
class TensorMaps {
 public:
  // An Error where the driver refuses a tensor, which plans exclude. hi_lo: the parts of f32 in the
  // workspace.
  LaunchMaps& at(const Driver&, const Problem&, const KernelConfig&, const void* hi_lo, int device);

 private:
  static constexpr int kMost = 6;

  template <class Places>
  void place(const Driver&, const Places&, const Problem&, const KernelConfig&, const void* hi_lo,
             int device);

  LaunchMaps maps_{};
  // The tensors' addresses in the order of the maps, and how far each lies behind the problem's
  // tensor, or behind hi_lo.
  std::array<const uint8*, kMost> addresses_{};
  std::array<std::ptrdiff_t, kMost> offsets_{};
  bool encoded_ = false;
};

}  // namespace regard::cuda_backend
