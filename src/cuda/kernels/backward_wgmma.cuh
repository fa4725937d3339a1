// Backward attention on Hopper, of a tile of keys: dk and dv, and its share of dq.
//
// A block keeps its keys and values in shared memory and walks over the query rows that see them,
// of every query head that shares them. Two warpgroups have 64 keys each, another makes dq and
// loads, and a fourth may make dbias; registers go from the others to those of the keys.
#pragma once

#include "cuda/kernels/tile/wgmma/backward_drops.cuh"
#include "cuda/kernels/tile/wgmma/dq_warpgroup.cuh"
#include "cuda/kernels/tile/wgmma/key_warpgroup.cuh"

namespace regard {

template <KernelConfig kConfig>
REGARD_DEVICE void backward_wgmma(const KernelParams& params, const BackwardMaps& maps) {
  static_assert(kConfig.tiling.warps == backward_warps(kConfig));
  const BackwardMemory<kConfig> memory;
  if (thread_index() == 0) {
    memory.init_barriers();
    memory.task() = backward_task<kConfig>(params);
  }
  if constexpr (kConfig.cluster > 1) {
    sync_cluster();
  } else {
    sync_block();
  }
  if (memory.task().key_count == 0) return;
  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    setmaxnreg_dec<registers_of_dq<kConfig>()>();
    DqWarpgroup<kConfig>{params, maps, memory}.run();
  } else if (has_dbias_warpgroup(kConfig) && warpgroup == 3) {
    setmaxnreg_dec<registers_of_dbias<kConfig>()>();
    DscoreBias<kConfig>{params, memory}.run();
  } else if (has_backward_dropout_warpgroup(kConfig) && warpgroup == 3) {
    setmaxnreg_dec<registers_of_drops<kConfig>()>();
    BackwardDrops<kConfig>{params, memory}.run();
  } else {
    setmaxnreg_inc<registers_of_keys<kConfig>()>();
    KeyWarpgroup<kConfig>{params, maps, memory, warpgroup - 1}.run();
  }
  if constexpr (kConfig.cluster > 1) sync_cluster();  // others read its shared memory until then
}

}  // namespace regard
