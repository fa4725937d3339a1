// CudaChoice: what the caller forces of a plan for a GPU.
#pragma once

#include <string>

#include "plan/cuda/kernel/kernel_config.h"

namespace regard {

struct CudaChoice {
  Family family = Family::simt;
  bool any_family = true;
  int level = 0;     // of the instructions; 0: the chip's
  int64 shared = 0;  // bytes that a block may use; 0: what the chip allows
  bool has_tiling = false;
  Tiling tiling;            // members that are 0 are left to the planner
  int multiprocessors = 0;  // that kernels may occupy, from Run::multiprocessors; 0: all
};

// Reads Run::backend or REGARD_BACKEND: "" or "cuda" (the planner chooses), "cuda:simt",
// "cuda:mma", "cuda:wgmma", "cuda:mma75" (as on a chip of level 75; also mma80 and mma90); after a
// / the kilobytes of shared memory that a block may use ("cuda:mma/99"); after an @ members of the
// main kernel's tiling ("cuda:mma@rows=64,keys=128"; simt backward: of key_gradient).
bool parse_cuda_choice(const std::string& name, CudaChoice&, std::string& why_not);

}  // namespace regard
