// Backward attention of f32 on Hopper, of a tile of keys: dk and dv, and its share of dq.
//
// By three products of f16 planes for each of f32. Up to 64 columns as backward_wgmma.cuh: two
// warpgroups have 64 keys each. Above, where what a tile of rows adds to dk and dv is summed by
// itself, as backward_wide.cuh: of 64 keys one warpgroup makes weights and dv, the other the
// gradients of scores and dk. The first makes dq.
#pragma once

#include "cuda/kernels/tile/wgmma/plane_dq_role.cuh"
#include "cuda/kernels/tile/wgmma/plane_dscore_warpgroup.cuh"
#include "cuda/kernels/tile/wgmma/plane_key_warpgroup.cuh"
#include "cuda/kernels/tile/wgmma/plane_weight_warpgroup.cuh"

namespace regard {

// Registers of a thread of each warpgroup, of 504 together. Where keys are 128, dq has sums of each
// half.
struct PlaneRegisters {
  int dq, second, third;
};
template <KernelConfig kConfig>
inline constexpr PlaneRegisters kPlaneRegisters =
    is_wide(kConfig) ? PlaneRegisters{64, 216, 224} : PlaneRegisters{72, 216, 216};

template <KernelConfig kConfig>
REGARD_DEVICE void backward_planes(const KernelParams& params, const BackwardMaps& maps) {
  static_assert(kConfig.tiling.warps == 12);
  const BackwardMemory<kConfig> memory;
  if (thread_index() == 0) {
    memory.init_barriers();
    memory.task() = backward_task<kConfig>(params);
  }
  sync_block();
  if (memory.task().key_count == 0) return;
  constexpr PlaneRegisters kRegisters = kPlaneRegisters<kConfig>;
  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    setmaxnreg_dec<kRegisters.dq>();
    PlaneDqRole<kConfig>{params, maps, memory}.run();
  } else if constexpr (!is_wide(kConfig)) {
    setmaxnreg_inc<kRegisters.second>();
    PlaneKeyWarpgroup<kConfig>{
        {{params, maps, memory, warpgroup, (warpgroup - 1) * kWarpgroupRows}}}
        .run();
  } else if (warpgroup == 1) {
    setmaxnreg_inc<kRegisters.second>();
    PlaneWeightWarpgroup<kConfig>{{{params, maps, memory, 1}}}.run();
  } else {
    setmaxnreg_inc<kRegisters.third>();
    PlaneDscoreWarpgroup<kConfig>{{{params, maps, memory, 2}}}.run();
  }
}

}  // namespace regard
