// Backward attention on Hopper, head sizes above 128 (f32: 64): dk and dv of a tile of 64 keys, and
// what the tile adds to dq.
//
// As backward_wgmma.cuh, except that dk and dv of 64 keys fill the registers of a warpgroup each.
// Warpgroup 0 makes dq, 1 makes P^T and dv, 2 makes dS^T and dk.
#pragma once

#include "cuda/kernels/tile/wgmma/backward/block_loop.cuh"
#include "cuda/kernels/tile/wgmma/backward/dk_warpgroup.cuh"
#include "cuda/kernels/tile/wgmma/backward/dq_warpgroup.cuh"
#include "cuda/kernels/tile/wgmma/backward/dv_warpgroup.cuh"

namespace regard {

// Registers of a thread of each warpgroup, of 504 together.
struct WideRegisters {
  int dq, dv, dk;
};
// Up to 192 columns of dk or dv leave the dq warpgroup of a CTA pair registers for sums in two
// turns.
REGARD_INLINE WideRegisters registers_of_pair(int dim, int dim_v) {
  constexpr int kLargest = 192;
  const int dk = dim > kLargest ? 208 : dim_v > kLargest ? 176 : 192;
  const int dv = dim_v > kLargest ? 208 : dim > kLargest ? 176 : 192;
  return {504 - dk - dv, dv, dk};
}
template <KernelConfig kConfig>
inline constexpr WideRegisters kWideRegisters =
    kConfig.products == Products::f16x3 ? WideRegisters{64, 216, 224}
    : kConfig.cta_pair                  ? registers_of_pair(kConfig.dim, kConfig.dim_v)
    : KeyScores<kConfig>::kPlain        ? WideRegisters{72, 216, 216}
                                        : WideRegisters{72, 224, 208};

template <KernelConfig kConfig>
REGARD_DEVICE void backward_wide(const KernelParams& params, const BackwardMaps& maps) {
  constexpr WideRegisters kRegisters = kWideRegisters<kConfig>;
  static_assert(kConfig.tiling.warps == 12);
  const BackwardMemory<kConfig> memory;
  const BlockLoop<kConfig> tasks{params, memory};
  tasks.begin(int(block_index()));
  if constexpr (kConfig.cta_pair) {
    sync_cluster();
    if (kConfig.varlen && !pair_has_keys<kConfig>(memory.task())) return;
  } else {
    sync_block();
    if (!kConfig.persistent && memory.task().key_count == 0) return;
  }
  const int warpgroup = warpgroup_index();
  if (warpgroup == 0) {
    setmaxnreg_dec<kRegisters.dq>();
    tasks.each([&] { DqWarpgroup<kConfig>{params, maps, memory}.run(); });
  } else if (warpgroup == 1) {
    setmaxnreg_inc<kRegisters.dv>();
    tasks.each([&] { DvWarpgroup<kConfig>{{params, maps, memory, 0}}.run(); });
  } else {
    setmaxnreg_inc<kRegisters.dk>();
    tasks.each([&] { DkWarpgroup<kConfig>{{params, maps, memory, 1}}.run(); });
  }
  if constexpr (kConfig.cta_pair) sync_cluster();  // the other block may write to shared memory
}

}  // namespace regard
