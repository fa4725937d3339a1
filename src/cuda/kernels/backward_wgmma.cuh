// Backward attention on Hopper, head sizes up to 128 (f32: 64): dk and dv of a tile of 128 keys,
// and what the tile adds to dq.
//
// A block keeps K and V in shared memory, and iterates over the tiles of query rows that see them,
// for every query head that shares them. Warpgroup 0 makes dq and loads, 1 and 2 have 64 keys each,
// and 3 may make dbias or dropout bits. docs/kernels.md draws the pipeline.
#pragma once

#include "cuda/kernels/tile/wgmma/backward/block_loop.cuh"
#include "cuda/kernels/tile/wgmma/backward/dk_dv_warpgroup.cuh"
#include "cuda/kernels/tile/wgmma/backward/dq_warpgroup.cuh"
#include "cuda/kernels/tile/wgmma/backward/dropout_warpgroup.cuh"
#include "cuda/kernels/tile/wgmma/backward/f32_dk_dv_warpgroup.cuh"

namespace regard {

// Registers of a thread of each warpgroup; dq has what the others leave.
struct BackwardRegisters {
  int dq = 0, keys = 216, fourth = 0;
};
template <KernelConfig kConfig>
constexpr BackwardRegisters backward_registers() {
  constexpr bool kNarrow = larger(kConfig.dim, kConfig.dim_v) <= 64;
  BackwardRegisters x;
  if (has_backward_dropout_warpgroup(kConfig)) x = {.keys = 208, .fourth = 32};
  if (has_dbias_warpgroup(kConfig)) {
    x = kNarrow ? BackwardRegisters{.keys = 184, .fourth = 56}
                : BackwardRegisters{.keys = 208, .fourth = 32};
  }
  x.dq = (backward_warps(kConfig) == 16 ? 4 * 128 : 3 * 168) - 2 * x.keys - x.fourth;
  return x;
}

template <KernelConfig kConfig>
REGARD_DEVICE void backward_wgmma(const KernelParams& params, const BackwardMaps& maps) {
  static_assert(kConfig.tiling.warps == backward_warps(kConfig));
  constexpr BackwardRegisters kRegisters = backward_registers<kConfig>();
  const BackwardMemory<kConfig> memory;
  const BlockLoop<kConfig> tasks{params, memory};
  tasks.begin(int(block_index()));
  if constexpr (kConfig.cluster > 1) {
    sync_cluster();
  } else {
    sync_block();
  }
  if (!kConfig.persistent && memory.task().key_count == 0) return;
  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    setmaxnreg_dec<kRegisters.dq>();
    tasks.each([&] { DqWarpgroup<kConfig>{params, maps, memory}.run(); });
  } else if (kConfig.tiling.warps == 16 && warpgroup == 3) {
    setmaxnreg_dec<kRegisters.fourth>();
    tasks.each([&] {
      if constexpr (has_dbias_warpgroup(kConfig)) {
        DbiasWarpgroup<kConfig>{params, memory}.run();
      } else if constexpr (has_backward_dropout_warpgroup(kConfig)) {
        DropoutWarpgroup<kConfig>{params, memory}.run();
      }
    });
  } else {
    setmaxnreg_inc<kRegisters.keys>();
    tasks.each([&] {
      if constexpr (BackwardMemory<kConfig>::kF32) {
        F32DkDvWarpgroup<kConfig>{{{params, maps, memory, warpgroup - 1}}}.run();
      } else {
        DkDvWarpgroup<kConfig>{{params, maps, memory, warpgroup - 1}}.run();
      }
    });
  }
  if constexpr (kConfig.cluster > 1) sync_cluster();  // other blocks read this one's shared memory
}

}  // namespace regard
