// CudaPlan: the launches of one call on a GPU, and the scratch memory between them.
#pragma once

#include <string>
#include <vector>

#include "plan/cuda/chip.hpp"
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
  int64 resident = 0;      // blocks that take the grid's places in turn; 0: a block for each

  int64 blocks() const { return resident > 0 ? smaller(resident, grid.blocks()) : grid.blocks(); }
};

// Where each part of the GPU workspace begins, in bytes, 256-byte aligned; see CudaBuffers. `clear`
// bytes from the first part on must be 0 before the first launch. A part reaches to where the next
// begins; one that is not used has size 0. The workspace itself must be 256-byte aligned.
struct CudaWorkspace {
  int64 tile_counter = 0;
  int64 dq_semaphores = 0;
  int64 any_flag = 0;
  int64 flags_q = 0;
  int64 flags_k = 0;
  int64 dbias_sums = 0;
  int64 clear = 0;  // all up to here, or nothing
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
  bool too_large = false;            // no chip could do it: stride 0 makes such problems
  Family family = Family::simt;      // of the main kernels
  int level = 50;                    // theirs
  std::vector<CudaLaunch> launches;  // in the order of the stream
  CudaWorkspace workspace;
  int splits = 1;
  InputSet copies;                   // made first
  Strides dbias_strides;             // of the sums
  std::vector<std::string> reasons;  // for a person; empty unless asked for

  bool supported() const { return refusal.empty(); }
  std::string name() const;
};

// What the caller forces, from Run::backend or REGARD_BACKEND: "" or "cuda" (choose), "cuda:simt",
// "cuda:mma", "cuda:wgmma", "cuda:mma75" (as on a chip of level 75; also mma80), after a / the
// kilobytes of shared memory that a block may use ("cuda:mma/99", "cuda/99"), and after an @ what
// the tiles of the pass's main kernel (simt backward: key_gradient) are:
// "cuda:mma@rows=64,keys=128,warps=8,stages=2". What is not named of a tiling stays as the planner
// would have it.
struct CudaChoice {
  Family family = Family::simt;
  bool any_family = true;
  int level = 0;     // 0 = the chip's
  int64 shared = 0;  // bytes that a block may use; 0 = what the chip allows
  bool has_tiling = false;
  Tiling tiling;  // 0 = not named
};
bool parse_cuda_choice(const std::string& name, CudaChoice&, std::string& why_not);

// Pure; cheap where reasons are left out. Sequence tables and data are never read: pointers are
// asked for their alignment alone. Launches whose grid would be empty are left out.
enum class Reasons : uint8 { left_out, given };
CudaPlan plan_cuda(const Problem&, const Chip&, const CudaChoice&, Reasons);

// The main kernel's configuration, in a line; and everything, of a plan with reasons.
std::string cuda_kernel_line(const CudaPlan&);
std::string cuda_explanation(const Problem&, const Chip&, const CudaPlan&);

}  // namespace regard
