// Backward attention on Hopper for head sizes above 128, of a tile of 64 keys: dk and dv, and its
// share of dq.
//
// A block walks over the query rows that see its keys, as that of backward_wgmma.cuh does; but dk
// and dv of 64 keys fill the registers of a warpgroup each. The second warpgroup makes weights and
// dv, the third the gradients of scores and dk, the first dq.
#pragma once

#include "cuda/kernels/tile/wgmma/dq_role.cuh"
#include "cuda/kernels/tile/wgmma/dscore_warpgroup.cuh"
#include "cuda/kernels/tile/wgmma/weight_warpgroup.cuh"

namespace regard {

// How many registers a thread of each warpgroup has, of 504 together. The terms of scores take the
// most.
struct WideRegisters {
  int dq, weights, dscores;
};
template <KernelConfig kConfig>
inline constexpr WideRegisters kWideRegisters =
    kConfig.cta_pair             ? WideRegisters{88, 208, 208}
    : KeyScores<kConfig>::kPlain ? WideRegisters{72, 216, 216}
                                 : WideRegisters{72, 224, 208};

template <KernelConfig kConfig>
REGARD_DEVICE void backward_wide(const KernelParams& params, const BackwardMaps& maps) {
  constexpr WideRegisters kRegisters = kWideRegisters<kConfig>;
  static_assert(kConfig.tiling.warps == 12);
  const BackwardMemory<kConfig> memory;
  if (thread_index() == 0) {
    memory.init_barriers();
    memory.task() = backward_task<kConfig>(params);
  }
  if constexpr (kConfig.cta_pair) {
    sync_cluster();
  } else {
    sync_block();
    if (memory.task().key_count == 0) return;
  }
  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    setmaxnreg_dec<kRegisters.dq>();
    DqRole<kConfig>{memory, {params, maps, memory}}.run();
  } else if (warpgroup == 1) {
    setmaxnreg_inc<kRegisters.weights>();
    WeightWarpgroup<kConfig>{{params, maps, memory, 1}}.run();
  } else {
    setmaxnreg_inc<kRegisters.dscores>();
    DscoreWarpgroup<kConfig>{{params, maps, memory, 2}}.run();
  }
  // The other block may still write to this one's memory.
  if constexpr (kConfig.cta_pair) sync_cluster();
}

}  // namespace regard
