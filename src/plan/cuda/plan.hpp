// CudaPlan: the launches of one call on a GPU, and the scratch memory between them.
#pragma once

#include <string>
#include <vector>

#include "plan/cuda/kernel/block_grid.h"
#include "plan/cuda/kernel/copy_layout.h"
#include "plan/cuda/kernel/kernel_config.h"
#include "problem/problem.h"

namespace regard {

struct CudaLaunch {
  KernelConfig config;
  BlockGrid grid;
  int threads = 0;
  int64 shared_bytes = 0;  // dynamic
  int64 resident = 0;      // a persistent grid: blocks that take its tiles; 0: one for each

  int64 blocks() const { return resident > 0 ? smaller(resident, grid.blocks()) : grid.blocks(); }
};

// Offsets of the parts of the GPU workspace in bytes, 256-byte aligned, in their order in memory; a
// part ends where the next one begins. CudaBuffers describes them. The workspace itself must be
// 256-byte aligned.
struct CudaWorkspace {
  int64 tile_counter = 0;
  int64 dq_semaphores = 0;
  int64 any_flag = 0;
  int64 flags_q = 0;
  int64 flags_k = 0;
  int64 dbias_sums = 0;
  int64 clear = 0;  // bytes from the beginning that must be 0 before the first launch
  int64 row_states = 0;
  int64 row_terms = 0;
  int64 dq_sums = 0;
  int64 partial_out = 0;
  int64 partial_rows = 0;
  int64 arrivals = 0;
  int64 hi_lo = 0;
  int64 copies = 0;
  int64 size = 0;
};

struct CudaPlan {
  std::string refusal;               // why there are no launches, where they should be
  bool too_large = false;            // no chip could do it: strides of 0 make such problems
  Family family = Family::simt;      // of the main kernels
  int level = 50;                    // of their instructions
  std::vector<CudaLaunch> launches;  // in the order of the stream
  CudaWorkspace workspace;
  int splits = 1;                    // of the keys, forward
  InputSet copies;                   // inputs that are copied first
  Strides dbias_strides;             // of the sums of dbias
  std::vector<std::string> reasons;  // for a person; empty unless asked for

  bool supported() const { return refusal.empty(); }
  std::string name() const;  // "cuda:mma"
};

std::vector<KernelConfig> configs_of(const CudaPlan&);  // each once
void remove_repetitions(std::vector<KernelConfig>&);

}  // namespace regard
