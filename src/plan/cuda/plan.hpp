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
  GridDivisors by;
  int threads = 0;
  int64 shared_bytes = 0;  // dynamic
  int64 resident = 0;      // a persistent grid: blocks that take its tiles; 0: one for each

  int64 blocks() const { return resident > 0 ? smaller(resident, grid.blocks()) : grid.blocks(); }
};

// The parts of the GPU workspace, in their order in memory. CudaBuffers describes them.
enum class WorkspacePart {
  tile_counter,
  dq_semaphores,
  any_flag,
  flags_q,
  flags_k,
  dbias_sums,
  row_states,  // from here on, nothing must be 0 at first
  row_terms,
  dq_sums,
  partial_out,
  partial_rows,
  arrivals,
  tile_map,
  hi_lo,
  copies,
};
inline constexpr int kWorkspaceParts = int(WorkspacePart::copies) + 1;

// Offsets in bytes. Each part begins at a multiple of 256, as the workspace itself must.
struct CudaWorkspace {
  int64 begins[kWorkspaceParts] = {};
  int64 clear = 0;  // bytes from the beginning that must be 0 before the first launch
  int64 size = 0;

  int64 begin(WorkspacePart part) const { return begins[int(part)]; }
  int64 end(WorkspacePart part) const {
    return int(part) + 1 < kWorkspaceParts ? begins[int(part) + 1] : size;
  }
  int64 bytes(WorkspacePart part) const { return end(part) - begin(part); }
};

struct CudaPlan {
  std::string refusal;               // why there are no launches, where they should be
  bool too_large = false;            // no chip could do it: strides of 0 make such problems
  Family family = Family::simt;      // of the main kernels
  int level = 50;                    // of their instructions
  std::vector<CudaLaunch> launches;  // in the order of the stream
  CudaWorkspace workspace;
  int splits = 1;                    // forward: of the keys; backward: of the query rows
  InputSet copies;                   // inputs that are copied first
  Strides dbias_strides;             // of the sums of dbias
  std::vector<std::string> reasons;  // for a person; empty unless asked for

  bool supported() const { return refusal.empty(); }
  std::string name() const;  // "cuda:mma"
};

std::vector<KernelConfig> configs_of(const CudaPlan&);  // each once
void remove_repetitions(std::vector<KernelConfig>&);

}  // namespace regard
