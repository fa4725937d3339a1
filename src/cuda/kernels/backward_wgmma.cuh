// Backward attention on Hopper, of a tile of keys: dk and dv, and its share of dq.
//
// A block keeps its keys and values in shared memory and walks over the query rows that see them,
// of every query head that shares them. Two warpgroups have 64 keys each, the third makes dq and
// loads; registers go from the one to the others.
#pragma once

#include "cuda/kernels/tile/dq_warpgroup.cuh"
#include "cuda/kernels/tile/key_warpgroup.cuh"

namespace regard {

template <KernelConfig kConfig>
REGARD_DEVICE void backward_wgmma(const KernelParams& params, const BackwardMaps& maps) {
  // Of the 504 that a thread of each warpgroup has at the start, together.
  static_assert(kConfig.tiling.warps == 12);
  const BackwardMemory<kConfig> memory;
  if (thread_index() == 0) {
    memory.init_barriers();
    memory.task() = backward_task<kConfig>(params);
  }
  sync_block();
  if (memory.task().key_count == 0) return;
  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    give_registers<72>();
    DqWarpgroup<kConfig>{params, maps, memory}.run();
  } else {
    take_registers<216>();
    KeyWarpgroup<kConfig>{params, maps, memory, warpgroup - 1}.run();
  }
}

}  // namespace regard
